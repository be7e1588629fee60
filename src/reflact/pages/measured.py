"""The sections of a calibration's page that say how good the critic is: before and after, and by round."""

from __future__ import annotations

from collections.abc import Iterator

import htpy as h

from reflact.calibration.metrics import TOLERANCE, Bin, Group, Measures
from reflact.calibration.results import CalibrationReport, Change
from reflact.calibration.words import FIGURES
from reflact.pages.charts import Row, course, ends_of, intervals, reliability_diagram
from reflact.pages.frame import Section, counted, estimated, figure, folded, named, number, table
from reflact.pages.verdict import moved

DIFFICULTIES = ("easy", "middle", "hard")

NAMES = (("held-out", "Held-out traces"), ("anchors", "Anchors"))


def _changes(report: CalibrationReport) -> Iterator[tuple[str, str, Change, Measures, Measures]]:
    """Yield what was measured before and after: id, name, the change, and both measures."""
    for (name, heading), change in zip(NAMES, (report.held_out, report.anchors), strict=True):
        if change.before is not None and change.after is not None:
            yield name, heading, change, change.before, change.after


def change(report: CalibrationReport) -> Section:
    """Return the critic before and after, on the held-out traces and on the anchors."""
    measured = list(_changes(report))
    rows = [(name, heading, _errors_of(before, after)) for name, heading, _, before, after in measured]
    ends = ends_of([row for *_, both in rows for row in both])
    missing = {name for name, _ in NAMES} - {name for name, *_ in measured}
    return Section(
        "change",
        "Before and after",
        (
            bool(rows)
            and figure(
                "With 95% intervals; lower is better. The upright bar is the constant: what always giving "
                "the same answer would reach.",
                *(
                    intervals(
                        f"error-{name}",
                        f"{heading}: mean absolute error",
                        both,
                        ends=ends,
                        known_as="constant",
                    )
                    for name, heading, both in rows
                ),
            ),
            [_measured(heading, change, before, after) for _, heading, change, before, after in measured],
            "held-out" in missing
            and h.p[
                "No held-out step has a score that is known to be right and was scored before and after, so "
                "the critic was not measured on held-out traces."
            ],
            "anchors" in missing
            and h.p(".note")[
                "There are no anchors: gold pairs that are never learned from and choose nothing."
            ],
        ),
    )


def _errors_of(before: Measures, after: Measures) -> tuple[Row, Row]:
    return (
        Row("before", before.error, "before", before.constant.error),
        Row("after", after.error, "after", after.constant.error),
    )


def _measured(heading: str, change: Change, before: Measures, after: Measures) -> h.Node:
    constant = {
        "error": before.constant.error,
        "accuracy": before.constant.accuracy,
        "brier": before.constant.brier,
    }
    rows: list[list[h.Node]] = []
    for name, field, note in FIGURES:
        same = constant.get(field)
        was, now = getattr(before, field), getattr(after, field)
        shown = "–" if same is None else number(same)
        rows.append([[name, h.small[note]], estimated(was), estimated(now), shown])
    gain = change.gain
    caption = f"{heading}: {counted(before.traces, 'trace')}, {counted(before.transitions, 'step')}"
    return [
        table(caption, ("figure", "before", "after", "constant"), rows),
        gain is not None and h.p[f"Averaged within each trace, the error {moved(gain)}."],
        change.unscored > 0
        and h.p(".note")[
            f"In neither column: {counted(change.unscored, 'step')} without a valid score before or after."
        ],
        before.traces == 1
        and h.p(".note")["Of a single trace nothing can be said; its intervals are the scale."],
    ]


def reliability(report: CalibrationReport) -> Section:
    """Return reliability diagrams, before and after."""
    charts = [
        figure(
            f"On the dashed line the critic is right as often as it is sure. Larger marks "
            f"are more steps; a score is right within {number(TOLERANCE, 0)} point of the known one.",
            reliability_diagram(
                f"reliability-{name}-before", f"{heading}, before", before.reliability, look="before"
            ),
            reliability_diagram(
                f"reliability-{name}-after", f"{heading}, after", after.reliability, look="after"
            ),
        )
        for name, heading, _, before, after in _changes(report)
    ]
    tables = [
        table(
            f"{heading}: bins of confidence",
            ("confidence", "steps", "mean", "right", "steps", "mean", "right"),
            _bins(before.reliability, after.reliability),
        )
        for _, heading, _, before, after in _changes(report)
    ]
    nothing = h.p["Nothing was measured, so there is nothing to draw."]
    numbers = folded("The numbers: steps, mean confidence and share right, before and then after", tables)
    return Section(
        "reliability", "How sure it is, and how often right", (charts or nothing, tables and numbers)
    )


