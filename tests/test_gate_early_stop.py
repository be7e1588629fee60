"""Early stop: the decision equals that of the complete evaluation, in any order of completion."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from reflact.gate.decision import CONFIRMATION_REPEATS, GateSettings, Ruling, ScorePair, TrialRequest, decide
from reflact.gate.early_stop import EarlyStopMonitor, decide_early

Sides = tuple[float | None, float | None]
Score = Callable[[int, str], Sides]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def setting(n: int, **changes: Any) -> GateSettings:
    """Return a setting for n items."""
    values = {"trials": 4, "level": 0.05, **changes}
    return GateSettings.model_validate({"item_ids": tuple(f"item-{i:02}" for i in range(n)), **values})


def pair(item_id: str, sides: Sides) -> ScorePair:
    """Return a pair whose scores are also what is solved."""
    candidate, current = sides
    return ScorePair(
        item_id=item_id,
        candidate=candidate,
        current=current,
        candidate_solved=None if candidate is None else candidate > 0,
        current_solved=None if current is None else current > 0,
    )


def pairs(*sides: Sides) -> list[ScorePair]:
    """Return pairs of the first items."""
    return [pair(f"item-{i:02}", both) for i, both in enumerate(sides)]


def trial(*sides: Sides) -> dict[str, ScorePair]:
    """Return the pairs of a trial's first items by id."""
    return {each.item_id: each for each in pairs(*sides)}


def first_stop(
    setting: GateSettings, trials: dict[int, dict[str, ScorePair]], sides: Sequence[Sides]
) -> tuple[int, str]:
    """Return after how many answers to the next question the decision is clear, and which it is."""
    asked = decide(setting, trials)
    assert isinstance(asked, TrialRequest)
    found = [pair(i, both) for i, both in zip(asked.item_ids, sides, strict=False)]
    for length in range(1, len(found) + 1):
        ruling = decide_early(setting, trials, asked, found[:length])
        if ruling is not None:
            assert ruling.evidence.bound
            return length, ruling.action
    return 0, "open"


# ---------------------------------------------------------------------------------------------- one pass


@pytest.mark.parametrize(
    ("sides", "stop"),
    [
        ([WON, WON, BOTH, BOTH, BOTH, BOTH], (5, "accept")),
        ([WON, WON, WON, WON, BOTH, BOTH], (4, "accept")),
        ([LOST, LOST, LOST, BOTH, BOTH, BOTH], (3, "reject")),
        ([WON, LOST, BOTH, NEITHER, BOTH], (0, "open")),
        ([LOST, BOTH, BOTH, BOTH, BOTH], (5, "reject")),
    ],
)
def test_one_pass_stops_when_the_open_pairs_cannot_turn_the_mean(
    sides: list[Sides], stop: tuple[int, str]
) -> None:
    """Six items: accepted when more are won than can still be lost, rejected when no more can be won."""
    assert first_stop(setting(6, policy="strict"), {}, sides) == stop
    assert first_stop(setting(6, declared_deterministic=True), {}, sides) == stop


def test_the_least_improvement_counts_in_the_open_pairs_too() -> None:
    """Two items that must gain more than three quarters: without a gain on the first they cannot."""
    assert first_stop(setting(2, policy="strict", min_improvement=0.75), {}, [BOTH, WON]) == (1, "reject")
    assert first_stop(setting(2, policy="strict", min_improvement=0.25), {}, [BOTH, WON]) == (0, "open")
    assert first_stop(setting(4, policy="strict", min_improvement=0.25), {}, [WON] * 4) == (3, "accept")


def test_the_record_says_that_it_is_a_bound() -> None:
    """The scores are those of the pairs that are known."""
    ruling = decide_early(
        setting(6, policy="strict"),
        {},
        TrialRequest(trial=0, item_ids=setting(6).item_ids),
        pairs(*[LOST] * 3),
    )
    assert ruling is not None
    assert ruling.reason == (
        "The candidate's 0.0000 is not above the current 1.0000 over 3 of 3 pairs. "
        "The 3 open pairs cannot change that."
    )
    assert (ruling.evidence.rounds, ruling.evidence.pairs, ruling.evidence.bound) == (1, 3, True)


def test_an_improvement_that_must_be_repeated_has_no_early_acceptance() -> None:
    """Which items differ is known only when all have been run; a rejection can come early."""
    assert first_stop(setting(4), {}, [WON] * 4) == (0, "open")
    assert first_stop(setting(4), {}, [LOST] * 4) == (2, "reject")


def test_stored_repeats_of_open_items_may_show_noise() -> None:
    """Where one is at hand, a mean that cannot rise is no rejection yet; strict does not care."""
    stored = {1: {"item-03": pair("item-03", BOTH)}}
    assert first_stop(setting(4), stored, [LOST] * 4) == (0, "open")
    assert first_stop(setting(4, policy="strict"), stored, [LOST] * 4) == (2, "reject")


