"""Cards by themselves: states, scopes, ranks, and what a pair's cards say."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pairs import evidence_for, make_pair
from reflact.errors import DataError
from reflact.memory.cards import (
    NEXT_STATUSES,
    PAIR_KINDS,
    RankedUnit,
    build_cards,
    check_status_change,
    content_id,
    create_card,
    is_visible_to,
    rank_units,
)
from reflact.memory.models import BatchTest, CardStatus, Scope

NOW = datetime(2026, 3, 1, tzinfo=UTC)
TEST = BatchTest(number=1, holdout_id="h", n_earlier_tests=0, unit_ids=("a",), at=NOW)
STATES: tuple[CardStatus, ...] = tuple(NEXT_STATUSES)
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True).map(tuple)
SCOPES = st.builds(
    Scope, roles=NAMES, tools=NAMES, task_categories=NAMES, user=st.sampled_from([None, "alice", "bob"])
)
STANDINGS = st.lists(
    st.builds(
        RankedUnit,
        st.text("abc", min_size=1, max_size=3),
        st.sampled_from([0.0, 0.5, 3.0]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.sampled_from([NOW, NOW - timedelta(days=30), NOW + timedelta(days=1)]),
    ),
    unique_by=lambda one: one.id,
    max_size=8,
)


@given(path=st.lists(st.sampled_from(STATES), max_size=8))
def test_no_way_leads_to_promotion_without_quarantine(path: list[CardStatus]) -> None:
    """Whatever is tried from candidate on, a promoted card was quarantined just before, and on evidence."""
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


def test_a_card_of_alice_is_seen_by_those_who_name_alice() -> None:
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


@given(standings=STANDINGS, order=st.randoms())
def test_a_ranking_does_not_depend_on_the_order_of_what_is_ranked(
    standings: list[RankedUnit], order: random.Random
) -> None:
    """Shuffled input gives the same list, all of it, with and without a time."""
    shuffled = order.sample(standings, len(standings))
    for now in (None, NOW):
        assert rank_units(shuffled, now) == rank_units(standings, now)
        assert sorted(rank_units(standings, now)) == sorted(one.id for one in standings)


def test_relevance_comes_before_utility_and_that_before_trust_and_recency() -> None:
    """Each part of a rank decides where those above it are equal; ids decide where all are."""

    def standing(name: str, relevance: float, utility: float, trust: float, days: int) -> RankedUnit:
        return RankedUnit(name, relevance, trust, utility, NOW - timedelta(days=days))

    rows = [
        standing("relevant", 9, 0.5, 0.5, 90),
        standing("useful", 1, 1.0, 0.5, 90),
        standing("trusted", 1, 0.5, 1.0, 90),
        standing("recent", 1, 0.5, 0.5, 60),
        standing("b", 1, 0.5, 0.5, 90),
        standing("a", 1, 0.5, 0.5, 90),
    ]
    assert rank_units(rows, NOW) == ["relevant", "useful", "trusted", "recent", "a", "b"]
    assert rank_units(rows) == ["relevant", "useful", "trusted", "a", "b", "recent"]


def test_both_cards_of_a_pair_carry_its_transition() -> None:
    """The right and the wrong card name purpose, states and action; the wrong one the mistake and why."""
    pair = make_pair(7, agreement=0.8)
    right, wrong = build_cards(pair, created_by="test")
    assert (right.kind, wrong.kind) == PAIR_KINDS
    for card in (right, wrong):
        assert pair.purpose in card.content
        assert '"files": [7]' in card.content
        assert "write" in card.content
        assert card.scope.roles == ("critic",)
        assert (card.pair_id, card.trust, card.created_by) == (pair.id, 0.8, "test")
        assert card.provenance == pair.provenance
        assert card.id == content_id(card)
    assert "2 -> 3" in right.content
    assert "2 -> 9" in wrong.content
    assert (wrong.pattern, wrong.strategy) == ("credit_for_intention", pair.reason)
    assert right.id != wrong.id


def test_a_cards_id_follows_from_what_it_says_and_for_whom() -> None:
    """Other words or another scope are another card; who made it and how much it is trusted are not."""
    card = create_card("tool_policy", "Use grep.")
    assert card.id == create_card("tool_policy", "Use grep.", trust=0.9, created_by="me").id
    assert card.id != create_card("tool_policy", "Use rg.").id
    assert card.id != create_card("skill_card", "Use grep.").id
    assert card.id != create_card("tool_policy", "Use grep.", scope=Scope(user="alice")).id
    assert card.status == "candidate"
