"""Evaluations that are wrong by construction: of a perturbed input, or of the critic's own making. Pure.

``docs/contrast.md`` says how each one is known to be wrong. Source of the idea: T. Wang et al., Self-Taught Evaluators
(arXiv 2408.02666), section 3: the worse answer is a good answer to a modified instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import JsonValue

from reflact.calibration.guards import QuotableTexts
from reflact.calibration.transition_view import TransitionView, list_changes, show_state
from reflact.jsonutil import is_same_json
from reflact.memory.models import (
    Action,
    Construction,
    ContrastPair,
    Evaluation,
    Provenance,
    ScoreEvent,
    Transition,
)

HIDDEN_TEXT = "(not shown)"
"""Stands for what is withdrawn from a state."""

MAX_LABEL_DISTANCE = 0.5
"""An evaluation that is so near to a label without reasons lends it its reasons."""

DISTANCE_TOLERANCE = 1e-9

OTHER_PURPOSE_MISTAKE = "inflated_score"
"""The kind of mistake of an evaluation that is meant for another purpose."""

_MAX_QUOTE_CHARS = 80
_MAX_QUOTED_FIELDS = 3


class DistanceBand(NamedTuple):
    """How far a wrong progress after may be from the right one."""

    nearest: float
    farthest: float

    def contains(self, wrong: Evaluation, right: Evaluation) -> bool:
        """Whether the distance of two evaluations lies within."""
        distance = abs(wrong.progress_after - right.progress_after)
        return self.nearest - DISTANCE_TOLERANCE <= distance <= self.farthest + DISTANCE_TOLERANCE


class StepToContrast(NamedTuple):
    """A step that pairs are made of: ``right`` is its right evaluation, ``band`` the distance of wrong scores."""

    event: ScoreEvent
    right: Evaluation
    purpose: str
    trace_id: str
    band: DistanceBand

    def build_pair(
        self, wrong: Evaluation, *, construction: Construction, mistake: str, reason: str, **changes: Any
    ) -> ContrastPair:
        """Return a pair of the step; ``changes`` replace fields that follow from it."""
        label, step = self.event.label, self.event.step
        fields: dict[str, Any] = {
            "purpose": self.purpose,
            "transition": self.event.transition,
            "right": self.right,
            "label_source": "agreement" if label is None else label.source,
            "provenance": Provenance(trace_id=self.trace_id, step=step),
        }
        return ContrastPair(
            wrong=wrong, construction=construction, mistake=mistake, reason=reason, **(fields | changes)
        )

    def list_wrong_evaluations(self) -> tuple[Evaluation, ...]:
        """Return what fits the true step, the critic's own words first if it has said any."""
        own = self.event.evaluation
        return (self.right,) if own is None else (own, self.right)


def find_reference(event: ScoreEvent) -> Evaluation | None:
    """Return the right evaluation of a step: its label's numbers, in its own words or those of a close evaluation.

    Without either, the words only repeat the numbers, and the changes are the evidence. None without a label, or if
    the label lacks the state before: then only half of what is right is known.
    """
    label, own = event.label, event.evaluation
    if label is None or label.progress_before is None:
        return None
    before, after = label.progress_before, label.progress_after
    if (
        own is not None
        and not label.reasoning.strip()
        and abs(own.progress_before - before) <= MAX_LABEL_DISTANCE
        and abs(own.progress_after - after) <= MAX_LABEL_DISTANCE
    ):
        return own.model_copy(update={"progress_before": before, "progress_after": after})
    bare = f"It was at {_format_progress(before)} before the action and is at {_format_progress(after)} after it."
    return Evaluation(
        progress_before=before,
        progress_after=after,
        reasoning=label.reasoning if label.reasoning.strip() else bare,
        evidence=label.evidence or quote_changes(event.transition),
        confidence=1,
    )


def build_pairs(step: StepToContrast) -> tuple[ContrastPair, ...]:
    """Return all pairs that need no model, the best first; each within the band."""
    observed = build_observed_pair(step)
    return (*([] if observed is None else [observed]), *_build_perturbed(step))


def build_other_purpose_pair(step: StepToContrast, *, purpose: str, right: Evaluation) -> ContrastPair | None:
    """Return the pair of a step under another purpose, for which ``right`` was agreed on; None if it is no contrast."""
    for wrong in step.list_wrong_evaluations():
        if wrong.progress_after > right.progress_after and step.band.contains(wrong, right):
            return step.build_pair(
                wrong,
                construction="other_purpose",
                mistake=OTHER_PURPOSE_MISTAKE,
                reason="It credits what the action did towards something else than this purpose.",
                purpose=purpose,
                right=right,
                label_source="agreement",
            )
    return None


def classify_error(wrong: Evaluation, right: Evaluation) -> str:
    """Return the kind of mistake that an evaluation shows beside the right one, by the direction of its error."""
    if wrong.progress_after < right.progress_after:
        return "ignored_evidence"
    return "inflated_score" if right.delta > 0 else "credit_for_intention"


def quote_changes(transition: Transition) -> tuple[str, ...]:
    """Return words that point at what changed, as evidence: fields, or the first new line of a text."""
    texts = isinstance(transition.before, str) and isinstance(transition.after, str)
    found: dict[str, str] = {}
    for text in _list_change_texts(transition.before, transition.after):
        found.setdefault(text[:_MAX_QUOTE_CHARS], text)
        if len(found) == (1 if texts else _MAX_QUOTED_FIELDS):
            break
    return tuple(quote for quote, text in found.items() if _is_quotable(quote, text, transition.action))


