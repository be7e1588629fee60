"""An optimizer of dspy in a cell: its defaults, for a program of one predictor that sends the messages of all methods.

The document of a predictor is its instructions, and after them its demonstrations in one fixed form; so it can be
measured like all others.
"""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import dspy
from client import CONCURRENCY, Job, show_answer
from dspy.utils.exceptions import AdapterParseError

job = Job.read()
job.save("")
SETTINGS = dict(job.settings)
NAME = SETTINGS.pop("optimizer")


class PlainAdapter(dspy.ChatAdapter):
    """The document is the system message, the question and the turns after it follow, and the reply is the answer.

    This holds for the program; what an optimizer asks for itself has dspy's own messages.
    """

    def format(self, signature: Any, demos: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages."""
        if not is_program(signature):
            messages: list[dict[str, Any]] = super().format(signature, demos, inputs)
            return messages
        document = render_document(signature.instructions, demos)
        system = [{"role": "system", "content": document.strip("\n")}] if document.strip() else []
        user = {"role": "user", "content": inputs["question"]}
        return [*system, user, *json.loads(inputs.get("turns") or "[]")]

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """Return the answer."""
        if not is_program(signature):
            fields: dict[str, Any] = super().parse(signature, completion)
            return fields
        return {"answer": completion}


def is_program(signature: Any) -> bool:
    """Whether a signature is that of the program."""
    return list(signature.fields) == [*FIELDS, "answer"]


def render_document(instructions: str, demos: Sequence[Any]) -> str:
    """Return instructions and demonstrations as one document; dspy's own instructions stand for none."""
    parts = [] if instructions == SEED else [instructions.strip("\n")]
    for demo in demos:
        if demo.get("answer") is not None:
            turns = "".join(
                f"\n{turn['role']}: {turn['content']}"
                for turn in json.loads(demo.get("turns") or "[]")
            )
            parts.append(f"Message:\n{demo['question']}{turns}\nAnswer:\n{demo['answer']}")
    return "\n\n".join(filter(None, parts))


class Conversation(dspy.Module):
    """Asks one predictor until the task has no further message."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(f"{', '.join(FIELDS)} -> answer")

    def forward(self, question: str) -> Any:
        """Return the answer and its grade."""
        item = ITEMS[question]
        turns: list[dict[str, str]] = []
        answers: list[str] = []
        while True:
            values = {"question": question, "turns": json.dumps(turns)}
            answers.append(self.answer(**{name: values[name] for name in FIELDS}).answer)
            grade = job.grade(item, answers)
            turns.append({"role": "assistant", "content": answers[-1]})
            if "message" not in grade:
                shown = show_answer([{"role": "user", "content": question}, *turns])
                best.record(read_document(self), item, grade["score"])
                return dspy.Prediction(answer=shown, grade=grade)
            turns.append({"role": "user", "content": grade["message"]})


class Best:
    """Keeps the document with the best score on all validation items, in case the budget ends before the optimizer."""

    def __init__(self) -> None:
        self.items = {item["id"] for item in job.items["val"]}
        self.scores: dict[str, dict[str, float]] = defaultdict(dict)
        self.document = ""
        self.score = -1.0
        self.measured = 0
        self._lock = threading.Lock()

    def record(self, document: str, item: dict[str, Any], score: float) -> None:
        """Note a score, and save the document if it is the best one that is measured on all validation items."""
        with self._lock:
            scores = self.scores[document]
            if item["id"] not in self.items or item["id"] in scores:
                return
            scores[item["id"]] = score
            mean = sum(scores.values()) / len(scores)
            self.measured += len(scores) == len(self.items)
            if len(scores) == len(self.items) and mean > self.score:
                self.score, self.document = mean, document
                job.save(document, "budget", candidates=self.measured, val=mean)


def read_document(program: Any) -> str:
    """Return the document of a program."""
    return render_document(program.answer.signature.instructions, program.answer.demos)


def connect(role: str, **fields: Any) -> dspy.LM:
    """Return the model of a role behind the meter."""
    return dspy.LM(
        f"openai/{role}",
        api_base=f"{job.url}/{role}/v1",
        api_key="none",
        cache=False,
        num_retries=0,
        timeout=3600,
        **fields,
    )


def score_answer(gold: Any, pred: Any, trace: Any = None, **_: Any) -> float:
    """Return the score; a bootstrapped demonstration must be fully right."""
    score = float(pred.grade["score"])
    return score if trace is None else float(score == 1)


def explain_answer(
    gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
) -> Any:
    """Return the score and the feedback, as GEPA asks for it."""
    return dspy.Prediction(score=pred.grade["score"], feedback=pred.grade["feedback"])


def build_examples(split: str) -> list[dspy.Example]:
    """Return the items of a split, with their right answers if there are some."""
    return [
        dspy.Example(question=item["message"], answer=item["reference"]).with_inputs("question")
        for item in job.items[split]
    ]


def build_optimizer(proposer: dspy.LM) -> Any:
    """Return the optimizer with its defaults."""
    if NAME == "GEPA":
        return dspy.GEPA(
            metric=explain_answer,
            max_metric_calls=job.rollouts,
            reflection_lm=proposer,
            num_threads=CONCURRENCY,
            seed=job.seed,
            **SETTINGS,
        )
    if NAME == "MIPROv2":
        return dspy.MIPROv2(
            metric=score_answer,
            prompt_model=proposer,
            task_model=target,
            num_threads=CONCURRENCY,
            seed=job.seed,
            auto="light",
            **SETTINGS,
        )
    # it has no seed, so its train items are in another order
    random.Random(job.seed).shuffle(trainset)
    return dspy.BootstrapFewShotWithRandomSearch(
        metric=score_answer, num_threads=CONCURRENCY, **SETTINGS
    )


ITEMS = {item["message"]: item for split in job.items.values() for item in split}
FIELDS = (
    ("question",) if any(item["reference"] for item in ITEMS.values()) else ("question", "turns")
)
"""What the predictor gets; a task without right answers in text has several turns."""

SEED = Conversation().answer.signature.instructions
"""dspy gives a signature without instructions this text; it stands for the empty document."""

best = Best()
trainset = build_examples("train")
target = connect("target", temperature=0.0)
dspy.configure(lm=target, adapter=PlainAdapter(), max_errors=1)
optimizer = build_optimizer(
    connect("optimizer", temperature=1.0, max_tokens=job.optimizer_max_tokens)
)
try:
    found = optimizer.compile(Conversation(), trainset=trainset, valset=build_examples("val"))
except AdapterParseError:
    # MIPROv2 ends with this error if its proposer's reply has another form
    job.save(best.document, "unreadable reply", candidates=best.measured, val=best.score)
except Exception:
    # the kind of error is that of the client library
    if not job.is_spent():
        raise
else:
    job.save(read_document(found), "complete", candidates=best.measured, val=best.score)
