"""The live display: events update its state, it fits every screen, and its rows show the state."""

from __future__ import annotations

import io
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from rich.cells import cell_len
from rich.console import Console

from reflact import events
from reflact.records import SkillScore, SkillVersion, Usage
from reflact.reporting.live import describe_progress
from reflact.reporting.live_display import (
    LiveDisplay,
    LiveState,
    draw_heights,
    limit_height,
    render_draft,
    restore_state,
    update_state,
)
from reflact.types import GateAction, Split

RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
USAGE = Usage(calls=128, input_tokens=45_210, output_tokens=3_100, usd=0.25)
EVIL = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"
ESCAPED = r"\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"


def start_step(step: int) -> events.Event:
    """Return the start of a step."""
    return events.StepStarted(run_id=RUN, step=step, epoch=1, item_ids=("a",))


def commit_step(step: int, action: GateAction = "reject", current: SkillVersion = V1) -> events.Event:
    """Return the commit of a step."""
    return events.StepCommitted(run_id=RUN, step=step, epoch=1, action=action, current=current, best=current)


def request_trial(trial: int, n: int, part: str = "step") -> events.Event:
    """Return a request of the gate in step 5."""
    return events.TrialRequested(run_id=RUN, step=5, part=part, trial=trial, n=n)


def progress(stage: events.Stage, done: int, total: int, step: int = 5) -> events.Event:
    """Return the progress of a stage."""
    return events.StageProgressed(run_id=RUN, step=step, stage=stage, done=done, total=total)


def draft(call_id: str, value: JsonValue, attempt: int = 1) -> events.DraftUpdated:
    """Return the partial reply of a call."""
    call = {"run_id": RUN, "role": "optimizer", "purpose": "merge", "call_id": call_id}
    return events.DraftUpdated(**call, attempt=attempt, draft=value)  # type: ignore[arg-type]


def refuse(call_id: str, reason: str) -> events.Event:
    """Return the refusal of a draft."""
    call = {"run_id": RUN, "role": "optimizer", "purpose": "merge", "call_id": call_id}
    return events.DraftDiscarded(**call, attempt=1, reason=reason)  # type: ignore[arg-type]


def finish_call(call_id: str, outcome: str = "reply") -> events.Event:
    """Return the end of a call."""
    call = {"run_id": RUN, "role": "optimizer", "purpose": "merge", "call_id": call_id}
    end = {"outcome": outcome, "attempts": 1, "usage": Usage(), "seconds": 1.0}
    return events.ModelCallFinished(**call, **end)  # type: ignore[arg-type]


def finish_score(name: str, split: Split, hard: float) -> events.Event:
    """Return a score of the final report."""
    measured = SkillScore(name=name, skill_hash="a" * 64, split=split, n=8, hard=hard)
    return events.FinalScoreMeasured(run_id=RUN, step=14, score=measured)


ACTIONS: tuple[GateAction, ...] = ("accept_new_best", "reject", "no_patches", "set_aside")
PLAN = events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80)
BEGINNING: tuple[events.Event, ...] = (
    PLAN,
    events.GatePowerEstimated(run_id=RUN, description="", trials=4, rollouts=320),
    events.BaselineMeasured(run_id=RUN, score=0.25, n=40),
)
STEPS = tuple(commit_step(step, action) for step, action in enumerate(ACTIONS, start=1))
GATE: tuple[events.Event, ...] = (
    start_step(5),
    events.StageFinished(run_id=RUN, step=5, stage="rollout", seconds=12.0),
    events.StageFinished(run_id=RUN, step=5, stage="reflect", seconds=0.2),
    events.StageStarted(run_id=RUN, step=5, stage="evaluate"),
    request_trial(0, 40),
    request_trial(1, 12),
    progress("evaluate", 6, 24),
)
DRAFT = draft("s", {"edits": [{"op": "append", "content": f"rule {number}"} for number in range(40)]})
PAUSE = events.RateLimited(run_id=RUN, endpoint="api.example.com", status=429, seconds=12.0, rate=3.25)
BUDGET = events.BudgetUpdated(run_id=RUN, usage=USAGE, seconds=90.0, max_usd=1.0)
EVERYTHING = (*BEGINNING, *STEPS, *GATE, BUDGET, PAUSE, DRAFT)
SCALARS = st.none() | st.booleans() | st.integers() | st.text()
DRAFTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=12
)


