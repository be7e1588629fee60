"""What a judge and some answers of a person prove: false claims and power, over judges that err in many ways.

    python benchmarks/corrected_claim.py                    all cells, in about fifteen minutes
    python benchmarks/corrected_claim.py --runs 200

A run draws pairs of answers from a population in which the candidate's is better, equal or worse. The judge votes on
each pair four times, twice in each order. A person answers some pairs; two in five are equal. A claim is false if the
population has no gain.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pool
from typing import NamedTuple

from harness import at_most, write_results

from reflact.gate.corrected_claim import LOOKS, JudgedPair, correct_claim, order_pairs

RUNS = 2_000
PAIRS = 200
VOTES = 4
TIES = 0.4
ANSWERS = (30, 60, 120)
GAINS = (0.0, 0.05, 0.1, 0.2)

Draw = Callable[[], int]
Judge = Callable[[random.Random, int, Draw], Callable[[], int]]


def find_right(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """A judge whose votes are right, or as good as drawn; its verdicts have a kappa of .6."""
    return lambda: right if chance.random() < 0.61 else draw()


def forgive(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """A lenient judge, which seldom says that the candidate is worse."""

    def vote() -> int:
        said = right if chance.random() < 0.5 else draw()
        return 0 if said < 0 and chance.random() < 0.6 else said

    return vote


def like_long(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """A judge that is fond of the longer answer, which is the candidate's in three of four pairs."""
    longer = 1 if chance.random() < 0.75 else -1
    return lambda: right if chance.random() < 0.35 else longer


def like_candidate(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """A judge that is fond of the candidate."""
    return lambda: right if chance.random() < 0.4 else 1


def say_opposite(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """An adversarial judge, which mostly says the opposite of what is right."""
    return lambda: -right if chance.random() < 0.5 else draw()


def say_equal(chance: random.Random, right: int, draw: Draw) -> Callable[[], int]:
    """No judge: all answers are equal to it."""
    return lambda: 0


JUDGES: dict[str, Judge] = {
    "unbiased": find_right,
    "lenient": forgive,
    "fond of long answers": like_long,
    "fond of the candidate": like_candidate,
    "adversarial": say_opposite,
}


class Cell(NamedTuple):
    """The runs of a judge, a gain and a number of answers."""

    judge: str
    gain: float
    n_answers: int
    runs: int


class Counts(NamedTuple):
    """Claims of a cell at any look so far: with the judge, without it, and without it from half as many more answers.

    Then the intervals that hold the gain.
    """

    claims: int
    alone: int
    alone_with_more: int
    covered: int


def play_cell(cell: Cell) -> tuple[Cell, Counts]:
    """Play the runs of a cell."""
    chance = random.Random(f"{cell.judge} {cell.gain} {cell.n_answers}")
    runs = [play_run(cell, chance) for _ in range(cell.runs)]
    return cell, Counts(*(sum(column) for column in zip(*runs, strict=True)))


def play_run(cell: Cell, chance: random.Random) -> Counts:
    """Play one run."""
    rights = [draw_preference(chance, cell.gain) for _ in range(PAIRS)]
    pairs = list(judge_pairs(JUDGES[cell.judge], rights, cell.gain, chance))
    order = order_pairs(pairs, seed=chance.randrange(2**32))
    known = {pair.pair_id: right for pair, right in zip(pairs, rights, strict=True)}

    def prove(pairs: list[JudgedPair], order: Sequence[str], looks: Sequence[int]) -> bool:
        for number, look in enumerate(looks, 1):
            answers = {pair_id: known[pair_id] for pair_id in order[:look]}
            if correct_claim(pairs, answers, look=number).proven == "better":
                return True
        return False

    looks = [look for look in LOOKS if look <= cell.n_answers]
    blind = list(judge_pairs(say_equal, rights, cell.gain, chance))
    unsorted = order_pairs(blind, seed=chance.randrange(2**32))
    answers = {pair_id: known[pair_id] for pair_id in order[: cell.n_answers]}
    gain = correct_claim(pairs, answers).gain
    return Counts(
        claims=prove(pairs, order, looks),
        alone=prove(blind, unsorted, looks),
        alone_with_more=prove(blind, unsorted, [look * 3 // 2 for look in looks]),
        covered=gain.low <= cell.gain <= gain.high,
    )


def draw_preference(chance: random.Random, gain: float) -> int:
    """Draw whether the candidate's answer is better, equal or worse."""
    place = chance.random()
    better = (1 - TIES + gain) / 2
    if place < better:
        return 1
    return 0 if place < better + TIES else -1


def judge_pairs(
    judge: Judge, rights: list[int], gain: float, chance: random.Random
) -> Iterator[JudgedPair]:
    """Give the pairs with the votes of a judge."""
    for number, right in enumerate(rights):
        vote = judge(chance, right, lambda: draw_preference(chance, gain))
        votes = tuple(float(vote()) for _ in range(VOTES))
        yield JudgedPair(pair_id=str(number), votes=votes)


def main() -> None:
    """Print the table of docs/benchmarks.md, and draw its picture."""
    parser = argparse.ArgumentParser(description="Simulate claims that correct a judge.")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of each cell")
    runs = parser.parse_args().runs
    cells = [Cell(judge, gain, n, runs) for judge in JUDGES for n in ANSWERS for gain in GAINS]
    results = dict[Cell, Counts]()
    with Pool() as pool:
        for cell, counts in pool.imap(play_cell, cells):
            results[cell] = counts
    columns = " | ".join(f"gain {100 * gain:.0f}" for gain in GAINS[1:])
    print(f"| judge | answers | false claims | at most | intervals hold | {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    for judge in JUDGES:
        for n in ANSWERS:
            false = results[Cell(judge, 0.0, n, runs)].claims
            covered = min(results[Cell(judge, gain, n, runs)].covered for gain in GAINS)
            texts = [
                f"{share:.1%}" for share in (false / runs, at_most(false, runs), covered / runs)
            ]
            for gain in GAINS[1:]:
                counts = results[Cell(judge, gain, n, runs)]
                both = (counts.claims, counts.alone, counts.alone_with_more)
                texts.append(" / ".join(f"{100 * count / runs:.0f}" for count in both))
            print(f"| {judge} | {n} | {' | '.join(texts)} |")
    write_results("corrected_claim", [[*cell, *counts] for cell, counts in results.items()])


if __name__ == "__main__":
    main()
