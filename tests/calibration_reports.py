"""Reports of calibrations, made up: one with everything in it, one with nothing, one that is hostile."""

from __future__ import annotations

from reflact.calibration.metrics import Measures, Scored, measure
from reflact.calibration.results import CalibrationReport, Change, Consumed, DropCount, PairCount
from reflact.memory import Evaluation, Gold, Promotion
from reflact.results import IntervalEstimate, Usage

CRITIC = (
    '{"checksum":"cd6b","critic":"critic@1","llm":"{\\"endpoint\\":\\"http://127.0.0.1:9/v1\\",'
    '\\"model\\":\\"qwen-small\\"}","settings":{"examples":2},"snapshot":null}'
)

NOTHING = CalibrationReport(
    critic=CRITIC,
    prompt="critic@1",
    rounds=0,
    learned_from=0,
    held_out_name="given",
    candidates=0,
    pairs=(),
    drops=(),
    held=0,
    tests=(),
    not_tested=None,
    held_out=Change(before=None, after=None, gain=None),
    anchors=Change(before=None, after=None, gain=None),
    outlook="no held-out trace shows anything",
    usage=Usage(),
)


def measures(error: float, *, traces: int = 24, mistakes: tuple[str, ...] = ("inflated_score",)) -> Measures:
    """Return measures of a critic whose scores are too high by about so much, on traces of three steps."""
    scored = [
        Scored(
            trace_id=f"t{trace}",
            step=step,
            gold=Gold(phi_before=step, phi_after=step + 1, source="program"),
            evaluation=Evaluation(
                phi_before=step,
                phi_after=min(10.0, step + 1 + error * (trace % 3)),
                reasoning="r",
                confidence=0.15 * (1 + (trace + step) % 6),
            ),
            mistakes=mistakes,
            difficulty=(0.0, 0.1, 0.5)[step],
        )
        for trace in range(traces)
        for step in range(3)
    ]
    found = measure(scored)
    assert found is not None
    return found


def evidence(
    number: int, effect: float, *, promoted: bool, outcome: str, accuracy: float | None = 0.05
) -> Promotion:
    """Return the evidence of a batch of four pairs, the so-many-th on its traces, from 1."""
    return Promotion(
        pair_ids=tuple(f"{number}{n}" * 16 for n in range(4)),
        promoted=promoted,
        traces=24,
        transitions=72,
        batches_before=number - 1,
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


def everything() -> CalibrationReport:
    """Return a report in which every field says something."""
    before, after = measures(2.0), measures(0.5)
    return CalibrationReport(
        critic=CRITIC,
        prompt="critic@1",
        rounds=3,
        learned_from=16,
        held_out_name="slice 2",
        candidates=41,
        pairs=(
            PairCount(mistake="credit_for_intention", pairs=20, difficulty=0.25),
            PairCount(mistake="inflated_score", pairs=12, difficulty=None),
        ),
        drops=(DropCount(reason="bad_reply", candidates=6), DropCount(reason="judged_wrong", candidates=3)),
        held=2,
        tests=(
            evidence(1, 0.61, promoted=True, outcome="better"),
            evidence(2, 0.37, promoted=False, outcome="accuracy_fell", accuracy=-0.07),
            evidence(3, -0.43, promoted=False, outcome="not_shown", accuracy=None),
        ),
        not_tested="the fourth batch came too late",
        held_out=Change(
            before=before, after=after, gain=IntervalEstimate(value=1.41, low=1.02, high=1.83), unscored=4
        ),
        anchors=Change(
            before=measures(2.5, traces=5),
            after=measures(1.5, traces=5),
            gain=IntervalEstimate(value=0.83, low=-0.11, high=1.71),
        ),
        by_round=(before, measures(1.2), measures(0.8), after),
        outlook="24 held-out traces show with 95% power what lowers the error by 0.78 deviations",
        usage=Usage(calls=1234, input_tokens=56789, output_tokens=4321, usd=1.2345, uncounted=2),
        consumed=(
            Consumed(
                role="critic", purpose="score", questions=900, unanswered=1, refused=2, usage=Usage(calls=902)
            ),
            Consumed(role="judge", purpose="compare", questions=330, refused=3, usage=Usage(calls=332)),
        ),
    )


def hostile(text: str) -> CalibrationReport:
    """Return a report that holds a text in each place that holds text."""
    full = everything()
    marked = text.encode("utf-8", "surrogatepass").hex()
    tests = tuple(
        test.model_copy(update={"critic": critic, "prompt": text, "comparison": text, "pair_ids": (text,)})
        for test, critic in zip(full.tests, (text, f'{{"llm":"{{}}","{marked}":1}}', CRITIC), strict=True)
    )
    ill = measures(2.0, mistakes=(text,))
    return full.model_copy(
        update={
            "critic": text,
            "prompt": text,
            "held_out_name": text,
            "pairs": tuple(kind.model_copy(update={"mistake": text}) for kind in full.pairs),
            "drops": tuple(drop.model_copy(update={"reason": text}) for drop in full.drops),
            "tests": tests,
            "not_tested": text,
            "held_out": Change(before=ill, after=ill, gain=full.held_out.gain),
            "estimate_power": text,
            "consumed": tuple(
                one.model_copy(update={"role": text, "purpose": text}) for one in full.consumed
            ),
        }
    )