def _list_change_texts(before: JsonValue, after: JsonValue) -> Iterator[str]:
    if not isinstance(before, str) or not isinstance(after, str):
        yield from (change.path for change in list_changes(before, after))
        return
    old = set(before.splitlines())
    new = (line.strip() for line in show_state(after).splitlines() if line not in old)
    yield from (line for line in new if line)


def _is_quotable(quote: str, text: str, action: Action) -> bool:
    """Whether a quote from the beginning of a text ends at the end of a word, and says more than connects."""
    view = TransitionView(Transition(before="", action=action, after=text))
    return not QuotableTexts(view).find_invented([quote])


def build_observed_pair(step: StepToContrast) -> ContrastPair | None:
    """Return the pair that the critic's own evaluation of a step makes; None if it is no contrast."""
    wrong, right = step.event.evaluation, step.right
    if wrong is None or not step.band.contains(wrong, right):
        return None
    if has_same_words(wrong.reasoning, right.reasoning):
        return None
    error = wrong.progress_after - right.progress_after
    return step.build_pair(
        wrong,
        construction="observed",
        mistake=classify_error(wrong, right),
        reason=f"It is too {'high' if error > 0 else 'low'} by {_format_progress(abs(error))}.",
    )


def _build_perturbed(step: StepToContrast) -> Iterator[ContrastPair]:
    """Yield the perturbations that apply, each with the first evaluation that it makes wrong."""
    if not step.event.transition.changes_state:
        return
    for transition, right, construction, mistake, reason in _perturb_input(step.event.transition, step.right):
        changes = {"transition": transition, "right": right}
        for wrong in step.list_wrong_evaluations():
            is_too_low = construction == "claim_for_effect" and wrong.progress_after <= right.progress_after
            if step.band.contains(wrong, right) and not is_too_low:
                yield step.build_pair(
                    wrong, construction=construction, mistake=mistake, reason=reason, **changes
                )
                break


def _perturb_input(
    transition: Transition, right: Evaluation
) -> Iterator[tuple[Transition, Evaluation, Construction, str, str]]:
    low, high = _format_progress(right.progress_before), _format_progress(right.progress_after)

    def stay(reasoning: str, *, evidence: tuple[str, ...] = (), confidence: float = 1) -> Evaluation:
        before = right.progress_before
        return Evaluation(
            progress_before=before,
            progress_after=before,
            reasoning=f"{reasoning}, so it stays at {low}.",
            evidence=evidence,
            confidence=confidence,
        )

    yield (
        transition.model_copy(update={"after": transition.before}),
        stay("The action changed nothing"),
        "no_effect",
        "ignored_evidence",
        "It credits an effect, but the states before and after are the same.",
    )
    claim = f"The agent says: {transition.action.name} is done, and with it all that was asked for."
    with_claim = _add_claim(transition.before, claim)
    if with_claim is not None:
        yield (
            transition.model_copy(update={"after": with_claim}),
            stay("All that is new is a claim. A claim is no effect", evidence=(claim,)),
            "claim_for_effect",
            "credit_for_intention",
            "It takes the claim of an effect for the effect.",
        )
    swapped = transition.model_copy(update={"before": transition.after, "after": transition.before})
    yield (
        swapped,
        Evaluation(
            progress_before=right.progress_after,
            progress_after=right.progress_before,
            reasoning=f"The state before was worth {high}, and the state after is worth {low}.",
            evidence=quote_changes(swapped),
            confidence=1,
        ),
        "progress_reversed",
        "scale_inconsistency",
        "It scores the two states the wrong way round: what is farther from the purpose gets more.",
    )
    yield (
        transition.model_copy(update={"after": _hide_changes(transition.before, transition.after)}),
        stay("What changed is not shown. Nothing is credited unseen", confidence=0.5),
        "evidence_withdrawn",
        "ignored_evidence",
        "It credits what the state after does not show.",
    )


def _add_claim(state: JsonValue, claim: str) -> JsonValue:
    """Return a state with a claim added; None if it has no place for one."""
    if isinstance(state, str):
        return f"{state}\n{claim}" if state else claim
    if isinstance(state, list):
        return [*state, claim]
    if not isinstance(state, Mapping):
        return None
    name = "message"
    while name in state:
        name += "_"
    return {**state, name: claim}


def _hide_changes(before: JsonValue, after: JsonValue) -> JsonValue:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return HIDDEN_TEXT
    same = {name for name in before.keys() & after.keys() if is_same_json(before[name], after[name])}
    names = sorted(before.keys() | after.keys())
    return {name: before[name] if name in same else HIDDEN_TEXT for name in names}


def has_same_words(one: str, other: str) -> bool:
    """Whether two texts are equal but for case, punctuation and spaces."""
    return keep_letters_and_digits(one) == keep_letters_and_digits(other)


def keep_letters_and_digits(text: str) -> str:
    """Return a text's letters and digits, in small letters; empty if it has none."""
    return "".join(c for c in text.casefold() if c.isalnum())


def _format_progress(value: float) -> str:
    return f"{round(value, 2):g}"
