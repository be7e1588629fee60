"""Pairs by themselves: statuses, scopes, and a pair's cards."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pairs import evidence_for, make_pair
from reflact.errors import DataError
from reflact.memory.cards import NEXT_STATUSES, build_cards, check_status_change, is_visible_to
from reflact.memory.models import BatchTest, CardStatus, Scope

TEST = BatchTest(
    number=1, holdout_id="h", n_earlier_tests=0, pair_ids=("a",), at=datetime(2026, 3, 1, tzinfo=UTC)
)
STATUSES: tuple[CardStatus, ...] = tuple(NEXT_STATUSES)
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True).map(tuple)
SCOPES = st.builds(
    Scope, roles=NAMES, tools=NAMES, task_categories=NAMES, user=st.sampled_from([None, "alice", "bob"])
)


@given(before=st.sampled_from(STATUSES), after=st.sampled_from(STATUSES))
def test_statuses_follow_the_table_alone(before: CardStatus, after: CardStatus) -> None:
    """Only a quarantined pair can be promoted, and an archived one stays; all other changes raise."""
    if after in NEXT_STATUSES[before]:
        check_status_change(before, after, evidence_for(TEST))
        assert after != "promoted" or before == "quarantined"
    else:
        with pytest.raises(DataError, match=f"{before} cannot become {after}"):
            check_status_change(before, after, evidence_for(TEST))


def test_a_promotion_needs_the_evidence_of_a_passed_test() -> None:
    """No evidence, and evidence of a test that was not passed, promote nothing."""
    for evidence in (None, evidence_for(TEST, promoted=False)):
        with pytest.raises(DataError, match="evidence of a passed test"):
            check_status_change("quarantined", "promoted", evidence)


@given(scope=SCOPES, asker=SCOPES)
def test_each_field_of_a_scope_is_a_condition_of_its_own(scope: Scope, asker: Scope) -> None:
    """A field is empty, or shares a value with the asker's; a user is the same one."""
    named = [(scope.roles, asker.roles), (scope.tools, asker.tools)]
    named.append((scope.task_categories, asker.task_categories))
    shares = all(not required or set(required) & set(offered) for required, offered in named)
    assert is_visible_to(scope, asker) == (shares and scope.user in {None, asker.user})
    assert is_visible_to(Scope(), asker)


def test_both_cards_name_their_pair_and_say_it_in_words() -> None:
    """The wrong card has the mistake and why it is one; neither repeats the transition."""
    pair = make_pair(7)
    right, wrong = build_cards(pair)
    assert (right.kind, wrong.kind) == ("critic_calibration", "failure_pattern")
    assert right.content == "2 -> 3\nReasoning: One file more.\nEvidence: files"
    assert right.strategy == "One file more."
    assert "2 -> 9" in wrong.content
    assert (wrong.mistake, wrong.strategy) == ("credit_for_intention", pair.reason)
    assert right.pair_id == wrong.pair_id == pair.id
