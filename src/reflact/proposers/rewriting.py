"""The proposers ``one_shot`` and ``best_of_n``: whole documents, each written by one call from all evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from reflact.concurrency import fan_out
from reflact.config.training import ReflectConfig
from reflact.messages import NoReply, RenderedPrompt
from reflact.prompts import PromptBook
from reflact.protocols import StepBudget, StepEvidence
from reflact.stages.evaluate import GateMetric, build_measurement
from reflact.stages.prompt_sections import (
    join_sections,
    show_buffer,
    show_memory,
    show_meta,
    show_skill,
    show_step_cases,
)
from reflact.stages.reflect import build_pattern
from reflact.stages.reply_models import (
    ReasonedOneShotReply,
    check_document_rules,
    check_reply,
    one_shot_reply_type,
)
from reflact.types import Rewrite, Skill, Split

PURPOSE = "one_shot"
"""The prompt of a rewrite, and the purpose of its calls."""


@dataclass(frozen=True)
class RewritingProposer:
    """Asks for ``n`` documents in independent calls; several are rolled out on the step's items, the best first.

    ``metric`` is the gate's. Documents are compared on the items that were measured under all of them; among
    equals the earlier one comes first.
    """

    n: int
    prompts: PromptBook
    config: ReflectConfig
    metric: GateMetric

    @property
    def identity(self) -> str:
        """Its name; the configuration, which the run's identity holds, has the rest."""
        return PURPOSE if self.n == 1 else f"best_of_{self.n}"

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> tuple[Rewrite, ...]:
        """Return the documents, the best first, and then the calls without a valid reply."""
        if not evidence.cases:
            return (Rewrite(reason="there is no case to learn from"),)
        write = partial(self._write, skill, evidence, budget)
        rewrites = await fan_out(write, range(self.n), limit=self.config.concurrency)
        written = [rewrite for rewrite in rewrites if rewrite.document is not None]
        if len(written) > 1:
            written = await self._rank(written, budget)
        return (*written, *(rewrite for rewrite in rewrites if rewrite.document is None))

    async def _write(self, skill: Skill, evidence: StepEvidence, budget: StepBudget, number: int) -> Rewrite:
        failures = [case for case in evidence.cases if case.failed]
        successes = [case for case in evidence.cases if not case.failed]
        cases = (*failures, *successes)
        tokens = self.config.trajectory_tokens * math.ceil(len(cases) / self.config.minibatch_size)

        def render(tokens: int) -> RenderedPrompt:
            attempts = join_sections(
                show_buffer(evidence.attempts),
                show_memory(evidence.rejected_edits),
                show_meta(evidence.meta_skill),
            )
            values = {
                "task": evidence.task,
                "document": show_skill(skill),
                "attempts": attempts,
                "cases": show_step_cases(failures, successes, tokens=tokens),
            }
            return self.prompts.render(PURPOSE, values)

        def check(reply: ReasonedOneShotReply) -> None:
            check_reply(reply, skill=skill)
            check_document_rules(reply.document, skill, [case.item for case in cases])

        reply = await budget.ask(
            render(tokens),
            one_shot_reply_type(failures=len(failures)),
            purpose=PURPOSE,
            part=str(number),
            check=check,
            shorten=lambda: render(min(tokens // 2, self.config.trajectory_tokens)),
        )
        if isinstance(reply, NoReply):
            return Rewrite(reason=reply.reason, number=number)
        return Rewrite(
            document=reply.document,
            reasoning=reply.reasoning,
            patterns=tuple(
                build_pattern(pattern, [c.item.id for c in failures]) for pattern in reply.patterns
            ),
            number=number,
        )

    async def _rank(self, written: Sequence[Rewrite], budget: StepBudget) -> list[Rewrite]:
        """Return the documents with their means on the step's items, the best first."""
        rolled = await budget.roll_out([str(rewrite.document) for rewrite in written])
        scores = [[self.metric.score_rollout(rollout) for rollout in rollouts] for rollouts in rolled]
        common = [n for n, row in enumerate(zip(*scores, strict=True)) if None not in row]
        means = [math.fsum(row[n] or 0.0 for n in common) for row in scores]
        measured = [
            rewrite.model_copy(
                update={"measurement": build_measurement(rollouts[0].skill_hash, Split.train, rollouts)}
            )
            for rewrite, rollouts in zip(written, rolled, strict=True)
        ]
        return [measured[n] for n in sorted(range(len(measured)), key=lambda n: -means[n])]