def state_at(*moments: tuple[float, events.Event], name: str = "demo") -> LiveState:
    """Return the state after events, each with its second."""
    state = LiveState(name=name, epochs=2, opened_at=10.0)
    for at, event in moments:
        state = update_state(state, event, at)
    return state


def state_after(*happened: events.Event, name: str = "demo") -> LiveState:
    """Return the state after events that all came at second 100."""
    return state_at(*((100.0, event) for event in happened), name=name)


def build_console(width: int = 80, height: int = 24, encoding: str = "utf-8") -> Console:
    """Return a console without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, height=height, color_system=None, _environ={})


def render(state: LiveState, console: Console | None = None, *, now: float = 100.0) -> list[str]:
    """Return the rows of the display as text."""
    console = console or build_console()
    lines = console.render_lines(LiveDisplay(state, now), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def find_row(state: LiveState, label: str, *, now: float = 100.0) -> str | None:
    """Return the content of the only row with a label; None if there is none."""
    found = [row[12:] for row in render(state, build_console(80, 50), now=now) if row[:12].strip() == label]
    assert len(found) <= 1
    return found[0] if found else None


def render_lines(value: JsonValue, *, width: int = 42, height: int = 6, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a draft."""
    console = build_console(width, 50, encoding)
    return [line.plain.rstrip() for line in render_draft(value, console, console.options, height=height)]


FIRST = ((0, PLAN), (0, start_step(1)), (10, commit_step(1)))


@pytest.mark.parametrize(
    ("moments", "now", "left"),
    [
        ([], 9.0, None),
        ([(0, PLAN), (1, start_step(1))], 9.0, None),
        ([(0, start_step(1)), (5, commit_step(1))], 9.0, None),
        ([(0, PLAN), (3, commit_step(4))], 9.0, None),
        ([(0, PLAN), (0, start_step(28)), (5, commit_step(28))], 5.0, None),
        ([*FIRST, (10, start_step(2))], 14.0, 27 * 10.0 - 4),
        ([*FIRST, (10, start_step(2))], 99.0, 26 * 10.0),
        ([*FIRST, (10, start_step(2)), (30, commit_step(2))], 30.0, 26 * 15.0),
    ],
)
def test_the_steps_that_are_left_count_as_the_mean_of_timed_steps(
    moments: list[tuple[float, events.Event]], now: float, left: float | None
) -> None:
    """The time of the current step is deducted, up to the mean.

    Without a plan or a step that was seen from start to commit, and after the last step, nothing is estimated.
    """
    assert state_at(*moments).estimate_seconds_left(now) == pytest.approx(left)


def test_an_earlier_start_is_restored_without_its_times() -> None:
    """Its steps, scores and plan are known again, and none of the moments."""
    earlier = (PLAN, start_step(1), commit_step(1, "accept_new_best"), start_step(2))
    state = restore_state(LiveState(epochs=2, opened_at=100.0), earlier)
    assert (state.total_steps, state.last_committed_step, state.best) == (28, 1, V1)
    assert (state.step_seconds, state.step_started_at) == ((), None)
    assert state.estimate_seconds_left(101.0) is None


def test_stages_overlap_and_end() -> None:
    """Each stage keeps its own count, and its seconds once it is over."""
    state = state_at(
        (0, start_step(1)),
        (1, events.StageStarted(run_id=RUN, step=1, stage="rollout")),
        (2, events.StageStarted(run_id=RUN, step=1, stage="reflect")),
        (3, progress("rollout", 4, 4, step=1)),
        (4, progress("reflect", 1, 2, step=1)),
        (5, events.StageFinished(run_id=RUN, step=1, stage="rollout", seconds=4.0)),
    )
    stages = [
        (stage.name, stage.started_at, stage.done, stage.total, stage.seconds) for stage in state.stages
    ]
    assert stages == [("rollout", 1, 4, 4, 4.0), ("reflect", 2, 1, 2, None)]


def test_a_commit_clears_what_only_its_step_was_about() -> None:
    """Stages, trials and drafts are gone, and a step that is reported twice is counted once."""
    begun = events.StageStarted(run_id=RUN, step=5, stage="evaluate")
    before = state_after(start_step(5), begun, request_trial(0, 10), draft("s", "x"))
    assert (len(before.stages), len(before.trials), len(before.drafts)) == (1, 1, 1)
    after = update_state(before, commit_step(5), 1.0)
    assert (after.stages, after.trials, after.drafts) == ((), (), ())
    assert len(state_after(commit_step(1), commit_step(2), commit_step(2)).results) == 2


