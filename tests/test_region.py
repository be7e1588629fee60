"""The live region: rows that fit a screen, and what stands in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from reflact.report.region import Screen, bar, heights_of, region

from reflact import events
from reflact.records import Version
from reflact.reporting.live_state import LiveState, fold
from reflact.results import Usage
from reflact.types import Action

RUN = "r1"
V0 = Version(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = Version(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
USAGE = Usage(calls=128, input_tokens=45_210, output_tokens=3_100, usd=0.25)
MARKS = Screen().marks

ACTIONS: tuple[Action, ...] = ("accept_new_best", "reject", "no_patches", "inconclusive")
BEGINNING: tuple[events.Event, ...] = (
    events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80),
    events.Outlook(run_id=RUN, words="", effect=None, trials=4, rollouts=320),
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
    events.GateLooked(run_id=RUN, step=5, part="step", trial=0, n=40),
    events.GateLooked(run_id=RUN, step=5, part="step", trial=1, n=12),
    events.Progress(run_id=RUN, step=5, stage="evaluate", done=6, total=24, note="trial 1"),
)
EDITS: list[JsonValue] = [{"op": "append", "content": f"rule {number}"} for number in range(40)]
DRAFT = events.Drafted(
    run_id=RUN, role="optimizer", purpose="merge", sample="s", attempt=1, draft={"edits": EDITS}
)
BACKED_OFF = events.BackedOff(run_id=RUN, endpoint="api.example.com", status=429, seconds=12.0, rate=3.25)
BUDGET = events.BudgetMoved(run_id=RUN, usage=USAGE, seconds=90.0, max_usd=1.0)
EVERYTHING = (*BEGINNING, *STEPS, *GATE, BUDGET, BACKED_OFF, DRAFT)


def watched(*happened: events.Event, name: str = "demo") -> LiveState:
    """Return what is known after events that all came at second 100."""
    known = LiveState(name=name, epochs=2, began=10.0)
    for event in happened:
        known = fold(known, event, 100.0)
    return known


def rows(known: LiveState, screen: Screen | None = None, *, now: float = 100.0) -> list[str]:
    """Return the region's rows as text."""
    return [row.plain for row in region(known, screen or Screen(), now)]


def row(known: LiveState, label: str, screen: Screen | None = None, *, now: float = 100.0) -> str:
    """Return what stands in the only row with a label."""
    (found,) = (line[12:] for line in rows(known, screen, now=now) if line.startswith(f"{label:<11} "))
    return found


# ------------------------------------------------------------------------------------------ the screen


@given(
    st.lists(st.sampled_from(EVERYTHING), max_size=30),
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from(["utf-8", "ascii", "latin-1", "cp437"]),
)
def test_whatever_happens_fits_the_screen(
    happened: list[events.Event], width: int, height: int, encoding: str
) -> None:
    """At any size and in any encoding the region leaves a line free, and no row reaches the edge."""
    screen = Screen(width, height, encoding)
    found = region(watched(*happened), screen, 105.0)
    assert len(found) <= max(1, height - 1)
    for line in found:
        assert line.cell_len <= max(width - 2, 0)
        assert "\n" not in line.plain
        line.plain.encode(encoding)


def test_a_small_screen_keeps_what_matters_most() -> None:
    """Where rows must go, the place of the run and the bar under way stay."""
    found = rows(watched(*EVERYTHING), Screen(60, 8))
    assert len(found) == 5
    for words in ("demo r1", "step 5 of 28", "evaluate", "baseline 0.250"):
        assert any(words in line for line in found), words


def test_a_large_screen_shows_more() -> None:
    """Everything is there at 80x24; at 160x50 the plan, one row of spend and more of the draft."""
    small, large = (rows(watched(*EVERYTHING), screen) for screen in (Screen(80, 24), Screen(160, 50)))
    assert len(small) == 15
    assert len(large) == 31
    for label in ("run", "val", "decided", "spend", "stages", "evaluate", "gate", "limits", "draft"):
        assert any(line.startswith(label) for line in small), label
    assert "56 train, 40 val, 80 test items" in large[1]
    assert sum(line.startswith("  + rule") for line in large) > sum(
        line.startswith("  + rule") for line in small
    )
    assert large[-1] == small[-1] == "  + rule 39"


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """Bars, rules and heights have plain signs, and words of models are written out."""
    evil = events.Drafted(
        run_id=RUN, role="optimizer", purpose="merge", sample="s", attempt=1, draft="Größe \x1b[2J"
    )
    found = rows(watched(*EVERYTHING[:-1], evil, name="Grüße"), Screen(encoding="ascii"))
    assert all(line.isascii() for line in found)
    assert found[0].startswith(r"-- Gr\xfc\xdfe r1 ---")
    assert found[-1] == r"  Gr\xf6\xdfe \x1b[2J"


