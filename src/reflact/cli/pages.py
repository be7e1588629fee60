"""Pages that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.calibration.results import CalibrationReport


def write_calibration_page(path: Path, report: CalibrationReport) -> None:
    """Write a calibration's page in one step, so that nobody reads a part of it.

    Raises:
        StoreError: The file cannot be written.
    """
    from reflact.exports import write
    from reflact.pages.calibration import calibration_page

    write(path, calibration_page(report))
