"""Notes on the steps of failed trajectories, for the analysts that read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import TypeAdapter

from reflact.ports import Annotator, Journal
from reflact.stages.reflect import Minibatch
from reflact.tasks import fan_out
from reflact.types import Item, Report, Rollout

NOTES: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


class Annotated:
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
        analyse: Callable[[Minibatch], Awaitable[Report]],
        annotator: Annotator,
        *,
        journal: Journal,
        step: int,
    ) -> None:
        self._analyse = analyse
        self._annotator = annotator
        self._journal = journal
        self._step = step

    async def report(self, batch: Minibatch) -> Report:
        """Return the report on a minibatch.

        Raises:
            ProviderError: An endpoint refused, failed or could not be reached.
        """
        if batch.source == "failure":
            cases = tuple(zip(batch.items, batch.rollouts, strict=True))
            batch = batch.model_copy(update={"rollouts": await fan_out(self._annotated, cases)})
        return await self._analyse(batch)

    async def _annotated(self, case: tuple[Item, Rollout]) -> Rollout:
        item, rollout = case
        notes = await self._notes(item, rollout)
        if not notes:
            return rollout
        said = () if rollout.feedback is None else (rollout.feedback,)
        return rollout.model_copy(update={"feedback": "\n".join((*said, *notes))})

    async def _notes(self, item: Item, rollout: Rollout) -> tuple[str, ...]:
        label = f"notes/{rollout.key}"
        noted = await self._journal.recall(self._step, label)
        if noted is None:
            noted = NOTES.dump_python(tuple(await self._annotator.annotate(item, rollout)), mode="json")
            await self._journal.note(self._step, label, noted)
        return NOTES.validate_python(noted)