# ------------------------------------------------------------------------------------------ the rows


def test_before_the_plan_is_known_the_run_is_starting() -> None:
    """The first frame says so."""
    header, first = rows(watched())
    assert header.startswith("── demo ──")
    assert header.endswith(" 1:30 ─")
    assert first.split() == ["run", "starting"]


def test_the_header_says_when_the_steps_end() -> None:
    """A dash before there is an estimate, and nothing once all steps are committed."""
    assert "steps end in -" in rows(watched(*BEGINNING))[0]
    known = watched(*BEGINNING, *STEPS)
    begun = fold(known, GATE[0], 100.0)
    once = fold(begun, STEPS[0].model_copy(update={"step": 5}), 130.0)
    assert "2:00 · steps end in ~12 min" in rows(once, now=130.0)[0]
    last = STEPS[0].model_copy(update={"step": 28})
    assert "steps end" not in rows(watched(*BEGINNING, last))[0]


def test_scores_are_shown_as_they_come() -> None:
    """The baseline at first, then versions and what the best one gained."""
    assert row(watched(*BEGINNING), "val") == "baseline 0.250"
    later = row(watched(*BEGINNING, *STEPS), "val")
    assert later == "baseline 0.250   current v1 0.500   best v1 0.500 (+0.250)"


def test_decisions_stand_under_the_scores_of_their_steps() -> None:
    """One column for each step; the legend names the signs that occur."""
    known = watched(*BEGINNING, *STEPS)
    assert row(known, "decided") == "+x.?   + new best, x rejected, ? open, . unchanged"
    assert row(known, "val by step") == "▁▁▁▁"


def test_of_many_steps_the_last_ones_are_shown() -> None:
    """A run of more steps than columns shows the end of the row."""
    many = [STEPS[1].model_copy(update={"step": step}) for step in range(1, 400)]
    assert row(watched(*BEGINNING, *many, STEPS[0].model_copy(update={"step": 400})), "decided") == (
        "x" * 65 + "+"
    )


def test_the_stages_of_the_step_are_a_chain() -> None:
    """What is over has its seconds, where these are worth a word; what is to come is dimmed."""
    chain = "rollout 12s › reflect › aggregate › select › update › evaluate"
    assert row(watched(*EVERYTHING), "stages") == chain
    tight = rows(watched(*EVERYTHING), Screen(70, 50))
    assert "stages      rollout 12s›reflect›aggregate›select›update›evaluate" in tight


def test_the_gate_says_what_it_looks_at() -> None:
    """Which look, how many pairs of which trial, and what the decision has asked for of its most."""
    assert row(watched(*EVERYTHING), "gate") == "look 2: 12 pairs of trial 2 · 104 of at most 320 rollouts"


def test_a_bar_counts_the_parts_of_a_stage() -> None:
    """The stage under way has a bar, its parts, and how long it has gone on."""
    shown = row(watched(*EVERYTHING), "evaluate", now=165.0)
    assert shown == "━" * 8 + "─" * 24 + "  6 of 24     1:05"
    baseline = events.Progress(run_id=RUN, stage="evaluate", done=1, total=2)
    assert row(watched(baseline), "baseline").endswith("1 of 2      0:00")


def test_a_stage_that_waits_for_another_has_no_bar() -> None:
    """Rollouts that are done wait for the analysts; alone, a full bar stays."""
    rolled = events.Progress(run_id=RUN, step=5, stage="rollout", done=4, total=4)
    begun = events.StageStarted(run_id=RUN, step=5, stage="reflect")
    assert row(watched(*BEGINNING, rolled), "rollout").startswith("━" * 32)
    both = rows(watched(*BEGINNING, rolled, begun))
    assert any(line.startswith("reflect ") for line in both)
    assert not any(line.startswith("rollout ") for line in both)


def test_a_stage_without_parts_says_how_long_it_goes_on() -> None:
    """There is no bar of nothing."""
    begun = events.StageStarted(run_id=RUN, step=5, stage="aggregate")
    assert row(watched(*BEGINNING, begun), "aggregate", now=103.0) == "under way for 0:03"


