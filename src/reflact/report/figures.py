"""Quantities in few characters."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400


def clock(seconds: float) -> str:
    """Return a time that has passed as ``m:ss`` or ``h:mm:ss``, whole seconds that are complete."""
    whole = max(int(seconds), 0)
    minutes, rest = divmod(whole, MINUTE)
    hours, minutes = divmod(minutes, MINUTE)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float | None, sign: str = "~") -> str:
    """Return a time that is estimated or read at a glance, in one unit; a dash where there is none."""
    if seconds is None:
        return "-"
    for limit, unit, name in ((100, 1, "s"), (100 * MINUTE, MINUTE, "min"), (48 * HOUR, HOUR, "h")):
        if seconds < limit:
            digits = 1 if name == "h" or seconds < 1 else 0
            return f"{sign}{seconds / unit:.{digits}f} {name}"
    return f"{sign}{seconds / DAY:.1f} days"


def quantity(number: int) -> str:
    """Return a count with at most four digits: ``9,999``, ``45.2k``, ``1.23M``."""
    if number < 10_000:
        return f"{number:,}"
    for unit, name in ((1e3, "k"), (1e6, "M")):
        value = number / unit
        if value < 999.5:
            return f"{value:.3g}{name}"
    return f"{number / 1e9:.3g}G"