def test_repeats_and_suspects_are_run_to_the_end() -> None:
    """Rounds that ask whether something happens again are as short as they can be."""
    assert first_stop(setting(4), {0: trial(WON, WON, WON, BOTH)}, [WON, BOTH, BOTH]) == (0, "open")
    noisy = setting(12, level=0.2, no_regression=0, deterministic=False)
    assert first_stop(noisy, {0: trial(LOST, LOST, *[WON] * 10)}, [BOTH, BOTH]) == (0, "open")


def test_losing_suspects_again_does_not_undo_the_acceptance() -> None:
    """Evidence that was just enough stays so, whatever the further trials of suspects would make of it."""
    noisy = setting(12, trials=2, planned_level=0.2, no_regression=0, deterministic=False)
    first = {0: trial(LOST, LOST, *[WON] * 10)}
    enough = decide(noisy.model_copy(update={"no_regression": None, "level": 0.9}), first)
    assert isinstance(enough, Ruling)
    assert enough.evidence.value is not None
    barely = noisy.model_copy(update={"level": 1.01 / enough.evidence.value})
    assert decide(barely, first) == TrialRequest(trial=1, item_ids=("item-00", "item-01"))
    assert first_stop(barely, first, [LOST, LOST]) == (0, "open")


def test_too_many_lost_items_reject_at_once() -> None:
    """With a veto the outcome is the same whatever the mean; without one lost item may be outweighed."""
    sides = [WON, LOST, WON, WON, WON, WON]
    assert first_stop(setting(6, policy="strict", no_regression=0), {}, sides) == (2, "reject")
    assert first_stop(setting(6, policy="strict", no_regression=1), {}, sides) == (0, "open")
    assert first_stop(setting(6, policy="strict"), {}, sides) == (5, "accept")


def test_an_item_that_was_solved_once_is_not_lost() -> None:
    """Neither by a repeat before its failure nor by one after it, where the metric sees no difference."""
    half = pair("item-00", (0.5, 0.5))
    failed, solved = (half.model_copy(update={"candidate_solved": each}) for each in (False, True))
    declared = setting(6, declared_deterministic=True, no_regression=0)
    for order in ((failed, solved), (solved, failed)):
        stored = {number: {"item-00": each} for number, each in enumerate(order)}
        assert first_stop(declared, stored, [WON, WON, WON, BOTH, BOTH]) == (0, "open")
    assert first_stop(declared, {0: {"item-00": failed}}, [WON, WON, WON, BOTH, BOTH]) == (1, "reject")


def test_an_acceptance_waits_while_a_veto_is_possible() -> None:
    """Five won items outweigh the sixth, but it may still be the one that is lost."""
    strict = setting(6, policy="strict")
    assert first_stop(strict, {}, [WON] * 6) == (4, "accept")
    assert first_stop(strict.model_copy(update={"no_regression": 1}), {}, [WON] * 6) == (5, "accept")
    assert first_stop(strict.model_copy(update={"no_regression": 0}), {}, [WON] * 6) == (0, "open")


def test_a_complete_ask_is_for_the_gate_itself() -> None:
    """There is no bound where nothing is open, and no early stop where it is switched off."""
    assert first_stop(setting(1, policy="strict"), {}, [WON]) == (0, "open")
    assert first_stop(setting(6, policy="strict", early_stop=False), {}, [LOST] * 6) == (0, "open")


# ------------------------------------------------------------------------------------------------- noisy


def test_proof_that_no_loss_can_undo_is_accepted() -> None:
    """The recorded evidence is the least that the open pairs can leave, and the first that is enough."""
    noisy = setting(12, trials=1, level=0.2, deterministic=False)
    least = math.sqrt(4 * math.log(5) / 12)
    stakes = list(zip((0.4, 0.4, 0.2), (least, min(2 * least, 0.9), 0.9), strict=True))
    left = [sum(w * (1 + s) ** n * (1 - s) ** (12 - n) for w, s in stakes) for n in range(12)]
    length = next(n for n in range(12) if left[n] >= 5)
    assert length < 11
    assert first_stop(noisy, {}, [WON] * 12) == (length, "accept")
    ruling = decide_early(noisy, {}, TrialRequest(trial=0, item_ids=noisy.item_ids), pairs(*[WON] * 11))
    complete = decide(noisy, {0: trial(*[WON] * length, *[LOST] * (12 - length))})
    assert ruling is not None
    assert isinstance(complete, Ruling)
    assert ruling.evidence.value == complete.evidence.value == pytest.approx(left[length], rel=1e-5)
    assert (ruling.evidence.bound, complete.evidence.bound) == (True, False)


