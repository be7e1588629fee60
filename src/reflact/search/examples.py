"""The source ``examples``: worked examples from train items, in sets that the race compares."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from reflact.data import shuffle
from reflact.skills.document import apply_edits
from reflact.types import Candidate, Edit, Skill, WorkedExample

HEADING = "## Worked examples"

# Sizes of the first sets; the set of all examples that fit comes first.
FIRST_SIZES = (4, 8, 16, 32)

# A later set swaps one example in so many.
SWAPPED_SHARE = 4


def render_examples(examples: Sequence[WorkedExample]) -> str:
    """Return the section of worked examples; empty for none."""
    if not examples:
        return ""
    shown = [f"Task: {example.task}\nAnswer: {example.answer}" for example in examples]
    return "\n\n".join((HEADING, *shown)).replace("\r\n", "\n")


def apply_examples(skill: Skill, examples: Sequence[WorkedExample]) -> Candidate:
    """Return the document with these examples in place of its own ones."""
    edit = Edit(
        op="examples", content=render_examples(examples), support_count=max(1, len(examples))
    )
    candidate = apply_edits(skill, [edit])
    return candidate.model_copy(update={"examples": tuple(examples)})


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


def fit_examples(examples: Sequence[WorkedExample], max_bytes: int) -> tuple[WorkedExample, ...]:
    """Return the examples that fit, in their order; one that is too long is passed over."""
    fitting: list[WorkedExample] = []
    left = max_bytes - len(HEADING)
    for example in examples:
        size = (
            len(example.task.encode()) + len(example.answer.encode()) + len("Task: \nAnswer: \n\n")
        )
        if size <= left:
            fitting.append(example)
            left -= size
    return tuple(fitting)


def spread(
    pool: Sequence[WorkedExample], groups: Sequence[str], seed: int, label: str
) -> tuple[WorkedExample, ...]:
    """Return a pool in a seeded order in which the examples of each group are spread evenly.

    ``groups`` names the group of each example, such as its task type: every beginning of the result
    holds about as many of one group as of another.
    """
    order = shuffle(range(len(pool)), seed, label)
    by_group: defaultdict[str, list[int]] = defaultdict(list)
    for index in order:
        by_group[groups[index]].append(index)
    ranks = {index: rank for members in by_group.values() for rank, index in enumerate(members)}
    position = {index: place for place, index in enumerate(order)}
    return tuple(
        pool[index] for index in sorted(order, key=lambda index: (ranks[index], position[index]))
    )


def group_examples(
    pool: Sequence[WorkedExample], task_types: Sequence[str | None]
) -> tuple[str, ...]:
    """Return the group of each example: its task type, or its answer if there are few answers."""
    if any(task_types):
        return tuple(kind or "" for kind in task_types)
    answers = [example.answer for example in pool]
    return tuple(answers) if 2 * len(set(answers)) <= len(answers) else ("",) * len(answers)


def draw_first_sets(
    pool: Sequence[WorkedExample],
    groups: Sequence[str],
    *,
    seed: int,
    label: str,
    most: int,
    max_bytes: int,
) -> tuple[tuple[WorkedExample, ...], ...]:
    """Return up to ``most`` sets of several sizes, the largest first, smaller ones repeatedly."""
    orders = [spread(pool, groups, seed, f"{label}/{draw}") for draw in range(most)]
    largest = [fit_examples(order, max_bytes) for order in orders]
    full = len(largest[0]) if largest else 0
    sizes = [full, *(size for size in reversed(FIRST_SIZES) if size < full)]
    drawn = [largest[draw][:size] for draw in range(most) for size in sizes]
    return _keep_distinct(drawn)[:most]


def draw_variants(
    current: Sequence[WorkedExample],
    pool: Sequence[WorkedExample],
    groups: Sequence[str],
    failed: Collection[str],
    *,
    seed: int,
    label: str,
    most: int,
    max_bytes: int,
) -> tuple[tuple[WorkedExample, ...], ...]:
    """Return up to ``most`` variants of a document's examples.

    Items that still fail (``failed``) come in first, in place of some of the present ones or beside
    them; another variant is half of the present ones, and the rest are new draws of the same size
    and of twice the size.
    """
    used = {example.item_id for example in current}
    orders = [spread(pool, groups, seed, f"{label}/{draw}") for draw in range(most)]
    sets: list[tuple[WorkedExample, ...]] = []
    for draw, order in enumerate(orders):
        fresh = [e for e in order if e.item_id not in used]
        fresh.sort(key=lambda example: example.item_id not in failed)
        kept = shuffle(current, seed, f"{label}/kept/{draw}")
        swapped = max(1, len(kept) // SWAPPED_SHARE)
        sets += [
            (*kept, *fresh[: max(2, len(kept) // 2)]),
            (*kept[swapped:], *fresh[:swapped]),
            tuple(order[: 2 * len(kept)]),
            tuple(kept[: (len(kept) + 1) // 2]),
            tuple(order[: len(kept)]),
        ]
    fitting = [fit_examples(each, max_bytes) for each in sets]
    return _keep_distinct([each for each in fitting if {e.item_id for e in each} != used])[:most]


def _keep_distinct(
    sets: Sequence[tuple[WorkedExample, ...]],
) -> tuple[tuple[WorkedExample, ...], ...]:
    """Return the sets that are not empty, each set of items once."""
    first: dict[frozenset[str], tuple[WorkedExample, ...]] = {}
    for each in sets:
        if each:
            first.setdefault(frozenset(example.item_id for example in each), each)
    return tuple(first.values())
