"""The source ``examples``: worked examples from train items, in sets that the race compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from reflact.data import shuffle
from reflact.skills.document import apply_edits
from reflact.text import name_count
from reflact.types import Candidate, Edit, Skill, WorkedExample

HEADING = "## Worked examples"

# Sizes of the first sets; the set of all examples that fit comes first.
FIRST_SIZES = (4, 8, 16, 32)

# A later set swaps one example in so many.
SWAPPED_SHARE = 4


def apply_examples(skill: Skill, examples: Sequence[WorkedExample]) -> Candidate:
    """Return the document with these examples in place of its own ones."""
    section = ""
    if examples:
        shown = [f"Task: {example.task}\nAnswer: {example.answer}" for example in examples]
        section = "\n\n".join((HEADING, *shown)).replace("\r\n", "\n")
    edit = Edit(op="examples", content=section, support_count=max(1, len(examples)))
    label = name_count(len(examples), "example")
    update = {"examples": tuple(examples), "label": label}
    return apply_edits(skill, [edit]).model_copy(update=update)


def shuffle_answers(examples: Sequence[WorkedExample], seed: int) -> tuple[WorkedExample, ...]:
    """Return the examples with their answers shuffled: a control that tells form from content.

    No example keeps its answer, unless one answer serves more than half of them; then the result is
    empty.
    """
    drawn = shuffle(examples, seed, "shuffled answers")
    first = {example.answer: place for place, example in reversed([*enumerate(drawn)])}
    order = sorted(drawn, key=lambda example: first[example.answer])
    shift = max(Counter(example.answer for example in order).values(), default=0)
    if 2 * shift > len(order):
        return ()
    answers = [example.answer for example in (*order[shift:], *order[:shift])]
    by_id = {
        example.item_id: example.model_copy(update={"answer": answer})
        for example, answer in zip(order, answers, strict=True)
    }
    return tuple(by_id[example.item_id] for example in examples)


def group_examples(
    pool: Sequence[WorkedExample], task_types: Sequence[str | None]
) -> tuple[str, ...]:
    """Return the group of each example: its task type, or its answer if there are few answers."""
    if any(task_types):
        return tuple(kind or "" for kind in task_types)
    answers = [example.answer for example in pool]
    return tuple(answers) if 2 * len(set(answers)) <= len(answers) else ("",) * len(answers)


@dataclass(frozen=True, kw_only=True)
class ExampleDraws:
    """Draws up to ``most`` sets of examples from a pool, each of at most ``max_bytes``.

    ``groups`` names the group of each example: every beginning of a draw holds about as many of one
    group as of another.
    """

    pool: Sequence[WorkedExample]
    groups: Sequence[str]
    seed: int
    label: str
    most: int
    max_bytes: int

    def draw_first_sets(self) -> tuple[tuple[WorkedExample, ...], ...]:
        """Return sets of several sizes, the largest first, smaller ones repeatedly."""
        largest = [self._fit(self._draw(number)) for number in range(self.most)]
        full = len(largest[0])
        sizes = [full, *(size for size in reversed(FIRST_SIZES) if size < full)]
        return self._keep_distinct([order[:size] for order in largest for size in sizes])

    def draw_variants(
        self, current: Sequence[WorkedExample], failed: Collection[str]
    ) -> tuple[tuple[WorkedExample, ...], ...]:
        """Return variants of a document's examples.

        Items that still fail (``failed``) come in first, in place of some of the present ones or
        beside them; another variant is half of the present ones, and the rest are new draws of the
        same size and of twice the size.
        """
        used = {example.item_id for example in current}
        sets: list[tuple[WorkedExample, ...]] = []
        for number in range(self.most):
            order = self._draw(number)
            fresh = [example for example in order if example.item_id not in used]
            fresh.sort(key=lambda example: example.item_id not in failed)
            kept = shuffle(current, self.seed, f"{self.label}/kept/{number}")
            swapped = max(1, len(kept) // SWAPPED_SHARE)
            sets += [
                (*kept, *fresh[: max(2, len(kept) // 2)]),
                (*kept[swapped:], *fresh[:swapped]),
                order[: 2 * len(kept)],
                kept[: (len(kept) + 1) // 2],
                order[: len(kept)],
            ]
        fitting = [self._fit(each) for each in sets]
        return self._keep_distinct([s for s in fitting if {e.item_id for e in s} != used])

    def _draw(self, number: int) -> tuple[WorkedExample, ...]:
        """Return the pool in a seeded order in which the examples of each group are spread."""
        order = shuffle(range(len(self.pool)), self.seed, f"{self.label}/{number}")
        n_of_group: Counter[str] = Counter()
        ranks = {}
        for index in order:
            ranks[index] = n_of_group[self.groups[index]]
            n_of_group[self.groups[index]] += 1
        return tuple(self.pool[index] for index in sorted(order, key=lambda index: ranks[index]))

    def _fit(self, examples: Sequence[WorkedExample]) -> tuple[WorkedExample, ...]:
        """Return the examples that fit, in their order; one that is too long is passed over."""
        fitting: list[WorkedExample] = []
        left = self.max_bytes - len(HEADING)
        for example in examples:
            size = len(f"Task: {example.task}\nAnswer: {example.answer}\n\n".encode())
            if size <= left:
                fitting.append(example)
                left -= size
        return tuple(fitting)

    def _keep_distinct(
        self, sets: Sequence[tuple[WorkedExample, ...]]
    ) -> tuple[tuple[WorkedExample, ...], ...]:
        """Return the first sets that are not empty, each set of items once."""
        first: dict[frozenset[str], tuple[WorkedExample, ...]] = {}
        for each in sets:
            if each:
                first.setdefault(frozenset(example.item_id for example in each), each)
        return tuple(first.values())[: self.most]