def test_spend_has_a_bar_only_where_there_is_a_limit() -> None:
    """What has no limit is a number; a price that nobody knows is no number."""
    assert row(watched(BUDGET), "spend", Screen(100, 24)) == (
        "128 calls   45.2k tokens in, 3,100 out   $0.2500 of $1.00 ━━────────"
    )
    free = events.BudgetMoved(run_id=RUN, usage=Usage(calls=3), seconds=90.0, max_seconds=3600.0)
    assert row(watched(free), "spend", now=130.0) == (
        "3 calls   0 tokens in, 0 out   2:00 of 1:00:00 ──────────"
    )
    tokens = events.BudgetMoved(run_id=RUN, usage=USAGE, seconds=0.0, max_tokens=50_000, max_calls=200)
    assert row(watched(tokens), "spend", Screen(160, 50)) == (
        "128 of 200 calls ━━━━━━────   48.3k of 50k tokens ━━━━━━━━━─   $0.2500"
    )


def test_an_endpoint_is_shown_while_it_matters() -> None:
    """While it waits, for how long; then for a minute at which rate it goes on; then no more."""
    known = watched(BACKED_OFF)
    assert row(known, "limits", now=102.0) == "api.example.com answered 429: waits 10 s, then 3.25 calls/s"
    assert row(known, "limits", now=113.0) == "api.example.com answered 429: goes on at 3.25 calls/s"
    assert not any(line.startswith("limits") for line in rows(known, now=173.0))
    silent = watched(BACKED_OFF.model_copy(update={"rate": None}))
    assert row(silent, "limits", now=102.0) == "api.example.com answered 429: waits 10 s"
    assert not any(line.startswith("limits") for line in rows(silent, now=113.0))
    gone = watched(BACKED_OFF.model_copy(update={"status": None, "rate": None}))
    assert row(gone, "limits", now=102.0) == "api.example.com cannot be reached: waits 10 s"


def test_the_draft_says_whose_it_is() -> None:
    """Its purpose, its attempt where that is not the first, and how many others are being written."""
    second = DRAFT.model_copy(update={"attempt": 2})
    other = DRAFT.model_copy(update={"sample": "t"})
    assert row(watched(DRAFT), "draft") == "merge (optimizer)"
    assert row(watched(second, other), "draft") == "merge (optimizer), attempt 2, and 1 more under way"


def test_a_large_screen_has_room_for_several_drafts() -> None:
    """Each has its own rows, and those for which there are none are counted."""
    drafts = [DRAFT.model_copy(update={"sample": str(n), "purpose": f"merge_{n}"}) for n in range(6)]
    found = rows(watched(*drafts), Screen(160, 50))
    titles = [line[12:] for line in found if line.startswith("draft ")]
    assert titles == [
        "merge 0 (optimizer)",
        "merge 1 (optimizer)",
        "merge 2 (optimizer), and 3 more under way",
    ]
    assert len(found) == Screen(160, 50).most
    assert sum(line == "  + rule 39" for line in found) == 3


def test_a_refused_draft_says_why() -> None:
    """The reason is a model's text as well."""
    reset = events.DraftReset(
        run_id=RUN, role="optimizer", purpose="merge", sample="s", attempt=1, reason="no [b]\x1b[1m\nanchor"
    )
    words = r"merge (optimizer), attempt 1 refused: no [b]\x1b[1m anchor"
    assert row(watched(DRAFT, reset), "draft") == words


# ------------------------------------------------------------------------------------------ their parts


@given(st.lists(st.none() | st.floats(0, 1), max_size=30), st.sampled_from(["0123456789", "▁▂▃▄▅▆▇█"]))
def test_higher_scores_never_stand_lower(scores: list[float | None], ramp: str) -> None:
    """One sign for each score; none is invented for what has no score."""
    heights = heights_of(scores, ramp)
    assert len(heights) == len(scores)
    pairs = [(s, ramp.index(h)) for s, h in zip(scores, heights, strict=True) if s is not None]
    assert all(a[1] <= b[1] for a in pairs for b in pairs if a[0] <= b[0])
    assert all(h == " " for s, h in zip(scores, heights, strict=True) if s is None)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 60))
def test_a_bar_is_full_only_at_the_end(done: int, total: int, size: int) -> None:
    """Rounding never says that all is done."""
    cells = bar(done, total, size, MARKS).plain
    assert len(cells) == size
    assert (cells == MARKS.full * size) == (done >= total or size == 0)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_signs_are_drawn_only_where_the_encoding_has_them(encoding: str) -> None:
    """A terminal that lacks one of them gets the plain ones."""
    assert "".join(Screen(encoding=encoding).marks).isascii()
