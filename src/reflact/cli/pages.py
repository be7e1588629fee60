"""Pages that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.calibration.results import CalibrationReport


def require_writable(path: Path) -> None:
    """Make sure that a page can be written, before what it is to show is paid for.

    Raises:
        ConfigError: It cannot be; says why.
    """
    from reflact.errors import ConfigError

    trial = path.with_name(f".{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written: {error.strerror or error}; name another file, nothing "
            "was asked yet"
        ) from None


def write_calibration_page(path: Path, report: CalibrationReport) -> None:
    """Write a calibration's page in one step, so that nobody reads a part of it.

    Raises:
        StoreError: The file cannot be written.
    """
    from reflact.exports import write
    from reflact.pages.calibration import calibration_page

    write(path, calibration_page(report))
