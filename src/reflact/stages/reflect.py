"""Stage 2: analysts read minibatches of trajectories and propose edits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.calls import Sample
from reflact.config import ReflectConfig
from reflact.data import shuffled
from reflact.errors import ContextOverflow, ReplyError
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.stages.material import show_buffer, show_cases, show_skill
from reflact.stages.replies import (
    AnalystReply,
    Proposal,
    analysing,
    analyst_check,
    operations_on,
    praising,
    success_check,
)
from reflact.tasks import fan_out
from reflact.types import (
    BufferEntry,
    Edit,
    FailurePattern,
    Frozen,
    Item,
    Operation,
    Patch,
    Report,
    Rollout,
    Skill,
    Source,
)


class Minibatch(Frozen):
    """The trajectories of one analyst call, in the plan's order."""

    source: Source
    index: int
    items: tuple[Item, ...]
    rollouts: tuple[Rollout, ...]


def minibatches(
    items: Sequence[Item], rollouts: Sequence[Rollout], config: ReflectConfig, *, seed: int, step: int
) -> tuple[Minibatch, ...]:
    """Deal a batch into minibatches: failures and successes apart, each along one seeded order.

    Unmeasured rollouts are neither.
    """
    order = shuffled(range(len(items)), seed, f"reflect/{step}")
    sources: list[Source] = ["failure"] if config.failure_only else ["failure", "success"]
    dealt = []
    for source in sources:
        chosen = [
            i for i in order if rollouts[i].score is not None and rollouts[i].failed == (source == "failure")
        ]
        size = config.minibatch_size
        for index, start in enumerate(range(0, len(chosen), size)):
            part = chosen[start : start + size]
            dealt.append(
                Minibatch(
                    source=source,
                    index=index,
                    items=tuple(items[i] for i in part),
                    rollouts=tuple(rollouts[i] for i in part),
                )
            )
    return tuple(dealt)


async def reflect(
    batches: Sequence[Minibatch],
    skill: Skill,
    *,
    llm: LLM,
    prompts: PromptBook,
    config: ReflectConfig,
    max_edits: int,
    operations: tuple[Operation, ...],
    buffer: Sequence[BufferEntry],
    step: int,
    report: Callable[[Report], Awaitable[None]] | None = None,
) -> tuple[Report, ...]:
    """Return one report for each minibatch, in order.

    A minibatch whose analyst gave no valid reply, or that does not fit the model's context even when
    its trajectories are cut to half, has a report that says so.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """

    async def one(batch: Minibatch) -> Report:
        done = await _analyse(
            batch,
            skill,
            llm=llm,
            prompts=prompts,
            config=config,
            max_edits=max_edits,
            operations=operations,
            buffer=buffer,
            step=step,
        )
        if report is not None:
            await report(done)
        return done

    return await fan_out(one, batches, limit=config.concurrency)


async def _analyse(
    batch: Minibatch,
    skill: Skill,
    *,
    llm: LLM,
    prompts: PromptBook,
    config: ReflectConfig,
    max_edits: int,
    operations: tuple[Operation, ...],
    buffer: Sequence[BufferEntry],
    step: int,
) -> Report:
    empty = Report(source_type=batch.source, index=batch.index, item_ids=tuple(i.id for i in batch.items))
    sample = Sample(role="optimizer", purpose=f"analyst_{batch.source}", step=step, part=str(batch.index))
    kinds = operations_on(skill, operations)
    for chars in (config.trajectory_chars, config.trajectory_chars // 2):
        prompt = prompts.render(
            f"analyst_{batch.source}",
            {
                "max_edits": str(max_edits),
                "document": show_skill(skill),
                "cases": show_cases(batch.rollouts, batch.items, chars=chars),
                "attempts": show_buffer(buffer),
            },
        )
        try:
            if batch.source == "failure":
                check = analyst_check(skill, cases=len(batch.items), max_edits=max_edits)
                wanted = analysing(kinds, cases=len(batch.items), most=max_edits)
                failure = (await llm.ask(prompt, wanted, sample=sample, check=check)).value
                return _failure_report(empty, failure)
            praise = success_check(skill, max_edits=max_edits)
            success = await llm.ask(prompt, praising(kinds, most=max_edits), sample=sample, check=praise)
            return empty.model_copy(
                update={"patch": _patch(empty, success.value.strengths, success.value.edits)}
            )
        except ReplyError as error:
            return empty.model_copy(update={"refusal": str(error)})
        except ContextOverflow as error:
            refusal = str(error)
    return empty.model_copy(update={"refusal": refusal})


def _failure_report(empty: Report, reply: AnalystReply) -> Report:
    patterns = tuple(
        FailurePattern(type=p.type, count=p.count, description=p.description, item_ids=empty.item_ids)
        for p in reply.patterns
    )
    reasoning = "; ".join(p.description for p in patterns)
    return empty.model_copy(update={"patch": _patch(empty, reasoning, reply.edits), "patterns": patterns})


def _patch(report: Report, reasoning: str, edits: Sequence[Proposal]) -> Patch:
    def supported(edit: Edit) -> Edit:
        return edit.model_copy(
            update={"source_type": report.source_type, "support_count": len(report.item_ids)}
        )

    return Patch(reasoning=reasoning, edits=tuple(supported(e.edit()) for e in edits))
