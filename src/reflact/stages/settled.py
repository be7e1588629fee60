"""One way to ask for a decision that may not be had, so that its absence is decided once."""

from __future__ import annotations

from collections.abc import Callable

from reflact.calls import CallId, RenderedPrompt, Reply
from reflact.errors import ContextOverflow, ReplyError
from reflact.ports import LLM, DecisionLog, R
from reflact.types import FrozenModel


class NoReply(FrozenModel):
    """A decision that could not be had, and why."""

    reason: str


async def ask_or_fallback(
    llm: LLM,
    prompt: RenderedPrompt,
    reply_type: type[R],
    *,
    call_id: CallId,
    check: Callable[[R], None] | None = None,
    decision_log: DecisionLog,
    shorten: Callable[[], RenderedPrompt] | None = None,
) -> Reply[R] | NoReply:
    """Return a model's reply, or why there is none: no attempt was valid, or the prompt was too long.

    The absence is journalled before it is returned; a restart meets it again without asking. Where the
    prompt is too long, ``shorter`` is asked for another one, once; that is journalled as well, so that a
    restart asks with the same prompt.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached; nothing is journalled.
        ValueError: The sample belongs to no step.
    """
    if call_id.step is None:
        raise ValueError(f"{call_id.label} belongs to no step, so its absence cannot be journalled")
    step, refused, shrunk = call_id.step, f"refusal/{call_id.label}", f"shrunk/{call_id.label}"
    noted = await decision_log.get(step, refused)
    if noted is not None:
        return NoReply(reason=str(noted))
    if shorten is not None and await decision_log.get(step, shrunk) is not None:
        prompt, shorten = shorten(), None
    try:
        try:
            return await llm.ask(prompt, reply_type, call_id=call_id, check=check)
        except ContextOverflow as error:
            if shorten is None:
                raise
            await decision_log.put(step, shrunk, str(error))
        return await llm.ask(shorten(), reply_type, call_id=call_id, check=check)
    except (ReplyError, ContextOverflow) as error:
        await decision_log.put(step, refused, str(error))
        return NoReply(reason=str(error))
