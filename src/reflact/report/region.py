"""The live region: what is known of a run as rows of text that fit a screen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from reflact import events
from reflact.report.drafts import cut, draft_lines, shown
from reflact.report.figures import about, clock, quantity
from reflact.report.story import number
from reflact.report.watched import StageSeen, StepTaken, Watched, Writing
from reflact.results import Usage

LABEL = 12
"""Cells of the column in which each row says what it is about."""

RATE_SECONDS = 60.0
"""How long after a back-off the rate of an endpoint still matters."""

DRAFT_ROWS = 8
"""Rows that a draft needs beside another one."""

IN_A_STEP: tuple[events.Stage, ...] = ("rollout", "reflect", "aggregate", "select", "update", "evaluate")


class Marks(NamedTuple):
    """The signs that a terminal can show."""

    full: str
    empty: str
    rule: str
    dot: str
    then: str
    cut: str
    heights: str


PLAIN = Marks(full="#", empty=".", rule="-", dot="|", then=">", cut="...", heights="0123456789")
DRAWN = Marks(full="━", empty="─", rule="─", dot="·", then="›", cut="…", heights="▁▂▃▄▅▆▇█")


@dataclass(frozen=True)
class Screen:
    """What rows are made for: cells, lines, and the encoding of the terminal."""

    width: int = 80
    height: int = 24
    encoding: str = "utf-8"

    @property
    def marks(self) -> Marks:
        """The signs that the encoding has."""
        try:
            "".join(DRAWN).encode(self.encoding)
        except UnicodeEncodeError:
            return PLAIN
        return DRAWN

    @property
    def most(self) -> int:
        """The most rows that the region may take: five eighths of the screen, and one line less than it."""
        return max(1, min(self.height - 1, self.height * 5 // 8))


class Look(NamedTuple):
    """How a decision is shown: its sign, its style, and its name in the legend."""

    sign: str
    style: str
    name: str


UNCHANGED = Look(".", "dim", "unchanged")
OPEN = Look("?", "yellow", "open")
LOOKS = {
    "accept_new_best": Look("+", "bold green", "new best"),
    "accept": Look("=", "green", "accepted"),
    "force_accept": Look("!", "green", "forced"),
    "reject": Look("x", "red", "rejected"),
    "inconclusive": OPEN,
    "unmeasured": OPEN,
}


class Section(NamedTuple):
    """Rows that come and go together; those of the highest rank go first where the screen is small."""

    rank: int
    rows: Sequence[Text]


def region(watched: Watched, screen: Screen, now: float) -> tuple[Text, ...]:
    """Return the rows of the live region at a moment: never more or wider than the screen has room for."""
    width = screen.width - 2
    marks = screen.marks
    sections = [
        Section(0, [_header(watched, width, marks, screen.encoding, now)]),
        Section(1, _place(watched, width, marks)),
        Section(2, _scores(watched)),
        Section(7, _by_step(watched.taken, width, marks)),
        Section(4, _spend(watched, width, marks, now)),
        Section(6, _chain(watched, width, marks)),
        Section(1, [_bar_row(stage, width, marks, now) for stage in _open(watched)]),
        Section(5, _gate(watched, marks)),
        Section(3, _limits(watched, now, screen.encoding)),
    ]
    while sum(len(section.rows) for section in sections) > screen.most and len(sections) > 1:
        sections.remove(max(sections, key=lambda section: section.rank))
    rows = [row for section in sections for row in section.rows]
    rows += _drafts(watched, width, screen.most - len(rows), screen)
    return tuple(_fitting(row, width, marks) for row in rows[: screen.most])


def _fitting(row: Text, width: int, marks: Marks) -> Text:
    if row.cell_len > width:
        row = row.copy()
        mark = marks.cut[: max(width, 0)]
        row.truncate(max(width - len(mark), 0), overflow="crop")
        row.append(mark, "dim")
    return row


def _row(label: str, *parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{LABEL - 1}} ", "dim"), *parts)


def _header(watched: Watched, width: int, marks: Marks, encoding: str, now: float) -> Text:
    run_id = "" if watched.plan is None else watched.plan.run_id
    name = " ".join(filter(None, (shown(watched.name, encoding), run_id)))
    parts = [clock(now - watched.began)]
    if watched.total is not None and watched.committed < watched.total:
        parts.append(f"steps end in {about(watched.seconds_left(now))}")
    right = f" {marks.dot} ".join(parts)
    name = cut(name, max(width - len(right) - 8, 0), marks.cut)
    left = Text.assemble((marks.rule * 2, "dim"), (f" {name} " if name else "", "bold"))
    line = marks.rule * max(width - left.cell_len - len(right) - 3, 0)
    return Text.assemble(left, (line, "dim"), " ", right, " ", (marks.rule, "dim"))


def _place(watched: Watched, width: int, marks: Marks) -> list[Text]:
    total = watched.total
    if watched.plan is None and not watched.stages:
        return [_row("run", ("starting", "dim"))]
    if total is None or watched.plan is None:
        return []
    if watched.step == 0:
        where = "before the first step"
    else:
        where = f"epoch {watched.epoch} of {watched.epochs}, step {watched.step} of {total}"
    where = f"{where:<28}  "
    plan = f"{watched.plan.n_train} train, {watched.plan.n_val} val, {watched.plan.n_test} test items"
    size = min(max(width - LABEL - len(where) - 10, 0), 40)
    row = _row("run", where, bar(watched.committed, total, size, marks), f"  {watched.committed} done")
    wide = Text.assemble(row, ("   " + plan, "dim"))
    return [wide if wide.cell_len <= width else row]


def _scores(watched: Watched) -> list[Text]:
    parts: list[str | Text | tuple[str, str]] = []
    if watched.baseline is not None:
        parts.append(f"baseline {number(watched.baseline)}")
    for name, version in (("current", watched.current), ("best", watched.best)):
        if version is not None and version.number:
            parts.append(f"   {name} v{version.number} {number(version.score)}")
    best = watched.best
    if watched.baseline is not None and best is not None and best.score is not None and best.number:
        gain = best.score - watched.baseline
        parts.append((f" ({gain:+.3f})", "green" if gain > 0 else "dim"))
    return [_row("val", *parts)] if parts else []


def _by_step(taken: Sequence[StepTaken], width: int, marks: Marks) -> list[Text]:
    """Return a column for each committed step: the height of the current score, and what was decided."""
    if not taken:
        return []
    shown_steps = taken[-max(width - LABEL, 1) :]
    looks = [LOOKS.get(step.action, UNCHANGED) for step in shown_steps]
    kinds = dict.fromkeys(sorted(looks, key=[*LOOKS.values(), UNCHANGED].index))
    decided = _row("decided", *((look.sign, look.style) for look in looks))
    legend = "   " + ", ".join(f"{look.sign} {look.name}" for look in kinds)
    if decided.cell_len + len(legend) <= width:
        decided.append(legend, "dim")
    heights = heights_of([step.score for step in shown_steps], marks.heights)
    return [_row("val by step", (heights, "cyan")), decided] if heights.strip() else [decided]


def heights_of(scores: Sequence[float | None], ramp: str) -> str:
    """Return a sign for each score, from the lowest to the highest of them; a blank where there is none.

    Scores that are all equal have the lowest sign.
    """
    known = [score for score in scores if score is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    top = len(ramp) - 1
    span = high - low or 1.0
    return "".join(" " if score is None else ramp[round((score - low) / span * top)] for score in scores)


def _spend(watched: Watched, width: int, marks: Marks, now: float) -> list[Text]:
    budget = watched.budget
    if budget is None:
        return []
    usage = budget.usage
    cells = [
        _of(budget.max_calls, usage.calls, "calls", marks),
        _tokens(usage, budget.max_tokens, marks),
    ]
    if budget.max_usd is not None or usage.usd is not None:
        spent = usage.usd or 0.0
        most = None if budget.max_usd is None else f"${budget.max_usd:.2f}"
        cells.append(_share(f"${spent:.4f}", most, spent, budget.max_usd, marks))
    if budget.max_seconds is not None:
        seconds = budget.seconds + max(now - watched.budget_at, 0.0)
        cells.append(_share(clock(seconds), clock(budget.max_seconds), seconds, budget.max_seconds, marks))
    if watched.failed_calls:
        cells.append(Text(f"{watched.failed_calls} without a reply", "yellow"))
    return list(_packed("spend", cells, width))


def _tokens(usage: Usage, most: int | None, marks: Marks) -> Text:
    if most is None:
        return Text(f"{quantity(usage.input_tokens)} tokens in, {quantity(usage.output_tokens)} out")
    used = usage.input_tokens + usage.output_tokens
    return _of(most, used, "tokens", marks)


def _of(most: int | None, used: int, what: str, marks: Marks) -> Text:
    return _share(
        quantity(used), None if most is None else quantity(most), used, most, marks, what=f" {what}"
    )


def _share(
    said: str, limit: str | None, used: float, most: float | None, marks: Marks, *, what: str = ""
) -> Text:
    """Return what was consumed, beside its limit and with a bar where it has one."""
    if limit is None or most is None:
        return Text(said + what)
    near = most <= 0 or used / most >= 0.9
    return Text.assemble(
        f"{said} of {limit}{what} ", bar(used, most, 10, marks, style="yellow" if near else "cyan")
    )


def _packed(label: str, cells: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield rows of cells, as many in each as fit."""
    row: Text | None = None
    for cell in cells:
        if row is not None and row.cell_len + 3 + cell.cell_len <= width:
            row = Text.assemble(row, "   ", cell)
            continue
        if row is not None:
            yield row
        row, label = _row(label, cell), ""
    if row is not None:
        yield row


