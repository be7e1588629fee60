"""The state of a run for the live view."""

from __future__ import annotations

import pytest

from reflact import events
from reflact.records import SkillVersion, Usage
from reflact.reporting.live_display import LiveState, restore_state, update_state
from reflact.types import GateAction

RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
PLAN = events.RunStarted(run_id=RUN, steps_per_epoch=5, n_train=20, n_val=10, n_test=10)


def started(step: int) -> events.Event:
    """A step begins."""
    return events.StepStarted(run_id=RUN, step=step, epoch=1, item_ids=("a",))


def committed(step: int, action: GateAction = "reject", current: SkillVersion = V0) -> events.Event:
    """A step is committed."""
    return events.StepCommitted(run_id=RUN, step=step, epoch=1, action=action, current=current, best=current)


def drafted(call_id: str, draft: str, attempt: int = 1) -> events.Event:
    """A call has written so much."""
    return events.DraftUpdated(
        run_id=RUN, role="optimizer", purpose="merge", call_id=call_id, attempt=attempt, draft=draft
    )


def called(call_id: str, *, reply: bool = True) -> events.Event:
    """A call is over."""
    return events.ModelCallFinished(
        run_id=RUN,
        role="optimizer",
        purpose="merge",
        call_id=call_id,
        outcome="reply" if reply else "failed",
        attempts=1,
        usage=Usage(),
        seconds=1.0,
    )


def after(*moments: tuple[float, events.Event], state: LiveState | None = None) -> LiveState:
    """Return what is known after events, each with its moment."""
    state = LiveState(epochs=2) if state is None else state
    for at, event in moments:
        state = update_state(state, event, at)
    return state


def at_once(*happened: events.Event) -> LiveState:
    """Return what is known after events of one moment."""
    return after(*((0.0, event) for event in happened))


# ------------------------------------------------------------------------------------------ estimates


def test_nothing_is_estimated_before_a_step_was_state() -> None:
    """Without a plan, or without a finished step, there is no estimate."""
    assert LiveState().estimate_seconds_left(9.0) is None
    assert after((0, PLAN), (1, started(1))).estimate_seconds_left(9.0) is None
    assert after((0, started(1)), (5, committed(1))).estimate_seconds_left(9.0) is None


def test_steps_that_are_left_count_as_the_mean_of_those_that_are_over() -> None:
    """Ten steps, of which two took 10 and 20 seconds: eight are left."""
    two = after((0, PLAN), (0, started(1)), (10, committed(1)), (10, started(2)), (30, committed(2)))
    assert two.estimate_seconds_left(30.0) == pytest.approx(8 * 15.0)


def test_what_the_step_under_way_has_taken_is_deducted() -> None:
    """Up to the mean: a step that takes longer leaves the others as they were estimated."""
    third = after((0, PLAN), (0, started(1)), (10, committed(1)), (10, started(2)))
    assert third.estimate_seconds_left(14.0) == pytest.approx(9 * 10.0 - 4)
    assert third.estimate_seconds_left(99.0) == pytest.approx(8 * 10.0)


def test_after_the_last_step_nothing_is_estimated() -> None:
    """What comes then is of another kind."""
    done = after((0, PLAN), (0, started(10)), (5, committed(10)))
    assert done.estimate_seconds_left(5.0) is None


def test_a_step_whose_beginning_was_not_state_tells_nothing_of_time() -> None:
    """It was under way when an earlier start was stopped, so its time is not known."""
    resumed = after((0, PLAN), (3, committed(4)))
    assert resumed.step_seconds == ()
    assert resumed.last_committed_step == 4


def test_an_earlier_start_is_restore_state_without_its_times() -> None:
    """Its steps, scores and plan are known again, and none of the moments."""
    told = (PLAN, started(1), committed(1, "accept_new_best", V1), started(2))
    known = restore_state(LiveState(epochs=2, opened_at=100.0), told)
    assert (known.total_steps, known.last_committed_step, known.best) == (10, 1, V1)
    assert known.step_seconds == ()
    assert known.step_started_at is None
    assert known.estimate_seconds_left(101.0) is None


# ------------------------------------------------------------------------------------------ stages


def test_stages_overlap_and_end() -> None:
    """Each stage keeps its own count, and its seconds once it is over."""
    known = after(
        (0, started(1)),
        (1, events.StageStarted(run_id=RUN, step=1, stage="rollout")),
        (2, events.StageStarted(run_id=RUN, step=1, stage="reflect")),
        (3, events.StageProgressed(run_id=RUN, step=1, stage="rollout", done=4, total=4)),
        (4, events.StageProgressed(run_id=RUN, step=1, stage="reflect", done=1, total=2)),
        (5, events.StageFinished(run_id=RUN, step=1, stage="rollout", seconds=4.0)),
    )
    rollout, reflect = known.stages
    assert (rollout.name, rollout.done, rollout.total, rollout.seconds) == ("rollout", 4, 4, 4.0)
    assert (reflect.name, reflect.done, reflect.total, reflect.seconds) == ("reflect", 1, 2, None)
    assert reflect.started_at == 2