def test_trials_of_another_decision_begin_anew() -> None:
    """Only the requests of the current decision are counted."""
    first, other = request_trial(0, 10), request_trial(0, 7, part="slow update")
    assert state_after(first, first).trials == (first, first)
    assert state_after(first, first, other).trials == (other,)


def test_drafts_keep_their_order_until_they_end() -> None:
    """Each call has its last draft; the last finished one stays until another begins."""
    state = state_after(draft("a", "1"), draft("b", "2"), draft("a", "11"))
    assert [(d.call_id, d.draft) for d in state.drafts] == [("a", "11"), ("b", "2")]
    state = state_after(draft("a", "1"), draft("b", "2"), finish_call("a"), finish_call("b"))
    assert [(d.call_id, d.finished) for d in state.drafts] == [("b", True)]
    state = update_state(state, draft("c", "3"), 0.0)
    assert [(d.call_id, d.finished) for d in state.drafts] == [("c", False)]


def test_a_refused_draft_has_a_reason_until_the_next_attempt() -> None:
    """The draft stays, and the next attempt replaces it; on screen the reason stays on one escaped line."""
    refused = state_after(draft("a", "1"), refuse("a", "no [b]\x1b[1m\nanchor"))
    assert refused.drafts[0].draft == "1"
    assert find_row(refused, "draft") == r"merge (optimizer), attempt 1 refused: no [b]\x1b[1m anchor"
    again = update_state(refused, draft("a", "2", attempt=2), 0.0)
    assert (again.drafts[0].draft, again.drafts[0].refusal) == ("2", None)
    assert find_row(again, "draft") == "merge (optimizer), attempt 2"


def test_calls_without_a_reply_are_counted() -> None:
    """Those with a draft, and those without."""
    failed = finish_call("a", "failed"), draft("b", "1"), finish_call("b", "failed"), finish_call("c")
    assert state_after(*failed).failed_calls == 2


def test_the_epochs_end_moves_the_versions() -> None:
    """Slow updates change the current version."""
    closed = events.EpochCommitted(
        run_id=RUN, step=5, epoch=1, slow_update=None, meta_skill=None, fallbacks=(), current=V1, best=V0
    )
    assert (state_after(closed).current, state_after(closed).best) == (V1, V0)


@given(
    st.lists(st.sampled_from(EVERYTHING), max_size=30),
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from(["utf-8", "ascii", "latin-1", "cp437"]),
)
def test_the_display_fits_every_screen(
    happened: list[events.Event], width: int, height: int, encoding: str
) -> None:
    """At any size and in any encoding the display leaves a line free, and no row is too wide."""
    rows = render(state_after(*happened), build_console(width, height, encoding), now=105.0)
    assert len(rows) <= max(1, height - 1)
    for row in rows:
        assert cell_len(row) <= width
        row.encode(encoding)


def test_a_large_screen_shows_more() -> None:
    """80x24 has every row, 60x8 the most important ones; 160x50 adds items of the plan and more of the draft."""
    sizes = ((60, 8), (80, 24), (160, 50))
    tiny, small, large = (render(state_after(*EVERYTHING), build_console(*size)) for size in sizes)
    assert (len(tiny), len(small), len(large)) == (5, 15, 31)
    for words in ("demo r1", "step 5 of 28  ", "4 committed", "evaluate", "baseline 0.250"):
        assert any(words in row for row in tiny), words
    labels = "run val decisions spend budget stages evaluate gate limits draft"
    assert set(labels.split()) <= {row[:12].strip() for row in small}
    assert "56 train, 40 val, 80 test items" in large[1]
    assert sum("+ rule" in row for row in large) > sum("+ rule" in row for row in small)
    assert large[-1] == small[-1] == "  + rule 39"


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """Bars, rules and heights have ASCII signs, and other characters of a name or a model are escaped."""
    state = state_after(*EVERYTHING[:-1], draft("s", "Größe \x1b[2J"), name="Grüße")
    rows = render(state, build_console(encoding="ascii"))
    assert all(row.isascii() for row in rows)
    assert rows[0].startswith(r"Gr\xfc\xdfe r1 ")
    assert rows[0].endswith("---")
    assert rows[-1] == r"  Gr\xf6\xdfe \x1b[2J"


