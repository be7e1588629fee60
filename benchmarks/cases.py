"""What few cases can prove: false claims and power of the two claims, on these cases and on new ones.

    python benchmarks/cases.py

Cases are drawn from a population of rates of success before and after. Each gate runs every case ``REPEATS`` times
under both documents. The claim on these cases is false if the cases of this gate gain nothing in the mean; the claim on
new cases, which reads the first run of each case, is false if the population gains nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

from reflact.gate.cases import CaseScores, compare_cases
from reflact.gate.intervals import CLAIM_LEVEL, compute_chance, improvement_interval

GATES = 2_000
REPEATS = 3
SIZES = (3, 5, 8, 20)

Rates = tuple[float, float]
World = Callable[[random.Random], Rates]


def change_nothing(chance: random.Random) -> Rates:
    """Return the rates of a case that the document does not change."""
    rate = chance.choice((0.1, 0.3, 0.5, 0.7, 0.9))
    return rate, rate


def help_half(chance: random.Random) -> Rates:
    """Return the rates of a case that gains or loses as much, with the same probability."""
    return chance.choice(((0.2, 0.8), (0.8, 0.2)))


def help_all(chance: random.Random) -> Rates:
    """Return the rates of a case that gains 60 points."""
    return 0.2, 0.8


WORLDS: dict[str, tuple[World, bool]] = {
    "nothing changes": (change_nothing, False),
    "half gains, half loses": (help_half, False),
    "each case gains 60 points": (help_all, True),
}


def main() -> None:
    """Print the table of docs/gate.md."""
    print("| cases | world | claimed on these cases | falsely | claimed on new cases | falsely |")
    print("|---|---|---|---|---|---|")
    for n_cases in SIZES:
        for name, (world, gains) in WORLDS.items():
            chance = random.Random(f"{name} {n_cases}")
            gates = [play_gate(world, n_cases, chance) for _ in range(GATES)]
            here, false_here, there = (fmean(column) for column in zip(*gates, strict=True))
            false_there = 0.0 if gains else there
            shares = (here, false_here, there, false_there)
            print(
                f"| {n_cases} | {name} | {' | '.join(f'{share:.1%}' for share in shares)} |",
                flush=True,
            )


def play_gate(world: World, n_cases: int, chance: random.Random) -> tuple[bool, bool, bool]:
    """Return whether a gain on these cases is claimed, whether falsely, and whether one on new cases is."""
    rates = [world(chance) for _ in range(n_cases)]
    cases = []
    for number, both in enumerate(rates):
        before, after = (
            tuple(float(chance.random() < rate) for _ in range(REPEATS)) for rate in both
        )
        cases.append(CaseScores(case_id=str(number), before=before, after=after))
    here = compare_cases(cases, name="before").proven == "better"
    gained = fmean(after - before for before, after in rates)
    first = [case.before[0] for case in cases], [case.after[0] for case in cases]
    there = improvement_interval(*first)[1] > 0 and compute_chance(*first) <= CLAIM_LEVEL
    return here, here and gained <= 0, there


if __name__ == "__main__":
    main()
