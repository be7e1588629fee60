"""The client of a role: typed calls through the openai client and a stack of HTTP transports.

Each attempt of a call is one request through the stack. If a reply is invalid (malformed, refused, truncated,
or not fitting the data), the client sends it back with the reason and asks again. The conversation then
contains all earlier attempts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial, reduce
from json import JSONDecodeError
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
import openai
from openai.types.chat import ChatCompletion
from pydantic import JsonValue

from reflact.concurrency import SingleFlight, Stream
from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig
from reflact.errors import ConfigError, ModelError, ProviderError, ReflactError, ReplyError
from reflact.events import ModelCallFinished
from reflact.llm.budget import Budget
from reflact.llm.cache import CALL_ID_HEADER, REPLY_TYPE_HEADER, ResponseCacheTransport
from reflact.llm.cache_keys import derive_seed
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.drafts import DraftSubscribers
from reflact.llm.errors import build_unusable_error, translate_client_error
from reflact.llm.metering import MeteredTransport
from reflact.llm.pricing import usd_of
from reflact.llm.rate_limit import EndpointClient, LimitChange, endpoint_for
from reflact.llm.redaction import (
    RedactingTransport,
    build_header_hook,
    redact_logs,
    refuse_key_in,
    resolve_key,
)
from reflact.llm.retry import RetryTransport
from reflact.llm.sse import read_usage
from reflact.llm.streaming import CONTEXT, RequestContext, StreamingTransport
from reflact.llm.structured import MODE_ORDER, Conversation, InvalidReply, Mode, refuses_format
from reflact.messages import CallId, Draft, RenderedPrompt, Reply, ReplyModel, Text
from reflact.protocols import DecisionLog, EventCallback, ResponseStore
from reflact.records import Usage
from reflact.types import canonical_json

R = TypeVar("R", bound=ReplyModel)


class Client:
    """One role's model. Use it as an async context manager.

    Args:
        config: Endpoint, model and settings.
        role: The role, for identities, messages and the ledger.
        run_id: The run that pays.
        responses: The store of requests and answers.
        decision_log: Stores the chosen structured-output mode.
        budget: The run's budget; None: no limits.
        transport: Replaces the network.
        on_event: Takes an event for each call and its drafts.
        on_limit: Called at each back-off, and at each retry after a failed connection; must neither wait nor
            raise.

    Raises:
        ConfigError: On entering: the role's key is missing or invalid, or the settings contain it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        role: str,
        run_id: str,
        responses: ResponseStore,
        decision_log: DecisionLog,
        budget: Budget | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        on_event: EventCallback | None = None,
        on_limit: Callable[[LimitChange], None] | None = None,
    ) -> None:
        self._config = config
        self._role = role
        self._run_id = run_id
        self._responses = responses
        self._decision_log = decision_log
        self._budget = budget or Budget(BudgetConfig())
        self._transport = transport
        self._on_event = on_event
        self._on_limit = on_limit
        self._stack = AsyncExitStack()
        self._secret: str | None = None
        self._mode_lock = anyio.Lock()
        self._mode: Mode | None = None if config.mode == "auto" else config.mode

    @property
    def identity(self) -> str:
        """Endpoint, model and settings that influence replies, as canonical JSON without credentials."""
        address = urlsplit(self._config.base_url)
        endpoint = f"{address.scheme}://{address.hostname}:{address.port}{address.path}"
        names = ("model", "api", "api_version", "mode", "reasks")
        chosen: dict[str, JsonValue] = {n: getattr(self._config, n) for n in names}
        return canonical_json({"endpoint": endpoint, **chosen, "settings": self._settings(None)})

    async def __aenter__(self) -> Self:
        if self._config.api == "azure" and self._config.api_version is None:
            raise ConfigError(f"models.{self._role}.api_version is required for api: azure")
        self._secret = await resolve_key(self._config, self._role)
        if self._secret is not None:
            refuse_key_in(self._config, self._role, self._secret)
            self._stack.enter_context(redact_logs(self._secret))
        flights = await self._stack.enter_async_context(SingleFlight[Any]())
        network = self._transport
        if network is None:
            network = await self._stack.enter_async_context(PooledTransport())
        endpoint = self._stack.enter_context(endpoint_for(self._config, on_limit=self._on_limit))
        http = httpx.AsyncClient(
            transport=self._compose(network, endpoint, flights),
            timeout=self._config.timeout,
            follow_redirects=True,
            event_hooks={"request": [build_header_hook(self._config, self._secret)]},
        )
        self._stack.push_async_callback(http.aclose)
        self._openai = self._connect(http)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def _compose(
        self, network: httpx.AsyncBaseTransport, endpoint: EndpointClient, flights: SingleFlight[Any]
    ) -> httpx.AsyncBaseTransport:
        """Return the stack of transports above the network, outermost first."""
        config, responses = self._config, self._responses
        layers: tuple[Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport], ...] = (
            StreamingTransport,
            partial(
                ResponseCacheTransport,
                responses=responses,
                flights=flights,
                run_id=self._run_id,
                role=self._role,
                model=config.model,
                forward=config.call_id_header,
            ),
            partial(RetryTransport, retries=config.max_retries, endpoint=endpoint),
            partial(
                MeteredTransport, config=config, budget=self._budget, endpoint=endpoint, responses=responses
            ),
            RedactingTransport,
        )
        return reduce(lambda inner, layer: layer(inner), reversed(layers), network)

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply; see ``reflact.protocols.LLM.ask``."""
        return await self._call(prompt, reply_type, call_id, check)

    def draft(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Stream[Draft[R]]:
        """Ask as ``ask`` does, and iterate over drafts; the last one carries the reply.

        The first iteration sends the request. Leaving ``async with`` or the loop cancels the call. There is
        only one draft if the reply is stored or plain text, or if the endpoint does not stream.
        """
        return Stream(partial(self._call, prompt, reply_type, call_id, check))

    async def _call(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        call_id: CallId,
        check: Callable[[R], None] | None,
        on_draft: Callable[[Draft[R]], Awaitable[None]] | None = None,
    ) -> Reply[R]:
        subscribers = DraftSubscribers(self._on_event, on_draft, run_id=self._run_id, call_id=call_id)
        drafts = subscribers.open_stream(reply_type) if self._config.stream else None
        context = RequestContext(drafts)
        token = CONTEXT.set(context)
        started = anyio.current_time()
        report_end = partial(self._report_end, context, call_id, started)
        try:
            work = partial(self._ask, prompt, reply_type, call_id, check, context)
            reply = await subscribers.follow(drafts, work)
        except ReflactError as error:
            if isinstance(error, ModelError):
                error.usage = context.usage
            await report_end(error)
            raise
        finally:
            CONTEXT.reset(token)
        await report_end(None)
        return reply

    async def _report_end(
        self, context: RequestContext, call_id: CallId, started: float, error: ReflactError | None
    ) -> None:
        """Post the event of a finished call; ``error`` is the reason if it has no reply."""
        if self._on_event is None:
            return
        answered = error is None or isinstance(error, ReplyError)
        event = ModelCallFinished(
            run_id=self._run_id,
            step=call_id.step or 0,
            role=call_id.role,
            purpose=call_id.purpose,
            call_id=call_id.label,
            outcome="reply" if error is None else "failed",
            attempts=context.attempts,
            usage=context.usage,
            seconds=anyio.current_time() - started,
            from_store=answered and not context.sent,
        )
        await self._on_event(event)

    async def _ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        call_id: CallId,
        check: Callable[[R], None] | None,
        context: RequestContext,
    ) -> Reply[R]:
        mode: Mode | None = None
        if not issubclass(reply_type, Text):
            mode = self._mode or await self._choose_mode(prompt, reply_type, call_id)
        conversation = Conversation(prompt.messages, reply_type, mode, check)
        reasons: list[str] = []
        for attempt in range(1, self._config.reasks + 2):
            context.attempts = attempt
            numbered = call_id.model_copy(update={"attempt": call_id.attempt + attempt - 1})
            completion = await self._create(conversation, reply_type, numbered)
            context.usage += self._usage(completion)
            try:
                value = conversation.parse(completion)
            except InvalidReply as invalid:
                reasons.append(str(invalid))
                if context.drafts is not None:
                    context.drafts.reset(reasons[-1])
                conversation.send_back(completion, invalid)
            else:
                return Reply(value=value, attempts=attempt, usage=context.usage)
        raise ReplyError(
            f"models.{self._role}: no valid {reply_type.__name__} in {len(reasons)} attempts "
            f"({call_id.label}); the last one: {reasons[-1]}",
            reasons=tuple(reasons),
        )

    def _usage(self, completion: ChatCompletion) -> Usage:
        usage = read_usage("application/json", [completion.model_dump_json(include={"usage"})])
        if usage.uncounted:
            return usage
        return usage.model_copy(update={"usd": usd_of(usage, self._config)})

    async def _create(
        self, conversation: Conversation[Any], reply_type: type[ReplyModel], call_id: CallId
    ) -> ChatCompletion:
        """Send one request. ``extra_body`` carries the messages, which the openai client would copy."""
        try:
            completion = await self._openai.chat.completions.create(
                model=self._config.model,
                messages=[],
                extra_headers={
                    CALL_ID_HEADER: call_id.label,
                    REPLY_TYPE_HEADER: f"{reply_type.__name__}@{reply_type.version}",
                },
                extra_body={**self._settings(call_id), **conversation.body},
            )
        except openai.OpenAIError as error:
            failure = translate_client_error(error, self._config, self._role, self._secret)
        except JSONDecodeError as error:
            failure = build_unusable_error(error.doc, self._config, self._role, self._secret)
        except RecursionError:
            failure = build_unusable_error("too deeply nested JSON", self._config, self._role, self._secret)
        else:
            if _is_usable(completion):
                return completion
            failure = build_unusable_error(completion, self._config, self._role, self._secret)
        raise failure  # outside the except block, so that its context has no error that may quote the key

    async def _choose_mode(
        self, prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
    ) -> Mode:
        """Return the first mode that the endpoint accepts; log it before its first use."""
        async with self._mode_lock:
            if self._mode is not None:
                return self._mode
            label = f"mode/{self._role}"
            logged = await self._decision_log.get(0, label)
            mode = next((m for m in MODE_ORDER if m == logged), None)
            if mode is None:
                mode = await self._try_modes(prompt, reply_type, call_id)
                await self._decision_log.put(0, label, mode)
            self._mode = mode
            return mode

    async def _try_modes(self, prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> Mode:
        first: ProviderError | None = None
        for mode in MODE_ORDER:
            try:
                await self._create(Conversation(prompt.messages, reply_type, mode), reply_type, call_id)
            except ProviderError as error:
                if not refuses_format(error):
                    raise
                first = first or error
            else:
                return mode
        raise first or AssertionError("there is at least one mode")

    def _settings(self, call_id: CallId | None) -> dict[str, JsonValue]:
        config = self._config
        seed: JsonValue = config.seed
        if seed == "per_call" and call_id is not None:
            seed = derive_seed(call_id.label)
        named: dict[str, JsonValue] = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": seed,
            config.max_tokens_key: config.max_tokens,
            "reasoning_effort": config.reasoning_effort,
        }
        return {**{k: v for k, v in named.items() if v is not None}, **config.extra_body}

    def _connect(self, http: Any) -> openai.AsyncOpenAI:
        """Return the openai client. Its types ask for httpx2; a test shows that it also takes httpx."""
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


def _is_usable(completion: object) -> bool:
    """Whether an answer is a chat completion, which the openai client does not check."""
    choices: Any = getattr(completion, "choices", None)
    return bool(choices) and getattr(choices[0], "message", None) is not None
