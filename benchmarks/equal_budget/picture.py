"""The picture of the page: a bar for each method, the best one first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from scores import Estimate

WIDTH, ROW, TOP, LEFT, RIGHT = 760, 30, 64, 250, 60
STYLE = (
    "text{fill:#1a202c}.small{font-size:12px;fill:#4a5568}.back{fill:#fff}.bar{fill:#a0aec0}.own{fill:#2b6cb0}"
    ".line{stroke:#1a202c;stroke-width:1.5}.grid{stroke:#cbd5e0}"
    "@media (prefers-color-scheme: dark){text{fill:#edf2f7}.small{fill:#cbd5e0}.back{fill:#181818}"
    ".bar{fill:#4a5568}.own{fill:#63b3ed}.line{stroke:#edf2f7}.grid{stroke:#4a5568}}"
)


def draw_bars(estimates: Mapping[str, Estimate], *, own: str, title: str, about: str) -> str:
    """Return an SVG with a bar and its interval for each method; the bar of ``own`` has another colour."""
    ranked = sorted(estimates.items(), key=lambda pair: -pair[1].mean)
    low = TOP + ROW * len(ranked)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {low + 34}" role="img" '
        'aria-labelledby="title desc" font-family="ui-sans-serif, system-ui, sans-serif" font-size="14">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape("; ".join(f"{name}: {e.mean:.0%}" for name, e in ranked))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{low + 34}"/>',
        f'<text x="16" y="24" font-weight="bold">{escape(title)}</text>',
        f'<text x="16" y="44" class="small">{escape(about)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _place(share)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP - 8}V{low}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{low + 18}" class="small" text-anchor="middle">{share:.0%}</text>'
        )
    for number, (name, estimate) in enumerate(ranked):
        parts += _draw_bar(name, estimate, TOP + ROW * number, is_own=name == own)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _draw_bar(name: str, estimate: Estimate, top: float, *, is_own: bool) -> list[str]:
    middle = top + ROW / 2 - 2
    weight = ' font-weight="bold"' if is_own else ""
    low, high = _place(estimate.low), _place(estimate.high)
    return [
        f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end"{weight}>{escape(name)}</text>',
        f'<rect class="{"own" if is_own else "bar"}" x="{LEFT}" y="{top + 3}" height="{ROW - 10}" '
        f'width="{_place(estimate.mean) - LEFT:.1f}"/>',
        f'<path class="line" d="M{low:.1f} {middle}H{high:.1f}"/>',
        f'<text x="{max(high, _place(estimate.mean)) + 8:.1f}" y="{middle + 5}"{weight}>{estimate.mean:.0%}</text>',
    ]
