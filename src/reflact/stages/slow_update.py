"""The end of an epoch: compares two epochs' skills, and writes guidance and advice from that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from reflact.concurrency import fan_out
from reflact.config.training import SlowUpdateConfig
from reflact.data import shuffle
from reflact.errors import RunFailed
from reflact.messages import NoReply, ReplyModel
from reflact.prompts import fence
from reflact.records import ComparisonCategory, ItemComparison
from reflact.skills.document import check_region_text
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_case, show_meta, show_skill
from reflact.types import FrozenModel, Item, Rollout, Skill, is_failure


class GuidanceReply(ReplyModel):
    """What the comparison says about the earlier guidance, and the guidance from now on."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        description="What got better, what got worse and what keeps failing, and why."
    )
    helped: Literal["helped", "hurt", "unclear", "none"] = Field(
        description="Whether the earlier guidance helped; none if there was none."
    )
    guidance: str = Field(
        min_length=1,
        description="The new guidance, as Markdown: what the assistant should heed on every task.",
    )


class MemoryReply(ReplyModel):
    """What to remember about editing this document."""

    version: ClassVar[int] = 1
    reasoning: str = Field(description="Which changes helped, which hurt, and why.")
    memory: str = Field(
        min_length=1,
        description="Advice for future edits: which kinds help here, which do not, what to try "
        "next.",
    )


async def slow_update(
    earlier: Skill,
    current: Skill,
    *,
    context: StageContext,
    epoch: int,
    comparison: str,
    guidance: str,
) -> GuidanceReply | NoReply:
    """Return new guidance from the comparison of the skills at the last steps of two epochs."""
    return await context.ask_or_fallback(
        "slow_update",
        {
            "earlier": show_skill(earlier),
            "document": show_skill(current),
            "guidance": fence("guidance", guidance) if guidance else "There is no guidance yet.",
            "comparison": comparison,
        },
        GuidanceReply,
        part=f"epoch-{epoch}",
        check=lambda reply: check_region_text(reply.guidance),
    )


async def update_meta_skill(
    earlier: Skill,
    current: Skill,
    *,
    context: StageContext,
    epoch: int,
    comparison: str,
    attempts: str,
    memory: str,
) -> MemoryReply | NoReply:
    """Return the optimizer's memory after the comparison of two epochs' skills.

    The arguments are those of ``slow_update``, and ``attempts`` (the outcomes of the epoch's steps,
    as text) and ``memory`` (the memory so far).
    """
    variables = {
        "earlier": show_skill(earlier),
        "document": show_skill(current),
        "attempts": attempts,
        "memory": show_meta(memory),
        "comparison": comparison,
    }
    part = f"epoch-{epoch}"
    return await context.ask_or_fallback("meta_skill", variables, MemoryReply, part=part)


CHANGED_CATEGORIES: frozenset[ComparisonCategory] = frozenset({"improved", "regressed"})

# The category of an item, by whether it failed before and after.
CATEGORIES: Mapping[tuple[bool, bool], ComparisonCategory] = {
    (True, False): "improved",
    (False, True): "regressed",
    (True, True): "persistent_failure",
    (False, False): "stable_success",
}
CATEGORY_WORDS: Mapping[ComparisonCategory, str] = {
    "improved": "wrong before, right now",
    "regressed": "right before, wrong now",
    "persistent_failure": "wrong before and now",
    "stable_success": "right before and now",
}


class ComparedItem(FrozenModel):
    """One item with its rollouts under the earlier and the later skill, and their scores."""

    item: Item
    before: Rollout
    after: Rollout
    comparison: ItemComparison

    @property
    def category(self) -> ComparisonCategory:
        """How its outcome changed."""
        return self.comparison.category

    @property
    def is_changed(self) -> bool:
        """Whether its outcome differs."""
        return self.category in CHANGED_CATEGORIES


class Comparison(FrozenModel):
    """The items that a comparison shows, and the measured ones that its policy left out."""

    chosen: tuple[ComparedItem, ...]
    left_out: tuple[ComparedItem, ...] = ()


async def compare_skills(
    items: Sequence[Item],
    earlier: Skill,
    later: Skill,
    *,
    roll: Callable[[Sequence[Item], Skill], Awaitable[Sequence[Rollout]]],
    config: SlowUpdateConfig,
    threshold: float | None,
    seed: int,
    epoch: int,
) -> Comparison:
    """Compare two skills on up to ``config.samples`` train items on which both were measured.

    The items are shuffled with ``seed + 2000 * epoch``. ``mixed`` takes the first ones. ``changed``
    and ``unchanged`` select items whose outcome differs, or does not. They roll out as many further
    items at a time until there are enough or none are left; the others that were measured are left
    out. The order of completion has no effect.
    """
    order = shuffle(items, seed + 2000 * epoch, "slow")
    samples = config.samples
    policy = config.pair_policy
    # The second of equal skills reads the rollouts of the first.
    at_once = 1 if earlier.hash == later.hash else 2
    selected: list[ComparedItem] = []
    measured: list[ComparedItem] = []
    for start in range(0, len(order), samples):
        chunk = order[start : start + samples]
        before, after = await fan_out(partial(roll, chunk), (earlier, later), limit=at_once)
        pairs = categorize_items(chunk, before, after, threshold)
        measured += pairs
        if not measured:
            lost = next(r for r in (*before, *after) if r.score is None)
            raise RunFailed(
                f"no train item could be measured under both skills; one failure: {lost.error}"
            )
        if policy != "mixed":
            pairs = tuple(pair for pair in pairs if pair.is_changed == (policy == "changed"))
        selected += pairs
        if policy == "mixed" or len(selected) >= samples:
            break
    chosen = tuple(selected[:samples])
    left_out = tuple(pair for pair in measured if pair not in chosen)
    return Comparison(chosen=chosen, left_out=left_out)


def categorize_items(
    items: Sequence[Item],
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    threshold: float | None,
) -> tuple[ComparedItem, ...]:
    """Return the items with their categories, without those unmeasured on either side."""
    pairs = []
    for item, old, new in zip(items, before, after, strict=True):
        if old.score is None or new.score is None:
            continue
        category = CATEGORIES[is_failure(old, threshold), is_failure(new, threshold)]
        comparison = ItemComparison(
            item_id=item.id, category=category, before=old.score, after=new.score
        )
        pairs.append(ComparedItem(item=item, before=old, after=new, comparison=comparison))
    return tuple(pairs)


def show_comparison(pairs: Sequence[ComparedItem], *, tokens: int) -> str:
    """Return the pairs as numbered, fenced cases; pairs with a changed outcome come first.

    Each case shows the later trajectory, and the earlier answer if it differs.
    """
    share = max(1, tokens // len(pairs))
    counted = Counter(pair.category for pair in pairs)
    counts = [f"{counted[name]} {words}" for name, words in CATEGORY_WORDS.items() if counted[name]]
    sections = [f"{len(pairs)} tasks: {', '.join(counts)}."]
    for number, pair in enumerate(sorted(pairs, key=lambda p: not p.is_changed), 1):
        lines = [f"outcome: {CATEGORY_WORDS[pair.category]}"]
        if pair.before.answer != pair.after.answer:
            lines.append(f"earlier answer: {pair.before.answer}")
        failed = pair.category in {"regressed", "persistent_failure"}
        lines.append(show_case(pair.after, pair.item, failed=failed, tokens=share))
        sections.append(fence(f"case_{number}", "\n".join(lines)))
    return "\n\n".join(sections)
