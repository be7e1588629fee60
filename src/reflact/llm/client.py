"""The client of a role: typed calls through the openai client and a stack of HTTP transports.

If a reply is invalid (malformed, refused, truncated, or not fitting the data), the client sends it back with
the reason and asks again. The conversation then contains all earlier attempts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import httpx
import openai
from openai.types.chat import ChatCompletion
from pydantic import JsonValue

from reflact.concurrency import Stream
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, ModelError, ProviderError, ReflactError, ReplyError, RequestRefused
from reflact.events import ModelCallFinished
from reflact.llm.bodies import MAX_BYTES, find_max_bytes
from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key, derive_seed, strip_to_endpoint
from reflact.llm.cassettes import ReplayTransport
from reflact.llm.completions import COMPLETIONS_PATH, AgentTransport
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.drafts import CONTEXT, DraftStream, RequestContext, StreamingTransport
from reflact.llm.errors import translate_client_error
from reflact.llm.metering import RESERVATION, MeteredTransport
from reflact.llm.middleware import compose
from reflact.llm.pricing import CAP_NAMES, read_cap, read_counts, usd_of
from reflact.llm.rate_limit import LimitChange, endpoint_for
from reflact.llm.redaction import (
    KeySource,
    RedactingTransport,
    RenewingTransport,
    build_header_hook,
    redact_logs,
    refuse_key_in,
)
from reflact.llm.retry import RetryTransport
from reflact.llm.structured import (
    MODE_ORDER,
    Conversation,
    InvalidReply,
    Mode,
    find_refused_cap,
    refuses_format,
)
from reflact.messages import (
    NO_VALID_REPLY,
    AgentAnswer,
    CallId,
    CallReservation,
    Draft,
    RenderedPrompt,
    Reply,
    ReplyModel,
    Text,
)
from reflact.protocols import EventCallback
from reflact.records import Usage
from reflact.types import canonical_json

R = TypeVar("R", bound=ReplyModel)
T = TypeVar("T")

AGENT_PATH = "/agent"
"""The path of an agent's requests below ``base_url``, in keys and recordings; nothing is sent there."""


class _Question(NamedTuple, Generic[R]):
    prompt: RenderedPrompt
    reply_type: type[R]
    call_id: CallId
    check: Callable[[R], None] | None


class ResponseCache:
    """The stored responses to the requests of a role: every request has a content key and is paid once.

    Each attempt of a call has its own stored response, including replies that failed validation. A process that is
    killed and restarted sends only the missing requests, since ``reflact.llm.metering`` stores a response before
    anyone sees it.

    Args:
        role: The role.
        model: The name of its model, for the ledger.
        account: Where responses are stored.
        endpoint: Scheme, host and port, without credentials.
        root: The path before that of each request.
    """

    def __init__(self, role: str, model: str, account: Account, *, endpoint: str, root: str) -> None:
        self._role = role
        self._model = model
        self._account = account
        self._endpoint = endpoint
        self._root = root.rstrip("/")
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def get_or_send(
        self,
        path: str,
        body: Mapping[str, JsonValue],
        call_id: CallId,
        reply: str,
        context: RequestContext,
        *,
        send: Callable[[], Awaitable[str]],
    ) -> str:
        """Return the stored response to a request, or send it; equal requests wait for each other.

        Args:
            path: Below the root, such as ``/chat/completions``.
            body: The body of the request.
            call_id: The call.
            reply: Name and version of the reply type.
            context: Takes the key and the reservation of the request.
            send: Sends the request, and stores its response.
        """
        label = call_id.label
        key = build_cache_key(
            endpoint=self._endpoint, path=self._root + path, body=body, call_id=label, reply=reply
        )
        context.keys.append(key)
        async with self._locks.setdefault(key, anyio.Lock(fast_acquire=True)):
            stored = await self._account.responses.find_response(key)
            if stored is not None:
                return "".join(stored.chunks)
            context.reservation = CallReservation(
                key=key,
                run_id=self._account.run_id,
                call_id=label,
                role=self._role,
                purpose=call_id.purpose,
                endpoint=self._endpoint,
                model=self._model,
            )
            text = await send()
            context.sent = True
            return text


