"""Evaluations that are wrong by construction: of a perturbed input, or of the critic's own making. Pure.

A good evaluation of a step is wrong for another step, if that one differs from it where it matters. What is
right for the other step follows from how it was made, so that no opinion is asked:

- ``no_effect``: the state after is the state before, so phi stays.
- ``claim_for_effect``: a claim of success is all that was added to the state before, so phi stays: words
  about work are not work. (Where the purpose is nothing but to make a claim, this does not hold.)
- ``progress_reversed``: the states are swapped, and their phi with them, since phi belongs to a state.
- ``evidence_withdrawn``: all that changed is hidden, so phi stays by the rule that nothing is credited
  unseen. What it truly is nobody knows: such a pair teaches the rule.

For another purpose nothing is known but that the evaluation should be too high; ``under`` therefore takes
what samples agree on for it, and refuses what does not bear that out.

Source of the idea: T. Wang et al., Self-Taught Evaluators (arXiv 2408.02666), section 3: the worse answer is
a good answer to a modified instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from reflact.calibration.changes import changes, show_state
from reflact.calibration.guards import Grounds
from reflact.memory import Action, Construction, Evaluation, Gold, GoldSource, ScoreEvent, Transition
from reflact.types import FrozenModel
from reflact.values import is_same_json

HIDDEN = "(not shown)"
"""Stands for what is withdrawn from a state."""

CLOSE = 0.5
"""So near to gold without reasons, an evaluation's own reasons are taken for it."""

ROUNDING = 1e-9
_QUOTE = 80
_FIELDS = 3


class Label(FrozenModel):
    """What is right for a step, and who says so."""

    right: Evaluation
    source: GoldSource


class Band(NamedTuple):
    """How far a wrong phi after may be from the right one."""

    nearest: float
    farthest: float

    def holds(self, wrong: Evaluation, right: Evaluation) -> bool:
        """Whether the distance of two evaluations lies within."""
        distance = abs(wrong.phi_after - right.phi_after)
        return self.nearest - ROUNDING <= distance <= self.farthest + ROUNDING


class Built(FrozenModel):
    """A pair's two sides with their input, before anything was paid for or compared."""

    construction: Construction
    mistake: str
    purpose: str
    transition: Transition
    right: Evaluation
    wrong: Evaluation
    source: GoldSource
    why: str


def label_of(event: ScoreEvent, gold: Gold) -> Label | None:
    """Return what gold says of a step, in the words of its reasons or of an evaluation close to it.

    Without either the words are bare, and what changed is the evidence. None where gold says nothing of the
    state before: then only half of what is right is known.
    """
    own, before = event.evaluation, gold.phi_before
    if before is None:
        return None
    if own is not None and not gold.reasoning.strip() and _distance(own, before, gold.phi_after) <= CLOSE:
        given = {"phi_before": before, "phi_after": gold.phi_after}
        return Label(right=own.model_copy(update=given), source=gold.source)
    low, high = _phi(before), _phi(gold.phi_after)
    bare = f"It was at {low} before the action and is at {high} after it."
    right = Evaluation(
        phi_before=before,
        phi_after=gold.phi_after,
        reasoning=gold.reasoning if gold.reasoning.strip() else bare,
        evidence=gold.evidence or quotes(event.transition),
        confidence=1,
    )
    return Label(right=right, source=gold.source)


def _distance(own: Evaluation, before: float, after: float) -> float:
    return max(abs(own.phi_before - before), abs(own.phi_after - after))


def built(event: ScoreEvent, label: Label, *, purpose: str, band: Band) -> tuple[Built, ...]:
    """Return all pairs that need no model, the best first; each within the band."""
    found = (_observed(event, label, purpose, band), *_perturbed(event, label, purpose, band))
    return tuple(one for one in found if one is not None)


def under(event: ScoreEvent, label: Label, *, purpose: str, right: Evaluation, band: Band) -> Built | None:
    """Return the pair of a step under another purpose, for which ``right`` was agreed on.

    None where the step's evaluation is not too high for that purpose, by a distance within the band.
    """
    wrong = next(
        (w for w in _wrongs(event, label) if w.phi_after > right.phi_after and band.holds(w, right)), None
    )
    if wrong is None:
        return None
    why = "It credits what the action did towards something else than this purpose."
    return Built(
        construction="other_purpose",
        mistake="inflated_score",
        purpose=purpose,
        transition=event.transition,
        right=right,
        wrong=wrong,
        source="agreement",
        why=why,
    )


def kind_of_error(wrong: Evaluation, right: Evaluation) -> str:
    """Return the kind of mistake that an evaluation shows beside the right one.

    Too high where nothing was achieved: credit for an intention. Too high else: an inflated score. Too
    low: ignored evidence.
    """
    if wrong.phi_after < right.phi_after:
        return "ignored_evidence"
    return "inflated_score" if right.delta > 0 else "credit_for_intention"


def quotes(transition: Transition) -> tuple[str, ...]:
    """Return words that point at what changed, as evidence: fields, or the first new line of a text."""
    texts = isinstance(transition.before, str) and isinstance(transition.after, str)
    kept: dict[str, str] = {}
    for place in _places(transition.before, transition.after):
        kept.setdefault(place[:_QUOTE], place)
        if len(kept) == (1 if texts else _FIELDS):
            break
    return tuple(quote for quote, place in kept.items() if _stands(quote, place, transition.action))


