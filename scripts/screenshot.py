"""Draws docs/live-view.svg: a scripted moment of a run in the live view, at 80x24.

Usage: python scripts/screenshot.py [FILE]

The events are made up, after the recorded demo; the clock is scripted, too, so that the picture is the
same each time.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.segment import SegmentLines
from rich.terminal_theme import TerminalTheme

from reflact import events
from reflact.records import SkillVersion, Usage
from reflact.reporting.live import EventLines, render_display
from reflact.reporting.progress import RunProgress
from reflact.reporting.terminal import wrap_line
from reflact.types import Edit, EditResult, GateAction, Verdict

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "live-view.svg"
RUN = "ra0cb29af99c2"
NAME = "weather-sql"
WIDTH, HEIGHT = 80, 24
Moment = tuple[float, events.Event]

LIGHT = TerminalTheme(
    (255, 255, 255),
    (26, 32, 44),
    [
        (0, 0, 0),
        (197, 48, 48),
        (39, 103, 73),
        (151, 90, 22),
        (43, 108, 176),
        (128, 90, 213),
        (9, 121, 133),
        (74, 85, 104),
    ],
)
DARK = TerminalTheme(
    (17, 24, 33),
    (237, 242, 247),
    [
        (0, 0, 0),
        (252, 129, 129),
        (104, 211, 145),
        (236, 201, 75),
        (99, 179, 237),
        (183, 148, 244),
        (79, 209, 214),
        (160, 174, 192),
    ],
)

LINE_END = re.compile(r"<text [^>]*>\s+</text>")

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-labelledby="title desc">
  <title id="title">The live view of a run</title>
  <desc id="desc">A terminal of 80 columns and 24 lines. Above: a line for the plan, the outlook of the \
gate, the baseline and each finished step with its decision and scores. Below, drawn anew as the run goes \
on: where the run is, the stages of the step under way, the scores, what is spent, and the reply that a model \
is writing.</desc>
  <style>
    .{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
    @media (prefers-color-scheme: dark) {{
      svg > rect {{ fill: #111821; }}
@DARK@
    }}
  </style>
  <defs>
    <clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" \
height="{terminal_height}"/></clipPath>
    {lines}
  </defs>
  <rect fill="#ffffff" stroke="#a0aec0" width="100%" height="100%" rx="8"/>
  <g transform="translate({terminal_x}, 22)" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">{matrix}</g>
  </g>
</svg>
"""


def version(number: int, step: int, score: float) -> SkillVersion:
    """Return a version that a step made."""
    return SkillVersion(
        number=number, skill_hash=f"{number:064}", origin=f"step {step}", score=score
    )


INITIAL = SkillVersion(number=0, skill_hash="0" * 64, origin="initial", score=0.2)
FIRST, SECOND = version(1, 1, 0.425), version(2, 2, 0.575)

STEPS: tuple[tuple[GateAction, float | None, int, SkillVersion], ...] = (
    ("accept_new_best", 0.425, 4, FIRST),
    ("accept_new_best", 0.575, 3, SECOND),
    ("reject", 0.125, 2, SECOND),
    ("no_patches", None, 0, SECOND),
    ("set_aside", 0.6, 3, SECOND),
)


def opening() -> Iterator[Moment]:
    """Yield the events before the first step."""
    yield (
        0.0,
        events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80),
    )
    words = "Candidates run on 40 items."
    yield 0.0, events.GatePowerEstimated(run_id=RUN, description=words, trials=4, rollouts=320)
    yield 21.0, events.BaselineMeasured(run_id=RUN, score=0.2, n=40)


