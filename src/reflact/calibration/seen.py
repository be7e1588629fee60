"""A transition as it is looked at: its texts, each made once, however many look. Pure."""

from __future__ import annotations

from functools import cached_property

from pydantic import JsonValue

from reflact.calibration.changes import Change, changes, show_change, show_fields, show_state
from reflact.memory import Transition
from reflact.types import canonical, canonical_object, digest_of


class Seen:
    """The texts of a transition, each made when it is first asked for, in time in proportion to the states.

    Args:
        transition: What is looked at.
    """

    def __init__(self, transition: Transition) -> None:
        self.transition = transition

    @property
    def sides(self) -> tuple[JsonValue, JsonValue]:
        """The states before and after."""
        return self.transition.before, self.transition.after

    @cached_property
    def before(self) -> str:
        """The state before, as it is shown."""
        return show_state(self.transition.before)

    @cached_property
    def after(self) -> str:
        """The state after, as it is shown."""
        return show_state(self.transition.after)

    @cached_property
    def change(self) -> str:
        """What changed."""
        texts = all(isinstance(side, str) for side in self.sides)
        return show_change(*self.sides) if texts else show_fields(self.fields)

    @cached_property
    def brief_change(self) -> str:
        """What changed, without most of what long texts have in common."""
        return show_fields(self.fields, brief=True)

    @cached_property
    def fields(self) -> tuple[Change, ...]:
        """The fields that changed."""
        return tuple(changes(*self.sides))

    @cached_property
    def canonical(self) -> str:
        """The transition as canonical JSON, from which its hashes follow."""
        return self.transition.canonical

    def subject(self, purpose: str) -> str:
        """Return the hash of the transition under a purpose; see ``memory_cards.subject_of``."""
        fields = {"purpose": canonical(purpose), "transition": self.canonical}
        return digest_of(canonical_object(fields))


def seen(transition: Transition | Seen) -> Seen:
    """Return a transition as it is looked at, with the texts that it has by now."""
    return transition if isinstance(transition, Seen) else Seen(transition)
