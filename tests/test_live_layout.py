"""The live display: it fits every screen, and its rows show the state of the run."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from rich.cells import cell_len
from rich.console import Console

from reflact import events
from reflact.records import SkillVersion, Usage
from reflact.reporting.live_display import (
    LiveDisplay,
    LiveState,
    draw_heights,
    limit_height,
    render_draft,
    update_state,
)
from reflact.types import GateAction

RUN = "r1"
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
USAGE = Usage(calls=128, input_tokens=45_210, output_tokens=3_100, usd=0.25)
EVIL = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"
ESCAPED = r"\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"

ACTIONS: tuple[GateAction, ...] = ("accept_new_best", "reject", "no_patches", "inconclusive")
BEGINNING: tuple[events.Event, ...] = (
    events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80),
    events.GatePowerEstimated(run_id=RUN, description="", effect=None, trials=4, rollouts=320),
    events.BaselineMeasured(run_id=RUN, score=0.25, n=40),
)
STEPS: tuple[events.Event, ...] = tuple(
    events.StepCommitted(run_id=RUN, step=step, epoch=1, action=action, current=V1, best=V1)
    for step, action in enumerate(ACTIONS, start=1)
)
GATE: tuple[events.Event, ...] = (
    events.StepStarted(run_id=RUN, step=5, epoch=1, item_ids=("a",)),
    events.StageFinished(run_id=RUN, step=5, stage="rollout", seconds=12.0),
    events.StageFinished(run_id=RUN, step=5, stage="reflect", seconds=0.2),
    events.StageStarted(run_id=RUN, step=5, stage="evaluate"),
    events.TrialRequested(run_id=RUN, step=5, part="step", trial=0, n=40),
    events.TrialRequested(run_id=RUN, step=5, part="step", trial=1, n=12),
    events.StageProgressed(run_id=RUN, step=5, stage="evaluate", done=6, total=24, note="trial 1"),
)
EDITS: list[JsonValue] = [{"op": "append", "content": f"rule {number}"} for number in range(40)]
DRAFT = events.DraftUpdated(
    run_id=RUN, role="optimizer", purpose="merge", call_id="s", attempt=1, draft={"edits": EDITS}
)
PAUSE = events.RateLimited(run_id=RUN, endpoint="api.example.com", status=429, seconds=12.0, rate=3.25)
BUDGET = events.BudgetUpdated(run_id=RUN, usage=USAGE, seconds=90.0, max_usd=1.0)
EVERYTHING = (*BEGINNING, *STEPS, *GATE, BUDGET, PAUSE, DRAFT)
SCALARS = st.none() | st.booleans() | st.integers() | st.text()
DRAFTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=12
)


def state_after(*happened: events.Event, name: str = "demo") -> LiveState:
    """Return the state after events that all came at second 100."""
    state = LiveState(name=name, epochs=2, opened_at=10.0)
    for event in happened:
        state = update_state(state, event, 100.0)
    return state


def build_console(width: int = 80, height: int = 24, encoding: str = "utf-8") -> Console:
    """Return a console without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, height=height, color_system=None, _environ={})


