"""The list of runs as a page: one row for each, which a few lines of script sort and filter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import htpy as h

from reflact.reporting import facts
from reflact.reporting.history import RunListing
from reflact.reporting.html import page
from reflact.text import name_count

SCRIPT = "runs.js"

MAX_RUNS = 1_000
MAX_ERRORS = 20
TEXT_BYTES = 500_000


class ServedRun(NamedTuple):
    """A run of the list, with its database and the key of its address."""

    key: str
    database: Path
    listing: RunListing


def describe_runs(runs: Sequence[ServedRun]) -> str:
    """Return how many runs there are, and how many of them have not ended."""
    n_open = sum(run.listing.status in {None, "running"} for run in runs)
    not_ended = f", {n_open:,} not ended" if n_open else ""
    return f"{name_count(len(runs), 'run')}{not_ended}."


def render_index(
    root: Path, runs: Sequence[ServedRun], errors: Sequence[str], *, version: str
) -> str:
    """Return the list of runs, the newest first, as an HTML document."""
    limit = page.TextLimit(TEXT_BYTES)
    rows = [_build_row(run, root, limit) for run in runs[:MAX_RUNS]]
    left_out = len(runs) - len(rows)
    search = h.label["Search ", h.input(type="search", autocomplete="off")]
    content = (
        not rows and h.p["There is no run yet. The page shows the first one when it begins."],
        bool(rows) and h.div("#run-controls.controls", hidden=True)[search],
        bool(rows)
        and page.build_row_table(
            "Runs, the newest first", rows, prose=("started", "status", "model, grader")
        ),
        left_out > 0 and h.p(".note")[f"{left_out:,} older runs are left out."],
        [
            h.p(".note")[f"A database cannot be read: {limit.fit(error, 500)}"]
            for error in errors[:MAX_ERRORS]
        ],
    )
    bar = page.LiveBar("/events", version, describe_runs(runs), home=None)
    section = page.PageSection("runs", "", content)
    return page.build_document("Runs", h.h1(".title")["Runs"], [section], script=SCRIPT, live=bar)


def _build_row(run: ServedRun, root: Path, limit: page.TextLimit) -> dict[str, h.Node]:
    row = facts.build_run_row(run.listing, root)
    link = h.a(href=f"/runs/{run.key}")[page.break_key(limit.fit(row["folder"], 200))]
    score, against = facts.describe_listed_score(run.listing)
    spend = facts.SpendFact(usage=run.listing.usage)
    return {
        "run": [link, h.small[row["run"]]],
        "started": f"{run.listing.created:%Y-%m-%d %H:%M}",
        "status": row["status"],
        "model, grader": [limit.fit(row["model"], 100), h.small[limit.fit(row["grader"], 100)]],
        "steps": row["steps"],
        "score": [score, h.small[against]],
        "cost": [row["cost"], spend.usage.calls > 0 and h.small[f"{spend.tokens} tokens"]],
    }
