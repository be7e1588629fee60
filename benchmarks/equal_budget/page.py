"""Write docs/equal-budget.md from the results of run.py, with the settings of settings.yaml.

With --check it writes nothing, and exits with 1 if the page is not current.
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from meter import BudgetLimits
from run import HERE, RESULTS, ROOT, CellResult, Settings, read_results, read_settings

PAGE = ROOT / "docs" / "equal-budget.md"
FINDINGS = HERE / "findings.md"
NOTE = "<!-- Written by benchmarks/equal_budget/page.py; do not edit. -->"
DRAWS = 4000
REFLACT = "reflact"


def bootstrap(groups: Sequence[Sequence[str]], other: Sequence[Sequence[str]] = ()) -> tuple[float, float]:
    """Return the 95% interval of a mean share, or of the difference of two.

    Seeds and items are drawn with replacement (percentile bootstrap). Both sides share the drawn items.

    Args:
        groups: For each seed, a character for each item, 1 if it is solved.
        other: The same for the other side.
    """
    draws, rng = [], random.Random(0)
    for _ in range(DRAWS):
        items = rng.choices(range(len(groups[0])), k=len(groups[0]))
        shares = [
            fmean(seed[item] == "1" for seed in rng.choices(side, k=len(side)) for item in items)
            for side in (groups, other)
            if side
        ]
        draws.append(shares[0] - sum(shares[1:]))
    draws.sort()
    return draws[round(DRAWS * 0.025)], draws[round(DRAWS * 0.975) - 1]


def list_cells(results: Sequence[CellResult], task: str, method: str) -> list[CellResult]:
    """Return the results of a method on a task, by seed."""
    return sorted((r for r in results if (r.task, r.method) == (task, method)), key=lambda r: r.seed)


def list_tests(cells: Sequence[CellResult]) -> list[str]:
    """Return the outcomes on the test items, for each seed whose test is open."""
    return [cell.test.each for cell in cells if cell.test is not None]


def show_task(settings: Settings, results: Sequence[CellResult], name: str) -> str:
    """Return the section of a task: scores, differences and spend."""
    task = settings.tasks[name]
    if not any(r.task == name for r in results):
        return f"## Results: {task.title}\n\nNot run."
    parts = [
        f"## Results: {task.title}",
        f"{task.train} train, {task.val} validation and {task.test} test items of `{task.config}`. A cell may spend "
        f"{task.budget.rollouts} rollouts and {task.budget.optimizer_tokens:,} tokens of the optimizer.",
        show_models(settings, name),
        show_scores(settings, results, name),
        show_differences(settings, results, name),
        show_spend(settings, results, name),
    ]
    return "\n\n".join(filter(None, parts))


def show_models(settings: Settings, name: str) -> str:
    """Return a sentence on the models of a task."""
    return " ".join(
        f"The {role} is `{model.model}` at temperature {model.temperature:g}, with at most {model.max_tokens} tokens "
        "in a reply."
        for role, model in settings.list_models(name).items()
    )


def show_scores(settings: Settings, results: Sequence[CellResult], name: str) -> str:
    """Return the table of scores."""
    lines = [
        "| method | " + " | ".join(f"seed {seed}" for seed in settings.seeds) + " | mean | 95% interval |"
    ]
    lines.append("|---" * (len(settings.seeds) + 3) + "|")
    for method, about in settings.methods.items():
        cells = {cell.seed: cell for cell in list_cells(results, name, method)}
        shown = [show_cell(cells.get(seed)) for seed in settings.seeds]
        tests = list_tests(list(cells.values()))
        mean = f"**{fmean(share(t) for t in tests):.3f}**" if tests else ""
        low, high = bootstrap(tests) if tests else (0.0, 0.0)
        interval = f"{low:.3f} to {high:.3f}" if tests else ""
        lines.append(f"| {about.title} | " + " | ".join(shown) + f" | {mean} | {interval} |")
    about = (
        "A cell has the solved test items of a seed and, in brackets, the solved validation items. The mean is that of "
        "the seeds with an open test. The interval is a percentile bootstrap over seeds and items."
    )
    return "\n".join(lines) + "\n\n" + about


def share(each: str) -> float:
    """Return the share of solved items."""
    return each.count("1") / len(each)


def show_cell(cell: CellResult | None) -> str:
    """Return the scores of a cell."""
    if cell is None:
        return "not run"
    test = "not opened" if cell.test is None else str(cell.test.solved)
    return f"{test} ({cell.val.solved})"


def show_differences(settings: Settings, results: Sequence[CellResult], name: str) -> str:
    """Return sentences that compare reflact with each other method."""
    own = list_tests(list_cells(results, name, REFLACT))
    lines = []
    for method, about in settings.methods.items():
        tests = list_tests(list_cells(results, name, method))
        if method == REFLACT or not own or not tests:
            continue
        difference = fmean(map(share, own)) - fmean(map(share, tests))
        low, high = bootstrap(own, tests)
        word = "equal to" if difference == 0 else "above" if difference > 0 else "**below**"
        amount = "" if difference == 0 else f"{abs(difference) * 100:.1f} points "
        lines.append(
            f"- reflact is {amount}{word} {about.title} (95% interval of the difference: "
            f"{low * 100:+.1f} to {high * 100:+.1f} points)."
        )
    return "\n".join(lines)


def show_spend(settings: Settings, results: Sequence[CellResult], name: str) -> str:
    """Return the table of spend, means over the seeds that ran."""
    lines = [
        "| method | rollouts | target tokens | optimizer calls | optimizer tokens | model seconds | ended by |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, about in settings.methods.items():
        cells = list_cells(results, name, method)
        if about.script is None or not cells:
            continue
        target = [cell.spend["target"] for cell in cells]
        optimizer = [cell.spend["optimizer"] for cell in cells]
        seconds = fmean(t.seconds + o.seconds for t, o in zip(target, optimizer, strict=True))
        ended = "; ".join(sorted({show_end(cell, settings.tasks[name].budget) for cell in cells}))
        lines.append(
            f"| {about.title} | {fmean(t.calls for t in target):.0f} | {fmean(t.tokens for t in target):,.0f} | "
            f"{fmean(o.calls for o in optimizer):.1f} | {fmean(o.tokens for o in optimizer):,.0f} | {seconds:,.0f} | "
            f"{ended} |"
        )
    about = (
        "Means over the seeds that ran. Model seconds are those that the models took for the counted calls on a "
        "machine with much other work, also if a reply was stored; so they compare methods, and no more."
    )
    return "\n".join(lines) + "\n\n" + about


def show_end(cell: CellResult, budget: BudgetLimits) -> str:
    """Return what a cell ran out of."""
    spent = {
        "tokens": cell.spend["optimizer"].tokens >= budget.optimizer_tokens,
        "rollouts": cell.spend["target"].calls >= budget.rollouts,
    }
    return " and ".join(name for name, is_spent in spent.items() if is_spent) or "its own end"


def show_versions(results: Sequence[CellResult]) -> str:
    """Return the versions of the peers."""
    versions = sorted({f"{name} {version}" for r in results for name, version in r.versions.items()})
    return ", ".join(versions) or "none ran"


def render(settings: Settings, results: Sequence[CellResult]) -> str:
    """Return the page."""
    current = [r for r in results if r.settings == settings.digest(r.task, r.method)]
    tasks = [show_task(settings, current, name) for name in settings.tasks]
    head = (HERE / "about.md").read_text(encoding="utf-8").strip()
    settings_of = show_settings(settings)
    versions = f"Versions of the peers: {show_versions(current)}."
    findings = FINDINGS.read_text(encoding="utf-8").strip()
    parts = ["# Comparison at equal budget", NOTE, head, versions, settings_of, *tasks, findings]
    return wrap("\n\n".join(parts)) + "\n"


def show_settings(settings: Settings) -> str:
    """Return the table of all settings that are no defaults."""
    rows = [
        f"| {about.title}{where} | "
        + ("; ".join(f"`{k}: {v}`" for k, v in values.items()) or "defaults")
        + " |"
        for about in settings.methods.values()
        if about.script is not None
        for where, values in (
            ("", about.settings),
            *((f", on {settings.tasks[task].title}", own) for task, own in about.task_settings.items()),
        )
    ]
    return "\n".join(["| method | settings |", "|---|---|", *rows])


def wrap(text: str) -> str:
    """Wrap paragraphs and list items at 120 characters; tables, headings, code and notes stay."""
    lines = []
    for line in text.splitlines():
        if len(line) <= 120 or line.startswith(("|", "#", "<", "    ")):
            lines.append(line)
        else:
            rest = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(line, 120, subsequent_indent=rest, break_on_hyphens=False)
    return "\n".join(lines)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=Path, default=HERE / "settings.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = render(read_settings(options.settings), read_results(options.results))
    if options.check:
        return int(options.page.read_text(encoding="utf-8") != page)
    options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
