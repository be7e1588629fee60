"""Critics that score an agent's steps, and their calibration from traces; see also
``calibration.events``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.calibration.asked import Mistake
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.config import CalibratorSettings
    from reflact.calibration.critic import Critic
    from reflact.calibration.grading import (
        CriticAnnotator,
        CriticGrader,
        label_replies,
        list_transitions,
        measure_critic,
    )
    from reflact.calibration.pairs import (
        StepToContrast,
        build_anchors,
        find_reference,
        pairs_of,
    )
    from reflact.calibration.report import CalibrationReport
    from reflact.calibration.setup import connect
    from reflact.calibration.trace import Trace
    from reflact.config.critic import CriticSettings

__all__ = [
    "CalibrationReport",
    "Calibrator",
    "CalibratorSettings",
    "Critic",
    "CriticAnnotator",
    "CriticGrader",
    "CriticSettings",
    "Mistake",
    "StepToContrast",
    "Trace",
    "build_anchors",
    "connect",
    "find_reference",
    "label_replies",
    "list_transitions",
    "measure_critic",
    "pairs_of",
]

__getattr__ = load_exports(
    __name__,
    {
        "calibration.asked": ("Mistake",),
        "calibration.calibrator": ("Calibrator",),
        "calibration.config": ("CalibratorSettings",),
        "calibration.critic": ("Critic",),
        "calibration.grading": (
            "CriticAnnotator",
            "CriticGrader",
            "label_replies",
            "list_transitions",
            "measure_critic",
        ),
        "calibration.pairs": ("StepToContrast", "build_anchors", "find_reference", "pairs_of"),
        "calibration.report": ("CalibrationReport",),
        "calibration.setup": ("connect",),
        "calibration.trace": ("Trace",),
        "config.critic": ("CriticSettings",),
    },
)