def render(state: LiveState, console: Console | None = None, *, now: float = 100.0) -> list[str]:
    """Return the rows of the display as text."""
    console = console or build_console()
    lines = console.render_lines(LiveDisplay(state, now), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def find_row(state: LiveState, label: str, *, width: int = 80, now: float = 100.0) -> str:
    """Return the content of the only row with a label."""
    rows = render(state, build_console(width, 50), now=now)
    (found,) = (row[12:] for row in rows if row.startswith(f"{label:<11} "))
    return found


def drafted(draft: JsonValue, *, width: int = 42, height: int = 6, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a draft."""
    console = build_console(width, 50, encoding)
    return [line.plain.rstrip() for line in render_draft(draft, console, console.options, height=height)]


# ------------------------------------------------------------------------------------------ the screen


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


def test_a_small_screen_keeps_the_most_important_rows() -> None:
    """The place of the run and the bar of the current stage stay."""
    rows = render(state_after(*EVERYTHING), build_console(60, 8))
    assert len(rows) == 5
    for words in ("demo r1", "step 5 of 28  ", "4 committed", "evaluate", "baseline 0.250"):
        assert any(words in row for row in rows), words


def test_a_large_screen_shows_more() -> None:
    """Every row is there at 80x24; 160x50 adds the items of the plan and more of the draft."""
    small, large = (render(state_after(*EVERYTHING), build_console(*size)) for size in ((80, 24), (160, 50)))
    assert (len(small), len(large)) == (15, 31)
    for label in (
        "run",
        "val",
        "decisions",
        "spend",
        "budget",
        "stages",
        "evaluate",
        "gate",
        "limits",
        "draft",
    ):
        assert any(row.startswith(label) for row in small), label
    assert "56 train, 40 val, 80 test items" in large[1]
    assert sum("+ rule" in row for row in large) > sum("+ rule" in row for row in small)
    assert large[-1] == small[-1] == "  + rule 39"


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """Bars, rules and heights have ASCII signs, and other characters of a name or a model are escaped."""
    draft = DRAFT.model_copy(update={"draft": "Größe \x1b[2J"})
    rows = render(state_after(*EVERYTHING[:-1], draft, name="Grüße"), build_console(encoding="ascii"))
    assert all(row.isascii() for row in rows)
    assert rows[0].startswith(r"Gr\xfc\xdfe r1 ")
    assert rows[0].endswith("---")
    assert rows[-1] == r"  Gr\xf6\xdfe \x1b[2J"


# ------------------------------------------------------------------------------------------ the rows


def test_the_title_shows_the_time_that_is_left() -> None:
    """There is no estimate before the first timed step, nor after the last step."""
    assert render(state_after())[0].startswith("demo  1:30 ──")
    assert "starting" in render(state_after())[1]
    begun = update_state(state_after(*BEGINNING, *STEPS), GATE[0], 100.0)
    assert "left" not in render(begun)[0]
    timed = update_state(begun, STEPS[0].model_copy(update={"step": 5}), 130.0)
    assert "demo r1  2:00, about 12 min left ──" in render(timed, now=130.0)[0]
    assert "left" not in render(state_after(*BEGINNING, STEPS[0].model_copy(update={"step": 28})))[0]


def test_scores_and_decisions_are_shown_by_step() -> None:
    """Each step has one column, and the legend names the signs that occur."""
    assert find_row(state_after(*BEGINNING), "val") == "baseline 0.250"
    state = state_after(*BEGINNING, *STEPS)
    assert find_row(state, "val") == "baseline 0.250   current v1 0.500   best v1 0.500 (+0.250)"
    assert find_row(state, "decisions") == "+x.?   + new best, x rejected, ? inconclusive, . unchanged"
    assert find_row(state, "val by step") == "▁▁▁▁"


def test_a_long_run_shows_its_last_steps() -> None:
    """If there are more steps than columns, the first ones are left out."""
    many = [STEPS[1].model_copy(update={"step": step}) for step in range(1, 400)]
    state = state_after(*BEGINNING, *many, STEPS[0].model_copy(update={"step": 400}))
    assert find_row(state, "decisions") == "x" * 65 + "+"


def test_stages_stand_in_their_order_with_their_seconds() -> None:
    """A stage that took at least a second shows how long."""
    chain = "rollout 12s › reflect › aggregate › select › update › evaluate"
    assert find_row(state_after(*EVERYTHING), "stages") == chain


def test_the_gate_row_counts_pairs_and_rollouts() -> None:
    """It shows the look, the pairs of the trial, and the rollouts of the decision beside their limit."""
    assert find_row(state_after(*EVERYTHING), "gate") == (
        "look 2: 12 pairs of trial 2   104 of at most 320 rollouts"
    )


def test_the_current_stage_has_a_bar() -> None:
    """It shows the finished parts and the time; a stage without parts shows the time."""
    bar, *words = find_row(state_after(*EVERYTHING), "evaluate", now=165.0).split()
    assert bar == "━" * 8
    assert words == ["6", "of", "24", "1:05"]
    baseline = events.StageProgressed(run_id=RUN, stage="evaluate", done=1, total=2)
    assert find_row(state_after(baseline), "baseline").endswith("0:00")
    begun = events.StageStarted(run_id=RUN, step=5, stage="aggregate")
    assert find_row(state_after(*BEGINNING, begun), "aggregate", now=103.0) == "running for 0:03"


def test_a_stage_that_waits_for_another_has_no_bar() -> None:
    """A stage with all parts done has a bar only if no other stage is working."""
    rolled = events.StageProgressed(run_id=RUN, step=5, stage="rollout", done=4, total=4)
    begun = events.StageStarted(run_id=RUN, step=5, stage="reflect")
    assert find_row(state_after(*BEGINNING, rolled), "rollout").startswith("━" * 32)
    rows = render(state_after(*BEGINNING, rolled, begun))
    assert any(row.startswith("reflect ") for row in rows)
    assert not any(row.startswith("rollout ") for row in rows)


@given(st.integers(0, 999), st.integers(1, 1000))
def test_a_bar_is_full_only_at_the_end(done: int, total: int) -> None:
    """Rounding never shows an unfinished stage as finished."""
    stage = events.StageProgressed(run_id=RUN, step=5, stage="rollout", done=done, total=total)
    row = find_row(state_after(stage), "rollout")
    assert row.startswith("━" * 32) == (done >= total)


def test_the_budget_row_shows_the_closest_limit() -> None:
    """Without a limit there is no such row; an unknown price is left out."""
    words = "128 calls   45.2k tokens in, 3,100 out   $0.2500"
    assert find_row(state_after(BUDGET), "spend") == words
    assert find_row(state_after(BUDGET), "budget").endswith(" 25% of $1.00")
    free = events.BudgetUpdated(run_id=RUN, usage=Usage(calls=3), seconds=90.0)
    assert find_row(state_after(free), "spend") == "3 calls   0 tokens in, 0 out"
    assert not any(row.startswith("budget") for row in render(state_after(free)))
    timed = free.model_copy(update={"max_seconds": 240.0, "max_calls": 30})
    assert find_row(state_after(timed), "budget", now=130.0).endswith("50% of 4:00")
    tokens = events.BudgetUpdated(run_id=RUN, usage=USAGE, seconds=0.0, max_tokens=50_000, max_calls=200)
    assert find_row(state_after(tokens), "budget").endswith("96% of 50,000 tokens")


def test_an_endpoint_is_shown_while_it_matters() -> None:
    """The row shows the wait, then for a minute the new rate."""
    state = state_after(PAUSE)
    assert find_row(state, "limits", now=102.0) == (
        "api.example.com answered 429: waiting 10 s, then 3.25 calls/s"
    )
    assert find_row(state, "limits", now=113.0) == "api.example.com answered 429: continues at 3.25 calls/s"
    assert not any(row.startswith("limits") for row in render(state, now=173.0))
    silent = state_after(PAUSE.model_copy(update={"rate": None}))
    assert find_row(silent, "limits", now=102.0) == "api.example.com answered 429: waiting 10 s"
    assert not any(row.startswith("limits") for row in render(silent, now=113.0))
    gone = state_after(PAUSE.model_copy(update={"status": None, "rate": None}))
    assert find_row(gone, "limits", now=102.0) == "api.example.com cannot be reached: waiting 10 s"


def test_the_draft_row_names_the_call() -> None:
    """It shows the purpose, a later attempt, and how many other calls are being written."""
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


def test_a_refused_draft_shows_the_reason() -> None:
    """The reason is a model's text, so it is escaped and stays on one line."""
    reset = events.DraftDiscarded(
        run_id=RUN, role="optimizer", purpose="merge", call_id="s", attempt=1, reason="no [b]\x1b[1m\nanchor"
    )
    words = r"merge (optimizer), attempt 1 refused: no [b]\x1b[1m anchor"
    assert find_row(state_after(DRAFT, reset), "draft") == words
    again = state_after(DRAFT, reset, DRAFT.model_copy(update={"attempt": 2}))
    assert find_row(again, "draft") == "merge (optimizer), attempt 2"


# ------------------------------------------------------------------------------------------ drafts


@given(DRAFTS, st.integers(1, 60), st.integers(0, 9), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_every_draft_fits(draft: JsonValue, width: int, height: int, encoding: str) -> None:
    """No draft takes more lines or cells than there are, and none steers the terminal."""
    lines = drafted(draft, width=width, height=height, encoding=encoding)
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
    assert drafted({"edits": edits}) == ["+ one", "~ old => new", "- gone", "+ still gro"]
    draft: JsonValue = {
        "patterns": [{"type": "sums", "description": "off by one", "count": 2}],
        "reasoning": "so",
    }
    assert drafted(draft) == ["patterns: sums, off by one", "reasoning: so"]


def test_a_long_draft_shows_its_end() -> None:
    """Long lines wrap at words, and a mark shows that text before the first line is left out."""
    document = "\n".join(f"- rule {number}" for number in range(100))
    assert drafted({"strengths": "short", "document": document}, height=3) == [
        "...- rule 97",
        "- rule 98",
        "- rule 99",
    ]
    assert drafted({"guidance": "some words that are too many for a line of text"}, width=22) == [
        "guidance: some words",
        "that are too many",
        "for a line of text",
    ]


@pytest.mark.parametrize("draft", [{"edits": [{"op": "append", "content": EVIL}]}, {"document": EVIL}, EVIL])
def test_a_draft_cannot_steer_the_terminal(draft: JsonValue) -> None:
    """Control sequences, marks of direction and markup are shown as text."""
    (line,) = drafted(draft, width=79)
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
    assert drafted(text, encoding=encoding) == [shown]


@given(st.lists(st.none() | st.floats(0, 1), max_size=30), st.booleans())
def test_a_higher_score_is_never_drawn_lower(scores: list[float | None], ascii_only: bool) -> None:
    """Each score has one sign, and a missing score has a blank."""
    ramp = "0123456789" if ascii_only else "▁▂▃▄▅▆▇█"
    heights = draw_heights(scores, ascii_only=ascii_only)
    assert len(heights) == len(scores)
    pairs = [(s, ramp.index(h)) for s, h in zip(scores, heights, strict=True) if s is not None]
    assert all(a[1] <= b[1] for a in pairs for b in pairs if a[0] <= b[0])
    assert all(h == " " for s, h in zip(scores, heights, strict=True) if s is None)