def test_a_round_that_will_end_as_futile_stops() -> None:
    """After a round without a win, lost pairs settle it as soon as winning the rest cannot help."""
    noisy = setting(20, trials=4, level=0.0125, deterministic=False)
    length, action = first_stop(noisy, {0: trial(*[LOST] * 6, *[BOTH] * 14)}, [LOST] * 20)
    assert (0 < length < 20, action) == (True, "reject")
    ruling = decide_early(
        noisy,
        {0: trial(*[LOST] * 6, *[BOTH] * 14)},
        TrialRequest(trial=1, item_ids=noisy.item_ids),
        pairs(*[LOST] * 19),
    )
    assert ruling is not None
    assert ruling.evidence.futile


def test_the_last_round_stops_when_it_cannot_prove_anything() -> None:
    """A single round of two items can never be enough at this level: inconclusive after the first pair."""
    noisy = setting(2, trials=1, level=0.0001, deterministic=False)
    assert first_stop(noisy, {}, [WON]) == (1, "inconclusive")
    assert first_stop(noisy.model_copy(update={"trials": 2}), {}, [WON]) == (0, "open")


# -------------------------------------------------------------------------------------------- everything


@dataclass
class Evaluation:
    """An evaluation of both sides, with what was run in it."""

    setting: GateSettings
    score: Score
    trials: dict[int, dict[str, ScorePair]] = field(default_factory=dict)
    ran: set[tuple[int, str]] = field(default_factory=set)
    last: TrialRequest | None = None
    prefix: list[ScorePair] = field(default_factory=list)

    def store(self, stored: dict[int, tuple[str, ...]]) -> Evaluation:
        """Begin with pairs at hand."""
        for number, item_ids in stored.items():
            self.trials[number] = {i: pair(i, self.score(number, i)) for i in item_ids}
            self.ran |= {(number, i) for i in item_ids}
        return self

    def run(self, stop: Callable[[TrialRequest, list[ScorePair]], Ruling | None]) -> Ruling:
        """Answer what is asked until there is a decision."""
        while isinstance(asked := decide(self.setting, self.trials), TrialRequest):
            found = [pair(i, self.score(asked.trial, i)) for i in asked.item_ids]
            self.last, self.prefix = asked, []
            if (ruling := stop(asked, found)) is not None:
                return ruling
            self.trials.setdefault(asked.trial, {}).update({each.item_id: each for each in found})
        return asked

    def complete(self) -> Ruling:
        """Evaluate without early stop."""
        return self.run(lambda _, found: None)

    def in_order(self) -> Ruling:
        """Evaluate one item after the other."""

        def stop(asked: TrialRequest, found: list[ScorePair]) -> Ruling | None:
            watch = EarlyStopMonitor(self.setting, self.trials, asked)
            for each in found:
                self.prefix.append(each)
                self.ran.add((asked.trial, each.item_id))
                if (ruling := watch.add(each)) is not None:
                    return ruling
            return None

        return self.run(stop)

    def out_of_order(self, chance: random.Random) -> Ruling:
        """Evaluate all items at once; they finish in a random order."""

        def stop(asked: TrialRequest, found: list[ScorePair]) -> Ruling | None:
            finished: set[int] = set()
            for place in chance.sample(range(len(found)), len(found)):
                finished.add(place)
                length = next(n for n in range(len(found) + 1) if n not in finished)
                if (ruling := decide_early(self.setting, self.trials, asked, found[:length])) is not None:
                    return ruling
            return None

        return self.run(stop)


class World:
    """Random settings and scores; the same seed gives the same."""

    def __init__(self, seed: int, fewest: int = 2, most: int = 7) -> None:
        chance = random.Random(seed)
        self.setting = setting(
            chance.randint(fewest, most),
            policy=chance.choice(("strict", "paired", "paired", "paired")),
            trials=chance.randint(1, 4),
            level=chance.choice((0.02, 0.2, 0.5)),
            effect=chance.choice((0.05, 0.15, 0.4)),
            min_improvement=chance.choice((0.0, 0.0, 0.1)),
            coverage=chance.choice((0.5, 0.8)),
            no_regression=chance.choice((None, None, 0, 1)),
            deterministic=chance.random() < 0.4,
            declared_deterministic=chance.random() < 0.3,
        )
        self.values = chance.choice(((0.0, 1.0), (0.0, 0.3, 0.5, 1.0)))
        self.skill, self.lift = chance.random(), chance.choice((-0.5, 0.0, 0.5, 1.0))
        self.missing = chance.choice((0.0, 0.0, 0.05))
        ids = self.setting.item_ids
        stored = chance.sample(range(CONFIRMATION_REPEATS + 1), chance.choice((0, 0, 0, 1, 2)))
        self.stored = {number: tuple(chance.sample(ids, chance.randint(0, len(ids)))) for number in stored}
        self.scores = {(0, item_id): self._sides(chance) for item_id in ids}
        noise = chance.choice((0.0, 0.3, 1.0))
        for number in range(1, CONFIRMATION_REPEATS + 1):
            for item_id in ids:
                again = self._sides(chance) if chance.random() < noise else self.scores[0, item_id]
                self.scores[number, item_id] = again

    def score(self, number: int, item_id: str) -> Sides:
        """Return both sides' scores."""
        return self.scores[number, item_id]

    def evaluation(self, score: Score | None = None) -> Evaluation:
        """Return an evaluation that begins with what is stored."""
        return Evaluation(self.setting, self.score if score is None else score).store(self.stored)

    def _sides(self, chance: random.Random) -> Sides:
        return self._side(chance, self.lift), self._side(chance, 0.0)

    def _side(self, chance: random.Random, lift: float) -> float | None:
        if chance.random() < self.missing:
            return None
        if chance.random() < abs(lift):
            return self.values[-1 if lift > 0 else 0]
        if chance.random() < 0.2:
            return chance.choice(self.values)
        return self.values[-1 if chance.random() < self.skill else 0]


