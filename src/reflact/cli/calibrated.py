"""What a round of calibration did, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reflact.calibration.metrics import Measures
    from reflact.calibration.results import CalibrationReport, Change
    from reflact.memory import Promotion
    from reflact.results import Estimate

FIGURES = (
    ("mean absolute error", "error"),
    ("bias", "bias"),
    ("pairwise accuracy", "accuracy"),
    ("order consistency", "consistency"),
    ("Brier score", "brier"),
    ("calibration error", "calibration"),
)


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    kept = sum(kind.pairs for kind in report.pairs)
    console.print(
        f"{report.learned_from} traces, {report.candidates} candidates, rounds made: {report.rounds}; "
        f"{kept} pairs, {report.candidates - kept} dropped, {report.promoted} promoted"
    )
    for kind in report.pairs:
        hard = "" if kind.difficulty is None else f", mean difficulty {kind.difficulty:.2f}"
        console.print(f"  {kind.mistake}: {kind.pairs} pairs{hard}")
    for drop in report.drops:
        console.print(f"  dropped, {drop.reason}: {drop.candidates}")
    if report.held:
        console.print(f"  held back by the scan: {report.held}")
    for test in report.tests:
        console.print(_tested(test))
    if report.not_tested is not None:
        console.print(f"Not tested: {report.not_tested}.")
    for name, change in (("held-out traces", report.held_out), ("anchors", report.anchors)):
        if change.before is not None and change.after is not None:
            console.print(_table(name, change, change.before, change.after))
    console.print(f"{report.outlook}.")
    taken = report.usage
    money = "" if taken.usd is None else f", ${taken.usd:.4f}"
    console.print(
        f"Replies took {taken.calls} calls, {taken.input_tokens} tokens in, {taken.output_tokens} out"
        f"{money}, those that were found in the store included; calls that failed are not counted."
    )


def _tested(test: Promotion) -> str:
    shown = {
        "better": "promoted",
        "not_shown": "not promoted: no gain was shown",
        "accuracy_fell": "not promoted: pairwise accuracy fell",
        "worse": "taken back: it does harm",
        "no_harm_shown": "kept: no harm was shown",
    }
    effect = f"{test.effect:.2f} [{test.low:.2f}, {test.high:.2f}]"
    outcome = shown.get(test.outcome, test.outcome)
    return (
        f"Batch {test.batches_before + 1} on these traces, {len(test.pair_ids)} pairs: error falls by "
        f"{effect} over {test.traces} traces, p = {test.p_value:.2g} of {test.alpha:.2g}: {outcome}."
    )


def _table(name: str, change: Change, before: Measures, after: Measures) -> Table:
    from rich.table import Table

    gain = change.gain
    title = f"{name}: {before.traces} traces, {before.transitions} steps"
    if gain is not None:
        title += f"; error falls by {gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}]"
    table = Table(title=title, title_justify="left")
    for column in ("", "before", "after", "constant"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    always = before.constant
    same = {"error": always.error, "accuracy": always.accuracy, "brier": always.brier}
    for label, field in FIGURES:
        constant = f"{same[field]:.2f}" if field in same else ""
        table.add_row(label, _shown(getattr(before, field)), _shown(getattr(after, field)), constant)
    return table


def _shown(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
