"""What budgets and endpoints say in passing, as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reflact.config import BudgetConfig
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.results import Usage

if TYPE_CHECKING:
    from reflact.llm.rate_limit import LimitChange


class News:
    """Posts events of one run.

    Args:
        run_id: The run.
        limits: Its budget.
        post: Takes an event without waiting.
    """

    def __init__(self, run_id: str, limits: BudgetConfig, post: Callable[[Event], None]) -> None:
        self._run_id = run_id
        self._limits = limits.model_dump()
        self._post = post

    def budget_moved(self, usage: Usage, seconds: float) -> None:
        """Tell what the run has taken, in so many active seconds."""
        self._post(BudgetUpdated(run_id=self._run_id, usage=usage, seconds=seconds, **self._limits))

    def backed_off(self, change: LimitChange) -> None:
        """Tell that an endpoint was asked too much."""
        self._post(RateLimited(run_id=self._run_id, **change._asdict()))
