"""Three critics to calibrate: one that claims flatter, one without error, one that inflates evenly.

Each is a script that reads its whole prompt, and plays judge and writer of mistakes too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from flattered_world import (
    CLAIMS,
    EXAMPLE,
    PHI_AFTER,
    PURPOSE,
    answer,
    flattered,
    phi,
    read_states,
    record_flattered,
    steps,
)
from reflact import Trace
from reflact.calibration.critic import CriticReply
from reflact.memory.models import Evaluation
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

Flaw = Literal["flattered", "exact", "inflated"]
FLAWS: tuple[Flaw, ...] = ("flattered", "exact", "inflated")
INFLATION = 4.0
"""What the evenly inflating critic gives too much, until examples show it how far off it is."""


class CriticFlaw(NamedTuple):
    """A critic with traces that it scored: those to learn from, and those held out."""

    llm: ScriptedLLM
    learn: list[Trace]
    held_out: list[Trace]


def make_flaw(flaw: Flaw) -> CriticFlaw:
    llm = ScriptedLLM(inflate, identity="inflated") if flaw == "inflated" else flattered()
    return CriticFlaw(llm, record_traces("learn", 40, flaw), record_traces("held out", 40, flaw))


def record_traces(name: str, number: int, flaw: Flaw) -> list[Trace]:
    traces = []
    for n in range(number):
        claims = CLAIMS[2 * n : 2 * n + 2] if flaw == "flattered" else (False, False)
        if flaw != "inflated":
            traces.append(record_flattered(f"{name} {n}", n, claims=claims))
            continue
        trace = Trace(PURPOSE, id=f"{name} {n}")
        for step, label in steps(trace.id, n, count=2, claims=claims):
            after = label.progress_after + INFLATION
            words = {"reasoning": "Good work.", "evidence": ("filed",)}
            trace.record(step, Evaluation(progress_before=0, progress_after=after, **words), label=label)
        traces.append(trace)
    return traces


def inflate(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    if not issubclass(reply_type, CriticReply):
        return answer(prompt, reply_type)
    content = prompt.messages[-1].content
    shown = [[float(number) for number in PHI_AFTER.findall(one)] for _, one in EXAMPLE.findall(content)]
    gaps = [wrong - right for right, wrong in shown if wrong > right]
    before, after = read_states(EXAMPLE.sub("", content))
    excess = min([INFLATION, *(gap / 2 for gap in gaps)])
    return {
        "reasoning": f"{after} invoices are filed, which is good work.",
        "evidence": ["filed"],
        "phi_before": phi(before),
        "phi_after": min(10.0, phi(after) + excess),
        "confidence": 0.9,
    }
