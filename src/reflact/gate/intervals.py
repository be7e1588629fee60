"""95% intervals of means, and of improvements over the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from statistics import variance as variance_of

# The 97.5% quantile of the standard normal distribution.
Z_95 = 1.959963984540054

POWER = 0.8

# The 80% quantile of the standard normal distribution.
POWER_QUANTILE = 0.84

# Differences that are no further apart are equal.
ROUNDING = 1e-9

# The most that a gain may be due to chance (``compute_chance``) if it is to be confirmed.
CLAIM_LEVEL = 0.025

# The fewest items on which a gain can be confirmed: half to this power is below ``CLAIM_LEVEL``.
MIN_CLAIM_ITEMS = 6

# Typical variance of the difference of two scores of an item.
PAIR_VARIANCE = 0.3

# The 97.5% quantiles of Student's t for 1 to 9 degrees of freedom.
_T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of a share of successes, by Wilson's score method.

    A sum of scores in 0..1 counts as that many successes: no scores with the same mean vary more.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.

    Raises:
        ValueError: ``n`` is not positive or ``successes`` is not within 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} have no interval")
    share = successes / n
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    scale = 1 + Z_95**2 / n
    middle = share + Z_95**2 / (2 * n)
    low = 0.0 if successes == 0 else (middle - spread) / scale
    high = 1.0 if successes == n else (middle + spread) / scale
    return low, high


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores in 0..1.

    Binary scores have Wilson's interval. Fractional ones have the normal approximation with the
    sample's standard deviation, clipped to 0..1. A single fractional score has the interval 0..1.

    Raises:
        ValueError: There are no values.
    """
    if all(value in {0.0, 1.0} for value in values):
        return wilson_interval(round(sum(values)), len(values))
    if len(values) == 1:
        return 0.0, 1.0
    mean = math.fsum(values) / len(values)
    spread = Z_95 * stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - spread), min(1.0, mean + spread)


def improvement_interval(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float, float]:
    """Return the mean of ``after - before`` over the same items, and its 95% interval, in -1..1.

    Binary scores have Agresti and Min's adjusted Wald interval for matched pairs, which adds half a
    pair to each of the four outcomes. So have fractional ones that all differ by the same amount,
    which counts as the unit: their sample has no variance, but two or three items show little.
    Other fractional ones have Student's interval of the differences. A single fractional pair has
    the interval -1..1.

    Source: A. Agresti and Y. Min, Statistics in Medicine 24 (2005), 729-740.

    Raises:
        ValueError: There are no items, or not the same number on both sides.
    """
    if len(before) != len(after) or not before:
        raise ValueError(
            f"{len(before)} scores before and {len(after)} after cannot be compared item by item"
        )
    differences = [new - old for old, new in zip(before, after, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / len(differences)
    is_binary = {*before, *after} <= {0.0, 1.0}
    if n == 1 and not is_binary:
        return mean, -1.0, 1.0
    if is_binary or max(differences) - min(differences) <= ROUNDING:
        unit = 1.0 if is_binary else abs(mean)
        won = sum(difference > 0 for difference in differences) + 0.5
        lost = sum(difference < 0 for difference in differences) + 0.5
        middle = unit * (won - lost) / (n + 2)
        spread = unit * Z_95 * math.sqrt(won + lost - (won - lost) ** 2 / (n + 2)) / (n + 2)
    else:
        middle = mean
        spread = student_quantile(n - 1) * stdev(differences) / math.sqrt(n)
    return mean, max(-1.0, middle - spread), min(1.0, middle + spread)


def compute_chance(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the probability, 0..1, of so large a gain by chance alone.

    By chance, each item that differs is as likely to be worse as better. For binary scores, and for
    others that all differ by the same amount, this is the exact one-sided sign test, which is
    McNemar's exact test. For other scores it is the smallest probability that any such test can
    give: that of the one case in which all differences are gains.
    """
    differences = [
        new - old for old, new in zip(before, after, strict=True) if abs(new - old) > ROUNDING
    ]
    n = len(differences)
    sizes = [abs(difference) for difference in differences]
    if not n:
        return 1.0
    is_equal = max(sizes) - min(sizes) <= ROUNDING
    lost = sum(difference < 0 for difference in differences) if is_equal else 0
    ways = 1
    total = 1
    for k in range(lost):
        ways = ways * (n - k) // (k + 1)
        total += ways
    return float(total / 2**n)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t for degrees of freedom, to three decimals."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    return expand_student(Z_95, freedom)


def expand_student(z: float, freedom: int) -> float:
    """Return the quantile of Student's t that belongs to one of the normal distribution.

    The expansion in the inverse of the degrees of freedom is good to three decimals from 10 on.

    Source: M. Abramowitz and I. Stegun, Handbook of Mathematical Functions, 1964, 26.7.5.
    """
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def within_item_interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """Return the mean of ``after - before`` on these very items, and its 95% interval, in -1..1.

    Each item has at least two scores on each side; only their variance within the item counts (a z
    test stratified by item), so the interval says nothing about other items.
    """
    differences = [fmean(new) - fmean(old) for old, new in zip(before, after, strict=True)]
    variances = [variance_of(scores) / len(scores) for scores in (*before, *after)]
    variance = math.fsum(variances) / len(before) ** 2
    mean = fmean(differences)
    spread = Z_95 * math.sqrt(variance)
    return mean, max(-1.0, mean - spread), min(1.0, mean + spread)


def describe_claim(n: int) -> str:
    """Return a sentence on the gains that ``n`` test items confirm with 80% power."""
    if not n:
        return (
            "Without a test split, fresh passes of the validation items decide if the gain is "
            "confirmed."
        )
    items = f"The test split of {n} item{'s' * (n != 1)}"
    if n < MIN_CLAIM_ITEMS:
        return (
            f"{items} is too small to confirm any gain; use at least {MIN_CLAIM_ITEMS}, better 100."
        )
    gain = max(_find_share(n), min(1.0, (Z_95 + POWER_QUANTILE) * math.sqrt(PAIR_VARIANCE / n)))
    return f"{items} can confirm a gain of about {100 * gain:.0f} points or more."


def _find_share(n: int) -> float:
    """Return the least share of gained items, so that ``MIN_CLAIM_ITEMS`` gain with 80% power."""
    for points in range(1, 100):
        share = points / 100
        fewer = [
            math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(MIN_CLAIM_ITEMS)
        ]
        if 1 - math.fsum(fewer) >= POWER:
            return share
    return 1.0
