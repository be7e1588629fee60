"""Contrast pairs by construction: evaluations of a step, or of a changed input, that are known to
be wrong. Pure.

``docs/calibration.md`` says how each one is known to be wrong. Source of the idea: T. Wang et al.,
Self-Taught Evaluators (arXiv 2408.02666), section 3: the worse answer is a good answer to a
modified instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from pydantic import JsonValue

from reflact.calibration.guards import QuotableTexts
from reflact.calibration.trace import Trace
from reflact.calibration.transition_view import TransitionView, list_changes, show_state
from reflact.jsonutil import is_same_json
from reflact.memory.models import (
    Construction,
    ContrastPair,
    Evaluation,
    Provenance,
    ScoreEvent,
    Transition,
)
from reflact.types import digest_json

# Stands for what is withdrawn from a state.
HIDDEN_TEXT = "(not shown)"

# An evaluation that is so near to a label without reasons lends it its reasons.
MAX_LABEL_DISTANCE = 0.5

# Distances are differences of decimal numbers, which binary numbers only approximate.
DISTANCE_TOLERANCE = 1e-9

# A wrong progress after differs from the right one by at least so much: half a scale step is a
# matter of taste.
MIN_DISTANCE = 1.0

# Progress rises, stays or falls; each has a third of a batch.
N_DIRECTIONS = 3

_MAX_QUOTE_CHARS = 80
_MAX_QUOTED_FIELDS = 3


class StepToContrast(NamedTuple):
    """A step with its right evaluation, and how far from it a wrong progress after may be."""

    event: ScoreEvent
    right: Evaluation
    purpose: str
    trace_id: str
    max_distance: float = 10.0

    def contrasts(self, wrong: Evaluation, right: Evaluation) -> bool:
        """Whether two evaluations are from ``MIN_DISTANCE`` to ``max_distance`` apart."""
        distance = abs(wrong.progress_after - right.progress_after)
        is_far_enough = distance >= MIN_DISTANCE - DISTANCE_TOLERANCE
        return is_far_enough and distance <= self.max_distance + DISTANCE_TOLERANCE

    def build_pair(self, wrong: Evaluation, **fields: Any) -> ContrastPair:
        """Return a pair of the step; ``fields`` add to those that follow from it, or replace
        them.
        """
        label = self.event.label
        known: dict[str, Any] = {
            "purpose": self.purpose,
            "transition": self.event.transition,
            "right": self.right,
            "label_source": None if label is None else label.source,
            "provenance": Provenance(trace_id=self.trace_id, step=self.event.step),
        }
        return ContrastPair(wrong=wrong, **(known | fields))


# --------------------------------------------------------------------------------------- right side


def find_reference(event: ScoreEvent) -> Evaluation | None:
    """Return the right evaluation of a step: its label's numbers, in its own words or those of a
    close evaluation.

    Without either, the words only repeat the numbers, and the changes are the evidence. A step
    without a label has the critic's own evaluation, as in the paper. None if there is neither, or
    if the label lacks the state before: then only half of what is right is known.
    """
    label = event.label
    own = event.evaluation
    if label is None:
        return own
    if label.progress_before is None:
        return None
    before = label.progress_before
    after = label.progress_after
    has_reasons = bool(label.reasoning.strip())
    if (
        own is not None
        and not has_reasons
        and abs(own.progress_before - before) <= MAX_LABEL_DISTANCE
        and abs(own.progress_after - after) <= MAX_LABEL_DISTANCE
    ):
        return own.model_copy(update={"progress_before": before, "progress_after": after})
    reasoning = label.reasoning
    if not has_reasons:
        reasoning = (
            f"It was at {_format_progress(before)} before the action and is at "
            f"{_format_progress(after)} after it."
        )
    return Evaluation(
        progress_before=before,
        progress_after=after,
        reasoning=reasoning,
        evidence=label.evidence or quote_changes(event.transition),
        confidence=1,
    )


def quote_changes(transition: Transition) -> tuple[str, ...]:
    """Return evidence that points at what changed: fields, or the first new line of a text."""
    before = transition.before
    after = transition.after
    if isinstance(before, str) and isinstance(after, str):
        old = set(before.splitlines())
        lines = (line.strip() for line in show_state(after).splitlines() if line not in old)
        texts = [line for line in lines if line][:1]
    else:
        texts = [change.path for change in list_changes(before, after)]
    quotes: dict[str, str] = {}
    for text in texts:
        quotes.setdefault(text[:_MAX_QUOTE_CHARS], text)
        if len(quotes) == _MAX_QUOTED_FIELDS:
            break
    return tuple(quote for quote, text in quotes.items() if _is_quotable(quote, text, transition))


def _is_quotable(quote: str, text: str, transition: Transition) -> bool:
    """Whether a quote ends at the end of a word, and says more than words that connect."""
    view = TransitionView(Transition(before="", action=transition.action, after=text))
    return not QuotableTexts(view).find_invented([quote])


# --------------------------------------------------------------------------------------- wrong side


def pairs_of(step: StepToContrast) -> tuple[ContrastPair, ...]:
    """Return all pairs that a step gives without a model, the best first."""
    observed = build_observed_pair(step)
    perturbed = tuple(_build_perturbed(step))
    return perturbed if observed is None else (observed, *perturbed)


def build_observed_pair(step: StepToContrast) -> ContrastPair | None:
    """Return the pair of the critic's own evaluation of a step; None if it is no contrast."""
    wrong = step.event.evaluation
    right = step.right
    if wrong is None or not step.contrasts(wrong, right):
        return None
    if has_same_words(wrong.reasoning, right.reasoning):
        return None
    error = wrong.progress_after - right.progress_after
    direction = "high" if error > 0 else "low"
    return step.build_pair(
        wrong,
        construction="observed",
        mistake=classify_error(wrong, right),
        reason=f"It is too {direction} by {_format_progress(abs(error))}.",
    )


