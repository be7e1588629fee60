"""A transition as it is looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.calibration.state_diff import TransitionView, show_change, show_state, view_transition
from reflact.memory.cards import compute_subject_hash
from reflact.memory.models import Action, Transition

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
    texts = TransitionView(step)
    assert texts.canonical_json == step.canonical_json
    assert texts.subject_hash("p") == compute_subject_hash("p", step)
    assert (texts.before_text, texts.after_text) == (show_state(before), show_state(after))
    assert texts.change_text == show_change(before, after)
    assert texts.short_change_text == show_change(before, after, shorten=True)
    assert view_transition(texts) is texts
    assert view_transition(step).transition is step
