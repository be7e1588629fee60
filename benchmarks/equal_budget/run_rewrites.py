"""Plain rewrites in a cell: one call of the optimizer writes a whole document from failures of the empty one.

With ``most: 1`` the first document is returned as it is. Without ``most``, documents are written and measured on the
validation items until the budget is spent, and the best one is returned, or none if it is not better than no document.
"""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

from client import BudgetSpent, Job

PROMPT = """An assistant answers messages of one kind. Its answers below are wrong. Write instructions for the assistant,
so that it answers such messages right. Say what form an answer has, and state each rule, name and code that the right
answers show. The assistant will see your instructions and a new message, and nothing else.

{cases}

Now write the instructions for the assistant, as plain text and nothing else."""

CASE = """Message:
{message}
Answer of the assistant:
{answer}
Remark:
{feedback}"""

FENCE = re.compile(r"```\w*\n(.*?)(?:```)?", re.DOTALL)


def write_document(job: Job, failures: list[dict[str, Any]], rng: random.Random) -> str:
    """Ask the optimizer for a document."""
    chosen = rng.sample(failures, min(job.settings["failures"], len(failures)))
    cases = "\n\n".join(CASE.format(**case) for case in chosen)
    reply = job.ask("optimizer", [{"role": "user", "content": PROMPT.format(cases=cases)}]).strip()
    match = FENCE.fullmatch(reply)
    return (match[1] if match else reply).strip()


def measure(job: Job, document: str) -> float:
    """Return the mean score on the validation items."""
    scores = [shown["score"] for shown in job.roll_out_all(document, job.items["val"])]
    return sum(scores) / len(scores)


def search(job: Job) -> None:
    """Write documents until the budget or their number ends, and keep the best one."""
    rng = random.Random(job.seed)
    train = job.items["train"]
    shown = job.roll_out_all("", train)
    failures = [{**item, **one} for item, one in zip(train, shown, strict=True) if one["score"] < 1]
    if not failures:
        job.save("", "complete")
        return
    if job.settings.get("most") == 1:
        job.save(write_document(job, failures, rng), "complete")
        return
    best, candidates = measure(job, ""), 0
    while True:
        document = write_document(job, failures, rng)
        score = measure(job, document)
        candidates += 1
        if score > best:
            best = score
            job.save(document, "budget", candidates=candidates, val=score)


if __name__ == "__main__":
    task = Job.read()
    task.save("", "budget")
    with contextlib.suppress(BudgetSpent):
        search(task)