class Client:
    """One role's model. Use it as an async context manager.

    Args:
        config: Endpoint, model and settings.
        role: The role, for messages and the ledger.
        account: Where calls are stored and charged.
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
        role: str,
        account: Account,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        on_event: EventCallback | None = None,
        on_limit: Callable[[LimitChange], None] | None = None,
    ) -> None:
        self._config = config
        self._role = role
        self._account = account
        self._transport = transport
        self._on_event = on_event
        self._on_limit = on_limit
        self._stack = AsyncExitStack()
        self._secret: str | None = None
        self._mode_lock = anyio.Lock()
        self._mode: Mode | None = None if config.mode == "auto" else config.mode
        if config.api == "pydantic_ai":
            self._mode = "json_schema"
        self._cap_names: dict[str, str] = {}
        self._answer: Callable[[bytes], Awaitable[AgentAnswer]] | None = None

    @property
    def identity(self) -> str:
        """Endpoint, model and settings that influence replies, as canonical JSON without credentials."""
        return identify_model(self._config)

    async def __aenter__(self) -> Self:
        config, account = self._config, self._account
        if config.api == "azure" and config.api_version is None:
            raise ConfigError(f"models.{self._role}.api_version is required for api: azure")
        keys = KeySource(config, self._role)
        self._secret = await keys.fetch()
        if self._secret is not None:
            refuse_key_in(config, self._role, self._secret)
            self._stack.enter_context(redact_logs(keys.known))
        if config.api == "pydantic_ai" and type(self._transport) is not ReplayTransport:
            self._answer = _open_answerer(config, self._role, self._secret)
        network = self._transport
        if network is None:
            opened = await anyio.to_thread.run_sync(PooledTransport)  # it reads certificates
            network = await self._stack.enter_async_context(opened)
        endpoint = self._stack.enter_context(endpoint_for(config, self._secret, on_limit=self._on_limit))
        self._endpoint = endpoint
        layers: tuple[Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport], ...] = (
            lambda inner: RetryTransport(inner, endpoint),
            StreamingTransport,
            lambda inner: RenewingTransport(inner, keys),
            lambda inner: MeteredTransport(inner, config, account, endpoint),
            RedactingTransport,
            *(() if isinstance(network, ReplayTransport) else (AgentTransport,)),
        )
        http = httpx.AsyncClient(
            transport=compose(network, layers),
            timeout=config.timeout,
            follow_redirects=False,
            event_hooks={"request": [build_header_hook(config, keys), build_call_hook(config)]},
        )
        self._stack.push_async_callback(http.aclose)
        self._openai = self._connect(http)
        self._cache = ResponseCache(
            self._role,
            config.model,
            account,
            endpoint=strip_to_endpoint(str(self._openai.base_url)),
            root=self._openai.base_url.path,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply; see ``reflact.protocols.LLM.ask``."""
        return await self._call(_Question(prompt, reply_type, call_id, check))

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
        return Stream(partial(self._call, _Question(prompt, reply_type, call_id, check)))

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Make a request of an agent part of the run; see ``reflact.protocols.RequestSender``."""
        context = RequestContext(answer=lambda body: answer(), attempts=1)

        async def work() -> str:
            completion = await self._post(AGENT_PATH, body, call_id, context)
            context.usage = self._usage(completion)
            return completion.choices[0].message.content or ""

        return await self._report(call_id, context, work)

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a chat completion of an agent; see ``reflact.protocols.RequestSender``."""
        if self._config.api == "pydantic_ai" and body.get("tools"):
            raise ConfigError(
                f"models.{self._role}.api: pydantic_ai does not pass on the tools in the agent's request: name an "
                "OpenAI-compatible endpoint instead"
            )
        context = RequestContext(answer=self._answer, attempts=1)
        own = {"model": self._config.model, **build_settings(self._config, call_id)}
        hidden = set(CAP_NAMES if read_cap(own) is not None else ())
        request = {**{name: value for name, value in body.items() if name not in hidden}, **own}

        async def work() -> str:
            completion = await self._post(COMPLETIONS_PATH, request, call_id, context)
            context.usage = self._usage(completion)
            return completion.model_dump_json(exclude_none=True)

        return await self._report(call_id, context, work)

    async def _call(
        self, question: _Question[R], on_draft: Callable[[Draft[R]], Awaitable[None]] | None = None
    ) -> Reply[R]:
        reply_type, call_id = question.reply_type, question.call_id
        context, drafts = RequestContext(answer=self._answer), None
        if self._on_event is not None or on_draft is not None:
            drafts = DraftStream(reply_type, self._describe_call(call_id), self._on_event, on_draft)
            context.drafts = drafts if self._config.stream and not issubclass(reply_type, Text) else None
        work = partial(self._ask, question, context)
        return await self._report(call_id, context, work if drafts is None else partial(drafts.follow, work))

    def _describe_call(self, call_id: CallId) -> dict[str, Any]:
        """Return a call as the fields of its events."""
        return {
            "run_id": self._account.run_id,
            "step": call_id.step or 0,
            "role": call_id.role,
            "purpose": call_id.purpose,
            "call_id": call_id.label,
        }

    async def _report(self, call_id: CallId, context: RequestContext, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work of a call in its context, and post an event when it ends."""
        started = anyio.current_time()

        async def report_end(error: ReflactError | None) -> None:
            if self._on_event is not None:
                answered = error is None or isinstance(error, ReplyError)
                event = ModelCallFinished(
                    outcome="reply" if error is None else "failed",
                    reason=None if error is None else _explain(error),
                    attempts=context.attempts,
                    usage=context.usage,
                    seconds=anyio.current_time() - started,
                    from_store=answered and not context.sent,
                    **self._describe_call(call_id),
                )
                await self._on_event(event)

        token = CONTEXT.set(context)
        try:
            result = await work()
        except ReflactError as error:
            if isinstance(error, ModelError):
                error.usage = context.usage
            await report_end(error)
            raise
        finally:
            CONTEXT.reset(token)
        await report_end(None)
        return result

    async def _ask(self, question: _Question[R], context: RequestContext) -> Reply[R]:
        prompt, reply_type, call_id, check = question
        mode: Mode | None = None
        if not issubclass(reply_type, Text):
            mode = self._mode or await self._choose_mode(question, context)
        conversation = Conversation(prompt.messages, reply_type, mode, check)
        reasons: list[str] = []
        for attempt in range(1, self._config.reasks + 2):
            context.attempts = attempt
            completion = await self._create(conversation, reply_type, call_id, attempt, context)
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
        if call_id.role == "critic":
            self._account.rejected.extend(context.keys)
        raise ReplyError(
            f"models.{self._role} {NO_VALID_REPLY} {len(reasons)} attempts ({call_id.title}); the last reason: "
            f"{reasons[-1]}",
            reasons=tuple(reasons),
        )

    def _usage(self, completion: ChatCompletion) -> Usage:
        usage = read_counts(None if completion.usage is None else completion.usage.model_dump())
        return usage if usage.uncounted else usage.model_copy(update={"usd": usd_of(usage, self._config)})

    async def _create(
        self,
        conversation: Conversation[Any],
        reply_type: type[ReplyModel],
        call_id: CallId,
        attempt: int,
        context: RequestContext,
    ) -> ChatCompletion:
        """Send one request of a conversation, for the attempt of a number from 1."""
        if attempt > 1:
            call_id = call_id.model_copy(update={"attempt": call_id.attempt + attempt - 1})
        settings = build_settings(self._config, call_id)
        body = {"messages": [], "model": self._config.model, **settings, **conversation.body}
        reply = f"{reply_type.__name__}@{reply_type.version}"
        return await self._post(COMPLETIONS_PATH, body, call_id, context, reply=reply)

    async def _post(
        self,
        path: str,
        body: Mapping[str, JsonValue],
        call_id: CallId,
        context: RequestContext,
        *,
        reply: str = "",
    ) -> ChatCompletion:
        """Return the stored or new response to a request; ``reply`` is the reply type, empty for an agent's request."""
        send = partial(self._send, path, body)
        text = await self._cache.get_or_send(path, body, call_id, reply, context, send=send)
        return ChatCompletion.model_validate_json(text)

    async def _send(self, path: str, body: Mapping[str, JsonValue]) -> str:
        """Send a request and return its response, which ``MeteredTransport`` has written and stored.

        It avoids ``chat.completions.create``, which walks through the whole body to convert its values, and then
        through the whole response. If the endpoint refuses the cap by its name, the request is sent again with the
        other name, and so are all later ones.
        """
        sent = {self._cap_names.get(name, name): value for name, value in body.items()}
        try:
            return (await self._openai.post(path, cast_to=httpx.Response, body=sent)).text
        except openai.OpenAIError as error:
            failure = translate_client_error(error, self._config, self._role, self._secret, self._endpoint)
            answer = error.response.text if isinstance(error, openai.APIStatusError) else ""
        if isinstance(failure, ModelError):
            failure.answer = answer
        cap = find_refused_cap(answer, sent)
        if cap is None or cap in self._cap_names.values():
            raise failure  # outside the except block, so that its context has no error that may quote the key
        (self._cap_names[cap],) = {*CAP_NAMES} - {cap}
        return await self._send(path, body)

    async def _choose_mode(self, question: _Question[R], context: RequestContext) -> Mode:
        """Return the first mode that the endpoint accepts; log it before its first use."""
        async with self._mode_lock:
            if self._mode is None:
                label = f"mode/{self._role}"
                logged = await self._account.decision_log.get(0, label)
                mode = next((m for m in MODE_ORDER if m == logged), None)
                if mode is None:
                    mode = await self._try_modes(question, context)
                    await self._account.decision_log.put(0, label, mode)
                self._mode = mode
            return self._mode

    async def _try_modes(self, question: _Question[R], context: RequestContext) -> Mode:
        """Return the first mode whose format the endpoint follows, or else the last one that it answers at all.

        An answer without any format is sent back once, as in each call, since the next one may have it.
        """
        prompt, reply_type, call_id, _ = question
        first: ProviderError | RequestRefused | None = None
        answered: Mode | None = None
        for mode in MODE_ORDER:
            conversation = Conversation(prompt.messages, reply_type, mode)
            try:
                for attempt in range(1, min(2, self._config.reasks + 1) + 1):
                    completion = await self._create(conversation, reply_type, call_id, attempt, context)
                    if (invalid := conversation.find_missing_format(completion)) is None:
                        return mode
                    conversation.send_back(completion, invalid)
                answered = mode
            except (ProviderError, RequestRefused) as error:
                if not refuses_format(error):
                    raise
                first = first or error
        if answered is not None:
            return answered
        raise first or AssertionError("there is at least one mode")

    def _connect(self, http: Any) -> openai.AsyncOpenAI:
        """Return the openai client. Its types ask for httpx2; a test shows that it also takes httpx."""
        config = self._config
        shared: dict[str, Any] = {"api_key": self._secret or "none", "max_retries": 0, "http_client": http}
        if config.api != "azure":
            return openai.AsyncOpenAI(base_url=config.base_url, **shared)
        return openai.AsyncAzureOpenAI(
            azure_endpoint=config.base_url,
            azure_deployment=config.model,
            api_version=config.api_version,
            **shared,
        )


def build_call_hook(config: ModelConfig) -> Callable[[httpx.Request], Awaitable[None]]:
    """Return a hook that tells the transports which call a request belongs to."""
    most = find_max_bytes(config)

    async def mark(request: httpx.Request) -> None:
        context = CONTEXT.get()
        assert context is not None
        assert context.reservation is not None
        label = context.reservation.call_id
        request.extensions = {
            **request.extensions,
            RESERVATION: context.reservation,
            "reflact_call_id": label,
            MAX_BYTES: most,
        }
        if config.call_id_header is not None:
            request.headers[config.call_id_header] = label

    return mark


def _open_answerer(
    config: ModelConfig, role: str, key: str | None
) -> Callable[[bytes], Awaitable[AgentAnswer]]:
    """Return what answers requests by a model of pydantic-ai; raises as ``PydanticAIModel``."""
    from reflact.llm.pydantic_ai import PydanticAIModel

    model = PydanticAIModel(config, role, key)

    async def answer(body: bytes) -> AgentAnswer:
        return await model.answer(json.loads(body))

    return answer


def identify_model(config: ModelConfig) -> str:
    """Return endpoint, model and settings that influence replies, as canonical JSON without credentials."""
    address = urlsplit(config.base_url)
    endpoint = f"{address.scheme}://{address.hostname}:{address.port}{address.path}"
    names = ("model", "api", "api_version", "mode", "reasks")
    chosen: dict[str, JsonValue] = {name: getattr(config, name) for name in names}
    return canonical_json({"endpoint": endpoint, **chosen, "settings": build_settings(config, None)})


def build_settings(config: ModelConfig, call_id: CallId | None) -> dict[str, JsonValue]:
    """Return the fields of a request that a role's settings determine; a seed per call needs the call."""
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


def _explain(error: ReflactError) -> str:
    """Return why a call has no validated reply: the reason of its last attempt, if replies came."""
    return error.reasons[-1] if isinstance(error, ReplyError) and error.reasons else str(error)
