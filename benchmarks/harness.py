"""What the benchmarks share: cases that take turns, results as JSON, straight lines and their plots as SVG."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parent.parent / "docs"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 240, 46, 40, 30
COLOURS = ("#1f5fa8", "#c2571a")

Points = Sequence[tuple[float, float]]


def take_turns(
    cases: Mapping[K, Callable[[], Mapping[Any, Any]]], rounds: int
) -> list[dict[Any, Any]]:
    """Run all cases once in each round, and return the figures of each round."""
    return [
        {name: figure for case in cases.values() for name, figure in case().items()}
        for _ in range(rounds)
    ]


def at_most(count: int, n: int) -> float:
    """Return the one-sided 95% upper bound of a share, by Clopper and Pearson's method."""
    low, high = count / n, 1.0
    if count == n:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        terms = (
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(middle)
            + (n - k) * math.log1p(-middle)
            for k in range(count + 1)
        )
        low, high = (middle, high) if math.fsum(map(math.exp, terms)) > 0.05 else (low, middle)
    return high


def at_least(count: int, n: int) -> float:
    """Return the one-sided 95% lower bound of a share."""
    return 1 - at_most(n - count, n)


def describe_machine() -> str:
    """Return how busy the machine is: its load in the last minute, and its processors."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def write_results(name: str, results: object) -> None:
    """Write the results of a program as JSON."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(results, indent=1, default=str)
    (RESULTS / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def fit_line(points: Points) -> tuple[float, float]:
    """Return slope and start of the straight line through points, by least squares."""
    xs, ys = zip(*points, strict=True)
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0
    return slope, y_mean - slope * x_mean


STYLE = (
    "text{fill:#222}.back{fill:#fff}.axis{fill:none;stroke:#444}"
    "@media (prefers-color-scheme: dark){text{fill:#ddd}.back{fill:#181818}.axis{stroke:#bbb}}"
)


def draw_lines(name: str, panels: Mapping[str, Mapping[str, Points]], *, x: str) -> None:
    """Write a plot for the docs: panels side by side, each with measured points and their straight lines."""
    drawn = [
        _draw_panel(title, lines, x, WIDTH * n) for n, (title, lines) in enumerate(panels.items())
    ]
    width = WIDTH * len(panels)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        f'font-size="10">\n<title>{escape("; ".join(panels))}</title>\n'
        f"<desc>Measured points by {escape(x)}, with the straight lines through them.</desc>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="back" width="{width}" height="{HEIGHT}"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )
    (PLOTS / f"benchmark-{name}.svg").write_text(svg, encoding="utf-8")


def _draw_panel(title: str, lines: Mapping[str, Points], x_title: str, offset: float) -> str:
    most_x = max(x for points in lines.values() for x, _ in points)
    most_y = max(y for points in lines.values() for _, y in points) or 1.0
    right, low = WIDTH - 14, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return offset + LEFT + x / most_x * (right - LEFT), low - y / most_y * (low - TOP)

    x0, x1, y1 = offset + LEFT, offset + right, TOP
    parts = [
        f'<text x="{x0}" y="16" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{x0} {y1}V{low}H{x1}" class="axis"/>',
        f'<text x="{(x0 + x1) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>',
    ]
    for share in (0, 0.5, 1):
        x, y = place(share * most_x, share * most_y)
        parts += [
            f'<text x="{x:.1f}" y="{low + 14}" text-anchor="middle">{share * most_x:,.0f}</text>',
            f'<text x="{x0 - 4}" y="{y + 3:.1f}" text-anchor="end">{share * most_y:,.4g}</text>',
        ]
    for number, (label, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        slope, start = fit_line(points)
        (ax, ay), (bx, by) = place(0, max(0.0, start)), place(most_x, start + slope * most_x)
        parts.append(
            f'<path d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}" stroke="{colour}" stroke-opacity="0.5"/>'
        )
        for x, y in points:
            at_x, at_y = place(x, y)
            parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{colour}"/>')
        words = f"{label}: {1000 * slope:.3g} for 1,000"
        parts.append(
            f'<text x="{x0 + 8}" y="{TOP + 10 + 13 * number}" style="fill:{colour}">{escape(words)}</text>'
        )
    return "\n".join(parts)