def test_the_title_shows_the_time_that_is_left() -> None:
    """There is no estimate before the first timed step, nor after the last step."""
    assert render(state_after())[0].startswith("demo  1:30 ──")
    assert "starting" in render(state_after())[1]
    begun = state_after(*BEGINNING, *STEPS, start_step(5))
    assert "left" not in render(begun)[0]
    timed = update_state(begun, commit_step(5), 130.0)
    assert "demo r1  2:00, about 12 min left ──" in render(timed, now=130.0)[0]
    assert "left" not in render(state_after(*BEGINNING, commit_step(28)))[0]


def test_scores_and_decisions_are_shown_by_step() -> None:
    """Each step has one column, and the legend names the signs; of a long run the last steps are shown."""
    assert find_row(state_after(*BEGINNING), "val") == "baseline 0.250"
    state = state_after(*BEGINNING, *STEPS)
    assert find_row(state, "val") == "baseline 0.250   current v1 0.500   best v1 0.500 (+0.250)"
    assert find_row(state, "decisions") == "+x.?   + new best, x rejected, ? set aside, . unchanged"
    assert find_row(state, "val by step") == "▁▁▁▁"
    many = [*map(commit_step, range(1, 400)), commit_step(400, "accept_new_best")]
    assert find_row(state_after(*BEGINNING, *many), "decisions") == "x" * 65 + "+"


def test_the_rows_of_a_step_show_its_stages_and_its_gate() -> None:
    """A stage of at least a second has its time; the gate has its request, rollouts and their limit."""
    state = state_after(*EVERYTHING)
    chain = "rollout 12s › reflect › aggregate › select › update › evaluate"
    assert find_row(state, "stages") == chain
    assert find_row(state, "gate") == "12 items, again   52 of at most 320 rollouts"


def test_the_current_stage_has_a_bar() -> None:
    """It shows the finished parts and the time; a stage without parts shows the time.

    A stage with all parts done has a bar only if no other stage is working.
    """
    row = find_row(state_after(*EVERYTHING), "evaluate", now=165.0)
    assert str(row).split() == ["━" * 8, "6", "of", "24", "1:05"]
    baseline = state_after(*BEGINNING, progress("evaluate", 1, 2, step=0))
    assert str(find_row(baseline, "baseline")).endswith("0:00")
    begun = events.StageStarted(run_id=RUN, step=5, stage="aggregate")
    assert find_row(state_after(*BEGINNING, begun), "aggregate", now=103.0) == "running for 0:03"
    rolled = state_after(*BEGINNING, progress("rollout", 4, 4))
    assert str(find_row(rolled, "rollout")).startswith("━" * 32)
    reflecting = update_state(rolled, events.StageStarted(run_id=RUN, step=5, stage="reflect"), 100.0)
    assert find_row(reflecting, "reflect") is not None
    assert find_row(reflecting, "rollout") is None


def at(seconds: float, *told: events.Event) -> list[tuple[float, events.Event]]:
    """Return events with the time at which they came."""
    return [(seconds, event) for event in told]


def test_progress_in_one_line_has_counts_cost_and_rest() -> None:
    """Measurements of a stage count together; the rest takes no less than the pause since the last rollout."""
    say = partial(describe_progress, now=165.0)
    assert say(state_at()) == "progress  starting"
    begin = events.StageStarted(run_id=RUN, step=0, stage="evaluate")
    baseline = at(130.0, progress("evaluate", 10, 40, step=0))
    assert (
        say(state_at(*at(100.0, *BEGINNING[:2], begin), *baseline))
        == "progress  baseline 10 of 40 rollouts (about 3 min left)"
    )
    assert (
        say(state_at(*at(100.0, begin), *baseline))
        == "progress  evaluate 10 of 40 rollouts (about 3 min left)"
    )
    begun = (
        events.StageStarted(run_id=RUN, step=5, stage="rollout"),
        events.StageStarted(run_id=RUN, step=5, stage="reflect"),
    )
    later = (progress("rollout", 3, 16), BUDGET, finish_call("a"), finish_call("b", "failed"))
    assert say(state_at(*at(100.0, *BEGINNING, start_step(5), *begun), *at(130.0, *later))) == (
        "progress  step 5 of 28, rollout 3 of 16 (about 5 min left), reflect for 65 s (2 calls done); $0.25, 128 calls; "
        "1 call failed"
    )
    free = BUDGET.model_copy(update={"usage": Usage(calls=2, input_tokens=7)})
    notes = [("best", 8), ("placebo", 4)]
    final = [progress("final_test", done, 8, step=4).model_copy(update={"note": n}) for n, done in notes]
    ending = events.StageStarted(run_id=RUN, step=4, stage="final_test")
    assert say(state_at(*at(100.0, *BEGINNING, *STEPS, ending), *at(130.0, *final, free))) == (
        "progress  after step 4 of 28, final test 12 of 16 rollouts (about 35 s left); price unknown, 2 calls, 7 tokens"
    )
    known = [each.model_copy(update={"from_store": 3}) for each in final]
    assert "final test 12 of 16 rollouts (6 from the store, about 35 s left)" in say(
        state_at(*at(100.0, *BEGINNING, *STEPS, ending), *at(130.0, *known))
    )
    timed = state_at((100.0, start_step(1)), (160.0, commit_step(1)), (160.0, PLAN), (161.0, start_step(2)))
    assert say(timed) == "progress  step 2 of 28; about 27 min to the last step"