def steps() -> Iterator[Moment]:
    """Yield the events of the finished steps."""
    current = INITIAL
    for step, (action, score, failures, after) in enumerate(STEPS, start=1):
        since = 21.0 + 41.0 * (step - 1)
        yield (
            since,
            events.StepStarted(run_id=RUN, step=step, epoch=1, item_ids=("a", "b", "c", "d")),
        )
        edits = (EditResult(edit=Edit(op="append", content="x"), status="applied"),) * (
            score is not None
        )
        yield (
            since + 40,
            events.RolloutsFinished(run_id=RUN, step=step, n=4, failures=failures, unmeasured=0),
        )
        yield (
            since + 40,
            events.EditsApplied(
                run_id=RUN, step=step, pool_size=len(edits), budget=1, results=edits
            ),
        )
        verdict = Verdict(
            action=action,
            reason="",
            candidate_score=score,
            current_score=None if score is None else current.score,
        )
        yield since + 40, events.CandidateJudged(run_id=RUN, step=step, verdict=verdict)
        yield (
            since + 41,
            events.StepCommitted(
                run_id=RUN, step=step, epoch=1, action=action, current=after, best=after
            ),
        )
        current = after


def under_way() -> Iterator[Moment]:
    """Yield the events of the step that is under way."""
    yield 226.0, events.StepStarted(run_id=RUN, step=6, epoch=1, item_ids=("a", "b", "c", "d"))
    yield 226.0, events.StageStarted(run_id=RUN, step=6, stage="rollout")
    yield (
        231.0,
        events.StageProgressed(run_id=RUN, step=6, stage="rollout", done=4, total=4),
    )
    yield 231.0, events.StageFinished(run_id=RUN, step=6, stage="rollout", seconds=5.0)
    yield 231.0, events.StageStarted(run_id=RUN, step=6, stage="reflect")
    yield 232.0, events.StageProgressed(run_id=RUN, step=6, stage="reflect", done=1, total=2)
    yield (
        238.0,
        events.BudgetUpdated(
            run_id=RUN,
            usage=Usage(calls=447, input_tokens=61_230, output_tokens=9_820, usd=0.3127),
            seconds=238.0,
            max_usd=0.5,
            max_calls=2000,
        ),
    )
    yield (
        238.0,
        events.RateLimited(
            run_id=RUN, endpoint="api.example.com", status=429, seconds=9.0, rate=3.2
        ),
    )
    content = "When the question asks how many, answer with SELECT COUNT(*) and the"
    edits = [
        {
            "op": "append",
            "content": "States are two capital letters: WHERE state = 'AL', never 'Alabama'.",
        },
        {
            "op": "replace",
            "target": "LIKE '2013-12%'",
            "content": "a pattern of the month asked for",
        },
        {"op": "append", "content": content},
    ]
    yield (
        240.0,
        events.DraftUpdated(
            run_id=RUN,
            step=6,
            role="optimizer",
            purpose="analyst_failure",
            call_id="optimizer/analyst_failure/6",
            attempt=1,
            draft={
                "patterns": [{"type": "state", "description": "full names", "count": 2}],
                "edits": edits,
            },
        ),
    )


def draw_screen(console: Console) -> None:
    """Print what stands on the screen: the event lines, and the live display below them."""
    event_lines, progress = EventLines(), RunProgress(name=NAME, epochs=1)
    for at, event in (*opening(), *steps(), *under_way()):
        line = event_lines.format_event(event)
        if line is not None:
            console.print(wrap_line(line, console))
        progress.update(event, at)
    console.print(SegmentLines(render_display(progress, console, 241.0), new_lines=True))


def picture() -> str:
    """Return the picture, in colours for light and for dark surroundings."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        height=HEIGHT,
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    draw_screen(console)
    dark = console.export_svg(theme=DARK, code_format="{styles}", unique_id="live", clear=False)
    rules = "\n".join(f"      {rule}" for rule in dark.splitlines())
    template = SVG.replace("@DARK@", rules.replace("{", "{{").replace("}", "}}"))
    drawn = console.export_svg(theme=LIGHT, code_format=template, unique_id="live")
    drawn = LINE_END.sub("", drawn).replace("<text ", "\n<text ")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PICTURE).write_text(picture(), encoding="utf-8")
