"""A small world of scored steps for tests of contrasts, and models that play their parts in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.calibration.contrast import GenerationTask, PairModels, generate_contrast_pairs
from reflact.calibration.critic import Scorer
from reflact.calibration.curriculum import MistakeShare, RoundPlan
from reflact.calibration.mistakes import GenerationResult
from reflact.data import make_rng
from reflact.memory.models import (
    MISTAKE_KINDS,
    Action,
    ContrastPair,
    Evaluation,
    Label,
    ScoreEvent,
    StateScore,
    Transition,
)
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM

PURPOSE = "Write the three chapters of the report."


def evaluation(before: float, after: float, reasoning: str = "Chapters were written.") -> Evaluation:
    """Return an evaluation that quotes the field of the chapters."""
    return Evaluation(
        progress_before=before, progress_after=after, reasoning=reasoning, evidence=("chapters",)
    )


def event(
    step: int = 0,
    *,
    before: float = 2,
    after: float = 6,
    said: tuple[float, float] | None = None,
    gold: bool = True,
    changed: bool = True,
) -> ScoreEvent:
    """Return a step; ``said`` is the critic's own evaluation where it differs from what is right."""
    states: list[dict[str, JsonValue]] = [
        {"chapters": f"{step}/{before:g}", "title": "Report"},
        {"chapters": f"{step}/{after:g}" if changed else f"{step}/{before:g}", "title": "Report"},
    ]
    own = evaluation(*(said or (before, after)), f"Step {step} was scored.")
    return ScoreEvent(
        step=step,
        transition=Transition(before=states[0], action=Action(name="write"), after=states[1]),
        evaluation=own,
        label=Label(progress_before=before, progress_after=after, source="program") if gold else None,
    )


def round_of(*kinds: str, number: int = 1, nearest: float = 1, farthest: float = 10) -> RoundPlan:
    """Return a round that asks for these kinds equally; for all known ones if none is named."""
    names = kinds or MISTAKE_KINDS
    shares = tuple(MistakeShare(mistake=name, share=1 / len(names)) for name in names)
    return RoundPlan(number=number, shares=shares, nearest=nearest, farthest=farthest)


def mistaken(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    """Write a valid mistaken evaluation, or another purpose, as the prompt asks for it."""
    if call_id.purpose == "other_purpose":
        return {"purpose": "Draw the three figures of the report."}
    asked = prompt.messages[1].content.rsplit("Write the mistaken evaluation", 1)[1]
    found = re.search(r"\((\w+)\), with a number from ([\d.]+) to ([\d.]+)\.", asked)
    assert found is not None
    low, high = float(found[2]), float(found[3])
    return {
        "mistake": found[1],
        "reasoning": f"It looks like more, {call_id.part[:6]} and {call_id.trial}.",
        "phi_after": low + (high - low) / 2,
        "why": "The state shows something else.",
    }


Script = Callable[[RenderedPrompt, type[ReplyModel], CallId], Any]


async def generate(
    *events: ScoreEvent,
    plan: RoundPlan | None = None,
    write: Script | ScriptedLLM = mistaken,
    judge: Script | None = None,
    critic: Scorer | None = None,
    known_pair_ids: Container[str] = (),
    other_purposes: Sequence[str] = (),
    **more: Any,
) -> GenerationResult:
    """Generate the pairs of a trace."""
    writer = write if isinstance(write, ScriptedLLM) else ScriptedLLM(write)
    return await generate_contrast_pairs(
        events,
        GenerationTask(PURPOSE, "t", plan or round_of(), known_pair_ids, other_purposes),
        PairModels(writer, None if judge is None else ScriptedLLM(judge), critic),
        **more,
    )


class KnowingJudge:
    """Judges comparisons of known pairs: finds the right side as often as it is said to.

    Args:
        accuracy: How often, drawn for each comparison by itself.
        seed: Draws.
        always: Picks this side, whatever is there.
    """

    def __init__(self, accuracy: float = 1.0, *, seed: int = 0, always: str | None = None) -> None:
        self._accuracy = accuracy
        self._seed = seed
        self._always = always

    def __call__(self, prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
        """Answer one comparison; the right side is the one whose reasoning holds no praise."""
        text = prompt.messages[1].content
        first = text[text.index("<first>") : text.index("</first>")]
        right = "second" if "It looks like more" in first or "was scored" in first else "first"
        hit = make_rng(self._seed, call_id.label).random() < self._accuracy
        other = {"first": "second", "second": "first"}[right]
        return {"reasoning": "By the states.", "better": self._always or (right if hit else other)}


class PlainCritic:
    """A critic whose samples are given by trial, the same for all transitions and purposes."""

    def __init__(self, *phis: tuple[float, float], guarded: Sequence[int] = ()) -> None:
        self._phis = phis
        self._guarded = guarded
        self.trials: list[int] = []

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Return the sample of a trial, counted from 1."""
        self.trials.append(trial)
        raw = evaluation(*self._phis[(trial - 1) % len(self._phis)], f"Sample {trial}.")
        said = raw
        if trial in self._guarded:
            said = raw.model_copy(update={"progress_after": raw.progress_before})
        return StateScore(evaluation=said, raw=raw)
