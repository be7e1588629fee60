"""Rules that an evaluation must keep whatever the model says. Pure.

They are applied in the order of ``GUARDS``. The first four take credit away and nothing gives it back; the
others lower confidence in what is left, which nothing raises. So none undoes what another did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from reflact.calibration.evidence import Grounds
from reflact.calibration.seen import Seen, seen
from reflact.memory import Evaluation, Transition


class Limits(NamedTuple):
    """What the guards go by; see ``CriticSettings``."""

    jump: float
    jump_confidence: float
    unsupported_confidence: float


class Case(NamedTuple):
    """A transition as guards see it.

    Args:
        changed: Whether its states differ.
        grounds: What evidence may quote.
        limits: What the guards go by.
        phi_before: What the state before is worth whatever an evaluation says; None: that is its to say.
    """

    changed: bool
    grounds: Grounds
    limits: Limits
    phi_before: float | None = None

    @classmethod
    def of(cls, transition: Transition | Seen, limits: Limits, *, phi_before: float | None = None) -> Case:
        """Return what the guards need to know of a transition."""
        texts = seen(transition)
        return cls(texts.transition.changed, Grounds(texts), limits, phi_before)


def no_change(said: Evaluation, case: Case) -> Evaluation:
    """Where nothing changed nothing was achieved: phi after is phi before."""
    return said if case.changed else _no_credit(said)


def invented_evidence(said: Evaluation, case: Case) -> Evaluation:
    """Evidence that is not there is struck out; what rests on it gets no credit and little confidence."""
    invented = case.grounds.unfounded(said.evidence) if case.changed else ()
    if not invented:
        return said
    kept = tuple(quote for quote in said.evidence if quote not in invented)
    return _at_most(_no_credit(said), case.limits.unsupported_confidence).model_copy(
        update={"evidence": kept}
    )


def no_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A change that is judged without any evidence gets no credit and little confidence."""
    if not case.changed or said.evidence:
        return said
    return _at_most(_no_credit(said), case.limits.unsupported_confidence)


def vanished_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A gain for which only what is gone is quoted gets no credit and little confidence: it shows a loss."""
    if not case.changed or not said.evidence or _bearing(said, case):
        return said
    return _at_most(_no_credit(said), case.limits.unsupported_confidence)


def old_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A change of phi for which only what was there before is quoted gets little confidence."""
    if not case.changed or said.delta == 0 or case.grounds.new(_bearing(said, case)):
        return said
    return _at_most(said, case.limits.unsupported_confidence)


def jump(said: Evaluation, case: Case) -> Evaluation:
    """A large change of phi in one step gets limited confidence."""
    return _at_most(said, case.limits.jump_confidence) if abs(said.delta) > case.limits.jump else said


GUARDS: Final[tuple[Callable[[Evaluation, Case], Evaluation], ...]] = (
    no_change,
    invented_evidence,
    no_evidence,
    vanished_evidence,
    old_evidence,
    jump,
)


def guarded(said: Evaluation, case: Case) -> tuple[Evaluation, tuple[str, ...]]:
    """Return what is left of an evaluation, and the names of the guards that changed something."""
    said, names = _counted(said, case), list[str]()
    for guard in GUARDS:
        left = guard(said, case)
        if left != said:
            names.append(guard.__name__)
        said = left
    return said, tuple(names)


def objection(said: Evaluation, case: Case) -> str | None:
    """Return why an evaluation is to be asked for again, or None.

    A difference between two states that differ has to rest on evidence, and on none that is invented; a gain
    on more than what is gone.
    """
    said = _counted(said, case)
    if not case.changed or said.delta == 0:
        return None
    if not said.evidence:
        return f"evidence is empty: copy words from the state after or from the change, or {_withdrawn(case)}"
    invented = case.grounds.unfounded(said.evidence)
    if invented:
        return (
            f"evidence {_listed(invented)} stands neither in the state after nor in the change: copy words "
            "that do"
        )
    if _bearing(said, case):
        return None
    return (
        f"evidence {_listed(said.evidence)} is gone in the state after, which shows no gain: copy words from "
        f"the state after, or a change with both its sides, or {_withdrawn(case)}"
    )


def _bearing(said: Evaluation, case: Case) -> tuple[str, ...]:
    """Return the evidence that can bear the change of phi: what is gone bears a loss and no gain."""
    if said.delta <= 0:
        return said.evidence
    gone = case.grounds.gone(said.evidence)
    return tuple(quote for quote in said.evidence if quote not in gone)


def _listed(quotes: Sequence[str]) -> str:
    return ", ".join(repr(quote[:100]) for quote in quotes[:3])


def _counted(said: Evaluation, case: Case) -> Evaluation:
    """Return an evaluation from where it counts: the state before is worth what is known of it."""
    if case.phi_before is None or case.phi_before == said.phi_before:
        return said
    return said.model_copy(update={"phi_before": case.phi_before})


def _withdrawn(case: Case) -> str:
    """Return in words how an evaluation claims no change."""
    if case.phi_before is None:
        return "give equal numbers"
    return f"give {case.phi_before:g} as phi after, since the state before counts {case.phi_before:g} here"


def _no_credit(said: Evaluation) -> Evaluation:
    return said.model_copy(update={"phi_after": said.phi_before})


def _at_most(said: Evaluation, confidence: float) -> Evaluation:
    return said.model_copy(update={"confidence": min(said.confidence, confidence)})
