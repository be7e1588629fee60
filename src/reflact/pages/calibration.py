"""The page of a calibration: what it came to, how good the critic is, and on what evidence."""

from __future__ import annotations

import htpy as h

from reflact.calibration.results import CalibrationReport, Consumed
from reflact.pages.evidence import evidence, pairs, versions
from reflact.pages.frame import (
    Section,
    body_of,
    contents,
    counted,
    document,
    facts,
    named,
    number,
    safe,
    table,
)
from reflact.pages.measured import change, kinds, reliability, rounds
from reflact.pages.verdict import verdict
from reflact.results import IntervalEstimate, Usage

TERMS = (
    ("Score", "How far an agent's state has come towards its purpose: 0 is nothing of it, 10 all of it."),
    (
        "Known score",
        "What a program or a person says is right. What a critic's own samples agree on is no measure of it.",
    ),
    (
        "Held-out traces",
        "Traces that nothing was learned from. They chose what was promoted, so the gain that they show is a "
        "little flattered.",
    ),
    ("Anchors", "Pairs of known scores that are never learned from and choose nothing."),
    (
        "Contrast pair",
        "A right and a wrong evaluation of one step. Promoted pairs stand in its prompt as examples.",
    ),
    ("Bias", "The mean of score minus known score, after a step. Above 0 the critic inflates."),
    (
        "Pairwise accuracy",
        "How often states of one trace are ordered as their known scores order them, and how often the right "
        "side of a contrast pair is nearer than the wrong one. Ties count half.",
    ),
    ("Order consistency", "How often successive states are ordered alike within one score and across two."),
    (
        "Brier score and calibration error",
        "Of the critic's confidence, as the probability that its score is within one point of the known one.",
    ),
    ("Interval", "95%, in brackets, over resamples of whole traces, since steps of a trace are alike."),
    (
        "Constant",
        "What always giving the same answer would reach on these steps. A critic that is no better knows "
        "nothing of them.",
    ),
)


def calibration_page(report: CalibrationReport) -> str:
    """Return a calibration's report as one HTML document that needs no network and no script.

    It holds what the report holds and nothing else, so equal reports are equal documents. A report that was
    saved as JSON is read with ``CalibrationReport.model_validate_json``.
    """
    sections = (
        change(report),
        reliability(report),
        rounds(report),
        evidence(report),
        pairs(report),
        kinds(report),
        _outlook(report),
        _consumption(report),
        versions(report),
        _terms(),
    )
    found = verdict(report)
    promoted = counted(report.promoted, "pair") if report.promoted else "nothing"
    return document(
        f"Calibration: {promoted} promoted",
        h.header[
            h.h1["Calibration of a critic"],
            h.div(class_=["verdict", found.tone])[
                h.p(".headline")[found.headline], (h.p[words] for words in found.more)
            ],
            _tiles(report),
            contents(sections),
        ],
        body_of(sections),
    )


def _tiles(report: CalibrationReport) -> h.Element:
    before, after = report.held_out.before, report.held_out.after
    tiles: list[tuple[str, h.Node]] = []
    if before is not None and after is not None:
        tiles.append(("Mean absolute error", _from_to(before.error, after.error)))
        if before.accuracy is not None and after.accuracy is not None:
            tiles.append(("Pairwise accuracy", _from_to(before.accuracy, after.accuracy)))
        steps = counted(before.transitions, "step")
        tiles.append(("Held-out traces", [f"{before.traces:,}", h.small[f"{steps} with a known score"]]))
    kept = sum(kind.pairs for kind in report.pairs)
    made = f"{kept:,} kept in {counted(report.rounds, 'round')}"
    tiles.append(("Pairs promoted", [f"{report.promoted:,}", h.small[made]]))
    return facts(tiles, class_="tiles")


def _from_to(before: IntervalEstimate, after: IntervalEstimate) -> h.Node:
    return [
        h.span(".before")[number(before.value)],
        " → ",
        h.span(".after")[number(after.value)],
        h.small["held-out, before → after"],
    ]


def _outlook(report: CalibrationReport) -> Section:
    return Section("outlook", "What these traces can show", (h.p[f"{safe(report.outlook)}."],))


def _consumption(report: CalibrationReport) -> Section:
    taken = report.usage
    rows = [_consumed(one) for one in report.consumed]
    unpriced = "No price is known for these calls." if taken.usd is None else None
    uncounted = (
        f"The provider counted no tokens of {counted(taken.uncounted, 'call')}." if taken.uncounted else None
    )
    columns = (
        "asked for",
        "questions",
        "unanswered",
        "refused",
        "calls",
        "tokens in",
        "out",
        "USD",
    )
    totals = [sum(counts) for counts in zip(*map(_counts, report.consumed), strict=True)]
    shown = [f"{total:,}" for total in totals] or ["–"] * 3
    return Section(
        "cost",
        "What it took",
        (
            table(
                "Replies, by who asked and what for",
                columns,
                [*rows, [h.strong["all"], *shown, *_usage(taken)]],
            ),
            h.p(".note")[
                "Replies that were found in the store count as if they had been asked for; calls that failed "
                "without a reply do not. ",
                unpriced,
                " ",
                uncounted,
            ],
        ),
    )


def _consumed(one: Consumed) -> list[h.Node]:
    counts = (f"{count:,}" for count in _counts(one))
    return [[named(one.role), ", ", named(one.purpose)], *counts, *_usage(one.usage)]


def _counts(one: Consumed) -> tuple[int, ...]:
    return one.questions, one.unanswered, one.refused


def _usage(usage: Usage) -> tuple[h.Node, ...]:
    counts = (usage.calls, usage.input_tokens, usage.output_tokens)
    return (*(f"{count:,}" for count in counts), "–" if usage.usd is None else number(usage.usd, 4))


def _terms() -> Section:
    return Section("terms", "How to read this", (facts(TERMS),))
