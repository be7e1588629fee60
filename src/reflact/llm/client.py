"""The one door to a role's model: instructor over the openai client over httpx.

Each attempt of a call is one request through the stack of transports; ``reflact.llm.effects`` says why.
An attempt that gives nothing valid (malformed, refused, cut off, or not fitting the data at hand) is sent
back with the reason, in one conversation that grows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from json import JSONDecodeError
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, JsonValue, ValidationError

from reflact.calls import Draft, Message, Rendered, Reply, ReplyModel, Sample, Text
from reflact.config import BudgetConfig
from reflact.errors import ConfigError, ModelError, ProviderError, ReflactError, ReplyError
from reflact.events import Event
from reflact.llm.budget import Budget
from reflact.llm.drafting import Audience, shown
from reflact.llm.effects import REPLY_HEADER, SAMPLE_HEADER, EffectTransport
from reflact.llm.framing import FramingTransport
from reflact.llm.keys import seed_of
from reflact.llm.limits import LimitChange, endpoint_for
from reflact.llm.modes import ORDER, Body, Mode, messages_for, refused, wire
from reflact.llm.network import Network
from reflact.llm.paying import PayingTransport
from reflact.llm.prices import usd_of
from reflact.llm.retries import RetryTransport
from reflact.llm.secrets import ScrubTransport, key_for, own_headers, refuse_key_in, unlogged
from reflact.llm.telling import CALL, Call
from reflact.llm.translate import sentence, translated, unusable
from reflact.llm.usage import usage_of
from reflact.ports import EffectStore, Emit, Journal
from reflact.results import Usage
from reflact.roles import ModelConfig
from reflact.tasks import SingleFlight, Stream
from reflact.types import canonical

R = TypeVar("R", bound=ReplyModel)

REASON = 500
"""Characters of the reason for which a reply is sent back, on one line: it may quote the reply."""


class _Invalid(Exception):
    """An attempt that gave nothing usable: the reason, what the model wrote, and what it consumed."""

    def __init__(self, reason: str, completion: ChatCompletion, usage: Usage) -> None:
        super().__init__(_whole(" ".join(reason.split())[:REASON]))
        message = completion.choices[0].message
        calls = message.tool_calls or []
        arguments = [call.function.arguments for call in calls if call.type == "function"]
        self.written = _whole(message.content or "".join(arguments))
        self.usage = usage


class Client:
    """One role's model. Use it as an async context manager.

    Args:
        config: Endpoint, model and settings.
        role: The role, for identities, messages and the ledger.
        run_id: The run that pays.
        effects: Where requests and answers are stored.
        journal: Where the settled structured-output mode is noted.
        budget: What the run may still take; None: anything.
        transport: Carries requests instead of the network.
        emit: Told of each call; None: nobody.
        told: Called at each back-off and each repeat after the endpoint was not reached; must neither wait
            nor raise.

    Raises:
        ConfigError: On entering: the key's environment variable is not set.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        role: str,
        run_id: str,
        effects: EffectStore,
        journal: Journal,
        budget: Budget | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        emit: Emit | None = None,
        told: Callable[[LimitChange], None] | None = None,
    ) -> None:
        self._config = config
        self._role = role
        self._run_id = run_id
        self._effects = effects
        self._journal = journal
        self._budget = budget or Budget(BudgetConfig())
        self._transport = transport
        self._emit = emit
        self._backed_off = told
        self._stack = AsyncExitStack()
        self._secret: str | None = None
        self._parsers: dict[type[ReplyModel], Any] = {}
        self._settling = anyio.Lock()
        self._mode: Mode | None = None if config.mode == "auto" else config.mode

    @property
    def identity(self) -> str:
        """Endpoint, model and settings that influence replies, as canonical JSON; never credentials."""
        address = urlsplit(self._config.base_url)
        place = f"{address.scheme}://{address.hostname}:{address.port}{address.path}"
        names = ("model", "api", "api_version", "mode", "reasks")
        chosen: dict[str, JsonValue] = {n: getattr(self._config, n) for n in names}
        return canonical({"endpoint": place, **chosen, "settings": self._settings(None)})

    async def __aenter__(self) -> Self:
        if self._config.api == "azure" and self._config.api_version is None:
            raise ConfigError(f"models.{self._role}.api_version is required for api: azure")
        self._secret = await key_for(self._config, self._role)
        if self._secret is not None:
            refuse_key_in(self._config, self._role, self._secret)
            self._stack.enter_context(unlogged(self._secret))
        flights = await self._stack.enter_async_context(SingleFlight[Any]())
        network = self._transport
        if network is None:
            network = await self._stack.enter_async_context(Network())
        lease = self._stack.enter_context(endpoint_for(self._config, told=self._backed_off))
        paying = PayingTransport(
            ScrubTransport(network),
            config=self._config,
            budget=self._budget,
            lease=lease,
            effects=self._effects,
        )
        retrying = RetryTransport(paying, retries=self._config.max_retries, lease=lease)
        effects = EffectTransport(
            retrying,
            effects=self._effects,
            flights=flights,
            run_id=self._run_id,
            role=self._role,
            model=self._config.model,
            forward=self._config.sample_header,
        )
        http = httpx.AsyncClient(
            transport=FramingTransport(effects),
            timeout=self._config.timeout,
            follow_redirects=True,
            event_hooks={"request": [own_headers(self._config, self._secret)]},
        )
        self._stack.push_async_callback(http.aclose)
        self._openai = self._connect(http)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply; see ``reflact.ports.LLM.ask``."""
        return await self._call(prompt, reply_type, sample, check)

    def draft(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Stream[Draft[R]]:
        """Ask, and show the reply while it is written; see ``reflact.ports.Drafter.draft``."""
        return Stream(partial(self._call, prompt, reply_type, sample, check))

    async def _call(
        self,
        prompt: Rendered,
        reply_type: type[R],
        sample: Sample,
        check: Callable[[R], None] | None,
        hand: Callable[[Draft[R]], Awaitable[None]] | None = None,
    ) -> Reply[R]:
        audience = Audience(self._emit, hand, run_id=self._run_id, sample=sample)
        sketch = audience.sketch(reply_type) if self._config.stream else None
        call = Call(sketch)
        token = CALL.set(call)
        try:
            work = partial(self._ask, prompt, reply_type, sample, check, call)
            reply = await shown(sketch, work, audience)
        except ReflactError as error:
            if isinstance(error, ModelError):
                error.usage = call.usage
            await self._told(call.over(self._run_id, sample, error))
            raise
        finally:
            CALL.reset(token)
        await self._told(call.over(self._run_id, sample, None))
        return reply

    async def _told(self, event: Event) -> None:
        if self._emit is not None:
            await self._emit(event)

    # ------------------------------------------------------------------------------------ attempts

    async def _ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        sample: Sample,
        check: Callable[[R], None] | None,
        call: Call,
    ) -> Reply[R]:
        mode: Mode | None = None
        if not issubclass(reply_type, Text):
            mode = self._mode or await self._settle(prompt, reply_type, sample)
        conversation = messages_for(mode, prompt.messages, reply_type) if mode else list(prompt.messages)
        reasons: list[str] = []
        for attempt in range(1, self._config.reasks + 2):
            call.attempts = attempt
            try:
                place = sample.model_copy(update={"attempt": sample.attempt + attempt - 1})
                value, used = await self._attempt(conversation, reply_type, mode, place, check)
            except _Invalid as invalid:
                reasons.append(str(invalid))
                call.sent_back(reasons[-1])
                call.usage += invalid.usage
                conversation = [*conversation, *_sent_back(invalid)]
            else:
                call.usage += used
                return Reply(value=value, attempts=attempt, usage=call.usage)
        raise ReplyError(
            f"models.{self._role}: no valid {reply_type.__name__} in {len(reasons)} attempts "
            f"({sample.label}); the last one: {reasons[-1]}",
            reasons=tuple(reasons),
        )

    async def _attempt(
        self,
        conversation: Sequence[Message],
        reply_type: type[R],
        mode: Mode | None,
        sample: Sample,
        check: Callable[[R], None] | None,
    ) -> tuple[R, Usage]:
        extra = wire(mode, reply_type) if mode else {}
        completion = await self._create(conversation, reply_type, sample, extra)
        used = self._usage(completion)
        refusal = completion.choices[0].message.refusal
        if mode and refusal:
            raise _Invalid(f"it was a refusal: {refusal}", completion, used)
        try:
            value = self._parsed(completion, reply_type, mode) if mode else _said(completion, reply_type)
            if check is not None:
                check(value)
        except IncompleteOutputException:
            raise _Invalid("it was cut off at the token limit; be shorter", completion, used) from None
        except ValidationError as error:
            raise _Invalid(sentence(error), completion, used) from None
        except ValueError as error:
            raise _Invalid(str(error), completion, used) from None
        return value, used

    def _usage(self, completion: ChatCompletion) -> Usage:
        usage = usage_of("application/json", [completion.model_dump_json(include={"usage"})])
        if usage.uncounted:
            return usage
        return usage.model_copy(update={"usd": usd_of(usage, self._config)})

    def _parsed(self, completion: ChatCompletion, reply_type: type[R], mode: Mode) -> R:
        if reply_type not in self._parsers:
            bases, names = (reply_type, instructor.OpenAISchema), {"__doc__": reply_type.__doc__}
            self._parsers[reply_type] = type(reply_type.__name__, bases, names)
        kind = instructor.Mode.TOOLS if mode == "tools" else instructor.Mode.JSON_SCHEMA
        parsed: BaseModel = self._parsers[reply_type].from_response(completion, mode=kind, strict=True)
        return reply_type.model_validate(parsed.model_dump())

    async def _create(
        self, messages: Sequence[Message], reply_type: type[ReplyModel], sample: Sample, extra: Body
    ) -> ChatCompletion:
        """Send one request. Messages go as they are: the client library would copy them piece by piece."""
        try:
            completion = await self._openai.chat.completions.create(
                model=self._config.model,
                messages=[],
                extra_headers={
                    SAMPLE_HEADER: sample.label,
                    REPLY_HEADER: f"{reply_type.__name__}@{reply_type.version}",
                },
                extra_body={
                    **self._settings(sample),
                    **extra,
                    "messages": [{"role": m.role, "content": m.content} for m in messages],
                },
            )
        except openai.OpenAIError as error:
            failure = translated(error, self._config, self._role, self._secret)
        except JSONDecodeError as error:
            failure = unusable(error.doc, self._config, self._role, self._secret)
        except RecursionError:
            failure = unusable("too deeply nested JSON", self._config, self._role, self._secret)
        else:
            if _usable(completion):
                return completion
            failure = unusable(completion, self._config, self._role, self._secret)
        raise failure  # out here it carries no error of the client library, which may hold the key

    async def _settle(self, prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Mode:
        """Return the first mode that the endpoint accepts; decided once, journalled before it is used."""
        async with self._settling:
            if self._mode is not None:
                return self._mode
            label = f"mode/{self._role}"
            noted = await self._journal.recall(0, label)
            mode = next((m for m in ORDER if m == noted), None)
            if mode is None:
                mode = await self._tried(prompt, reply_type, sample)
                await self._journal.note(0, label, mode)
            self._mode = mode
            return mode

    async def _tried(self, prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Mode:
        first: ProviderError | None = None
        for mode in ORDER:
            messages = messages_for(mode, prompt.messages, reply_type)
            try:
                await self._create(messages, reply_type, sample, wire(mode, reply_type))
            except ProviderError as error:
                if not refused(error):
                    raise
                first = first or error
            else:
                return mode
        raise first or AssertionError("there is at least one mode")

    def _settings(self, sample: Sample | None) -> dict[str, JsonValue]:
        config = self._config
        seed: JsonValue = config.seed
        if seed == "per_sample" and sample is not None:
            seed = seed_of(sample.label)
        named: dict[str, JsonValue] = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": seed,
            config.max_tokens_key: config.max_tokens,
            "reasoning_effort": config.reasoning_effort,
        }
        return {**{k: v for k, v in named.items() if v is not None}, **config.extra_body}

    def _connect(self, http: Any) -> openai.AsyncOpenAI:
        """Make the client. It is typed for httpx2 and takes httpx as well, which a test pins."""
        config = self._config
        key = self._secret or "none"
        if config.api == "openai":
            return openai.AsyncOpenAI(base_url=config.base_url, api_key=key, max_retries=0, http_client=http)
        return openai.AsyncAzureOpenAI(
            azure_endpoint=config.base_url,
            azure_deployment=config.model,
            api_version=config.api_version,
            api_key=key,
            max_retries=0,
            http_client=http,
        )


def _usable(completion: object) -> bool:
    """Whether an answer is a chat completion; the openai client builds its values without checking them."""
    choices: Any = getattr(completion, "choices", None)
    return bool(choices) and getattr(choices[0], "message", None) is not None


def _said(completion: ChatCompletion, reply_type: type[R]) -> R:
    """Return a plain answer as it is: one that was cut off or refuses to answer is an answer too."""
    message = completion.choices[0].message
    text = message.content if message.content is not None else message.refusal
    return reply_type.model_validate({"text": "" if text is None else _whole(text)})


def _whole(text: str) -> str:
    """Return text with U+FFFD for halves of surrogate pairs, which JSON can name and nothing can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _sent_back(invalid: _Invalid) -> list[Message]:
    said = [Message(role="assistant", content=invalid.written)] if invalid.written else []
    ask = f"This reply cannot be used: {invalid}. Reply again, whole and corrected."
    return [*said, Message(role="user", content=ask)]
