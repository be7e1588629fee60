"""The model of a role: typed calls that are stored, retried, limited and charged.

Read a call from top to bottom: ``ask`` -> ``_complete`` (stored or new) -> ``_send`` (until it
succeeds) -> ``_try`` (with a stream or without) -> ``_attempt`` (once, paid for) -> ``_exchange``
(the wire). What is known of a call is one argument, ``Call``. Only what lies under every client is
below, as HTTP transports: redaction, recording, the network.

If a reply is invalid (malformed, refused, truncated, or not fitting the data), the client sends it
back with the reason and asks again. The conversation then contains all earlier attempts.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import httpx
from openai.types.chat import ChatCompletion
from pydantic import JsonValue, TypeAdapter

from reflact.concurrency import finish_if_cancelled, run_beside_loop
from reflact.config.models import ModelConfig
from reflact.errors import (
    CassetteMiss,
    ConfigError,
    ModelError,
    ProviderError,
    ReflactError,
    ReplyError,
    RequestRefused,
)
from reflact.events import ModelCallFinished
from reflact.jsonutil import replace_surrogates
from reflact.llm.budget import Account, Reservation
from reflact.llm.cache_keys import build_cache_key, derive_seed, strip_to_endpoint
from reflact.llm.cassettes import RECORDED_CAPS, ReplayTransport
from reflact.llm.completions import (
    ANSWERER,
    COMPLETIONS_PATH,
    EVENT_STREAM,
    JSON,
    AgentTransport,
    Answerer,
    AnswerFault,
    decode_text,
    read_completion,
    select_headers,
    write_completion,
)
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.drafts import DraftStream
from reflact.llm.errors import (
    CONNECT_FAILURES,
    classify_failure,
    classify_status,
    is_passing,
    is_throttled,
    read_retry_after,
    refuses_role,
    translate_outcome,
)
from reflact.llm.pricing import (
    CAP_NAMES,
    bound_usage,
    read_cap,
    read_counts,
    usd_of,
    worst_case,
    write_counts,
)
from reflact.llm.rate_limit import (
    LIMIT_STATUSES,
    PATIENCE_SECONDS,
    LimitChange,
    Outcome,
    RoleRefused,
    endpoint_for,
    jitter,
)
from reflact.llm.redaction import (
    MAX_BYTES,
    KeySource,
    RedactingTransport,
    find_keys,
    redact_logs,
    refuse_key_in,
    remove_keys,
)
from reflact.llm.structured import (
    FORMAT_REFUSALS,
    MODE_ORDER,
    Conversation,
    InvalidReply,
    Mode,
    find_refused_cap,
    refuses_format,
    remove_thoughts,
)
from reflact.messages import (
    MAX_BROKEN_STREAMS,
    NO_VALID_REPLY,
    AgentAnswer,
    CallId,
    CallReservation,
    RenderedPrompt,
    Reply,
    ReplyModel,
    StoredResponse,
    Text,
)
from reflact.protocols import EventCallback
from reflact.records import FaultKind, Usage
from reflact.types import canonical_json

R = TypeVar("R", bound=ReplyModel)

# The path of an agent's requests below ``base_url``, in keys and recordings; nothing is sent there.
AGENT_PATH = "/agent"

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

# Statuses with which endpoints refuse to stream, or refuse the options of the stream.
UNSTREAMABLE_STATUSES = FORMAT_REFUSALS | {500}

STREAM_WORDS = re.compile(r"\bstream", re.IGNORECASE)

MODE_ADAPTER: TypeAdapter[Mode] = TypeAdapter(Mode)

# How long the usage and the end of a stream are waited for after the reason why its answer ended.
HELD_OPEN_SECONDS = 1.0

# The most bytes that are read of the answer with an error status.
ERROR_BYTES = 2**14

# An answer may have 4 MiB and 512 bytes for each token of its cap; without a cap, for each of
# 16,384 tokens.
SPARE_BYTES = 4 * 2**20
TOKEN_BYTES = 512
UNCAPPED_TOKENS = 16_384

# A body of more bytes is read on a worker thread, so that the event loop does not wait for it.
LARGE_BYTES = 2**20

# How long a cancelled caller waits until its reservation is released.
RELEASE_SECONDS = 0.2

# Failures before a request was sent.
UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    CassetteMiss,
)

# The fields of a request for which a provider may validate what its model wrote.
FORMAT_FIELDS = frozenset({"response_format", "tools"})

# Codes with which a provider refuses what its own model wrote, and not the request.
FAILED_SAMPLES = ("json_validate_failed", "tool_use_failed")

# A prompt of so many characters was cut by its server if that counts less than one token for eight
# of them.
MIN_PROMPT = 16_000
PROMPT_RATIO = 8


@dataclass
class Call:
    """What is known of a call while it is made.

    ``drafts`` takes the answers while they arrive; None if no stream is wanted. ``answerer``
    answers in place of the network. ``sent`` is True if an answer came from the endpoint rather
    than the store. ``keys`` are those of the responses.
    """

    id: CallId
    drafts: DraftStream[Any] | None = None
    answerer: Answerer | None = None
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    sent: bool = False
    keys: list[str] = field(default_factory=list)


class _Question(NamedTuple, Generic[R]):
    prompt: RenderedPrompt
    reply_type: type[R]
    check: Callable[[R], None] | None


class _Request(NamedTuple):
    """One request of a call; its response is stored under the key."""

    url: httpx.URL
    body: Mapping[str, Any]
    call_id: CallId
    key: str


class _Answer(NamedTuple):
    """An answer that was read: without keys, a success as a completion in JSON."""

    response: httpx.Response
    usage: Usage
    fault: FaultKind | None


class Client:
    """One role's model. Use it as an async context manager.

    Args:
        config: Endpoint, model and settings.
        role: The role, for messages and the ledger.
        account: Where calls are stored and charged.
        transport: Replaces the network.
        on_event: Takes an event for each call and its drafts.
        on_limit: Called at each back-off, and at each retry after a failed connection; must neither
            wait nor raise.

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
        self._keys = KeySource(config, role)
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._answerer: Answerer | None = None
        # What the endpoint turns out to accept.
        self._mode: Mode | None = None if config.mode == "auto" else config.mode
        self._mode_lock = anyio.Lock()
        self._cap_names: dict[str, str] = {}
        self._streams = True
        self._n_broken_streams = 0
        self._models: dict[str, None] = {}

    @property
    def identity(self) -> str:
        """Endpoint, model and settings that influence replies, as JSON without credentials."""
        return identify_model(self._config)

    async def __aenter__(self) -> Self:
        config = self._config
        if config.api == "azure" and config.api_version is None:
            raise ConfigError(f"models.{self._role}.api_version is required for api: azure")
        secret = await self._keys.fetch()
        if secret is not None:
            refuse_key_in(config, self._role, secret)
            self._stack.enter_context(redact_logs(self._keys.known))
        if config.api == "pydantic_ai":
            self._mode = "json_schema"
            if type(self._transport) is not ReplayTransport:
                from reflact.llm.pydantic_ai import (
                    PydanticAIModel,
                )  # only here, since it takes a second

                self._answerer = PydanticAIModel(config, self._role, secret).answer
        network = self._transport
        if network is None:
            opened = await anyio.to_thread.run_sync(PooledTransport)  # it reads certificates
            network = await self._stack.enter_async_context(opened)
        # A recording lets agents answer itself, so that it has their answers too.
        if not isinstance(network, ReplayTransport):
            network = AgentTransport(network)
        self._network = RedactingTransport(network)
        self._limits = self._stack.enter_context(
            endpoint_for(config, secret, on_limit=self._on_limit)
        )
        self._urls = {path: build_url(config, path) for path in (COMPLETIONS_PATH, AGENT_PATH)}
        self._endpoint = strip_to_endpoint(str(self._urls[COMPLETIONS_PATH]))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    # ---- calls

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply; see ``reflact.protocols.LLM.ask``."""
        question = _Question(prompt, reply_type, check)
        call = Call(call_id, answerer=self._answerer)
        async with self._report(call):
            if self._on_event is None or issubclass(reply_type, Text):
                return await self._ask(call, question)
            fields = self._describe_call(call_id)
            drafts = DraftStream(reply_type, fields, self._on_event)
            call.drafts = drafts
            return await drafts.follow(partial(self._ask, call, question))

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Make a request of an agent part of the run; see ``reflact.protocols.RequestSender``."""
        call = Call(call_id, answerer=lambda body: answer(), attempts=1)
        completion = await self._pass_on(call, body, AGENT_PATH)
        return completion.choices[0].message.content or ""

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a chat completion of an agent; see ``reflact.protocols.RequestSender``."""
        if self._config.api == "pydantic_ai" and body.get("tools"):
            raise ConfigError(
                f"models.{self._role}.api: pydantic_ai does not pass on the tools in the agent's "
                "request: name an OpenAI-compatible endpoint instead"
            )
        settings = build_settings(self._config, call_id)
        hidden = CAP_NAMES if read_cap(settings) is not None else ()
        request = {name: value for name, value in body.items() if name not in hidden}
        request |= {"model": self._config.model, **settings}
        call = Call(call_id, answerer=self._answerer, attempts=1)
        completion = await self._pass_on(call, request, COMPLETIONS_PATH)
        return completion.model_dump_json(exclude_none=True)

    async def _pass_on(self, call: Call, body: Mapping[str, Any], path: str) -> ChatCompletion:
        """Send a request of an agent, whose answer is not validated."""
        async with self._report(call):
            completion = await self._complete(call, body, call.id, path=path)
            call.usage = self._price(completion)
        return completion

    @asynccontextmanager
    async def _report(self, call: Call) -> AsyncIterator[None]:
        """Post an event when a call ends, and add to its error what it used."""
        started = anyio.current_time()
        failure: ReflactError | None = None
        try:
            yield
        except ReflactError as error:
            failure = error
            if isinstance(error, ModelError):
                error.usage = call.usage
        if self._on_event is not None:
            reason = None if failure is None else str(failure)
            if isinstance(failure, ReplyError) and failure.reasons:
                reason = failure.reasons[-1]
            is_answered = failure is None or isinstance(failure, ReplyError)
            event = ModelCallFinished(
                outcome="reply" if failure is None else "failed",
                reason=reason,
                attempts=call.attempts,
                usage=call.usage,
                seconds=anyio.current_time() - started,
                from_store=is_answered and not call.sent,
                **self._describe_call(call.id),
            )
            await self._on_event(event)
        if failure is not None:
            raise failure

    def _describe_call(self, call_id: CallId) -> dict[str, Any]:
        """Return a call as the fields of its events."""
        return {
            "run_id": self._account.run_id,
            "step": call_id.step or 0,
            "role": call_id.role,
            "purpose": call_id.purpose,
            "call_id": call_id.label,
        }

    async def _ask(self, call: Call, question: _Question[R]) -> Reply[R]:
        """Ask until a reply is valid, or all re-asks are used."""
        mode: Mode | None = None
        if not issubclass(question.reply_type, Text):
            mode = self._mode or await self._choose_mode(call, question)
        conversation = Conversation(
            question.prompt.messages, question.reply_type, mode, question.check
        )
        reasons: list[str] = []
        for call.attempts in range(1, self._config.reasks + 2):
            completion = await self._converse(call, conversation, question, call.attempts)
            call.usage += self._price(completion)
            try:
                value = conversation.parse(completion)
            except InvalidReply as invalid:
                reasons.append(str(invalid))
                if call.drafts is not None:
                    call.drafts.reset(reasons[-1])
                conversation.send_back(completion, invalid)
            else:
                return Reply(value=value, attempts=call.attempts, usage=call.usage)
        if call.id.role == "critic":
            self._account.rejected.extend(call.keys)
        raise ReplyError(
            f"models.{self._role} {NO_VALID_REPLY} {len(reasons)} attempts ({call.id.title}); "
            f"the last reason: {reasons[-1]}",
            reasons=tuple(reasons),
        )

    async def _converse(
        self, call: Call, conversation: Conversation[R], question: _Question[R], attempt: int
    ) -> ChatCompletion:
        """Send the next request of a conversation, for the attempt of a number from 1."""
        call_id = call.id
        if attempt > 1:
            call_id = call_id.model_copy(update={"attempt": call_id.attempt + attempt - 1})
        settings = build_settings(self._config, call_id)
        body = {"messages": [], "model": self._config.model, **settings, **conversation.body}
        reply = f"{question.reply_type.__name__}@{question.reply_type.version}"
        return await self._complete(call, body, call_id, reply=reply)

    def _price(self, completion: ChatCompletion) -> Usage:
        usage = read_counts(None if completion.usage is None else completion.usage.model_dump())
        if usage.uncounted:
            return usage
        return usage.model_copy(update={"usd": usd_of(usage, self._config)})

    async def _choose_mode(self, call: Call, question: _Question[R]) -> Mode:
        """Return the first mode that the endpoint follows; it is logged before its first use."""
        async with self._mode_lock:
            if self._mode is None:
                log = self._account.decision_log
                work = partial(self._try_modes, call, question)
                mode: Mode = await log.once(0, f"mode/{self._role}", work, MODE_ADAPTER)
                self._mode = mode
            return self._mode

    async def _try_modes(self, call: Call, question: _Question[R]) -> Mode:
        """Return the first mode that the endpoint follows, or else the last one that it answers.

        An answer without any format is sent back once, as in each call, since the next one may have
        it.
        """
        first: ProviderError | RequestRefused | None = None
        answered: Mode | None = None
        for mode in MODE_ORDER:
            conversation = Conversation(question.prompt.messages, question.reply_type, mode)
            try:
                for attempt in range(1, min(2, self._config.reasks + 1) + 1):
                    completion = await self._converse(call, conversation, question, attempt)
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

    # ---- requests

    async def _complete(
        self,
        call: Call,
        body: Mapping[str, Any],
        call_id: CallId,
        *,
        path: str = COMPLETIONS_PATH,
        reply: str = "",
    ) -> ChatCompletion:
        """Return the stored or new response to a request; equal requests wait for each other.

        Every request has a content key, and is paid once. Each attempt of a call has its own stored
        response, including replies that failed validation. A process that is killed and restarted
        sends only the missing requests. ``reply`` is the reply type, empty for an agent's request.
        """
        url = self._urls[path]
        key = build_cache_key(
            endpoint=self._endpoint, path=url.path, body=body, call_id=call_id.label, reply=reply
        )
        call.keys.append(key)
        async with self._locks.setdefault(key, anyio.Lock(fast_acquire=True)):
            stored = await self._account.responses.find_response(key)
            if stored is None:
                text = await self._send(call, _Request(url, body, call_id, key))
                call.sent = True
            else:
                text = stored.text
        return ChatCompletion.model_validate_json(text)

    async def _send(self, call: Call, request: _Request) -> str:
        """Send a request until it succeeds; raise the error of an outcome that no retry can mend.

        If the endpoint refuses the cap by its name, the request is sent again with the other name,
        and so are all later ones.
        """
        retries = 0
        while True:
            body = {self._cap_names.get(name, name): value for name, value in request.body.items()}
            outcome: Outcome
            try:
                outcome = await self._try(call, request, body)
            except RoleRefused as refused:
                outcome = refused.outcome
                pause = None
            except ReflactError:
                raise
            except Exception as failure:  # noqa: BLE001 - a transport or an agent may raise anything
                outcome = failure
                pause = self._plan_retry(outcome, retries)
            else:
                pause = self._plan_retry(outcome, retries)
                if outcome.is_success:
                    return outcome.text
            if pause is not None:
                retries += 1
                await anyio.sleep(pause)
            elif not self._rename_cap(outcome, body):
                # Outside the except blocks, so that its context has no error that may quote the
                # key.
                raise translate_outcome(
                    outcome, self._config, self._role, self._keys.known, self._limits
                )

    def _plan_retry(self, outcome: Outcome, retries: int) -> float | None:
        """Return the seconds until a retry; None if the outcome is final, for its role perhaps.

        After 429 and 503 a retry waits for the endpoint's back-off (``reflact.llm.rate_limit``).
        Otherwise the delay before retry n is drawn uniformly from 0..min(cap, base * 2**n) seconds
        (full jitter: Brooker, "Exponential Backoff And Jitter", 2015), and is at least the server's
        ``Retry-After``. One above ``PATIENCE_SECONDS`` ends the retries, and so does an outage.
        """
        limits = self._limits
        passing = is_passing(outcome)
        last = retries == self._config.max_retries or not passing
        is_out = limits.endpoint.is_out(served=not passing)
        status = None
        asked = None
        if isinstance(outcome, httpx.Response):
            if outcome.is_success:
                limits.observe_answer()
                return None
            status = outcome.status_code
            asked = read_retry_after(outcome.headers)
        refused = refuses_role(outcome, limits, last=last) or is_out
        if refused:
            limits.refuse(outcome)
        if last or refused or (asked or 0.0) > PATIENCE_SECONDS:
            return None
        if status in LIMIT_STATUSES:
            return 0.0
        pause = max(asked or 0.0, jitter(retries, limits.endpoint.draw()))
        if isinstance(outcome, CONNECT_FAILURES):
            limits.report_unreached(pause)
        return pause

    def _rename_cap(self, outcome: Outcome, body: Mapping[str, Any]) -> bool:
        """Whether the endpoint refuses the name of the cap, and another one is left to try."""
        answer = outcome.text if isinstance(outcome, httpx.Response) else ""
        name = find_refused_cap(answer, body)
        if name is None or name in self._cap_names.values():
            return False
        (self._cap_names[name],) = {*CAP_NAMES} - {name}
        return True

    async def _try(self, call: Call, request: _Request, body: Mapping[str, Any]) -> httpx.Response:
        """Make an attempt, with a stream if drafts are watched and the endpoint can stream.

        No stream is asked for any more after a refusal, the second broken stream, or one that
        reports no usage, since such answers are charged at their worst case.
        """
        if call.drafts is None or not self._streams:
            return await self._renew(call, request, body)
        try:
            response = await self._renew(call, request, {**body, **STREAMED})
        except AnswerFault as fault:
            if fault.fault != "broken stream":
                raise
            call.drafts.reset("the stream broke off, and the answer is asked for again")
            self._n_broken_streams += 1
            self._streams = self._n_broken_streams < MAX_BROKEN_STREAMS
            if self._streams and fault.__cause__ is not None:
                raise  # the connection broke, which a retry may mend
        else:
            status = response.status_code
            if status not in UNSTREAMABLE_STATUSES or not STREAM_WORDS.search(response.text):
                return response
            self._streams = False
        return await self._renew(call, request, body)

    async def _renew(
        self, call: Call, request: _Request, body: Mapping[str, Any]
    ) -> httpx.Response:
        """Make an attempt; another one if the key is refused and there is a new one."""
        key = await self._keys.fetch()
        response = await self._attempt(call, request, body, key)
        if response.status_code == 401 and key is not None:
            other = await self._keys.fetch(refused=key)
            if other != key:
                response = await self._attempt(call, request, body, other)
        return response

    # ---- one attempt

    async def _attempt(
        self, call: Call, request: _Request, body: Mapping[str, Any], key: str | None
    ) -> httpx.Response:
        """Make one attempt, store its answer, and record its cost.

        It waits for the budget first, so that calls that wait for it occupy no slot of the
        endpoint. An error status is free. A time-out, a broken connection or answer, a
        cancellation, or an answer without usage counts at the worst case, since the provider may
        charge for it. Failed attempts are counted by kind.
        """
        config = self._config
        budget = self._account.budget
        responses = self._account.responses
        at = datetime.now(UTC)
        sent = self._build_request(call, request, body, key)
        most = read_cap(body) or 0
        bound = partial(worst_case, len(sent.content), config=config, at=at)
        worst = bound(most)
        cap = budget.find_shorter_cap(self._role) or most
        shorter = bound(cap) if cap < most and "n" not in body else None
        async with (
            budget.reserve(worst, shorter, role=self._role) as reserved,
            self._limits.admit(worst.input_tokens + worst.output_tokens) as slot,
        ):
            worst = reserved.worst
            if reserved.is_shortened:
                caps = {name: body[name] for name in CAP_NAMES if name in body}
                sent = self._build_request(call, request, {**body, **dict.fromkeys(caps, cap)}, key)
                sent.extensions[RECORDED_CAPS] = caps
            entry = CallReservation(
                key=request.key,
                run_id=self._account.run_id,
                call_id=request.call_id.label,
                role=self._role,
                purpose=request.call_id.purpose,
                endpoint=self._endpoint,
                model=config.model,
                worst_case=worst,
                step=budget.current_stage.step,
                stage=budget.current_stage.stage,
            )
            await self._reserve(entry)
            reserved.mark_sent()
            try:
                whole = await self._exchange(call, sent)
                read = partial(self._read, whole, body, find_keys(sent), worst, at)
                is_large = len(whole.content) > LARGE_BYTES
                response, usage, fault = await run_beside_loop(read) if is_large else read()
            except Exception as error:
                self._limits.endpoint.observe(slot, None, None, None)
                if isinstance(error, UNSENT):
                    await responses.release(entry)
                    reserved.release()
                await self._note_attempt(entry, Usage(), classify_failure(error))
                raise
            if reserved.is_shortened and is_cut(response):
                raise budget.end_at_cut_answer(cap)
            tokens = None if usage.uncounted else usage.input_tokens + usage.output_tokens
            asked = read_retry_after(response.headers)
            self._limits.endpoint.observe(slot, response.status_code, asked, tokens)
            if response.is_success:
                await finish_if_cancelled(
                    partial(self._store, response.text, usage, fault, entry, reserved)
                )
                if usage.uncounted and call.drafts is not None and "stream" in body:
                    self._streams = False
            else:
                if self._role in budget.answered_roles:
                    self._limits.note_access()
                await responses.release(entry)
                reserved.release()
                await self._note_attempt(entry, usage, fault)
            return response

    def _build_request(
        self, call: Call, request: _Request, body: Mapping[str, Any], key: str | None
    ) -> httpx.Request:
        """Return the HTTP request of an attempt; no header but these is sent."""
        config = self._config
        headers = {"accept": JSON, "accept-encoding": "gzip", "user-agent": "reflact"}
        if key is not None:
            is_bare = config.api == "azure" and config.auth == "key"
            headers |= {"api-key": key} if is_bare else {"authorization": f"Bearer {key}"}
        if config.call_id_header is not None:
            headers[config.call_id_header] = request.call_id.label
        cap = read_cap({"max_tokens": config.max_tokens, **config.extra_body})
        extensions = {
            "timeout": httpx.Timeout(config.timeout).as_dict(),
            "reflact_call_id": request.call_id.label,
            MAX_BYTES: SPARE_BYTES + TOKEN_BYTES * (UNCAPPED_TOKENS if cap is None else cap),
            ANSWERER: call.answerer,
        }
        return httpx.Request("POST", request.url, headers=headers, json=body, extensions=extensions)

    async def _reserve(self, entry: CallReservation) -> None:
        """Store the reservation; release it if the caller is cancelled meanwhile."""
        try:
            await self._account.responses.reserve(entry)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(RELEASE_SECONDS, shield=True):
                await self._account.responses.release(entry)
            raise

    async def _store(
        self,
        text: str,
        usage: Usage,
        fault: FaultKind | None,
        entry: CallReservation,
        reserved: Reservation,
    ) -> None:
        response = StoredResponse(key=entry.key, text=text, usage=usage)
        await self._account.responses.store_response(response, entry)
        reserved.settle(usage)
        await self._note_attempt(entry, usage, fault)

    async def _note_attempt(
        self, entry: CallReservation, usage: Usage, fault: FaultKind | None
    ) -> None:
        self._account.on_attempt(entry, usage, fault)
        if fault is not None:
            await self._account.responses.count_fault(entry.run_id, fault)

    async def _exchange(self, call: Call, request: httpx.Request) -> httpx.Response:
        """Send a request once and return its whole answer, which drafts follow as it arrives.

        The body of an error is cut after ``ERROR_BYTES``, and where it broke off or cannot be
        decoded.

        Raises:
            AnswerFault: The answer began, and broke off or cannot be decoded.
            httpx.TransportError: The request failed, or took longer than the time-out in total.
        """
        seconds = self._config.timeout
        drafts: DraftStream[Any] | None = None
        pieces: list[bytes] = []
        size = 0
        try:
            with anyio.fail_after(seconds) as time:
                response = await self._network.handle_async_request(request)
                headers = select_headers(response)
                is_streamed = response.is_success and headers["content-type"] == EVENT_STREAM
                if is_streamed and call.drafts is not None:
                    drafts = call.drafts
                    drafts.begin(find_keys(request))
                try:
                    assert isinstance(response.stream, httpx.AsyncByteStream)
                    async for piece in response.stream:
                        pieces.append(piece)
                        size += len(piece)
                        if size > ERROR_BYTES and not response.is_success:
                            break
                        if drafts is not None:
                            drafts.feed(piece)
                            if drafts.is_finished:
                                time.deadline = min(
                                    time.deadline, anyio.current_time() + HELD_OPEN_SECONDS
                                )
                except AnswerFault:
                    if response.is_success:
                        raise
                except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
                    if drafts is None or not drafts.is_finished:
                        kind: FaultKind = "broken stream" if is_streamed else "truncated"
                        raise AnswerFault(str(failure), kind) from failure
                finally:
                    await response.aclose()
        except TimeoutError:
            if drafts is None or not drafts.is_finished:
                raise httpx.ReadTimeout(f"no whole answer in {seconds:g} seconds") from None
        return httpx.Response(response.status_code, headers=headers, content=b"".join(pieces))

    def _read(
        self,
        whole: httpx.Response,
        body: Mapping[str, Any],
        keys: tuple[str, ...],
        worst: Usage,
        at: datetime,
    ) -> _Answer:
        """Return an answer in UTF-8 without API keys, its usage and its fault.

        A rate limit under another status gets the status 429. A sample of the model that its
        provider refuses is an answer, an invalid one.

        Raises:
            AnswerFault: It should be a chat completion and is none.
        """
        text = remove_keys(keys, decode_text(whole.content))
        status = whole.status_code
        headers = select_headers(whole)
        sample = None if FORMAT_FIELDS.isdisjoint(body) else find_failed_sample(status, text)
        if not whole.is_success and sample is None:
            if is_throttled(status, text):
                status = 429
            refusal = httpx.Response(status, headers=headers, content=text.encode("utf-8"))
            return _Answer(refusal, Usage(), classify_status(status))

        if sample is None:
            completion = read_completion(headers["content-type"], text)
        else:
            completion = write_completion({"content": sample, "refusal": None}, Usage())
        usage = read_counts(completion.get("usage"))
        bounded = bound_usage(usage, worst)
        fault: FaultKind | None = None
        if bounded != usage:
            completion["usage"] = write_counts(bounded)
            fault = "overcounted"
        elif is_prompt_cut(body, usage.input_tokens):
            fault = "cut prompt"
        elif self._role == "target":
            fault = find_answer_fault(completion, body)
        model = str(completion["model"])
        if model:
            self._models.setdefault(model)
            if fault is None and model != next(iter(self._models)):
                fault = "other model"
        if not bounded.uncounted:
            bounded = bounded.model_copy(update={"usd": usd_of(bounded, self._config, at=at)})
        # Again, since the events of a stream may divide a key.
        text = remove_keys(keys, replace_surrogates(json.dumps(completion, ensure_ascii=False)))
        response = httpx.Response(200, headers={"content-type": JSON}, content=text.encode("utf-8"))
        return _Answer(response, bounded, fault)


def find_failed_sample(status: int, text: str) -> str | None:
    """Return what its model wrote if a provider refuses that and not the request; else None."""
    document: Any = None
    with suppress(ValueError, RecursionError):
        document = json.loads(text) if status == 400 else None
    match document:
        case {"error": {"code": str(code), **error}} if code in FAILED_SAMPLES:
            return str(error.get("failed_generation") or "")
    return None


def is_prompt_cut(asked_for: Any, tokens: int) -> bool:
    """Whether a server counted far fewer tokens than the texts of a request have."""
    messages = asked_for.get("messages")
    texts = (
        [m.get("content") for m in messages if isinstance(m, dict)]
        if isinstance(messages, list)
        else []
    )
    size = sum(len(text) for text in texts if isinstance(text, str))
    return 0 < tokens * PROMPT_RATIO < size and size >= MIN_PROMPT


def find_answer_fault(completion: Any, asked_for: Any) -> FaultKind | None:
    """Return the fault of a target's answer that was cut, or has no text and no function call."""
    (choice,) = completion["choices"]
    message = choice["message"]
    if choice["finish_reason"] == "length":
        return "cut answer"
    text = remove_thoughts(message["content"] or message["refusal"] or "")
    has_call = "tools" in asked_for and message.get("tool_calls")
    return None if text.strip() or has_call else "empty answer"