def _chain(watched: Watched, width: int, marks: Marks) -> list[Text]:
    """Return the stages of a step in a row: those that are over with their seconds, those to come dimmed."""
    stages = {stage.name: stage for stage in watched.stages}
    if watched.step == 0 or not stages or not stages.keys() <= set(IN_A_STEP):
        return []
    links = [_link(name, stages.get(name)) for name in IN_A_STEP]
    rows = (
        _row("stages", Text.assemble((then, "dim")).join(links)) for then in (f" {marks.then} ", marks.then)
    )
    loose, tight = rows
    return [loose if loose.cell_len <= width else tight]


def _link(name: str, stage: StageSeen | None) -> Text:
    if stage is None:
        return Text(name, "dim")
    if stage.seconds is None:
        return Text(name, "bold")
    took = f" {about(stage.seconds, '').replace(' ', '')}" if stage.seconds >= 1 else ""
    return Text.assemble((name, "green"), (took, "dim"))


def _open(watched: Watched) -> list[StageSeen]:
    """Return the stages under way; one whose parts are done only waits for the others, if there are any."""
    under_way = [stage for stage in watched.stages if stage.seconds is None]
    busy = [stage for stage in under_way if stage.total is None or stage.done < stage.total]
    return (busy or under_way)[-3:]