def test_a_commit_clears_what_only_its_step_was_about() -> None:
    """Stages, looks of the gate and drafts of a step are gone with it."""
    look = events.TrialRequested(run_id=RUN, step=1, part="step", trial=0, n=10)
    begun = events.StageStarted(run_id=RUN, step=1, stage="evaluate")
    before = at_once(started(1), begun, look, drafted("s", "x"))
    assert (len(before.stages), len(before.trials), len(before.drafts)) == (1, 1, 1)
    assert update_state(before, committed(1), 1.0).stages == ()
    assert update_state(before, committed(1), 1.0).trials == ()
    assert update_state(before, committed(1), 1.0).drafts == ()


def test_looks_of_another_decision_begin_anew() -> None:
    """Only the looks of the decision under way are counted."""
    first = events.TrialRequested(run_id=RUN, step=5, part="step", trial=0, n=10)
    other = events.TrialRequested(run_id=RUN, step=5, part="slow update", trial=0, n=7)
    assert at_once(first, first).trials == (first, first)
    assert at_once(first, first, other).trials == (other,)


def test_a_step_that_is_told_twice_is_counted_once() -> None:
    """What an earlier start told and this one tells again is one step."""
    assert len(at_once(committed(1), committed(2), committed(2)).results) == 2


# ------------------------------------------------------------------------------------------ drafts


def test_a_draft_grows_in_its_place() -> None:
    """Of each call the last draft is kept, in the order in which they began."""
    known = at_once(drafted("a", "1"), drafted("b", "2"), drafted("a", "11"))
    assert [(w.call_id, w.draft) for w in known.drafts] == [("a", "11"), ("b", "2")]


def test_the_last_finished_draft_stays_until_another_begins() -> None:
    """It can be read while nothing is being written, and gives way then."""
    known = at_once(drafted("a", "1"), drafted("b", "2"), called("a"), called("b"))
    assert [(w.call_id, w.finished) for w in known.drafts] == [("b", True)]
    known = update_state(known, drafted("c", "3"), 0.0)
    assert [(w.call_id, w.finished) for w in known.drafts] == [("c", False)]


def test_a_reset_says_why_until_the_next_attempt() -> None:
    """A refused draft stays to be seen with its reason; the next attempt takes its place."""
    reset = events.DraftDiscarded(
        run_id=RUN, role="optimizer", purpose="merge", call_id="a", attempt=1, reason="no such anchor"
    )
    (refused,) = at_once(drafted("a", "1"), reset).drafts
    assert (refused.draft, refused.refusal) == ("1", "no such anchor")
    (again,) = at_once(drafted("a", "1"), reset, drafted("a", "2", attempt=2)).drafts
    assert (again.draft, again.refusal, again.attempt) == ("2", None, 2)


def test_calls_without_a_reply_are_counted() -> None:
    """Those that were drafted, and those that were not."""
    known = at_once(called("a", reply=False), drafted("b", "1"), called("b", reply=False), called("c"))
    assert known.failed_calls == 2


# ------------------------------------------------------------------------------------------ the rest


def test_an_endpoint_is_known_by_what_it_said_last() -> None:
    """Another back-off takes the place of the one before; another endpoint has its own."""

    def backed_off(endpoint: str, seconds: float) -> events.Event:
        return events.RateLimited(run_id=RUN, endpoint=endpoint, status=429, seconds=seconds, rate=2.0)

    known = after((0, backed_off("a", 5)), (1, backed_off("b", 5)), (2, backed_off("a", 9)))
    assert [(pause.endpoint, at) for at, pause in known.pauses] == [("b", 1), ("a", 2)]


def test_the_epochs_end_and_the_promotion_move_the_versions() -> None:
    """Slow updates change the current version, promotions the best one."""
    closed = events.EpochCommitted(
        run_id=RUN, step=5, epoch=1, slow_update=None, meta_skill=None, fallbacks=(), current=V1, best=V0
    )
    assert (at_once(closed).current, at_once(closed).best) == (V1, V0)


def test_events_that_change_nothing_leave_the_value_alone() -> None:
    """A value is made anew only where something became known."""
    known = at_once(PLAN)
    assert update_state(known, events.WarningIssued(run_id=RUN, message="x"), 1.0) is known