def classify_error(wrong: Evaluation, right: Evaluation) -> str:
    """Return the kind of mistake of an evaluation, by the direction of its error."""
    if wrong.progress_after < right.progress_after:
        return "ignored_evidence"
    return "inflated_score" if right.delta > 0 else "credit_for_intention"


class _Perturbation(NamedTuple):
    """A changed input with its right evaluation, and what is wrong with that of the true one."""

    transition: Transition
    right: Evaluation
    construction: Construction
    mistake: str
    reason: str


def _build_perturbed(step: StepToContrast) -> Iterator[ContrastPair]:
    """Yield a pair of each perturbation, with the first evaluation that it makes wrong.

    What fits the true step may be wrong for the changed one: the critic's own words, if it has said
    any, or else what is right.
    """
    if not step.event.transition.changes_state:
        return
    own = step.event.evaluation
    candidates = [step.right] if own is None else [own, step.right]
    for changed in _perturb_input(step.event.transition, step.right):
        for wrong in candidates:
            is_too_low = (
                changed.construction == "claim_for_effect"
                and wrong.progress_after <= changed.right.progress_after
            )
            if step.contrasts(wrong, changed.right) and not is_too_low:
                yield step.build_pair(wrong, **changed._asdict())
                break


def _perturb_input(transition: Transition, right: Evaluation) -> Iterator[_Perturbation]:
    low = _format_progress(right.progress_before)
    high = _format_progress(right.progress_after)

    def stay(
        reasoning: str, *, evidence: tuple[str, ...] = (), confidence: float = 1
    ) -> Evaluation:
        return Evaluation(
            progress_before=right.progress_before,
            progress_after=right.progress_before,
            reasoning=f"{reasoning}, so it stays at {low}.",
            evidence=evidence,
            confidence=confidence,
        )

    yield _Perturbation(
        transition.model_copy(update={"after": transition.before}),
        stay("The action changed nothing"),
        "no_effect",
        "ignored_evidence",
        "It credits an effect, but the states before and after are the same.",
    )
    claim = f"The agent says: {transition.action.name} is done, and with it all that was asked for."
    with_claim = _add_claim(transition.before, claim)
    if with_claim is not None:
        yield _Perturbation(
            transition.model_copy(update={"after": with_claim}),
            stay("All that is new is a claim. A claim is no effect", evidence=(claim,)),
            "claim_for_effect",
            "credit_for_intention",
            "It takes the claim of an effect for the effect.",
        )
    swapped = transition.model_copy(update={"before": transition.after, "after": transition.before})
    yield _Perturbation(
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
    yield _Perturbation(
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
    shown: dict[str, JsonValue] = {}
    for name in sorted(before.keys() | after.keys()):
        is_same = name in before and name in after and is_same_json(before[name], after[name])
        shown[name] = before[name] if is_same else HIDDEN_TEXT
    return shown


# ------------------------------------------------------------------------------------------ anchors

# So many points a careless evaluation is off, if it credits what was not achieved.
CARELESS_DISTANCE = 3.0


def build_anchors(traces: Iterable[Trace]) -> tuple[ContrastPair, ...]:
    """Return one labelled pair for each step whose label has both numbers, by a program or a
    person.

    The right side is the label. The wrong one is what the critic said if that is off by a point or
    more, else a careless evaluation: no credit if there was progress, credit if there was none.

    Args:
        traces: Runs that are set apart: neither learned from nor held out.
    """
    anchors = []
    for trace in traces:
        for event in trace.events:
            right = find_reference(event)
            if event.label is None or right is None:
                continue
            step = StepToContrast(event, right, trace.purpose, trace.id)
            wrong = _make_careless(right)
            construction = "written"
            if event.evaluation is not None and step.contrasts(event.evaluation, right):
                wrong = event.evaluation
                construction = "observed"
            reason = "It overlooks what was achieved."
            if wrong.progress_after > right.progress_after:
                reason = "It credits what was not achieved."
            anchor = step.build_pair(
                wrong,
                construction=construction,
                mistake=classify_error(wrong, right),
                reason=reason,
            )
            anchors.append(anchor)
    return tuple(anchors)


def _make_careless(right: Evaluation) -> Evaluation:
    """Return an evaluation that overlooks progress, or else one that believes in it."""
    if right.delta >= MIN_DISTANCE:
        progress = right.progress_before
        reasoning = "Nothing has changed."
    elif right.progress_after + CARELESS_DISTANCE <= 10:
        progress = right.progress_after + CARELESS_DISTANCE
        reasoning = "The agent does what it wants to do."
    else:
        progress = right.progress_after - CARELESS_DISTANCE
        reasoning = "Little of it is there."
    return right.model_copy(
        update={"progress_after": progress, "reasoning": reasoning, "evidence": ()}
    )


# ---------------------------------------------------------------------------------------- selection


def select_events(events: Iterable[ScoreEvent], *, min_delta: float) -> tuple[ScoreEvent, ...]:
    """Return the labelled events to learn from, each content once.

    They moved by ``min_delta``, by critic or label. Or nothing moved: that is where critics
    flatter.
    """
    selected: dict[str, ScoreEvent] = {}
    for event in events:
        if is_fully_labeled(event) and _moves(event, min_delta):
            fields = event.model_dump(mode="json", exclude={"step", "transition"})
            content = digest_json({**fields, "transition": event.transition.json_object})
            selected.setdefault(content, event)
    return tuple(selected.values())


def is_fully_labeled(event: ScoreEvent) -> bool:
    """Whether a program or a person says what both states of a step are worth."""
    return event.label is not None and event.label.progress_before is not None


def _moves(event: ScoreEvent, min_delta: float) -> bool:
    judgements = (event.evaluation, event.label)
    deltas = [one.delta for one in judgements if one is not None and one.delta is not None]
    if deltas[0] == 0 or not event.transition.changes_state:
        return True
    return any(delta != 0 and abs(delta) >= min_delta for delta in deltas)


def choose_batch(
    pairs: Iterable[ContrastPair], *, max_pairs: int | None, taken: Sequence[ContrastPair] = ()
) -> tuple[ContrastPair, ...]:
    """Return the pairs that a batch has room for beside those that are ``taken``, sorted by their
    hashes.

    Perturbed inputs nearly always have less effect than the true ones, and a critic that sees many
    examples of no effect learns to say that. So a third of the room goes to each direction of the
    right side.
    """
    by_id = {pair.id: pair for pair in pairs}
    order = [by_id[pair_id] for pair_id in sorted(by_id)]
    if max_pairs is None:
        return tuple(order)
    room = ceil(max_pairs / N_DIRECTIONS)
    counts = Counter(pair.right.direction for pair in taken)
    chosen = []
    for pair in order:
        if counts[pair.right.direction] < room:
            counts[pair.right.direction] += 1
            chosen.append(pair)
    return tuple(chosen)


def has_same_words(one: str, other: str) -> bool:
    """Whether two texts are equal but for case, punctuation and spaces."""
    return keep_letters_and_digits(one) == keep_letters_and_digits(other)


def keep_letters_and_digits(text: str) -> str:
    """Return a text's letters and digits, in small letters; empty if it has none."""
    return "".join(c for c in text.casefold() if c.isalnum())


def _format_progress(value: float) -> str:
    return f"{round(value, 2):g}"
