"""One way to ask for a decision that may not be had, so that its absence is decided once."""

from __future__ import annotations

from collections.abc import Callable

from reflact.calls import Rendered, Reply, Sample
from reflact.errors import ContextOverflow, ReplyError
from reflact.ports import LLM, Journal, R
from reflact.types import Frozen


class Refusal(Frozen):
    """A decision that could not be had, and why."""

    reason: str


async def ask_or_refusal(
    llm: LLM,
    prompt: Rendered,
    reply_type: type[R],
    *,
    sample: Sample,
    check: Callable[[R], None] | None = None,
    journal: Journal,
    shorter: Callable[[], Rendered] | None = None,
) -> Reply[R] | Refusal:
    """Return a model's reply, or why there is none: no attempt was valid, or the prompt was too long.

    The absence is journalled before it is returned; a restart meets it again without asking. Where the
    prompt is too long, ``shorter`` is asked for another one, once; that is journalled as well, so that a
    restart asks with the same prompt.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached; nothing is journalled.
        ValueError: The sample belongs to no step.
    """
    if sample.step is None:
        raise ValueError(f"{sample.label} belongs to no step, so its absence cannot be journalled")
    step, refused, shrunk = sample.step, f"refusal/{sample.label}", f"shrunk/{sample.label}"
    noted = await journal.recall(step, refused)
    if noted is not None:
        return Refusal(reason=str(noted))
    if shorter is not None and await journal.recall(step, shrunk) is not None:
        prompt, shorter = shorter(), None
    try:
        try:
            return await llm.ask(prompt, reply_type, sample=sample, check=check)
        except ContextOverflow as error:
            if shorter is None:
                raise
            await journal.note(step, shrunk, str(error))
        return await llm.ask(shorter(), reply_type, sample=sample, check=check)
    except (ReplyError, ContextOverflow) as error:
        await journal.note(step, refused, str(error))
        return Refusal(reason=str(error))