@given(st.integers(0, 999), st.integers(1, 1000))
def test_a_bar_is_full_only_at_the_end(done: int, total: int) -> None:
    """Rounding never shows an unfinished stage as finished."""
    row = find_row(state_after(progress("rollout", done, total)), "rollout")
    assert str(row).startswith("━" * 32) == (done >= total)


def test_the_budget_row_shows_the_closest_limit() -> None:
    """Without a limit there is no such row; an unknown price is left out."""
    words = "128 calls   45.2k tokens in, 3,100 out   $0.2500"
    assert find_row(state_after(BUDGET), "spend") == words
    assert str(find_row(state_after(BUDGET), "budget")).endswith(" 25% of $1.00")
    free = events.BudgetUpdated(run_id=RUN, usage=Usage(calls=3), seconds=90.0)
    assert find_row(state_after(free), "spend") == "3 calls   0 tokens in, 0 out"
    assert find_row(state_after(free), "budget") is None
    timed = free.model_copy(update={"max_seconds": 240.0, "max_calls": 30})
    assert str(find_row(state_after(timed), "budget", now=130.0)).endswith("50% of 4:00")
    tokens = events.BudgetUpdated(run_id=RUN, usage=USAGE, seconds=0.0, max_tokens=50_000, max_calls=200)
    assert str(find_row(state_after(tokens), "budget")).endswith("96% of 50,000 tokens")
    cut = BUDGET.model_copy(update={"worst_case": Usage(calls=1, usd=0.5)})
    assert find_row(state_after(cut), "spend") == words
    assert str(find_row(state_after(cut), "budget")).endswith(" 75% of $1.00")


@pytest.mark.parametrize(
    ("changes", "now", "row"),
    [
        ({}, 102.0, "answered 429: waiting 10 s, then 3.25 calls/s"),
        ({}, 113.0, "answered 429: continues at 3.25 calls/s"),
        ({}, 173.0, None),
        ({"rate": None}, 102.0, "answered 429: waiting 10 s"),
        ({"rate": None}, 113.0, None),
        ({"rate": None, "status": None}, 102.0, "cannot be reached: waiting 10 s"),
    ],
)
def test_an_endpoint_is_shown_while_it_matters(
    changes: dict[str, object], now: float, row: str | None
) -> None:
    """The row shows the last pause of an endpoint, then for a minute the new rate."""
    earlier = PAUSE.model_copy(update={"seconds": 99.0})
    state = state_after(earlier, PAUSE.model_copy(update=changes))
    assert find_row(state, "limits", now=now) == (None if row is None else f"api.example.com {row}")


def test_the_draft_row_names_the_call() -> None:
    """It shows the purpose, and how many other calls are being written."""
    assert find_row(state_after(DRAFT), "draft") == "merge (optimizer)"
    drafts = [DRAFT.model_copy(update={"call_id": str(n), "purpose": f"merge_{n}"}) for n in range(6)]
    rows = render(state_after(*drafts), build_console(160, 50))
    assert [row[12:] for row in rows if row.startswith("draft ")] == [
        "merge 0 (optimizer)",
        "merge 1 (optimizer)",
        "merge 2 (optimizer), and 3 more",
    ]
    assert len(rows) == limit_height(50)
    assert sum(row == "  + rule 39" for row in rows) == 3


