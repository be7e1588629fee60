"""The sections of a calibration's page that say on what evidence: tests, pairs, drops, models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

import htpy as h
from pydantic import JsonValue, TypeAdapter, ValidationError

from reflact.calibration.holding import GIVEN
from reflact.calibration.results import CalibrationReport
from reflact.calibration.words import first_up
from reflact.memory import Promotion
from reflact.memory_cards import LEVEL
from reflact.pages.charts import Look, Row, ends_of, intervals
from reflact.pages.frame import Section, counted, estimated, figure, folded, named, number, safe, table
from reflact.pages.verdict import drop_meaning, outcome
from reflact.results import IntervalEstimate

OBJECT: Final = TypeAdapter(dict[str, JsonValue])
MODELS = ("llm", "llm.model")
"""Where a critic's identity names its model: one that is only a name, or one with settings."""

DEEPEST = 2
"""Names of settings have at most so many points in them."""


def evidence(report: CalibrationReport) -> Section:
    """Return what every batch showed in its test, and what was decided."""
    name, heading = "evidence", "The evidence"
    untested = report.not_tested is not None and h.p[f"Not tested: {safe(report.not_tested)}."]
    if not report.tests:
        return Section(name, heading, (untested or h.p["No batch was tested."],))
    rows = [
        Row(_batch(test), IntervalEstimate(value=test.effect, low=test.low, high=test.high), _look(test))
        for test in report.tests
    ]
    return Section(
        name,
        heading,
        (
            h.p[
                "The steps of held-out traces were scored with what was promoted, and with the batch too. A "
                "batch passes if p is at most alpha and pairwise accuracy holds. All batches on the same "
                f"traces share an error probability of {LEVEL:.1%}. These traces: ",
                "given by the caller" if report.held_out_name == GIVEN else safe(report.held_out_name),
                ".",
            ],
            figure(
                "By how much each batch lowers the error, with its 95% interval. Right of the line it helps; "
                "a filled diamond was promoted.",
                intervals("effects", "Effect of each batch, in points", rows, ends=ends_of(rows)),
            ),
            table(
                "Every batch that was tested",
                ("batch", "outcome", "error falls by", "p", "alpha", "accuracy", "pairs", "traces", "steps"),
                [_tested(test) for test in report.tests],
                prose={1},
            ),
            untested,
            (
                folded(
                    f"Pairs of {_batch(test).lower()}",
                    h.ul(".ids")[(h.li[h.code[safe(pair_id[:12])]] for pair_id in test.pair_ids)],
                )
                for test in report.tests
            ),
        ),
    )


def _batch(test: Promotion) -> str:
    return f"Batch {test.batches_before + 1}"


def _look(test: Promotion) -> Look:
    return "after" if test.promoted else "before"


def _tested(test: Promotion) -> list[h.Node]:
    accuracy = "–" if test.accuracy_change is None else f"{test.accuracy_change:+z.2f}".replace("-", "−")
    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    return [
        _batch(test),
        h.span(class_=["outcome", _class(test)])[outcome(test)],
        estimated(effect),
        f"{test.p_value:.2g}",
        f"{test.alpha:.2g}",
        accuracy,
        *(f"{count:,}" for count in (len(test.pair_ids), test.traces)),
        f"{test.transitions:,}" + (f", {test.unscored:,} of them unscored" if test.unscored else ""),
    ]


def _class(test: Promotion) -> str | None:
    return "good" if test.promoted else "bad" if test.outcome == "worse" else None


def pairs(report: CalibrationReport) -> Section:
    """Return what was made of the traces: pairs by kind, and candidates that became none."""
    kept = sum(kind.pairs for kind in report.pairs)
    dropped = sum(drop.candidates for drop in report.drops)
    said = (
        f"From {counted(report.learned_from, 'trace')}, in {counted(report.rounds, 'round')}: "
        f"{counted(report.candidates, 'candidate')}, of which {kept:,} became pairs and {dropped:,} did not."
    )
    held = f" The scan holds back {report.held:,} of the pairs; they are in no test." if report.held else ""
    if report.archived or report.left_out:
        held += (
            f" The memory was full: its bound put away {counted(report.archived, 'pair')} before a test, and "
            f"nothing was made of {counted(report.left_out, 'trace')}."
        )
    made: list[list[h.Node]] = [
        [named(kind.mistake), _count(kind.pairs, kept), _difficulty(kind.difficulty)] for kind in report.pairs
    ]
    drops: list[list[h.Node]] = [
        [named(drop.reason), _count(drop.candidates, dropped), drop_meaning(drop.reason)]
        for drop in report.drops
    ]
    return Section(
        "pairs",
        "What was made",
        (
            h.p[said + held],
            made
            and table("Pairs by the mistake that they show", ("mistake", "pairs", "mean difficulty"), made),
            any(kind.difficulty is not None for kind in report.pairs)
            and h.p(".note")[
                "Difficulty is the share of blind comparisons that took the wrong side for right."
            ],
            drops
            and table(
                "Candidates that became no pair", ("reason", "candidates", "meaning"), drops, prose={2}
            ),
            report.writer_given_up is not None and h.p[f"{safe(first_up(report.writer_given_up))}."],
        ),
    )


def _count(count: int, of: int) -> h.Node:
    width = f"width: {100 * count / max(of, 1):.0f}%"
    return [f"{count:,}", h.span(".bar", aria_hidden="true")[h.span(style=width)]]


def _difficulty(difficulty: float | None) -> str:
    return "not compared" if difficulty is None else number(difficulty)


def versions(report: CalibrationReport) -> Section:
    """Return which critic was measured and tested: its prompt, its model, its settings."""
    parts = parts_of(report.critic)
    said = h.p[
        "All scores were made with the prompt ",
        h.code[safe(report.prompt)],
        *(h.fragment[" and the model ", h.code[safe(value)]] for name, value in parts if name in MODELS),
        ".",
    ]
    named = table(
        "The critic",
        ("setting", "value"),
        [[h.code[safe(name)], h.code[safe(value)]] for name, value in parts],
        prose={1},
    )
    return Section(
        "versions", "Prompt, model and settings", (said, folded("All that names this critic", named))
    )


def parts_of(identity: str) -> list[tuple[str, str]]:
    """Return the parts of a critic's identity by their names, or the whole of it where it has none.

    An identity is JSON, and within it so is that of the model.
    """
    found = _parsed(identity)
    return [("identity", identity)] if found is None else list(_flat("", found))


def _flat(above: str, values: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        below = _parsed(value) if isinstance(value, str) else value
        if isinstance(below, dict) and above.count(".") < DEEPEST:
            yield from _flat(f"{above}{name}.", below)
        else:
            yield f"{above}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> dict[str, JsonValue] | None:
    try:
        return OBJECT.validate_json(text)
    except ValidationError:
        return None
