"""Critics that score an agent's steps, and their calibration from traces; see also ``calibration.events``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.config import CalibratorSettings
    from reflact.calibration.contrast import PairModels, generate_contrast_pairs
    from reflact.calibration.critic import Critic
    from reflact.calibration.curriculum import CurriculumSettings, RoundPlan, plan_next_round
    from reflact.calibration.grading import CriticAnnotator, CriticGrader, measure_critic
    from reflact.calibration.mistakes import ContrastSettings, DroppedCandidate, GenerationResult
    from reflact.calibration.planning import GenerationTask
    from reflact.calibration.report import CalibrationReport
    from reflact.calibration.setup import connect
    from reflact.calibration.trace import Trace
    from reflact.calibration.trace_sources import build_anchors, label_replies, list_transitions
    from reflact.config.critic import CriticSettings

__all__ = [
    "CalibrationReport",
    "Calibrator",
    "CalibratorSettings",
    "ContrastSettings",
    "Critic",
    "CriticAnnotator",
    "CriticGrader",
    "CriticSettings",
    "CurriculumSettings",
    "DroppedCandidate",
    "GenerationResult",
    "GenerationTask",
    "PairModels",
    "RoundPlan",
    "Trace",
    "build_anchors",
    "connect",
    "generate_contrast_pairs",
    "label_replies",
    "list_transitions",
    "measure_critic",
    "plan_next_round",
]

__getattr__ = load_exports(
    __name__,
    {
        "calibration.calibrator": ("Calibrator",),
        "calibration.config": ("CalibratorSettings",),
        "calibration.contrast": ("PairModels", "generate_contrast_pairs"),
        "calibration.critic": ("Critic",),
        "calibration.curriculum": ("CurriculumSettings", "RoundPlan", "plan_next_round"),
        "calibration.grading": ("CriticAnnotator", "CriticGrader", "measure_critic"),
        "calibration.mistakes": ("ContrastSettings", "DroppedCandidate", "GenerationResult"),
        "calibration.planning": ("GenerationTask",),
        "calibration.report": ("CalibrationReport",),
        "calibration.setup": ("connect",),
        "calibration.trace": ("Trace",),
        "calibration.trace_sources": ("build_anchors", "label_replies", "list_transitions"),
        "config.critic": ("CriticSettings",),
    },
)
