"""Pairs by themselves: states, scopes, and what a pair's cards say."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pairs import evidence_for, make_pair
from reflact.errors import DataError
from reflact.memory.cards import (
    NEXT_STATUSES,
    PAIR_KINDS,
    build_cards,
    check_status_change,
    is_visible_to,
)
from reflact.memory.models import BatchTest, CardStatus, Scope

NOW = datetime(2026, 3, 1, tzinfo=UTC)
TEST = BatchTest(number=1, holdout_id="h", n_earlier_tests=0, pair_ids=("a",), at=NOW)
STATES: tuple[CardStatus, ...] = tuple(NEXT_STATUSES)
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True).map(tuple)
SCOPES = st.builds(
    Scope, roles=NAMES, tools=NAMES, task_categories=NAMES, user=st.sampled_from([None, "alice", "bob"])
)


@given(path=st.lists(st.sampled_from(STATES), max_size=8))
def test_no_way_leads_to_promotion_without_quarantine(path: list[CardStatus]) -> None:
    """Whatever is tried from candidate on, a promoted pair was quarantined just before, and on evidence."""
    status: CardStatus = "candidate"
    for after in path:
        before = status
        with suppress(DataError):
            check_status_change(status, after, evidence_for(TEST))
            status = after
        assert status != "promoted" or before in {"quarantined", "promoted"}
        assert before not in {"archived", "rejected"} or status in {before, "archived"}


@given(before=st.sampled_from(STATES), after=st.sampled_from(STATES))
def test_states_follow_the_table_alone(before: CardStatus, after: CardStatus) -> None:
    """A change is made exactly where the table has it."""
    if after in NEXT_STATUSES[before]:
        check_status_change(before, after, evidence_for(TEST))
    else:
        with pytest.raises(DataError, match=f"{before} cannot become {after}"):
            check_status_change(before, after, evidence_for(TEST))


def test_promotion_needs_evidence_that_says_so() -> None:
    """No evidence, and evidence of a test that was not passed, promote nothing."""
    for evidence in (None, evidence_for(TEST, promoted=False)):
        with pytest.raises(DataError, match="evidence of a passed test"):
            check_status_change("quarantined", "promoted", evidence)


def test_a_pair_of_alice_is_seen_by_those_who_name_alice() -> None:
    """Whoever names nobody, or somebody else, does not see it; roles, tools and categories likewise."""
    alice = Scope(user="alice")
    assert is_visible_to(alice, Scope(user="alice", roles=("coder",)))
    assert not is_visible_to(alice, Scope())
    assert not is_visible_to(alice, Scope(user="bob"))
    assert not is_visible_to(Scope(roles=("critic",)), Scope())
    assert is_visible_to(Scope(roles=("critic", "coder")), Scope(roles=("coder",)))


@given(scope=SCOPES, asker=SCOPES)
def test_each_field_of_a_scope_is_a_condition_of_its_own(scope: Scope, asker: Scope) -> None:
    """A scope of several fields is seen exactly by those who see each field alone."""
    parts = [
        Scope(roles=scope.roles),
        Scope(tools=scope.tools),
        Scope(task_categories=scope.task_categories),
        Scope(user=scope.user),
    ]
    assert is_visible_to(scope, asker) == all(is_visible_to(part, asker) for part in parts)
    assert is_visible_to(Scope(), asker)


def test_both_cards_name_their_pair_and_say_it_in_words() -> None:
    """The right card has the right evaluation, the wrong one the mistake and why; neither repeats the transition."""
    pair = make_pair(7)
    right, wrong = build_cards(pair)
    assert (right.kind, wrong.kind) == PAIR_KINDS
    assert (right.content, right.strategy) == (
        "2 -> 3\nReasoning: One file more.\nEvidence: files",
        "One file more.",
    )
    assert "2 -> 9" in wrong.content
    assert (wrong.mistake, wrong.strategy) == ("credit_for_intention", pair.reason)
    for card in (right, wrong):
        assert card.pair_id == pair.id
        assert pair.purpose not in card.content
