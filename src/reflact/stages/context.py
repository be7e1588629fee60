"""What the optimizer's calls of one step share, and the call that falls back if no reply is valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reflact.errors import CallError, ContextOverflow, RequestRefused
from reflact.messages import CallId, NoReply, RenderedPrompt
from reflact.prompts import PromptBook
from reflact.protocols import LLM, DecisionLog, R
from reflact.stages.prompt_sections import BYTES_PER_TOKEN

REPLY_TOKENS = 300
"""The tokens of a reply in the estimate of what a step costs."""


@dataclass
class AskedTokens:
    """The estimated tokens of a step's calls; the same for a resumed step, whose replies are stored."""

    tokens: int = 0

    def add(self, prompt: RenderedPrompt) -> None:
        """Count a call."""
        size = sum(len(message.content.encode("utf-8", "replace")) for message in prompt.messages)
        self.tokens += size // BYTES_PER_TOKEN + REPLY_TOKENS


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The collaborators of the optimizer's calls in one step; the log holds missing replies.

    ``task`` is the prompt section on the tasks, the score and the agent (``show_task``).
    """

    llm: LLM
    prompts: PromptBook
    decision_log: DecisionLog
    step: int
    task: str = ""
    asked: AskedTokens = field(default_factory=AskedTokens)

    async def ask_or_fallback(
        self,
        prompt: str,
        variables: Mapping[str, str],
        reply_type: type[R],
        *,
        purpose: str | None = None,
        part: str = "",
        check: Callable[[R], None] | None = None,
        shorten: Callable[[], Mapping[str, str]] | None = None,
    ) -> R | NoReply:
        """Return the optimizer's reply, or ``NoReply`` if no attempt was valid, or the prompt was too long or refused.

        If the prompt is too long, the call is repeated once with the variables of ``shorten``. That and a
        missing reply are logged before they are used, so that a resumed run does the same. The purpose of the
        call is the prompt's name, unless ``purpose`` is given. ``check`` raises ValueError if a reply cannot
        be used.

        Raises:
            ProviderError: The endpoint refuses all calls, failed or could not be reached; nothing is logged.
        """

        def render(variables: Mapping[str, str]) -> RenderedPrompt:
            return self.prompts.render(prompt, {"task": self.task, **variables})

        return await self.ask_rendered(
            render(variables),
            reply_type,
            purpose=purpose or prompt,
            part=part,
            check=check,
            shorten=None if shorten is None else lambda: render(shorten()),
        )

    async def ask_rendered(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        purpose: str,
        part: str = "",
        check: Callable[[R], None] | None = None,
        shorten: Callable[[], RenderedPrompt] | None = None,
    ) -> R | NoReply:
        """Ask with a rendered prompt, and as ``ask_or_fallback`` does."""
        self.asked.add(prompt)
        call_id = CallId(role="optimizer", purpose=purpose, step=self.step, part=part)
        no_reply, shortened = f"no_reply/{call_id.label}", f"shortened_prompt/{call_id.label}"
        logged = await self.decision_log.find(self.step, [no_reply, shortened])
        if no_reply in logged:
            return NoReply(reason=str(logged[no_reply]))
        if shorten is not None and shortened in logged:
            prompt, shorten = shorten(), None

        async def ask(prompt: RenderedPrompt) -> R:
            return (await self.llm.ask(prompt, reply_type, call_id=call_id, check=check)).value

        try:
            try:
                return await ask(prompt)
            except ContextOverflow as error:
                if shorten is None:
                    raise
                await self.decision_log.put(self.step, shortened, str(error))
            return await ask(shorten())
        except CallError as error:
            if isinstance(error, RequestRefused) and not error.answers_others:
                raise
            await self.decision_log.put(self.step, no_reply, str(error))
            return NoReply(reason=str(error))
