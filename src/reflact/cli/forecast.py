"""``reflact train --dry-run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from reflact.config import TrainerConfig
    from reflact.estimates import CostEstimate, EstimateRange
    from reflact.results import Spend
    from reflact.wiring import RunPlan


def print_cost_estimate(config: TrainerConfig) -> None:
    """Print what a run, or what is left of it, will take; nothing is called and nothing is written.

    Raises:
        UsageError: The configuration, the data, a prompt or the initial skill is wrong.
    """
    import anyio
    from rich.console import Console

    from reflact.wiring import Overrides, prepare_run

    planned = prepare_run(config, Overrides())
    path = config.store or config.out_dir / "run.db"
    done, text, spent = anyio.run(_read_progress, path, planned.run_id) if path.is_file() else (0, None, ())
    predicted = planned.estimate_cost(done=done, skill=text, spent=spent)
    console = Console()
    console.print(f"run {planned.run_id}: {predicted.steps} steps to take, {done} taken", highlight=False)
    console.print(build_estimate_table(predicted))
    for line in predicted.assumptions:
        typer.echo(line)
    _print_gate_power(planned)


async def _read_progress(path: Path, run_id: str) -> tuple[int, str | None, tuple[Spend, ...]]:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        records = await store.records(run_id)
        text = (await store.skill(records[-1].current.skill_hash)).text if records else None
        return len(records), text, await store.spend(run_id)


def build_estimate_table(estimate: CostEstimate) -> Table:
    """Return rows of calls as a table: the least, the expected and the most, tokens and any money beside."""
    from rich import box
    from rich.table import Table

    priced = any(row.usd is not None for row in estimate.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("role", no_wrap=True)
    table.add_column("calls for", no_wrap=True)
    for heading in ("least", "calls", "most", "tokens", "most", *(("$", "most") if priced else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in estimate.rows:
        counts = _format_counts(row.calls, row.input_tokens + row.output_tokens)
        table.add_row(row.role, row.purpose, *counts, *(_format_usd_range(row.usd) if priced else ()))
    table.add_section()
    counts = _format_counts(estimate.calls, estimate.tokens())
    table.add_row("all", "", *counts, *(_format_usd_range(estimate.usd) if priced else ()))
    return table


def _format_counts(calls: EstimateRange, tokens: EstimateRange) -> tuple[str, ...]:
    numbers = (calls.low, calls.expected, calls.high, tokens.expected, tokens.high)
    return tuple(_format_short(number) for number in numbers)


def _format_usd_range(usd: EstimateRange | None) -> tuple[str, str]:
    return ("-", "-") if usd is None else (_format_usd(usd.expected), _format_usd(usd.high))


def _format_usd(usd: float) -> str:
    return f"{usd:.3f}" if usd < 99.9995 else _format_short(usd)


def _format_short(number: float) -> str:
    """Return a count in at most six characters: in full up to 10,000, then three digits of it."""
    if number < 9_999.5:
        return f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < size * 999.5:
            digits = 1 if number < size * 99.95 else 0
            return f"{number / size:.{digits}f}{unit}"
    return f"{number:.0e}"


def _print_gate_power(plan: RunPlan) -> None:
    from reflact.judging import build_first_alpha, estimate_gate_power

    gate, n = plan.config.gate, len(plan.data.val)
    typer.echo(estimate_gate_power(gate, n, build_first_alpha(plan)).description)