@given(DRAFTS, st.integers(1, 60), st.integers(0, 9), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_every_draft_fits(value: JsonValue, width: int, height: int, encoding: str) -> None:
    """No draft takes more lines or cells than there are, and none steers the terminal."""
    lines = render_lines(value, width=width, height=height, encoding=encoding)
    assert len(lines) <= height
    for line in lines:
        assert cell_len(line) <= width
        assert not any(ord(c) < 32 or ord(c) == 127 for c in line)
        line.encode(encoding)


def test_each_edit_and_field_begins_a_line() -> None:
    """Edits have the sign of their operation, and other fields have their name."""
    edits: list[JsonValue] = [
        {"op": "append", "content": "one"},
        {"op": "replace", "target": "old", "content": "new"},
        {"op": "delete", "target": "gone"},
        {"content": "still gro"},
    ]
    assert render_lines({"edits": edits}) == ["+ one", "~ old => new", "- gone", "+ still gro"]
    patterns: list[JsonValue] = [{"type": "sums", "description": "off by one", "count": 2}]
    shown = ["patterns: sums, off by one", "reasoning: so"]
    assert render_lines({"patterns": patterns, "reasoning": "so"}) == shown


def test_a_long_draft_shows_its_end() -> None:
    """Long lines wrap at words, and a mark shows that text before the first line is left out."""
    document = "\n".join(f"- rule {number}" for number in range(100))
    end = ["...- rule 97", "- rule 98", "- rule 99"]
    assert render_lines({"strengths": "short", "document": document}, height=3) == end
    guidance = render_lines({"guidance": "some words that are too many for a line of text"}, width=22)
    assert guidance == ["guidance: some words", "that are too many", "for a line of text"]


@pytest.mark.parametrize("value", [{"edits": [{"op": "append", "content": EVIL}]}, {"document": EVIL}, EVIL])
def test_a_draft_cannot_steer_the_terminal(value: JsonValue) -> None:
    """Control sequences, marks of direction and markup are shown as text."""
    (line,) = render_lines(value, width=79)
    assert line.endswith(ESCAPED)


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("Größe → 世", "utf-8", "Größe → 世"),
        ("Größe → 世", "latin-1", r"Größe \u2192 \u4e16"),
        ("Größe", "ascii", r"Gr\xf6\xdfe"),
        ("\U0001f468\u200d\U0001f469", "utf-8", "\U0001f468\U0001f469"),
        ("a\tb", "utf-8", "a    b"),
    ],
)
def test_a_draft_is_written_in_the_terminals_encoding(text: str, encoding: str, shown: str) -> None:
    """Missing characters become escapes; joined characters, which have no certain width, come apart."""
    assert render_lines(text, encoding=encoding) == [shown]


@given(st.lists(st.none() | st.floats(0, 1), max_size=30), st.booleans())
def test_a_higher_score_is_never_drawn_lower(scores: list[float | None], ascii_only: bool) -> None:
    """Each score has one sign, and a missing score has a blank."""
    ramp = "0123456789" if ascii_only else "▁▂▃▄▅▆▇█"
    heights = draw_heights(scores, ascii_only=ascii_only)
    assert len(heights) == len(scores)
    pairs = [(s, ramp.index(h)) for s, h in zip(scores, heights, strict=True) if s is not None]
    assert all(a[1] <= b[1] for a in pairs for b in pairs if a[0] <= b[0])
    assert all(h == " " for s, h in zip(scores, heights, strict=True) if s is None)


def test_final_scores_and_controls_have_a_row() -> None:
    """It shows those of the split that is measured last; a further step removes it."""
    state = state_after(
        *BEGINNING,
        finish_score("best", Split.val, 0.75),
        finish_score("best", Split.test, 0.5),
        finish_score("null_empty", Split.test, 0.125),
    )
    assert find_row(state, "final") == "test   best 0.500   null_empty 0.125"
    assert find_row(update_state(state, start_step(2), 1.0), "final") is None


def test_rollouts_from_the_store_say_nothing_about_the_pace() -> None:
    """25 of 50 rollouts are there at once, and one takes half a minute: the other 24 take 12 minutes."""
    begin = events.StageStarted(run_id=RUN, step=5, stage="evaluate")
    found = (*at(100.0, *BEGINNING, start_step(5), begin), (100.2, progress("evaluate", 25, 50)))
    say = partial(describe_progress, now=130.0)
    assert say(state_at(*found)) == "progress  step 5 of 28, evaluate 25 of 50 rollouts"
    one = state_at(*found, (130.0, progress("evaluate", 26, 50)))
    assert say(one) == "progress  step 5 of 28, evaluate 26 of 50 rollouts (about 12 min left)"
