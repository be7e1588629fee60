"""Notes on the steps of failed trajectories, for the analysts that read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import TypeAdapter

from reflact.ports import Annotator, DecisionLog
from reflact.stages.reflect import Minibatch
from reflact.tasks import fan_out
from reflact.types import AnalystReport, Item, Rollout

NOTES_ADAPTER: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


class AnnotatingAnalyst:
    """Puts notes below the environment's feedback on failed cases, and leaves the rest to an analyst.

    Notes are journalled before they are read, so that a restart reads the same ones.

    Args:
        analyse: Reads the annotated minibatch.
        annotator: Makes the notes.
        journal: Where notes are kept.
        step: The step that uses the report.
    """

    def __init__(
        self,
        analyse: Callable[[Minibatch], Awaitable[AnalystReport]],
        annotator: Annotator,
        *,
        decision_log: DecisionLog,
        step: int,
    ) -> None:
        self._analyse = analyse
        self._annotator = annotator
        self._decision_log = decision_log
        self._step = step

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch.

        Raises:
            ProviderError: An endpoint refused, failed or could not be reached.
        """
        if batch.source == "failure":
            cases = tuple(zip(batch.items, batch.rollouts, strict=True))
            batch = batch.model_copy(update={"rollouts": await fan_out(self._annotate, cases)})
        return await self._analyse(batch)

    async def _annotate(self, case: tuple[Item, Rollout]) -> Rollout:
        item, rollout = case
        notes = await self._get_notes(item, rollout)
        if not notes:
            return rollout
        said = () if rollout.feedback is None else (rollout.feedback,)
        return rollout.model_copy(update={"feedback": "\n".join((*said, *notes))})

    async def _get_notes(self, item: Item, rollout: Rollout) -> tuple[str, ...]:
        label = f"notes/{rollout.key}"
        noted = await self._decision_log.get(self._step, label)
        if noted is None:
            noted = NOTES_ADAPTER.dump_python(
                tuple(await self._annotator.annotate(item, rollout)), mode="json"
            )
            await self._decision_log.put(self._step, label, noted)
        return NOTES_ADAPTER.validate_python(noted)
