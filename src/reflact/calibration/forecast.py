"""What a calibration will take: a low, an expected and a high count of calls, before any is made. Pure.

Which candidates there are and how each is to come about is known beforehand, see ``planned``; what models
will say is not, and is stated as an assumption. The high count is a bound: every reply is sent back as often
as may be, every score is asked for anew each time, every candidate takes the dearest way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reflact.calibration.choosing import ELSEWHERE_KIND
from reflact.calibration.comparing import outcome, sides
from reflact.calibration.course import Course
from reflact.calibration.lengths import EVALUATION, example_bytes, mean, shown_bytes
from reflact.calibration.made import ContrastSettings
from reflact.calibration.metrics import measure_accuracy
from reflact.calibration.planned import Planned, planned, round_of
from reflact.calibration.replay import Step, steps_in, steps_of
from reflact.calibration.review import enough, outlook
from reflact.calibration.settings import CalibratorSettings
from reflact.critic_config import CriticSettings
from reflact.estimates import BYTES_PER_TOKEN, Amount, Estimates, Length, Row, exactly
from reflact.memory import ContrastPair, Evaluation
from reflact.memory_cards import Anchored, subject_of
from reflact.memory_ports import count_tests
from reflact.prompts import PromptBook
from reflact.results import Spend, Usage

BORNE_OUT = 0.5
"""Of the looks at a step under another purpose, how many are expected to make a pair."""


class Asking(NamedTuple):
    """What is known of the model.

    Args:
        reasks: How often an invalid reply is sent back at most.
        cap: The most tokens of a reply; None: it has no cap.
        spent: What earlier calls consumed, if any; their mean is expected of later ones.
    """

    reasks: int = 2
    cap: int | None = None
    spent: tuple[Spend, ...] = ()


UNKNOWN = Asking()


class CalibrationForecast(Estimates):
    """What a calibration will take, beside its rows of calls.

    Args:
        learn: Traces that pairs are made of.
        held_out: Traces that test and measure.
        steps: Steps of these whose correct score is known.
        anchors: Steps that anchors speak of.
        candidates: Candidates of all rounds.
        pairs: Pairs that come of them.
        rounds: Rounds of contrast pairs.
        tests: Batches that are tested.
        testable: Whether there are enough held-out traces; else nothing can be promoted.
        outlook: What they can show, or what is missing, in words.
        missing: Why nothing would come to a test, and what to do; None where something can.
        tests_before: Batches that were tested on these held-out traces before the calibration began.
        resumed: Whether it was begun and stopped; what it asked before is in these numbers and costs nothing.
        over: Whether it is over and nothing has changed since, so that these numbers are for another one.
        budget: Whether each limit of a budget will hold, in sentences; see ``affording.afforded``.
    """

    learn: int
    held_out: int
    steps: int
    anchors: int
    candidates: Amount
    pairs: Amount
    rounds: Amount
    tests: Amount
    testable: bool
    outlook: str
    missing: str | None = None
    tests_before: int = 0
    resumed: bool = False
    over: bool = False
    budget: tuple[str, ...] = ()

    def priced(self, price: Callable[[Usage], float | None]) -> CalibrationForecast:
        """Return the forecast with money, by a function that prices one call, as far as it knows a price."""
        return self.model_copy(update={"rows": tuple(row.priced(price) for row in self.rows)})


def foreseen(
    course: Course,
    *,
    missing: str | None,
    anchors: Sequence[ContrastPair],
    waiting: bool,
    settings: CalibratorSettings,
    critic: CriticSettings,
    prompts: PromptBook,
    asking: Asking,
) -> CalibrationForecast:
    """Return what a calibration will take.

    Args:
        course: The calibration as it begins, or as it began where it was stopped.
        missing: Why nothing would come to a test.
        anchors: Gold pairs that are measured.
        waiting: Whether the memory has pairs that wait for a test.
        settings: How pairs are made and tested.
        critic: What the critic shows.
        prompts: The prompts.
        asking: What is known of the model.

    Raises:
        ConfigError: A kind of mistake is asked for that nobody described.
    """
    return _Forecaster(
        course,
        missing=missing,
        anchors=anchors,
        waiting=waiting,
        settings=settings,
        critic=critic,
        sizes={name: len((prompt.system + prompt.user).encode()) for name, prompt in prompts.prompts.items()},
        asking=asking,
    ).forecast()


class _Forecaster:
    def __init__(
        self,
        course: Course,
        *,
        missing: str | None,
        anchors: Sequence[ContrastPair],
        waiting: bool,
        settings: CalibratorSettings,
        critic: CriticSettings,
        sizes: Mapping[str, int],
        asking: Asking,
    ) -> None:
        self._course, self._parts = course, course.parts
        self._missing = missing
        self._waiting = waiting
        self._settings = settings
        self._critic = critic
        self._sizes = sizes
        self._asking = asking
        self._steps, self._anchors = steps_of(course.parts.held_out), steps_in(anchors)
        self._traces = {step.trace for step in self._steps}
        self._testable = enough(self._traces) is None
        own = settings.curriculum
        most = own.rounds if self._testable and _ordered(self._steps) else 1
        self._rounds = Amount(low=1, expected=min(most, 1 + own.patience), high=most)
        self._plans = self._planned(Anchored.of(anchors))

    def forecast(self) -> CalibrationForecast:
        rows = [self._row(*one) for one in (*self._scores(), *self._writing()) if one[2].high]
        tested = count_tests(self._course.before, self._traces)
        return CalibrationForecast(
            rows=tuple(rows),
            assumptions=self._assumptions(),
            learn=len(self._parts.learn),
            held_out=len(self._traces),
            steps=len(self._steps),
            anchors=len(self._anchors),
            candidates=exactly(self._plans[0].candidates) * self._rounds,
            pairs=self._pairs,
            rounds=self._rounds,
            tests=self._tests,
            testable=self._testable,
            outlook=outlook(len(self._traces), before=tested),
            missing=self._missing,
            tests_before=tested,
            resumed=self._course.resumed,
            over=self._course.report is not None,
        )

    def _planned(self, anchored: Anchored) -> tuple[Planned, ...]:
        """Return what each round would make, the pairs of earlier ones known."""
        known, plans = set(self._course.known), []
        for number in range(1, int(self._rounds.high) + 1):
            plan = planned(
                self._parts.learn,
                round_of(number, self._settings.curriculum),
                self._settings.contrast,
                known=known,
                anchored=anchored,
            )
            known |= plan.pair_ids
            plans.append(plan)
        return tuple(plans)

    @property
    def _expected(self) -> tuple[Planned, ...]:
        """The rounds that are expected to be made."""
        return self._plans[: int(self._rounds.expected)]

    @property
    def _pairs(self) -> Amount:
        return Amount(
            expected=sum(_made(plan) for plan in self._expected),
            high=self._plans[0].candidates * self._rounds.high,
        )

    @property
    def _tests(self) -> Amount:
        if not self._testable:
            return Amount()
        some = bool(self._pairs.expected or self._waiting)
        return Amount(expected=self._rounds.expected * some, high=self._rounds.high)

    # ----------------------------------------------------------------------------------------- scores

    def _scores(self) -> Iterator[_Calls]:
        """Yield the calls of the critic. What it was asked before it remembers, unless it is too much."""
        different = len({subject_of(step.purpose, step.transition) for step in self._steps})
        every, anchors, rounds = len(self._steps), len(self._anchors), self._rounds
        once = exactly(self._critic.samples)
        measuring = Amount(low=different, expected=different, high=every * (2 + rounds.high))
        yield _Calls("critic", "held-out steps", measuring * once, "score")
        again = 1 + (self._tests.expected > 0)
        measuring = Amount(low=anchors, expected=anchors * again, high=anchors * 2)
        yield _Calls("critic", "anchors", measuring * once, "score")
        testing = Amount(expected=different, high=2 * every) * self._tests
        yield _Calls("critic", "tests of batches", testing * once, "score", examples=True)
        weakest = Amount(
            expected=sum(plan.subjects + BORNE_OUT * plan.elsewhere for plan in self._expected[:-1]),
            high=self._plans[0].candidates * (rounds.high - 1),
        )
        yield _Calls("critic", "weakest kinds", weakest * once, "score", examples=True)
        contrast, first = self._settings.contrast, self._plans[0]
        samples = exactly(contrast.samples) * once
        agreeing = Amount(
            low=bool(first.agreed) / contrast.samples,
            expected=first.agreed * min(2, rounds.expected),
            high=first.events * rounds.high * bool(first.agreed),
        )
        yield _Calls("critic", "agreement", agreeing * samples, "score")
        yield _Calls("critic", "another purpose", self._elsewhere * samples, "score")

    @property
    def _elsewhere(self) -> Amount:
        """Looks at a step under another purpose, of which a step has one in a round at most."""
        purposes = {trace.purpose for trace in self._parts.learn}
        able = self._settings.contrast.near_misses or len(purposes) > 1
        able = able and ELSEWHERE_KIND in self._settings.curriculum.mistakes
        return Amount(
            expected=sum(plan.elsewhere for plan in self._expected),
            high=self._plans[0].events * self._rounds.high * able,
        )

    # --------------------------------------------------------------------------- mistakes and judges

    def _writing(self) -> Iterator[_Calls]:
        """Yield the calls that write and compare."""
        first, contrast = self._plans[0], self._settings.contrast
        sure = not first.agreed
        asked = Amount(
            low=first.asked * sure, expected=sum(plan.asked for plan in self._expected), high=self._pairs.high
        )
        yield _Calls("contrast", "mistakes", asked, "mistake")
        near = Amount(
            expected=sum(plan.near for plan in self._expected),
            high=self._elsewhere.high * contrast.near_misses,
        )
        yield _Calls("contrast", "other purposes", near, "other_purpose")
        if contrast.judges:
            compared = Amount(
                low=first.compared * sure * _fewest(contrast) / contrast.judges,
                expected=sum(
                    plan.compared + plan.asked + BORNE_OUT * plan.elsewhere for plan in self._expected
                ),
                high=self._pairs.high,
            )
            yield _Calls("judge", "comparisons", compared * exactly(contrast.judges), "compare")

    # ------------------------------------------------------------------------------------------ tokens

    def _row(self, role: str, purpose: str, calls: Amount, kind: str, examples: bool) -> Row:
        spent = [one.usage for one in self._asking.spent if one.purpose == kind and one.usage.calls]
        usage = sum(spent, Usage()) if spent else None
        length = Length.of(self._bytes(kind, examples=examples), cap=self._asking.cap, usage=usage)
        calls *= Amount(low=1, expected=1, high=1 + self._asking.reasks)
        return Row(
            role=role,
            purpose=purpose,
            calls=calls,
            input_tokens=calls * length.given,
            output_tokens=calls * length.written,
        )

    def _bytes(self, kind: str, *, examples: bool) -> float:
        """Bytes of a call's texts."""
        learned = [(trace.purpose, event.transition) for trace in self._parts.learn for event in trace.events]
        if kind == "other_purpose":
            return self._sizes["other_purpose"] + mean(
                [len(purpose.encode("utf-8", "replace")) for purpose, _ in learned]
            )
        if kind == "score":
            held = [(step.purpose, step.transition) for step in self._steps] or learned
            shown = shown_bytes(held, self._critic.state_tokens)
            with_ = examples or bool(self._course.promoted)
            return self._sizes["critic"] + shown + (example_bytes(learned, self._critic) if with_ else 0)
        prompt, evaluations = ("judge", 2) if kind == "compare" else ("contrast", 1)
        shown = shown_bytes(learned, self._settings.contrast.state_tokens)
        return self._sizes[prompt] + shown + evaluations * EVALUATION

    # ------------------------------------------------------------------------------------- assumptions

    def _assumptions(self) -> tuple[str, ...]:
        rounds, patience = self._rounds, self._settings.curriculum.patience
        candidates = self._plans[0].candidates * rounds.expected
        share = f" ({self._pairs.expected / candidates:.0%})" if candidates else ""
        known = sorted({one.purpose for one in self._asking.spent if one.usage.calls})
        helped = f" (the first helps, and {patience} more do not)" if rounds.high > 1 else ""
        return (
            f"expected: rounds made: {rounds.expected:g} of at most {rounds.high:g}{helped}; batches tested: "
            f"{self._tests.expected:g}, the first one promoted"
            if self._testable
            else "expected: one round, and no test",
            f"expected: {self._pairs.expected:,.0f} of {candidates:,.0f} candidates become pairs{share}: "
            "replies are valid at once, samples agree, judges find the right side, and every second look at "
            "another purpose bears it out",
            f"most: each reply is sent back {self._asking.reasks} times, each score is asked for anew each "
            "time, each candidate takes the dearest way",
            "what the store of calls holds is asked for nothing; it is not looked at here",
            f"mean consumption of earlier calls: {', '.join(known)}"
            if known
            else f"texts have {BYTES_PER_TOKEN:g} bytes a token, and a reply takes a quarter of its cap",
        )


class _Calls(NamedTuple):
    """Calls for one purpose; ``kind`` is what their samples call it."""

    role: str
    purpose: str
    calls: Amount
    kind: str
    examples: bool = False


def _made(plan: Planned) -> float:
    return plan.certain + plan.asked + BORNE_OUT * plan.elsewhere


def _ordered(steps: Sequence[Step]) -> bool:
    """Whether a critic's scores of these steps can be ordered, so that rounds can go on by its accuracy."""
    said = Evaluation(phi_before=0, phi_after=0, reasoning="whatever it says")
    return measure_accuracy([step.scored(said) for step in steps]) is not None


def _fewest(settings: ContrastSettings) -> int:
    """Return after how many comparisons a pair can be out."""
    plans = [sides(candidate, settings.judges, seed=settings.seed) for candidate in range(2)]
    return min(
        next(
            made
            for made in range(1, len(plan) + 1)
            if outcome(plan, [False] * made, agreement=settings.agreement) is not None
        )
        for plan in plans
    )
