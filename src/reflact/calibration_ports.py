"""What calibrations need from storage to be gone on with."""

from __future__ import annotations

from typing import Protocol

from reflact.types import FrozenModel


class StoredCalibration(FrozenModel):
    """A calibration that was begun.

    Args:
        number: Counts all calibrations of the store, from 1.
        baseline: What stood in the memory when it began, as JSON.
        result: What came of it, as JSON; None while it is not over.
    """

    number: int
    baseline: str
    result: str | None = None


class CalibrationStore(Protocol):
    """Calibrations that were begun, so that one which was stopped goes on from what it began with."""

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Book a calibration, on disk when this returns; ``identity`` is equal for equal ones."""
        ...

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        ...

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store what came of a calibration; of one that is over the first result stays."""
        ...
