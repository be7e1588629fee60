"""A transition as it is looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.calibration.changes import Seen, seen, show_change, show_state
from reflact.memory import Action, Transition
from reflact.memory_cards import subject_of

STATES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(before=STATES, after=STATES, name=st.text(), arguments=STATES)
def test_what_is_made_in_parts_is_what_is_made_at_once(
    before: JsonValue, after: JsonValue, name: str, arguments: JsonValue
) -> None:
    """Hashes and texts are those of the transition, made once."""
    step = Transition(before=before, action=Action(name=name, arguments=arguments), after=after)
    texts = Seen(step)
    assert texts.canonical == step.canonical
    assert texts.subject("p") == subject_of("p", step)
    assert (texts.before, texts.after) == (show_state(before), show_state(after))
    assert texts.change == show_change(before, after)
    assert texts.brief_change == show_change(before, after, brief=True)
    assert seen(texts) is texts
    assert seen(step).transition is step