def _places(before: JsonValue, after: JsonValue) -> Iterator[str]:
    if not isinstance(before, str) or not isinstance(after, str):
        yield from (change.path for change in changes(before, after))
        return
    old = set(before.splitlines())
    new = (line.strip() for line in show_state(after).splitlines() if line not in old)
    yield from (line for line in new if line)


def _stands(quote: str, place: str, action: Action) -> bool:
    """Whether a quote from the beginning of a place ends where a word does, and says more than connects."""
    return not Grounds(Transition(before="", action=action, after=place)).unfounded([quote])


# --------------------------------------------------------------------------------------- constructions


def _observed(event: ScoreEvent, label: Label, purpose: str, band: Band) -> Built | None:
    wrong = event.evaluation
    if wrong is None or not band.holds(wrong, label.right):
        return None
    if same_words(wrong.reasoning, label.right.reasoning):
        return None
    high = wrong.phi_after > label.right.phi_after
    why = f"It is too {'high' if high else 'low'} by {_phi(abs(wrong.phi_after - label.right.phi_after))}."
    return Built(
        construction="observed",
        mistake=kind_of_error(wrong, label.right),
        purpose=purpose,
        transition=event.transition,
        right=label.right,
        wrong=wrong,
        source=label.source,
        why=why,
    )


def _perturbed(event: ScoreEvent, label: Label, purpose: str, band: Band) -> Iterator[Built]:
    """Yield the perturbations that apply, each with the first evaluation that it makes wrong."""
    if not event.transition.changed:
        return
    for transition, right, construction, mistake, why in _inputs(event.transition, label.right):
        upward = construction == "claim_for_effect"
        for wrong in _wrongs(event, label):
            if band.holds(wrong, right) and (not upward or wrong.phi_after > right.phi_after):
                yield Built(
                    construction=construction,
                    mistake=mistake,
                    purpose=purpose,
                    transition=transition,
                    right=right,
                    wrong=wrong,
                    source=label.source,
                    why=why,
                )
                break


def _inputs(
    true: Transition, right: Evaluation
) -> Iterator[tuple[Transition, Evaluation, Construction, str, str]]:
    low, high = _phi(right.phi_before), _phi(right.phi_after)
    stays = right.model_copy(update={"phi_after": right.phi_before, "evidence": (), "confidence": 1.0})
    yield (
        true.model_copy(update={"after": true.before}),
        stays.model_copy(update={"reasoning": f"The action changed nothing, so it stays at {low}."}),
        "no_effect",
        "ignored_evidence",
        "It credits an effect, but the states before and after are the same.",
    )
    claim = f"The agent says: {true.action.name} is done, and with it all that was asked for."
    told = _with_claim(true.before, claim)
    if told is not None:
        yield (
            true.model_copy(update={"after": told}),
            stays.model_copy(
                update={
                    "reasoning": f"All that is new is a claim. A claim is no effect, so it stays at {low}.",
                    "evidence": (claim,),
                }
            ),
            "claim_for_effect",
            "credit_for_intention",
            "It takes the claim of an effect for the effect.",
        )
    swapped = true.model_copy(update={"before": true.after, "after": true.before})
    yield (
        swapped,
        Evaluation(
            phi_before=right.phi_after,
            phi_after=right.phi_before,
            reasoning=f"The state before was worth {high}, and the state after is worth {low}.",
            evidence=quotes(swapped),
            confidence=1,
        ),
        "progress_reversed",
        "scale_inconsistency",
        "It scores the two states the wrong way round: what is farther from the purpose gets more.",
    )
    yield (
        true.model_copy(update={"after": _withdrawn(true.before, true.after)}),
        stays.model_copy(
            update={
                "reasoning": f"What changed is not shown. Nothing is credited unseen, so it stays at {low}.",
                "confidence": 0.5,
            }
        ),
        "evidence_withdrawn",
        "ignored_evidence",
        "It credits what the state after does not show.",
    )


def _wrongs(event: ScoreEvent, label: Label) -> tuple[Evaluation, ...]:
    """Return what fits the true step, the critic's own words first where it has said any."""
    return (label.right,) if event.evaluation is None else (event.evaluation, label.right)


def _with_claim(state: JsonValue, claim: str) -> JsonValue:
    """Return a state with a claim added; None where it has no place for one."""
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


def _withdrawn(before: JsonValue, after: JsonValue) -> JsonValue:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return HIDDEN
    touched = {name for name in before.keys() | after.keys() if _differs(before, after, name)}
    return {
        name: HIDDEN if name in touched else before[name] for name in sorted(before.keys() | after.keys())
    }


def _differs(before: dict[str, JsonValue], after: dict[str, JsonValue], name: str) -> bool:
    if name not in before or name not in after:
        return True
    return not is_same_json(before[name], after[name])


def same_words(one: str, other: str) -> bool:
    """Whether two texts are equal but for case, punctuation and spaces."""
    return plain(one) == plain(other)


def plain(text: str) -> str:
    """Return a text's letters and digits, in small letters; empty where it has none."""
    return "".join(c for c in text.casefold() if c.isalnum())


def _phi(value: float) -> str:
    return f"{round(value, 2):g}"
