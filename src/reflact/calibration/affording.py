"""Whether a budget will hold for what a calibration is expected to take, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reflact.calibration.forecast import CalibrationForecast
from reflact.config import BudgetConfig
from reflact.estimates import Amount
from reflact.results import Spend, Usage


def afforded(predicted: CalibrationForecast, limits: BudgetConfig, spent: Sequence[Spend]) -> tuple[str, ...]:
    """Return for each limit whether it will hold; nothing where there is none.

    Args:
        predicted: What the calibration will take.
        limits: What may be taken at most, over all starts.
        spent: What earlier starts took. Of a calibration that was stopped it is a part of what is predicted;
            else it comes on top.
    """
    if predicted.over:
        return ()
    taken = sum((part for one in spent for part in (one.usage, one.worst)), Usage())
    return tuple(_sentences(predicted, limits, taken))


def _sentences(predicted: CalibrationForecast, limits: BudgetConfig, taken: Usage) -> Iterator[str]:
    tokens = taken.input_tokens + taken.output_tokens
    for key, limit, so_far, needed in (
        ("max_calls", limits.max_calls, taken.calls, predicted.calls),
        ("max_tokens", limits.max_tokens, tokens, predicted.tokens()),
        ("max_usd", limits.max_usd, taken.usd or 0.0, predicted.usd),
    ):
        if limit is not None and needed is not None:
            before = 0 if predicted.resumed else so_far
            yield _sentence(key, limit, before, needed)
    if limits.max_seconds is not None:
        yield (
            f"budget.max_seconds is {limits.max_seconds:g}: whether that holds is not known, since nobody "
            "knows how long calls take"
        )


def _sentence(key: str, limit: float, taken: float, needed: Amount) -> str:
    left = max(0.0, limit - taken)
    beside = f", and {_shown(key, taken)} are taken" if taken else ""
    about = f"budget.{key} is {_shown(key, limit)}{beside}"
    expected, high = _shown(key, needed.expected), _shown(key, needed.high)
    if needed.high <= left:
        return f"{about}: it will hold, since at most {high} are needed"
    if needed.expected <= left:
        return f"{about}: it should hold, since {expected} are expected; at most {high} may be needed"
    return (
        f"{about}: it will not do, since {expected} are expected and {_shown(key, left)} are left; the "
        f"calibration would stop on the way and go on with a larger one, such as "
        f"{_shown(key, taken + needed.expected)} or more"
    )


def _shown(key: str, number: float) -> str:
    return f"${number:,.2f}" if key == "max_usd" else f"{number:,.0f}"