def _bins(before: tuple[Bin, ...], after: tuple[Bin, ...]) -> list[list[h.Node]]:
    columns = [{(one.low, one.high): one for one in bins} for bins in (before, after)]
    return [
        [
            f"{number(low, 1)} to {number(high, 1)}",
            *(cell for bins in columns for cell in _bin(bins.get((low, high)))),
        ]
        for low, high in sorted(columns[0].keys() | columns[1].keys())
    ]


def _bin(one: Bin | None) -> tuple[h.Node, ...]:
    if one is None:
        return "–", "–", "–"
    return f"{one.transitions:,}", number(one.confidence), number(one.right)


def rounds(report: CalibrationReport) -> Section:
    """Return accuracy and error round by round, where more than one was measured."""
    course_of = report.by_round
    name, heading = "rounds", "Round by round"
    if len(course_of) < 2:
        made = counted(report.rounds, "round was", "rounds were")
        said = f"{made} made, and the critic was not measured after any of them."
        return Section(name, heading, (h.p[said if report.rounds else "No round was made."],))
    accuracy, error = [one.accuracy for one in course_of], [one.error for one in course_of]
    most = max(one.high for one in error)
    charts = [
        course(
            "rounds-error",
            "Mean absolute error",
            error,
            most=next(end for end in (1, 2, 4, 6, 8, 10) if end >= most),
            reference=course_of[-1].constant.error,
            known_as="constant",
        )
    ]
    if any(one is not None for one in accuracy):
        known_as, guess = "guessing", course_of[-1].constant.accuracy
        charts.insert(
            0,
            course(
                "rounds-accuracy", "Pairwise accuracy", accuracy, most=1, reference=guess, known_as=known_as
            ),
        )
    rows: list[list[h.Node]] = [
        ["before" if place == 0 else f"after round {place}", estimated(one.accuracy), estimated(one.error)]
        for place, one in enumerate(course_of)
    ]
    caption = (
        "The critic on the held-out traces, before any round and after each that was tested; 95% intervals."
    )
    numbers = table("Round by round, on the held-out traces", ("round", "pairwise accuracy", "error"), rows)
    return Section(name, heading, (figure(caption, *charts), folded("The numbers", numbers)))


def kinds(report: CalibrationReport) -> Section:
    """Return the error among steps that invite a mistake, and among pairs of each difficulty."""
    tables = [
        table(
            f"{heading}: {by}",
            (of, "steps", "error before", "after", "bias before", "after"),
            _groups(was, now),
        )
        for _, heading, _, before, after in _changes(report)
        for by, of, was, now in (
            ("by the mistake that a step invites", "mistake", before.by_mistake, after.by_mistake),
            ("by the difficulty of its pairs", "difficulty", before.by_difficulty, after.by_difficulty),
        )
        if was or now
    ]
    nothing = h.p[
        "None of the measured steps belongs to a contrast pair, so none is known to invite a mistake."
    ]
    return Section("kinds", "Where it errs", (tables or nothing,))


def _groups(before: tuple[Group, ...], after: tuple[Group, ...]) -> list[list[h.Node]]:
    was, now = ({group.name: group for group in groups} for groups in (before, after))
    return [
        [named(name), _steps(was.get(name), now.get(name)), *_errors(was.get(name), now.get(name))]
        for name in sorted(was.keys() | now.keys(), key=_place)
    ]


def _place(name: str) -> tuple[int, str]:
    return (DIFFICULTIES.index(name) if name in DIFFICULTIES else 0, name)


def _steps(before: Group | None, after: Group | None) -> str:
    counts = {f"{group.transitions:,}" for group in (before, after) if group is not None}
    return " / ".join(sorted(counts))


def _errors(before: Group | None, after: Group | None) -> Iterator[h.Node]:
    for field in ("error", "bias"):
        for group in (before, after):
            yield estimated(None if group is None else getattr(group, field))
