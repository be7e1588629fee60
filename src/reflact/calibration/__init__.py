"""Critics that score an agent's steps, and their calibration from traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.config import CalibratorSettings
    from reflact.calibration.contrast import GenerationTask, PairModels, generate_contrast_pairs
    from reflact.calibration.critic import Critic
    from reflact.calibration.curriculum import CurriculumSettings, RoundPlan, plan_next_round
    from reflact.calibration.events import (
        BatchTestPostponed,
        CalibrationEvent,
        CalibrationFinished,
        CalibrationStarted,
        CalibratorStopped,
        CriticMeasured,
        PairBatchTested,
        PairsGenerated,
        RoundStarted,
        ScoreSummary,
        TraceAccepted,
        TraceFailed,
        TraceSkipped,
    )
    from reflact.calibration.grading import CriticAnnotator, CriticGrader
    from reflact.calibration.mistakes import ContrastSettings, DroppedCandidate, GenerationResult
    from reflact.calibration.report import CalibrationReport
    from reflact.calibration.setup import connect
    from reflact.calibration.trace import Trace
    from reflact.calibration.trace_sources import build_anchors, label_replies, list_transitions
    from reflact.config.critic import CriticSettings

__all__ = [
    "BatchTestPostponed",
    "CalibrationEvent",
    "CalibrationFinished",
    "CalibrationReport",
    "CalibrationStarted",
    "Calibrator",
    "CalibratorSettings",
    "CalibratorStopped",
    "ContrastSettings",
    "Critic",
    "CriticAnnotator",
    "CriticGrader",
    "CriticMeasured",
    "CriticSettings",
    "CurriculumSettings",
    "DroppedCandidate",
    "GenerationResult",
    "GenerationTask",
    "PairBatchTested",
    "PairModels",
    "PairsGenerated",
    "RoundPlan",
    "RoundStarted",
    "ScoreSummary",
    "Trace",
    "TraceAccepted",
    "TraceFailed",
    "TraceSkipped",
    "build_anchors",
    "connect",
    "generate_contrast_pairs",
    "label_replies",
    "list_transitions",
    "plan_next_round",
]

__getattr__ = load_exports(
    __name__,
    {
        "calibration.calibrator": ("Calibrator",),
        "calibration.config": ("CalibratorSettings",),
        "calibration.contrast": ("GenerationTask", "PairModels", "generate_contrast_pairs"),
        "calibration.critic": ("Critic",),
        "calibration.curriculum": ("CurriculumSettings", "RoundPlan", "plan_next_round"),
        "calibration.events": (
            "CalibrationEvent",
            "CalibrationFinished",
            "CalibrationStarted",
            "CalibratorStopped",
            "CriticMeasured",
            "PairBatchTested",
            "PairsGenerated",
            "RoundStarted",
            "ScoreSummary",
            "BatchTestPostponed",
            "TraceAccepted",
            "TraceFailed",
            "TraceSkipped",
        ),
        "calibration.grading": ("CriticAnnotator", "CriticGrader"),
        "calibration.mistakes": ("ContrastSettings", "DroppedCandidate", "GenerationResult"),
        "calibration.report": ("CalibrationReport",),
        "calibration.setup": ("connect",),
        "calibration.trace": ("Trace",),
        "calibration.trace_sources": ("build_anchors", "label_replies", "list_transitions"),
        "config.critic": ("CriticSettings",),
    },
)
