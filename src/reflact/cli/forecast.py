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


def print_forecast(config: TrainerConfig) -> None:
    """Print what a run, or what is left of it, will take; nothing is called and nothing is written.

    Raises:
        UsageError: The configuration, the data, a prompt or the initial skill is wrong.
    """
    import anyio
    from rich.console import Console

    from reflact.wiring import Overrides, prepare_run

    planned = prepare_run(config, Overrides())
    path = config.store or config.out_dir / "run.db"
    done, text, spent = anyio.run(_left, path, planned.run_id) if path.is_file() else (0, None, ())
    predicted = planned.estimate_cost(done=done, skill=text, spent=spent)
    console = Console()
    console.print(f"run {planned.run_id}: {predicted.steps} steps to take, {done} taken", highlight=False)
    console.print(estimate_table(predicted))
    for line in predicted.assumptions:
        typer.echo(line)
    _print_outlook(planned)


async def _left(path: Path, run_id: str) -> tuple[int, str | None, tuple[Spend, ...]]:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        records = await store.records(run_id)
        text = (await store.skill(records[-1].current.skill_hash)).text if records else None
        return len(records), text, await store.spend(run_id)


def estimate_table(predicted: CostEstimate) -> Table:
    """Return rows of calls as a table: the least, the expected and the most, tokens and any money beside."""
    from rich import box
    from rich.table import Table

    priced = any(row.usd is not None for row in predicted.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("role", no_wrap=True)
    table.add_column("calls for", no_wrap=True)
    for heading in ("least", "calls", "most", "tokens", "most", *(("$", "most") if priced else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in predicted.rows:
        counts = _counts(row.calls, row.input_tokens + row.output_tokens)
        table.add_row(row.role, row.purpose, *counts, *(_money(row.usd) if priced else ()))
    table.add_section()
    counts = _counts(predicted.calls, predicted.tokens())
    table.add_row("all", "", *counts, *(_money(predicted.usd) if priced else ()))
    return table


def _counts(calls: EstimateRange, tokens: EstimateRange) -> tuple[str, ...]:
    numbers = (calls.low, calls.expected, calls.high, tokens.expected, tokens.high)
    return tuple(_short(number) for number in numbers)


def _money(usd: EstimateRange | None) -> tuple[str, str]:
    return ("-", "-") if usd is None else (_dollars(usd.expected), _dollars(usd.high))


def _dollars(usd: float) -> str:
    return f"{usd:.3f}" if usd < 99.9995 else _short(usd)


def _short(number: float) -> str:
    """Return a count in at most six characters: in full up to 10,000, then three digits of it."""
    if number < 9_999.5:
        return f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < size * 999.5:
            digits = 1 if number < size * 99.95 else 0
            return f"{number / size:.{digits}f}{unit}"
    return f"{number:.0e}"


def _print_outlook(planned: RunPlan) -> None:
    from reflact.judging import build_first_alpha, estimate_gate_power

    gate, n = planned.config.gate, len(planned.data.val)
    typer.echo(estimate_gate_power(gate, n, build_first_alpha(planned)).description)
