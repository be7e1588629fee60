"""What the optimizer's calls of one step share, and the call that may end without a reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from reflact.errors import CallError, ContextOverflow, RequestRefused
from reflact.messages import CallId, NoReply, RenderedPrompt
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM, DecisionLog, R
from reflact.stages.prompt_sections import BYTES_PER_TOKEN
from reflact.types import Rollout

# The tokens of a reply in the estimate of what a step costs.
REPLY_TOKENS = 300


class Journal(DecisionLog):
    """The outcomes of a loop of your own, in memory: what is known is not done again.

    It is the ``protocols.RolloutStore`` too; a run has a store on disk in its place.
    """

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._outcomes: dict[tuple[int, str], JsonValue] = {}

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        """Return the known rollouts among the keys."""
        return {key: self._rollouts[key] for key in keys if key in self._rollouts}

    async def store_rollout(self, rollout: Rollout) -> None:
        """Keep a measured rollout."""
        self._rollouts.setdefault(rollout.key, rollout)

    async def get(self, step: int, label: str) -> JsonValue:
        """Return the outcome of a step under a label, or None."""
        return self._outcomes.get((step, label))

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return the outcomes among those of the labels."""
        known = [label for label in labels if (step, label) in self._outcomes]
        return {label: self._outcomes[step, label] for label in known}

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Keep an outcome; the first one under a label stays."""
        self._outcomes.setdefault((step, label), value)


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The collaborators of the optimizer's calls in one step; the log holds missing replies.

    Attributes:
        llm: The optimizer.
        prompts: Its prompts; by default those of the package.
        decision_log: By default one in memory, as for a loop of your own.
        step: The number of the step, from 1.
        task: The prompt section on the tasks, the score and the agent (``show_task``).
        asked: The estimated tokens of each call so far, whether its reply was stored or not.
    """

    llm: LLM
    prompts: PromptBook = field(default_factory=load_prompts)
    decision_log: DecisionLog = field(default_factory=Journal)
    step: int = 1
    task: str = ""
    asked: list[int] = field(default_factory=list)

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
        """Render a prompt and ask, as ``ask_rendered`` does.

        The purpose of the call is the prompt's name, unless ``purpose`` is given. ``shorten``
        returns variables in place of some, for a prompt that is too long.
        """

        def render(**changes: str) -> RenderedPrompt:
            return self.prompts.render(prompt, {"task": self.task, **variables, **changes})

        return await self.ask_rendered(
            render(),
            reply_type,
            purpose=purpose or prompt,
            part=part,
            check=check,
            shorten=None if shorten is None else lambda: render(**shorten()),
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
        """Return the reply, or ``NoReply`` if none was valid, or the prompt too long or refused.

        If the prompt is too long, the call is repeated once with the prompt of ``shorten``. That
        and a missing reply are logged before they are used, so that a resumed run does the same.
        ``check`` raises ValueError if a reply cannot be used.
        """
        size = sum(len(message.content.encode("utf-8", "replace")) for message in prompt.messages)
        self.asked.append(size // BYTES_PER_TOKEN + REPLY_TOKENS)
        call_id = CallId(role="optimizer", purpose=purpose, step=self.step, part=part)
        no_reply = f"no_reply/{call_id.label}"
        shortened = f"shortened_prompt/{call_id.label}"
        logged = await self.decision_log.find(self.step, [no_reply, shortened])
        if no_reply in logged:
            return NoReply(reason=str(logged[no_reply]))
        if shorten is not None and shortened in logged:
            prompt = shorten()
            shorten = None

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
