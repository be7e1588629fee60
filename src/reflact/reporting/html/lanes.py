"""The chart of a run's calls: when those of each role and stage ran, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import htpy as h

from reflact.messages import CallTime
from reflact.reporting.html.page import (
    AxisScale,
    build_svg,
    draw_line,
    draw_text,
    format_coordinate,
)
from reflact.reporting.lines import escape_line, format_duration, name_count
from reflact.types import FrozenModel

BINS, MAX_LANES = 240, 24
MIN_PAUSE_SECONDS, PAUSE_SHARE, DRAWN_SHARE = 30.0, 0.2, 0.25
"""A pause is cut if no call ran for so long, and for so much of the time with calls; so much of that is drawn."""

LANE_HEIGHT, AREA_HEIGHT, TOP = 46, 22, 22
TICK_SECONDS = tuple(n * unit for unit in (0.01, 0.1, 1, 10, 60, 600, 3600, 36_000) for n in (1, 2, 3, 5))
MAX_TICKS = 5


class CallLane(FrozenModel):
    """The calls of a role in a stage: the most at once, and the mean number at once in each bin."""

    role: str
    stage: str
    count: int
    most: int
    means: tuple[float, ...]


class Pause(FrozenModel):
    """A time without calls that the chart cuts: where it begins, and how long it took, in seconds."""

    at: float
    seconds: float


class CallTimeline(FrozenModel):
    """The calls of a run in equal bins that take ``seconds`` together.

    Calls without a stored reply are ``unanswered``; their length is unknown. ``left_out`` are calls of further lanes.
    """

    seconds: float = 0.0
    lanes: tuple[CallLane, ...] = ()
    pauses: tuple[Pause, ...] = ()
    unanswered: int = 0
    left_out: int = 0


def bin_calls(calls: Sequence[CallTime], bins: int = BINS) -> CallTimeline:
    """Return calls as a timeline; its lanes are in the order of their first calls, at most ``MAX_LANES``."""
    if not calls:
        return CallTimeline()
    clock = _ActiveClock(calls)
    seconds = max(clock.read(clock.end), 1e-3)
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for call in sorted(calls, key=lambda call: call.started):
        span = clock.read(call.started), clock.read(_get_end(call))
        spans.setdefault((call.role, call.stage), []).append(span)
    lanes = tuple(
        CallLane(
            role=role,
            stage=stage,
            count=len(found),
            most=_count_most(found),
            means=tuple(_average(found, bins, seconds / bins)),
        )
        for (role, stage), found in list(spans.items())[:MAX_LANES]
    )
    return CallTimeline(
        seconds=seconds,
        lanes=lanes,
        pauses=tuple(clock.pauses),
        unanswered=sum(call.ended is None for call in calls),
        left_out=len(calls) - sum(lane.count for lane in lanes),
    )


def _get_end(call: CallTime) -> float:
    return call.started if call.ended is None else max(call.started, call.ended)


class _ActiveClock:
    """Maps times to seconds since the first call, without most of each long pause."""

    def __init__(self, calls: Sequence[CallTime]) -> None:
        busy: list[tuple[float, float]] = []
        for start, end in sorted((call.started, _get_end(call)) for call in calls):
            if busy and start <= busy[-1][1]:
                busy[-1] = busy[-1][0], max(busy[-1][1], end)
            else:
                busy.append((start, end))
        longest = max(MIN_PAUSE_SECONDS, PAUSE_SHARE * sum(end - start for start, end in busy))
        self.end = busy[-1][1]
        self.pauses: list[Pause] = []
        self._starts: list[tuple[float, float]] = [(busy[0][0], 0.0)]
        for (_, end), (start, _) in pairwise(busy):
            if start - end > longest:
                drawn = longest * DRAWN_SHARE
                at = self.read(end) + drawn
                self.pauses.append(Pause(at=at - drawn / 2, seconds=start - end))
                self._starts.append((start, at))

    def read(self, time: float) -> float:
        """Return the active seconds at a time when a call ran."""
        start, at = next(
            (each for each in reversed(self._starts) if each[0] <= time),
            self._starts[0],
        )
        return at + max(time - start, 0.0)


def _count_most(spans: Sequence[tuple[float, float]]) -> int:
    """Return the most spans that overlap; one that ends as another begins does not overlap it."""
    changes = sorted(
        change for start, end in spans for change in ((start, 1), (end, 0 if end > start else 2))
    )
    most = now = 0
    for _, change in changes:
        now += 1 if change == 1 else -1
        most = max(most, now)
    return most


def _average(spans: Sequence[tuple[float, float]], bins: int, width: float) -> Iterator[float]:
    """Yield the mean number of spans in each bin."""
    totals = [0.0] * bins
    for start, end in spans:
        for n in range(min(int(start / width), bins - 1), min(int(end / width), bins - 1) + 1):
            totals[n] += max(min(end, (n + 1) * width) - max(start, n * width), 0.0)
    yield from (total / width for total in totals)


def build_call_lanes(timeline: CallTimeline) -> h.Node:
    """Return the chart with its heading and its legend; nothing if there are no calls."""
    if not timeline.lanes:
        return None
    notes = [
        "Each lane shows how many calls ran at once, on a scale of its own; the highest number is at its right. "
        "A call runs from its reservation to its reply, so waiting for rate limits is a part of it.",
        timeline.pauses and "Dashed lines are pauses that are cut out.",
        timeline.unanswered
        and f"{name_count(timeline.unanswered, 'call has', 'calls have')} no stored reply and no length here.",
        timeline.left_out
        and f"{name_count(timeline.left_out, 'call is', 'calls are')} in lanes that are left out.",
    ]
    return [
        h.h3["When calls ran"],
        h.figure[
            h.div(".narrow")[_draw_lanes("lanes-narrow", timeline, 340)],
            h.div(".wide")[_draw_lanes("lanes-wide", timeline, 960)],
            h.figcaption[" ".join(note for note in notes if note)],
        ],
    ]


def _draw_lanes(name: str, timeline: CallTimeline, width: int) -> h.Element:
    across = AxisScale(0, timeline.seconds, 4, width - 40)
    bottom = TOP + LANE_HEIGHT * len(timeline.lanes)
    described = "; ".join(
        f"{_format_lane(lane)}: {name_count(lane.count, 'call')}, at most {lane.most:,} at once"
        for lane in timeline.lanes
    )
    every = next(
        (each for each in TICK_SECONDS if each * MAX_TICKS >= timeline.seconds), timeline.seconds / MAX_TICKS
    )
    ticks = [every * n for n in range(int(timeline.seconds / every) + 1)]
    return build_svg(
        name,
        "Calls at once by time",
        f"{described}. All within {format_duration(timeline.seconds)}.",
        bottom + 24,
        draw_text(4, 12, "Calls at once", class_="name"),
        [draw_line(across(at), TOP, across(at), bottom, "grid") for at in ticks],
        [
            h.g[
                h.title[f"pause of {format_duration(pause.seconds)}"],
                draw_line(across(pause.at), TOP, across(pause.at), bottom, "guide"),
            ]
            for pause in timeline.pauses[:MAX_LANES]
        ],
        [
            [
                draw_text(4, top + 14, _format_lane(lane), class_="halo"),
                _draw_area(lane, across, top + LANE_HEIGHT - 4),
                draw_line(across(0), top + LANE_HEIGHT - 4, width - 40, top + LANE_HEIGHT - 4, "grid"),
                draw_text(width - 2, top + LANE_HEIGHT - 6, f"{lane.most:,}", "end", "value"),
            ]
            for lane, top in ((lane, TOP + LANE_HEIGHT * n) for n, lane in enumerate(timeline.lanes))
        ],
        [
            draw_text(
                across(at), bottom + 18, format_duration(at) if at else "0", "middle" if at else "start"
            )
            for at in ticks
        ],
        width=width,
    )


def _format_lane(lane: CallLane) -> str:
    return escape_line(f"{lane.role}: {lane.stage or 'before the baseline'}").replace("_", " ")


def _draw_area(lane: CallLane, across: AxisScale, base: float) -> h.Element:
    """Return the means as an area of steps; the smallest is a hair line."""
    top = max(lane.means) or 1.0
    bins = len(lane.means)
    path: list[str] = []
    before = 0.0
    for n, mean in enumerate((*lane.means, 0.0)):
        height = max(AREA_HEIGHT * mean / top, 1.5) if mean else 0.0
        if round(height, 1) != round(before, 1):
            x = format_coordinate(across(across.high * n / bins))
            start = f"M{x} {format_coordinate(base)}" if not path or path[-1] == "Z" else f"H{x}"
            path += [start, f"V{format_coordinate(base - height)}", *(() if height else ("Z",))]
            before = height
    return h.path(d="".join(path), class_="area")
