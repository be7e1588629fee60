"""Writes the tables of docs/benchmarks.md that show the results of `calls.py` and `runs.py`.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import PLOTS, RESULTS, fit_line

PAGE = PLOTS / "benchmarks.md"

Run = Mapping[str, float]


def main() -> None:
    """Replace what stands between the marks of each table."""
    runs, calls = (
        json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in ("runs", "calls")
    )
    tables = {
        "runs": [
            *describe_origin(runs),
            *show_runs(runs["runs"]),
            *show_slopes(runs["runs"], "rollouts"),
        ],
        "resume": list(show_starts(runs)),
        "calls": [*describe_origin(calls), *show_calls(calls["milliseconds of processor time"])],
        "thousand": list(show_thousand(calls["1,000 calls at once"])),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        head, found, rest = text.partition(f"<!-- results: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        assert end, f"{PAGE} has no marks for {name}"
        text = "\n".join([f"{head}{found}", *lines, "", f"{end}{tail}"])
    PAGE.write_text(text, encoding="utf-8")


def describe_origin(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the number of runs and how busy the machine was."""
    n, (before, after) = results["rounds"], results["machine"]
    yield f"{f'Medians of {n} runs' if n > 1 else 'One run'}. The machine had a {before} before, and a {after} after."
    yield ""


def show_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row for each run."""
    yield "| rollouts | read by analysts | wall | processor time | for each rollout | memory | store |"
    yield "|---|---|---|---|---|---|---|"
    for run in runs:
        each = 1e3 * run["processor"] / run["rollouts"]
        yield (
            f"| {run['rollouts']:,.0f} | {run['analysed']:.0%} | {run['wall']:.1f} s | {run['processor']:.1f} s "
            f"| {each:.2f} ms | {run['memory']:.0f} MB | {run['disk']:,.0f} MB |"
        )


def show_slopes(runs: Sequence[Run], x: str) -> Iterator[str]:
    """Yield the slopes of the straight lines, and how far the largest run is from them."""
    units = {"wall": "s of wall time", "processor": "s of processor time", "memory": "MB of memory"}
    parts = []
    for key, unit in units.items():
        slope, start = fit_line([(run[x], run[key]) for run in runs])
        off = runs[-1][key] / (start + slope * runs[-1][x]) - 1
        parts.append(f"- {1000 * slope:.2f} {unit}; the largest run is {off:+.0%} off the line")
    yield ""
    yield f"1,000 {'rollouts' if x == 'rollouts' else 'MB'} add, by the straight lines through these runs:"
    yield ""
    yield from parts


def show_starts(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield how soon a run resumes and the command line starts."""
    resume, starts = results["resume"], results["starts"]
    total = resume["imports"] + resume["first rollout"]
    yield "| start | time | bound |"
    yield "|---|---|---|"
    yield (
        f"| first new rollout of a killed run with {resume['rollouts']:,.0f} stored rollouts, after its process began "
        f"| {total:.2f} s, of which imports {resume['imports']:.2f} s | 1 s |"
    )
    used = resume["processor"] + resume["processor, imports"]
    yield (
        f"| its processor time | {used:.2f} s, of which the interpreter and imports {resume['processor, imports']:.2f} s | |"
    )
    bounds = {"import reflact": "100 ms", "reflact --help": "350 ms"}
    for name, bound in bounds.items():
        yield f"| `{name}`, processor time over the bare interpreter's | {starts[name]:.0f} ms | {bound} |"


def show_calls(costs: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a row for each number of calls in flight."""
    names = list(next(iter(costs.values())))
    yield f"| in flight | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for in_flight, found in costs.items():
        cells = (f"{found[name]:.2f} ms ({found[name] / found['openai']:.2f})" for name in names)
        yield f"| {in_flight} | {' | '.join(cells)} |"


def show_thousand(found: Mapping[str, Run]) -> Iterator[str]:
    """Yield a row for each client."""
    yield "| client | wall | processor time | lag of the loop, 95% | longest lag |"
    yield "|---|---|---|---|---|"
    for name, run in found.items():
        yield (
            f"| {name} | {run['wall']:.1f} s | {run['processor']:.1f} s | {run['lag']:.0f} ms "
            f"| {run['longest lag']:.0f} ms |"
        )


if __name__ == "__main__":
    main()
