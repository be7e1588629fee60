"""dspy's GEPA in a cell: its defaults, for a program of one predictor whose messages are those of the other methods."""

from __future__ import annotations

from typing import Any

import dspy
from client import CONCURRENCY, Job

job = Job.read()
job.save("")


class PlainAdapter(dspy.Adapter):
    """The instructions are the system message, the question the user's, and the whole reply the answer."""

    def format(self, signature: Any, demos: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages."""
        skill = signature.instructions
        system = [] if skill in ("", SEED) else [{"role": "system", "content": skill.strip("\n")}]
        return [*system, {"role": "user", "content": inputs["question"]}]

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """Return the answer."""
        return {"answer": completion}


class Best:
    """Keeps the document with the best validation score, in case the budget ends within an iteration."""

    score = -1.0
    measured = 0

    def on_valset_evaluated(self, event: Any) -> None:
        """Keep a better document."""
        (skill,) = event["candidate"].values()
        self.measured += 1
        if event["average_score"] > self.score:
            self.score = event["average_score"]
            job.save("" if skill == SEED else skill, "budget", candidates=self.measured, val=self.score)


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


def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    """Grade an answer; feedback is asked for by the name of the predictor."""
    grade = job.grade(gold.item, pred.answer)
    return dspy.Prediction(score=grade["hard"], feedback=grade["feedback"])


def build_examples(split: str) -> list[dspy.Example]:
    """Return the items of a split."""
    return [
        dspy.Example(question=item["message"], item=item).with_inputs("question") for item in job.items[split]
    ]


program = dspy.Predict("question -> answer")
SEED = program.signature.instructions
"""dspy gives a signature without instructions this text; it stands for the empty document."""

best = Best()
dspy.configure(lm=connect("target", temperature=0.0), adapter=PlainAdapter())
optimizer = dspy.GEPA(
    metric=metric,
    max_metric_calls=job.rollouts,
    reflection_lm=connect("optimizer", temperature=1.0, max_tokens=job.optimizer_max_tokens),
    num_threads=CONCURRENCY,
    seed=job.seed,
    gepa_kwargs={"callbacks": [best]},
    **job.settings,
)
try:
    found = optimizer.compile(program, trainset=build_examples("train"), valset=build_examples("val"))
except Exception as error:
    # the kind of error is that of the client library
    if "402" not in str(error) and "budget" not in str(error):
        raise
else:
    skill = found.signature.instructions
    job.save("" if skill == SEED else skill, "complete", candidates=best.measured, val=best.score)