def is_cut(response: httpx.Response) -> bool:
    """Whether an answer ended at its cap."""
    if not response.is_success:
        return False
    return bool(response.json()["choices"][0]["finish_reason"] == "length")


def build_url(config: ModelConfig, path: str) -> httpx.URL:
    """Return the address of an API's path; Azure's has the deployment and the version."""
    root = config.base_url.rstrip("/")
    if config.api != "azure":
        return httpx.URL(root + path)
    address = f"{root}/openai/deployments/{config.model}{path}"
    return httpx.URL(address, params={"api-version": config.api_version})


def identify_model(config: ModelConfig) -> str:
    """Return endpoint, model and settings that influence replies, as JSON without credentials."""
    address = urlsplit(config.base_url)
    endpoint = f"{address.scheme}://{address.hostname}:{address.port}{address.path}"
    names = ("model", "api", "api_version", "mode", "reasks")
    chosen: dict[str, JsonValue] = {name: getattr(config, name) for name in names}
    return canonical_json(
        {"endpoint": endpoint, **chosen, "settings": build_settings(config, None)}
    )


def build_settings(config: ModelConfig, call_id: CallId | None) -> dict[str, JsonValue]:
    """Return the fields of a request that the settings determine; a seed may need the call."""
    seed: JsonValue = config.seed
    if seed == "per_call" and call_id is not None:
        seed = derive_seed(call_id.label)
    named: dict[str, JsonValue] = {
        "temperature": config.temperature,
        "seed": seed,
        "max_tokens": config.max_tokens,
        "reasoning_effort": config.reasoning_effort,
    }
    return {**{k: v for k, v in named.items() if v is not None}, **config.extra_body}
