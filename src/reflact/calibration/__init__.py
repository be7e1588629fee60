"""Critics that score an agent's steps, and their calibration from traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.config import CalibratorSettings
    from reflact.calibration.critic import Critic
    from reflact.calibration.events import CalibrationEvent
    from reflact.calibration.grading import CriticAnnotator, CriticGrader
    from reflact.calibration.report import CalibrationReport
    from reflact.calibration.setup import connect
    from reflact.calibration.trace import Trace
    from reflact.config.critic import CriticSettings

__all__ = [
    "CalibrationEvent",
    "CalibrationReport",
    "Calibrator",
    "CalibratorSettings",
    "Critic",
    "CriticAnnotator",
    "CriticGrader",
    "CriticSettings",
    "Trace",
    "connect",
]

__getattr__ = load_exports(
    __name__,
    {
        "calibration.calibrator": ("Calibrator",),
        "calibration.config": ("CalibratorSettings",),
        "calibration.critic": ("Critic",),
        "calibration.events": ("CalibrationEvent",),
        "calibration.grading": (
            "CriticAnnotator",
            "CriticGrader",
        ),
        "calibration.report": ("CalibrationReport",),
        "calibration.setup": ("connect",),
        "calibration.trace": ("Trace",),
        "config.critic": ("CriticSettings",),
    },
)
