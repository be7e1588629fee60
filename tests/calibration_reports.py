"""Reports of calibrations, made up: one with everything in it, one with nothing, one that is hostile."""

from __future__ import annotations

from functools import cache

from reflact.calibration.metrics import CriticMetrics, ScoredStep, compute_metrics
from reflact.calibration.report import CalibrationReport, DropCount, MetricsChange, PairCount
from reflact.memory.models import Evaluation, Label, PromotionEvidence
from reflact.records import IntervalEstimate, Usage

CRITIC = (
    '{"checksum":"cd6b","critic":"critic@1","llm":"{\\"endpoint\\":\\"http://127.0.0.1:9/v1\\",'
    '\\"model\\":\\"qwen-small\\"}","settings":{"examples":2},"snapshot":null}'
)

NOTHING = CalibrationReport(
    critic=CRITIC,
    prompt="critic@1",
    n_rounds=0,
    n_training_traces=0,
    held_out_name="given",
    n_candidates=0,
    pairs=(),
    dropped=(),
    n_quarantined=0,
    tests=(),
    not_tested_reason=None,
    held_out=MetricsChange(before=None, after=None, gain=None),
    anchors=MetricsChange(before=None, after=None, gain=None),
    power_summary="no held-out trace shows anything",
    usage=Usage(),
)


@cache
def measures(
    error: float, *, traces: int = 24, mistakes: tuple[str, ...] = ("inflated_score",)
) -> CriticMetrics:
    """Return measures of a critic whose scores are too high by about so much, on traces of three steps."""
    scored = [
        ScoredStep(
            trace_id=f"t{trace}",
            step=step,
            label=Label(progress_before=step, progress_after=step + 1, source="program"),
            evaluation=Evaluation(
                progress_before=step,
                progress_after=min(10.0, step + 1 + error * (trace % 3)),
                reasoning="r",
                confidence=0.15 * (1 + (trace + step) % 6),
            ),
            mistakes=mistakes,
        )
        for trace in range(traces)
        for step in range(3)
    ]
    found = compute_metrics(scored)
    assert found is not None
    return found


def evidence(
    number: int, effect: float, *, promoted: bool, outcome: str, accuracy: float | None = 0.05
) -> PromotionEvidence:
    """Return the evidence of a batch of four pairs, the so-many-th on its traces, from 1."""
    return PromotionEvidence(
        pair_ids=tuple(f"{number}{n}" * 16 for n in range(4)),
        passed_test=promoted,
        n_traces=24,
        n_transitions=72,
        n_earlier_tests=number - 1,
        effect=effect,
        low=effect - 0.25,
        high=effect + 0.25,
        p_value=0.0021,
        alpha=0.0152,
        critic=CRITIC,
        prompt="critic@1",
        accuracy_change=accuracy,
        outcome=outcome,
    )


@cache
def everything() -> CalibrationReport:
    """Return a report in which every field says something."""
    before, after = measures(2.0), measures(0.5)
    return CalibrationReport(
        critic=CRITIC,
        prompt="critic@1",
        n_rounds=3,
        n_training_traces=16,
        held_out_name="slice 2",
        n_candidates=41,
        pairs=(
            PairCount(mistake="credit_for_intention", n_pairs=20),
            PairCount(mistake="inflated_score", n_pairs=12),
        ),
        dropped=(
            DropCount(reason="bad_reply", n_candidates=6),
            DropCount(reason="judged_wrong", n_candidates=3),
        ),
        n_quarantined=2,
        tests=(
            evidence(1, 0.61, promoted=True, outcome="better"),
            evidence(2, 0.37, promoted=False, outcome="accuracy_fell", accuracy=-0.07),
            evidence(3, -0.43, promoted=False, outcome="not_shown", accuracy=None),
        ),
        not_tested_reason="the fourth batch came too late",
        held_out=MetricsChange(
            before=before, after=after, gain=IntervalEstimate(value=1.41, low=1.02, high=1.83), n_unscored=4
        ),
        anchors=MetricsChange(
            before=measures(2.5, traces=5),
            after=measures(1.5, traces=5),
            gain=IntervalEstimate(value=0.83, low=-0.11, high=1.71),
        ),
        metrics_by_round=(before, measures(1.2), measures(0.8), after),
        power_summary="24 held-out traces show with 95% power what lowers the error by 0.78 deviations",
        usage=Usage(calls=1234, input_tokens=56789, output_tokens=4321, usd=1.2345, uncounted=2),
        n_questions=1230,
        n_unanswered=1,
        n_invalid=5,
    )


def hostile(text: str) -> CalibrationReport:
    """Return a report that holds a text in each place that holds text."""
    full = everything()
    marked = text.encode("utf-8", "surrogatepass").hex()
    tests = tuple(
        test.model_copy(update={"critic": critic, "prompt": text, "outcome": text, "pair_ids": (text,)})
        for test, critic in zip(full.tests, (text, f'{{"llm":"{{}}","{marked}":1}}', CRITIC), strict=True)
    )
    ill = measures(2.0, mistakes=(text,))
    return full.model_copy(
        update={
            "critic": text,
            "prompt": text,
            "held_out_name": text,
            "pairs": tuple(kind.model_copy(update={"mistake": text}) for kind in full.pairs),
            "dropped": tuple(drop.model_copy(update={"reason": text}) for drop in full.dropped),
            "tests": tests,
            "not_tested_reason": text,
            "held_out": MetricsChange(before=ill, after=ill, gain=full.held_out.gain),
            "power_summary": text,
        }
    )
