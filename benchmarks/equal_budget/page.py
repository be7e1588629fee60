"""Write docs/equal-budget.md and its picture from the results of run.py, with the settings of settings.yaml.

With --check it writes nothing, and exits with 1 if one of them is not current.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from picture import draw_bars
from run import HERE, RESULTS, ROOT, CellResult, Settings, read_results, read_settings
from scores import (
    Costs,
    Estimate,
    Seeds,
    average_costs,
    collect_scores,
    estimate_difference,
    estimate_mean,
    find_cells,
)

PAGE = ROOT / "docs" / "equal-budget.md"
FINDINGS = HERE / "findings.md"
NOTE = "<!-- Written by benchmarks/equal_budget/page.py; do not edit. -->"
REFLACT = "reflact"
NONE = "none"
INTERVALS = (
    "The mean is that of the tasks, and the interval a 95% percentile bootstrap over seeds and items. The difference is "
    "paired by item, over the tasks that both methods have run."
)


class Report:
    """What the tables of a page read: settings, results, and the tasks of one half.

    Args:
        settings: All settings.
        results: Results of these settings.
        half: The half whose tasks count.
    """

    def __init__(self, settings: Settings, results: Sequence[CellResult], half: str) -> None:
        self.settings = settings
        self.tasks = settings.list_tasks(half)
        self._results = results

    def list_cells(self, method: str, budget: str) -> list[CellResult]:
        """Return the cells of a method; no skill costs nothing, so its cells hold for each budget."""
        cells = find_cells(self._results, method, budget)
        if self.settings.methods[method].script is None:
            cells = [r for r in self._results if r.cell.method == method]
        return [r for r in cells if r.cell.task in self.tasks]

    def collect(self, method: str, budget: str) -> dict[str, Seeds]:
        """Return the scores of a method on the test items, by task."""
        return collect_scores(self.list_cells(method, budget), self.tasks)

    def estimate(self, method: str, budget: str) -> Estimate | None:
        """Estimate the mean of a method, if a test is open."""
        scores = self.collect(method, budget)
        return estimate_mean(scores) if scores else None

    def compare(self, method: str, other: str, budget: str) -> Estimate | None:
        """Estimate how far a method is above another one."""
        return estimate_difference(self.collect(method, budget), self.collect(other, budget))

    def list_budgets(self) -> list[str]:
        """Return the budgets with which a method with a script has an open test."""
        ran = {
            r.cell.budget
            for r in self._results
            if r.test and r.cell.task in self.tasks and self.settings.methods[r.cell.method].script
        }
        return [budget for budget in self.settings.budgets if budget in ran]


def show_budget(report: Report, budget: str) -> str:
    """Return the tables of a budget."""
    limits = report.settings.budgets[budget]
    parts = [
        f"### Budget `{budget}`",
        f"A cell may spend {limits.rollouts} rollouts and {limits.optimizer_tokens:,} tokens of the optimizer.",
        show_means(report, budget),
        show_costs(report, budget),
        show_tasks(report, budget),
    ]
    return "\n\n".join(parts)


def show_means(report: Report, budget: str) -> str:
    """Return the table of means and differences."""
    lines = [
        "| method | mean | 95% interval | reflact minus it, points | tasks | cells |",
        "|---|---|---|---|---|---|",
    ]
    for method, about in report.settings.methods.items():
        estimate = report.estimate(method, budget)
        if estimate is None:
            continue
        cells = [r for r in report.list_cells(method, budget) if r.test is not None]
        tasks = len({r.cell.task for r in cells})
        difference = None if method == REFLACT else report.compare(REFLACT, method, budget)
        lines.append(
            f"| {about.title} | **{estimate.mean:.3f}** | {estimate.low:.3f} to {estimate.high:.3f} | "
            f"{show_points(difference)} | {tasks} of {len(report.tasks)} | {len(cells)} |"
        )
    missing = [
        about.title
        for name, about in report.settings.methods.items()
        if report.estimate(name, budget) is None
    ]
    note = f" Not run: {', '.join(missing)}." if missing else ""
    return "\n".join(lines) + f"\n\n{INTERVALS}{note}"


def show_points(difference: Estimate | None) -> str:
    """Return a difference in points with its interval."""
    if difference is None:
        return ""
    mean, low, high = (100 * share for share in (difference.mean, difference.low, difference.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def show_costs(report: Report, budget: str) -> str:
    """Return the table of what a cell cost, and what a method gained for it."""
    lines = [
        "| method | rollouts | optimizer calls | optimizer tokens | points per 1,000 rollouts | "
        "points per 100,000 optimizer tokens | tokens that the document adds to a call |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, about in report.settings.methods.items():
        cells = report.list_cells(method, budget)
        if about.script is None or not cells:
            continue
        costs, gain = average_costs(cells), report.compare(method, NONE, budget)
        lines.append(
            f"| {about.title} | {costs.rollouts:.0f} | {costs.optimizer_calls:.1f} | {costs.optimizer_tokens:,.0f} | "
            f"{show_rates(gain, costs)} | {costs.document_tokens:.0f} |"
        )
    return "\n".join(lines) + "\n\nThese are means over cells. Points are those above no skill."


def show_rates(gain: Estimate | None, costs: Costs) -> str:
    """Return the cells with the points that a method gained for its rollouts and for its tokens."""
    rates = (
        f"{100 * gain.mean / spent * unit:.0f}" if gain is not None and spent else ""
        for spent, unit in ((costs.rollouts, 1_000), (costs.optimizer_tokens, 100_000))
    )
    return " | ".join(rates)


def show_tasks(report: Report, budget: str) -> str:
    """Return the table of means by task, with the number of seeds if it is more than one."""
    titles = [report.settings.tasks[task].title for task in report.tasks]
    lines = [f"| method | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for method, about in report.settings.methods.items():
        scores = report.collect(method, budget)
        if scores:
            row = [show_share(scores.get(task, ())) for task in report.tasks]
            lines.append(f"| {about.title} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n\nIn brackets: the number of seeds, if there are several."


def show_share(seeds: Sequence[Sequence[float]]) -> str:
    """Return the mean of a task."""
    if not seeds:
        return "not run"
    count = f" ({len(seeds)})" if len(seeds) > 1 else ""
    return f"{fmean(map(fmean, seeds)):.2f}{count}"


def show_half(settings: Settings, results: Sequence[CellResult], half: str) -> str:
    """Return the section of a half."""
    report = Report(settings, results, half)
    tasks = ", ".join(settings.tasks[task].title for task in report.tasks)
    head = f"## Results: the {half} half\n\nTasks: {tasks}."
    budgets = [show_budget(report, budget) for budget in report.list_budgets()]
    return "\n\n".join([head, *budgets]) if budgets else f"{head} Not run."


def draw(settings: Settings, results: Sequence[CellResult]) -> str | None:
    """Return the picture of the showing half with the budget ``small``; None if fewer than two methods have run.

    It covers the tasks that all methods with at least half of the tasks have run, and these methods.
    """
    report = Report(settings, results, "showing")
    scores = {name: report.collect(name, "small") for name in settings.methods}
    drawn = {name: found for name, found in scores.items() if 2 * len(found) >= len(report.tasks)}
    tasks = [task for task in report.tasks if all(task in found for found in drawn.values())]
    if len(drawn) < 2 or not tasks:
        return None
    estimates = {
        settings.methods[name].title: estimate_mean({task: found[task] for task in tasks})
        for name, found in drawn.items()
    }
    limits = settings.budgets["small"]
    return draw_bars(
        estimates,
        own=settings.methods[REFLACT].title,
        title=f"Mean score on the test items of {len(tasks)} tasks that nothing was tuned on",
        about=f"Each method trained with {limits.rollouts} rollouts and {limits.optimizer_tokens:,} optimizer tokens. "
        "Lines are 95% intervals.",
    )


def show_models(settings: Settings) -> str:
    """Return a sentence on the models."""
    target, optimizer = settings.models["target"], settings.models["optimizer"]
    return (
        f"The target is `{target.model}` at temperature {target.temperature:g}. The optimizer is `{optimizer.model}` at "
        f"temperature {optimizer.temperature:g}, with at most {optimizer.max_tokens} tokens in a reply."
    )


def show_settings(settings: Settings) -> str:
    """Return the table of all settings that are no defaults."""
    rows = [
        f"| {about.title} | "
        + ("; ".join(f"`{k}: {v}`" for k, v in about.settings.items()) or "defaults")
        + " |"
        for about in settings.methods.values()
        if about.script is not None
    ]
    return "\n".join(["| method | settings |", "|---|---|", *rows])


def show_versions(results: Sequence[CellResult]) -> str:
    """Return the versions of the peers."""
    versions = sorted(
        {f"{name} {version}" for r in results for name, version in r.versions.items()}
    )
    return ", ".join(versions) or "none ran"


def render(settings: Settings, results: Sequence[CellResult], *, picture: str | None) -> str:
    """Return the page; ``picture`` is the name of its picture, if there is one."""
    sizes = settings.sizes
    parts = [
        "# Comparison at equal budget",
        NOTE,
        f"![Score of each method on tasks that nothing was tuned on]({picture})" if picture else "",
        (HERE / "about.md").read_text(encoding="utf-8").strip(),
        f"Each task has {sizes['train']} train, {sizes['val']} validation and {sizes['test']} test items. "
        f"{show_models(settings)}",
        f"Versions of the peers: {show_versions(results)}.",
        show_settings(settings),
        *(
            show_half(settings, results, half)
            for half in ("showing", "tuning")
            if settings.list_tasks(half)
        ),
        FINDINGS.read_text(encoding="utf-8").strip(),
    ]
    return wrap("\n\n".join(filter(None, parts))) + "\n"


def wrap(text: str) -> str:
    """Wrap paragraphs and list items at 120 characters; tables, headings, code, pictures and notes stay."""
    lines = []
    for line in text.splitlines():
        if len(line) <= 120 or line.startswith(("|", "#", "<", "!", "    ")):
            lines.append(line)
        else:
            rest = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(line, 120, subsequent_indent=rest, break_on_hyphens=False)
    return "\n".join(lines)


def main() -> int:
    """Write the page and its picture, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=Path, default=HERE / "settings.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    settings = read_settings(options.settings)
    results = [r for r in read_results(options.results) if r.settings == settings.digest(r.cell)]
    picture, path = draw(settings, results), options.page.with_suffix(".svg")
    page = render(settings, results, picture=path.name if picture else None)
    files = {options.page: page} | ({path: picture} if picture else {})
    if options.check:
        return int(
            any(
                not p.exists() or p.read_text(encoding="utf-8") != text for p, text in files.items()
            )
        )
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