def table(scores: Mapping[tuple[int, str], Sides]) -> Score:
    """Return the look-up of a table."""
    return lambda number, item_id: scores[number, item_id]


def continuations(world: World, ran: set[tuple[int, str]], seed: int) -> Iterator[Score]:
    """Yield what the pairs that were never run may give: all won, all lost, either, or no difference too."""
    chance = random.Random(seed)
    for choices in ((WON,), (LOST,), (WON, LOST), (WON, LOST, BOTH)):
        drawn = {key: world.scores[key] if key in ran else chance.choice(choices) for key in world.scores}
        yield table(drawn)


def kind(ruling: Ruling) -> str:
    """Name what a decision rested on."""
    words = [ruling.action, "by test" if ruling.evidence.value is not None else "by one pass"]
    words += ["veto"] * ("no_regression" in ruling.reason) + ["bound"] * ruling.evidence.bound
    return ", ".join(words)


BOUNDS = (
    "accept, by one pass, bound",
    "reject, by one pass, bound",
    "reject, by one pass, veto, bound",
    "accept, by test, bound",
    "reject, by test, bound",
    "inconclusive, by test, bound",
)


def test_the_decision_is_that_of_the_complete_evaluation(thorough: bool) -> None:
    """In 10,000 random sequences (1,000 unless thorough), whatever the pairs that are never run would give.

    The action is the complete evaluation's, futile where that is futile; and in a random order of completion
    the record is the same bytes.
    """
    kinds: Counter[str] = Counter()
    sequences = 10_000 if thorough else 1_000
    for seed in range(sequences):
        world = World(seed)
        evaluation = world.evaluation()
        stopped = evaluation.in_order()
        shuffled = world.evaluation().out_of_order(random.Random(seed))
        assert shuffled.model_dump_json() == stopped.model_dump_json(), seed
        kinds[kind(stopped)] += 1
        for score in continuations(world, evaluation.ran, seed):
            complete = world.evaluation(score).complete()
            assert complete.action == stopped.action, seed
            assert complete.evidence.futile == stopped.evidence.futile, seed
    assert min(kinds[each] for each in BOUNDS) >= (30 if thorough else 1), kinds


def test_what_is_never_run_needs_no_measurement(thorough: bool) -> None:
    """Were they as drawn, unmeasured ones among them, the action could differ only for want of coverage."""
    for seed in range(2000 if thorough else 200):
        world = World(seed)
        stopped, complete = world.evaluation().in_order(), world.evaluation().complete()
        if complete.action != stopped.action:
            assert (stopped.evidence.bound, complete.action) == (True, "unmeasured"), seed


def test_measuring_an_unmeasured_pair_after_all_changes_nothing(thorough: bool) -> None:
    """A decision that was clear beside unmeasured pairs of the prefix is the same when they are had."""
    mended = 0
    for seed in range(1000 if thorough else 300):
        world, chance = World(seed, 20, 25), random.Random(seed)
        lossy = {
            key: (None, old) if chance.random() < 0.03 else (new, old)
            for key, (new, old) in world.scores.items()
        }
        evaluation = world.evaluation(table(lossy))
        stopped = evaluation.in_order()
        if not stopped.evidence.bound or all(each.difference is not None for each in evaluation.prefix):
            continue
        assert evaluation.last is not None
        for candidate in (1.0, 0.0):
            prefix = [
                pair(each.item_id, (candidate if each.candidate is None else each.candidate, each.current))
                for each in evaluation.prefix
            ]
            again = decide_early(world.setting, evaluation.trials, evaluation.last, prefix)
            assert again is not None, seed
            assert again.action == stopped.action, seed
            mended += 1
    assert mended > (100 if thorough else 20)
