"""A claim without right answers: a judge sees all pairs, and a person's answers correct the judge.

A pair is an item with the answers of two documents. The judge says of every pair which answer is
better; a person says it of a sample, whose probabilities are known. The mean of the judge is
corrected by how far it is from the person on the sample (prediction-powered inference), so a judge
may be lenient, or fond of long answers, without a false claim. A judge that is of no use leaves the
interval of the person's answers alone.

Source: A. N. Angelopoulos et al., Science 382 (2023), 669-674; its slope, A. N. Angelopoulos,
J. C. Duchi and T. Zrnic, arXiv:2311.01453; its strata, A. Fisch et al., arXiv:2406.04291.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

from reflact.gate.intervals import CLAIM_LEVEL, Z_95, expand_student
from reflact.records import IntervalEstimate
from reflact.types import FrozenModel

# Pairs on which the judge's votes differ are asked so many times as often: there it errs more.
TORN_WEIGHT = 1.5

# Fewer answers carry no claim: the interval was simulated from 30 answers on.
MIN_ANSWERS = 20

# Each stratum counts so much of an answer for either side: without it, a sample that lacks the rare
# kind of answer has a mean that is too large and a variance that is too small.
PRIOR_ANSWERS = 1.0

# So many more answers are what ``CorrectedClaim.low_with_more`` speaks of.
MORE_ANSWERS = 30


# Claims are made at these numbers of answers, and when all pairs are answered.
LOOKS = (30, 60, 120, 240)


class JudgedPair(FrozenModel):
    """A pair and the judge's votes, -1..1: 1 says that the candidate's answer is better.

    ``is_same`` says that both answers are one text: they are equal, and nobody is asked.
    """

    pair_id: str
    votes: tuple[float, ...]
    is_same: bool = False

    @property
    def vote(self) -> float:
        """The mean of the votes."""
        return fmean(self.votes)

    @property
    def is_torn(self) -> bool:
        """Whether the votes differ."""
        return len(set(self.votes)) > 1


class CorrectedClaim(FrozenModel):
    """What a judge and a person's answers show of a gain: the share of pairs won less that lost.

    Args:
        n_pairs: The pairs that the judge saw.
        n_same: Those of them whose answers are one text.
        n_answers: The others that the person answered.
        gain: The gain in -1..1, corrected, with its 95% interval.
        judged: The judge's own mean, without a correction; no claim.
        answered: The gain that the person's answers show without the judge.
        agreement: The share of answers that equal the judge's verdict.
        kappa: The same beyond what chance gives (Cohen's), -1..1; None if chance gives all of it.
        is_judge_used: Whether the judge narrows the interval; if not, ``gain`` is ``answered``.
        n_saved: The answers that the judge saved: so many more would be as narrow without it.
        width_with_more: The width of the interval after ``MORE_ANSWERS`` more of the same kind.
        level: The error probability of this look; all looks together have ``CLAIM_LEVEL``.
        proven: Which document is proven better at this level; None: neither is.
    """

    n_pairs: int
    n_same: int
    n_answers: int
    gain: IntervalEstimate
    judged: float
    answered: IntervalEstimate
    agreement: float
    kappa: float | None
    is_judge_used: bool
    n_saved: int
    width_with_more: float
    level: float
    proven: Literal["better", "worse"] | None


class _Stratum(NamedTuple):
    """Pairs that are drawn with one probability: their share of all, and the answered ones."""

    n_pairs: int
    votes: tuple[float, ...]
    answers: tuple[float, ...]


class _Estimate(NamedTuple):
    mean: float
    sampling: float
    population: float
    freedom: int

    @property
    def error(self) -> float:
        return math.sqrt(self.sampling + self.population)


def order_pairs(pairs: Sequence[JudgedPair], *, seed: int) -> tuple[str, ...]:
    """Return the ids of pairs in the order in which a person is asked; those of one text are not.

    Each beginning of the order is a random sample in which torn pairs have ``TORN_WEIGHT`` times
    their share.
    """
    asked = [pair for pair in pairs if not pair.is_same]
    strata = [[pair.pair_id for pair in asked if pair.is_torn is torn] for torn in (False, True)]
    chance = random.Random(seed)  # noqa: S311
    for stratum in strata:
        chance.shuffle(stratum)
    weights = [float(len(strata[0])), TORN_WEIGHT * len(strata[1])]
    ordered: list[str] = []
    taken = [0, 0]
    while len(ordered) < len(asked):
        left = [n for n in (0, 1) if taken[n] < len(strata[n])]
        n = min(left, key=lambda n: (taken[n] + 1) / weights[n])
        ordered.append(strata[n][taken[n]])
        taken[n] += 1
    return tuple(ordered)


def list_looks(n_answers: int, n_pairs: int) -> tuple[int, ...]:
    """Return the numbers of answers at which claims have been made so far, in order.

    Args:
        n_answers: The answers that there are.
        n_pairs: The pairs that can be asked.
    """
    looks = [look for look in LOOKS if look <= n_answers and look < n_pairs]
    if 0 < n_pairs <= n_answers:
        looks.append(n_pairs)
    return tuple(looks)


def correct_claim(
    pairs: Sequence[JudgedPair], answers: Mapping[str, float], *, look: int = 1
) -> CorrectedClaim:
    """Return what the judge's votes and the answers to some of the pairs show.

    An answer is 1 if the candidate's is better, 0 if both are equal, -1 if it is worse, or the mean
    of what several persons said. The answered pairs are a beginning of ``order_pairs``. Each look
    costs a part of the error probability: the k-th is tested at
    ``CLAIM_LEVEL * 6 / (pi * k) ** 2``, and these sum to ``CLAIM_LEVEL``.

    Raises:
        ValueError: No pair is answered, or an answer is about none that can be asked.
    """
    asked = [pair for pair in pairs if not pair.is_same]
    unknown = sorted(set(answers) - {pair.pair_id for pair in asked})
    if unknown:
        raise ValueError(f"there is no pair {unknown[0]} to ask about")
    if not answers:
        raise ValueError("no pair is answered")
    strata = _stratify(asked, answers)
    slope = _fit_slope(strata)
    alone = _estimate(strata, len(pairs), judged=0.0, slope=0.0)
    judged = fmean(pair.vote for pair in asked)
    corrected = _estimate(strata, len(pairs), judged=judged, slope=slope)
    is_judge_used = slope > 0 and corrected.error < alone.error
    used = corrected if is_judge_used else alone
    level = CLAIM_LEVEL * 6 / (math.pi * look) ** 2
    reach = expand_student(-NormalDist().inv_cdf(level), used.freedom) * used.error
    proven: Literal["better", "worse"] | None = None
    if len(answers) >= MIN_ANSWERS and abs(used.mean) > reach:
        proven = "better" if used.mean > 0 else "worse"
    agreement, kappa = _measure_agreement(asked, answers)
    n_more = min(len(asked), len(answers) + MORE_ANSWERS)
    narrower = used._replace(
        sampling=used.sampling * _shrink(len(answers), n_more, len(asked)),
        freedom=used.freedom + n_more - len(answers),
    )
    return CorrectedClaim(
        n_pairs=len(pairs),
        n_same=len(pairs) - len(asked),
        n_answers=len(answers),
        gain=_give_interval(used),
        judged=judged * len(asked) / len(pairs),
        answered=_give_interval(alone),
        agreement=agreement,
        kappa=kappa,
        is_judge_used=is_judge_used,
        n_saved=_count_saved(alone, used, len(answers), len(asked)),
        width_with_more=2 * expand_student(Z_95, narrower.freedom) * narrower.error,
        level=level,
        proven=proven,
    )


def _stratify(pairs: Sequence[JudgedPair], answers: Mapping[str, float]) -> list[_Stratum]:
    """Return torn pairs and others, or all as one stratum where one has fewer than 2 answers."""
    groups = [[pair for pair in pairs if pair.is_torn is torn] for torn in (False, True)]
    groups = [group for group in groups if group]
    if any(sum(pair.pair_id in answers for pair in group) < 2 for group in groups):
        groups = [list(pairs)]
    strata = []
    for group in groups:
        asked = [pair for pair in group if pair.pair_id in answers]
        votes = tuple(pair.vote for pair in asked)
        said = tuple(answers[pair.pair_id] for pair in asked)
        strata.append(_Stratum(n_pairs=len(group), votes=votes, answers=said))
    return strata


def _fit_slope(strata: Sequence[_Stratum]) -> float:
    """Return by how much an answer rises with a vote, by weighted least squares; at least 0."""
    votes = _weigh(strata, [stratum.votes for stratum in strata])
    answers = _weigh(strata, [stratum.answers for stratum in strata])
    covariance = 0.0
    variance = 0.0
    for stratum in strata:
        weight = stratum.n_pairs / len(stratum.answers)
        for vote, answer in zip(stratum.votes, stratum.answers, strict=True):
            covariance += weight * (vote - votes) * (answer - answers)
            variance += weight * (vote - votes) ** 2
    return max(0.0, covariance / variance) if variance else 0.0


def _estimate(strata: Sequence[_Stratum], n_all: int, *, judged: float, slope: float) -> _Estimate:
    """Return the mean of the answers, with the votes of all pairs as a covariate, and its variance.

    The variance has two parts: the pairs that were drawn for the person, and the pairs that there
    are. Of ``n_all`` pairs, those that are in no stratum have equal answers.
    """
    n_pairs = sum(stratum.n_pairs for stratum in strata)
    n_answers = sum(len(stratum.answers) for stratum in strata)
    freedom = max(1, n_answers - len(strata) - (slope > 0))
    mean = slope * judged
    sampling = 0.0
    for stratum in strata:
        middle, variance = _estimate_rest(stratum, slope)
        share = stratum.n_pairs / n_pairs
        mean += share * middle
        sampling += share**2 * variance * (1 - len(stratum.answers) / stratum.n_pairs)
    sampling *= max(1, n_answers - len(strata)) / freedom
    differing = n_pairs / n_all
    answered = differing * _weigh(strata, [stratum.answers for stratum in strata])
    squares = [[answer**2 for answer in stratum.answers] for stratum in strata]
    spread = differing * (_weigh(strata, squares) + PRIOR_ANSWERS / n_answers) - answered**2
    return _Estimate(
        mean=differing * mean,
        sampling=differing**2 * sampling,
        population=spread / n_all,
        freedom=freedom,
    )


def _estimate_rest(stratum: _Stratum, slope: float) -> tuple[float, float]:
    """Return the mean of what the votes leave of a stratum's answers, and the variance of it.

    An answer for either side, with half of ``PRIOR_ANSWERS`` each and an average vote, is added.
    """
    rest = [
        answer - slope * vote for vote, answer in zip(stratum.votes, stratum.answers, strict=True)
    ]
    usual = slope * fmean(stratum.votes)
    added = [1 - usual, -1 - usual]
    n = len(rest) + PRIOR_ANSWERS
    middle = (math.fsum(rest) + PRIOR_ANSWERS * fmean(added)) / n
    square = math.fsum((each - middle) ** 2 for each in rest)
    square += PRIOR_ANSWERS * fmean((each - middle) ** 2 for each in added)
    return middle, square / (max(1.0, n - 1) * n)


def _weigh(strata: Sequence[_Stratum], values: Sequence[Sequence[float]]) -> float:
    """Return the mean of values of the answered pairs, each stratum with its share of all pairs."""
    n_pairs = sum(stratum.n_pairs for stratum in strata)
    return math.fsum(
        stratum.n_pairs / n_pairs * fmean(each)
        for stratum, each in zip(strata, values, strict=True)
    )


def _shrink(n: int, n_more: int, n_pairs: int) -> float:
    """Return the part of the sampling variance that is left with more answers."""
    if n >= n_pairs:
        return 1.0
    return (1 / n_more - 1 / n_pairs) / (1 / n - 1 / n_pairs)


def _count_saved(alone: _Estimate, used: _Estimate, n: int, n_pairs: int) -> int:
    """Return how many more answers would be as narrow without the judge; at most all pairs."""
    if n >= n_pairs or not alone.sampling:
        return 0
    left = (used.error**2 - alone.population) / alone.sampling
    needed = left * (1 / n - 1 / n_pairs) + 1 / n_pairs
    if needed <= 1 / n_pairs:
        return n_pairs - n
    return max(0, math.floor(1 / needed) - n)


def _give_interval(estimate: _Estimate) -> IntervalEstimate:
    spread = expand_student(Z_95, estimate.freedom) * estimate.error
    low = max(-1.0, estimate.mean - spread)
    high = min(1.0, estimate.mean + spread)
    return IntervalEstimate(value=estimate.mean, low=low, high=high)


def _measure_agreement(
    pairs: Sequence[JudgedPair], answers: Mapping[str, float]
) -> tuple[float, float | None]:
    """Return how often the judge's verdict is the person's answer, and Cohen's kappa."""
    asked = [pair for pair in pairs if pair.pair_id in answers]
    verdicts = [_round(pair.vote) for pair in asked]
    said = [_round(answers[pair.pair_id]) for pair in asked]
    equal = [verdict == answer for verdict, answer in zip(verdicts, said, strict=True)]
    by_chance = math.fsum(
        verdicts.count(value) * said.count(value) / len(asked) ** 2 for value in (-1, 0, 1)
    )
    agreement = fmean(equal)
    kappa = (agreement - by_chance) / (1 - by_chance) if by_chance < 1 else None
    return agreement, kappa


def _round(preference: float) -> int:
    """Return the verdict of votes or answers: 1, 0 or -1."""
    return (preference > 0) - (preference < 0)
