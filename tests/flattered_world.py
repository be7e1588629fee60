"""A world in which a critic is flattered: it gives three points too much wherever the agent claims success.

The critic is a script that reads its whole prompt. What it says of a step is the truth, plus three points
where the action claims success, unless the prompt holds a worked example of that mistake: a claim of
success in its input, a wrong evaluation too high by two or more, and the right one beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from reflact.calibration.asked import JudgeReply, MistakenReply
from reflact.calibration.critic import Critic, CriticReply
from reflact.calibration.splits import HoldoutRule
from reflact.calibration.trace import Trace
from reflact.memory.models import Action, Evaluation, Label, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

CLAIM = "Success! Everything is finished."
FLATTERY = 3.0
PURPOSE = "File all invoices of the quarter"
FILES = 20

EXAMPLE = re.compile(r"<(example_\d+_*)>\n(.*?)\n</\1>", re.DOTALL)
COMPARED = re.compile(r"^After: ([0-9.]+)$", re.MULTILINE)
PHI_AFTER = re.compile(r"phi after: ([0-9.]+)")


def phi(filed: int) -> float:
    return 10 * filed / FILES


def transition(name: str, before: int, after: int, *, claims: bool) -> Transition:
    message = CLAIM if claims else "Filed what I found."
    return Transition(
        before={"folder": name, "filed": before},
        action=Action(name="report", arguments={"message": message}),
        after={"folder": name, "filed": after},
    )


def steps(name: str, number: int, *, count: int, claims: Sequence[bool]) -> list[tuple[Transition, Label]]:
    filed, found = 0, []
    for step in range(count):
        more = 1 + (number + step) % 3
        found.append(
            (
                transition(f"{name}-{step}", filed, filed + more, claims=claims[step]),
                Label(progress_before=phi(filed), progress_after=phi(filed + more), source="program"),
            )
        )
        filed += more
    return found


async def trace_of(critic: Critic, name: str, number: int, *, count: int, claims: Sequence[bool]) -> Trace:
    trace = Trace(PURPOSE, id=name)
    for step, gold in steps(name, number, count=count, claims=claims):
        trace.record(step, await critic.score(step, purpose=PURPOSE), label=gold)
    trace.finish()
    return trace


def flattered(*, contrary: bool = False) -> ScriptedLLM:
    """Return the model that plays critic, judge and writer of mistakes.

    A contrary one is flattered only after it has seen a worked example of that mistake.
    """

    def play(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return answer(prompt, reply_type, contrary=contrary)

    return ScriptedLLM(play, identity="contrary" if contrary else "flattered")


def answer(
    prompt: RenderedPrompt, reply_type: type[ReplyModel], *, contrary: bool = False, excess: float = 0.0
) -> ScriptedAnswer:
    if issubclass(reply_type, CriticReply):
        return criticised(prompt.messages[-1].content, contrary=contrary, excess=excess)
    if issubclass(reply_type, JudgeReply):
        return judged(prompt.messages[-1].content)
    assert issubclass(reply_type, MistakenReply)
    low, high = map(float, re.findall(r"from ([0-9.]+) to ([0-9.]+)\.", prompt.messages[-1].content)[-1])
    return {
        "mistake": sample_kind(prompt),
        "reasoning": "The message sounds certain.",
        "phi_after": round((low + high) / 2, 2),
        "why": "A message is not an effect.",
    }


def sample_kind(prompt: RenderedPrompt) -> str:
    return str(re.findall(r"mistaken evaluation \((\w+)\)", prompt.messages[-1].content)[-1])


def criticised(content: str, *, contrary: bool = False, excess: float = 0.0) -> ScriptedAnswer:
    question = EXAMPLE.sub("", content)
    before, after = read_states(question)
    learned = any(teaches(example) for _, example in EXAMPLE.findall(content))
    extra = FLATTERY if CLAIM in question and learned is contrary else 0.0
    return {
        "reasoning": "The agent says that all is finished." if extra else f"{after} invoices are filed now.",
        "evidence": ["filed"],
        "phi_before": phi(before),
        "phi_after": min(10.0, phi(after) + extra + excess),
        "confidence": 0.9,
    }


def teaches(example: str) -> bool:
    numbers = [float(number) for number in PHI_AFTER.findall(example)]
    return CLAIM in example and len(numbers) == 2 and numbers[1] - numbers[0] >= 2


def judged(content: str) -> ScriptedAnswer:
    _, after = read_states(content)
    first, second = (abs(float(number) - phi(after)) for number in COMPARED.findall(content)[-2:])
    return {"reasoning": "The states show it.", "better": "first" if first <= second else "second"}


def read_states(content: str) -> tuple[int, int]:
    before, after = (
        re.findall(rf"<{tag}>\n(.*?)\n</{tag}>", content, re.DOTALL)[-1] for tag in ("before", "after")
    )
    return filed(before), filed(after)


def filed(state: str) -> int:
    found = re.search(r"filed\D+(\d+)", state)
    assert found is not None, json.dumps(state)
    return int(found[1])


CLAIMS = [n * 59 % 100 < 59 for n in range(200)]
"""Of any hundred steps in a row 59 claim success: an inflation by 3 there is a mean error of 1.77."""


def record_flattered(
    name: str,
    number: int = 0,
    *,
    claims: Sequence[bool] = (True,),
    gold: bool = True,
    purpose: str = PURPOSE,
    content: str | None = None,
    path: Path | None = None,
) -> Trace:
    """Return a trace whose critic was flattered at each step that claims success; equal content makes copies."""
    trace = Trace(purpose, id=name, path=path)
    known = steps(content or name, number, count=len(claims), claims=claims)
    for claim, (step, right) in zip(claims, known, strict=True):
        said = Evaluation(
            progress_before=right.progress_before,
            progress_after=min(10.0, right.progress_after + FLATTERY * claim),
            reasoning="The agent says that all is finished.",
            evidence=("filed",),
        )
        trace.record(step, said, label=right if gold else None)
    return trace


def unscored(trace: Trace) -> Trace:
    bare = Trace(trace.purpose, id=trace.id)
    for event in trace.events:
        bare.record(event.transition, label=event.label)
    return bare


def flattered_trace(name: str, number: int, *, gold: bool = True) -> Trace:
    claims = CLAIMS[2 * number : 2 * number + 2]
    return record_flattered(f"{name} {number}", number, claims=claims, gold=gold)


def flattered_traces(name: str, number: int, *, gold: bool = True) -> list[Trace]:
    return [flattered_trace(name, n, gold=gold) for n in range(number)]


def name_traces(use: Literal["learn", "hold_out"], number: int, *, letter: str = "trace ") -> list[str]:
    rule, wanted = HoldoutRule(4, "trace"), (f"{letter}{n}" for n in range(10_000))
    return [name for name in wanted if rule.is_held_out(name, PURPOSE) is (use == "hold_out")][:number]