def _bar_row(stage: StageSeen, width: int, marks: Marks, now: float) -> Text:
    name = "baseline" if stage.step == 0 and stage.name == "evaluate" else stage.name.replace("_", " ")
    since = clock(now - stage.since)
    if stage.total is None:
        return _row(name, (f"under way for {since}", "dim"))
    counts = f"{stage.done} of {stage.total}"
    size = min(max(width - LABEL - 34, 4), 60)
    return _row(name, bar(stage.done, stage.total, size, marks), f"  {counts:<12}", (since, "dim"))


def _gate(watched: Watched, marks: Marks) -> list[Text]:
    if not watched.looks:
        return []
    last = watched.looks[-1]
    asked = sum(2 * look.n for look in watched.looks)
    most = "" if watched.most_rollouts is None else f" of at most {watched.most_rollouts}"
    what = "" if last.part == "step" else f"{last.part}, "
    words = f"{what}look {len(watched.looks)}: {last.n} pairs of trial {last.trial + 1}"
    return [_row("gate", words, (f" {marks.dot} {asked}{most} rollouts", "dim"))]


def _limits(watched: Watched, now: float, encoding: str) -> list[Text]:
    rows = []
    for waiting in watched.waiting:
        rest = waiting.until - now
        rate = "" if waiting.rate is None else f"{waiting.rate:.3g} calls/s"
        host = waiting.endpoint.partition("://")[2].partition("/")[0] or waiting.endpoint
        how = "cannot be reached" if waiting.status is None else f"answered {waiting.status}"
        said = f"{shown(host, encoding)} {how}: "
        if rest > 0:
            then = f", then {rate}" if rate else ""
            rows.append(_row("limits", said, (f"waits {about(max(rest, 1), '')}{then}", "yellow")))
        elif rate and rest > -RATE_SECONDS:
            rows.append(_row("limits", said, f"goes on at {rate}"))
    return rows[-2:]


def _drafts(watched: Watched, width: int, room: int, screen: Screen) -> list[Text]:
    """Return the drafts of the calls that have been written for longest, or of the last one that was.

    Where there is room for more than one, each has at least ``DRAFT_ROWS`` rows.
    """
    if not watched.writing or room < 2:
        return []
    being_written = [writing for writing in watched.writing if not writing.over] or watched.writing[:1]
    count = max(1, min(len(being_written), room // DRAFT_ROWS))
    rows: list[Text] = []
    for place, mine in enumerate(being_written[:count]):
        free = (room - len(rows)) // (count - place)
        unseen = len(being_written) - count if place == count - 1 else 0
        lines = draft_lines(mine.draft, width=width - 2, room=free - 1, encoding=screen.encoding)
        style = "dim" if mine.over or mine.refused is not None else ""
        rows += [_row("draft", _title(mine, unseen, screen)), *(Text("  " + s, style) for s in lines)]
    return rows


def _title(mine: Writing, unseen: int, screen: Screen) -> Text:
    words = shown(f"{mine.purpose.replace('_', ' ')} ({mine.role})", screen.encoding)
    if mine.refused is not None:
        reason = " ".join(shown(mine.refused, screen.encoding).split())
        return Text.assemble(words, (f", attempt {mine.attempt} refused: {reason}", "yellow"))
    if mine.over:
        return Text(f"{words}, done", "dim")
    again = f", attempt {mine.attempt}" if mine.attempt > 1 else ""
    more = f", and {unseen} more under way" if unseen else ""
    return Text.assemble(words, (again, "yellow"), (more, "dim"))


def bar(done: float, total: float, size: int, marks: Marks, *, style: str = "cyan") -> Text:
    """Return a bar of a number of cells; it is full only when everything is done."""
    full = size if total <= 0 else max(0, min(size, int(size * done / total)))
    return Text.assemble((marks.full * full, style), (marks.empty * (size - full), "dim"))
