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
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import httpx
from openai.types.chat import ChatCompletion
from pydantic import JsonValue, TypeAdapter

from reflact import errors
from reflact.concurrency import finish_if_cancelled, run_beside_loop
from reflact.config.models import ModelConfig
from reflact.events import ModelCallFinished
from reflact.jsonutil import replace_surrogates
from reflact.llm import completions, pricing, rate_limit, redaction, structured
from reflact.llm import errors as failures
from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key, derive_seed, strip_to_endpoint
from reflact.llm.cassettes import RECORDED_CAPS, ReplayTransport
from reflact.llm.completions import COMPLETIONS_PATH, JSON, AnswerFault
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.drafts import DraftStream
from reflact.llm.structured import Conversation, InvalidReply, Mode, NoFormat
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
UNSTREAMABLE_STATUSES = structured.FORMAT_REFUSALS | {500}
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
    errors.CassetteMiss,
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
    answers in place of the network. ``answer`` is the last one that came from the endpoint rather
    than the store. ``keys`` are those of the responses.
    """

    id: CallId
    drafts: DraftStream[Any] | None = None
    answerer: completions.Answerer | None = None
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    answer: StoredResponse | None = None
    keys: list[str] = field(default_factory=list)


class _Request(NamedTuple):
    """One request of a call, and its entry in the ledger."""

    call: Call
    url: httpx.URL
    body: Mapping[str, Any]
    entry: CallReservation


@dataclass(eq=False)
class Client:
    """One role's model. Use it as an async context manager.

    Entering raises ConfigError if the role's key is missing or invalid, or the settings contain it.

    Args:
        role: The role, for messages and the ledger.
        account: Where calls are stored and charged.
        transport: Replaces the network.
        on_event: Takes an event for each call and its drafts.
        on_limit: Called at each back-off, and at each retry after a failed connection; must neither
            wait nor raise.
    """

    config: ModelConfig
    role: str
    account: Account
    _: KW_ONLY
    transport: httpx.AsyncBaseTransport | None = None
    on_event: EventCallback | None = None
    on_limit: Callable[[rate_limit.LimitChange], None] | None = None

    def __post_init__(self) -> None:
        self._stack = AsyncExitStack()
        self._keys = redaction.KeySource(self.config, self.role)
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._answerer: completions.Answerer | None = None
        # What the endpoint turns out to accept.
        self._mode: Mode | None = None if self.config.mode == "auto" else self.config.mode
        self._mode_lock = anyio.Lock()
        self._cap_names: dict[str, str] = {}
        self._streams = True
        self._n_broken_streams = 0
        self._model = ""

    @property
    def identity(self) -> str:
        """Endpoint, model and settings that influence replies, as JSON without credentials."""
        return identify_model(self.config)

    async def __aenter__(self) -> Self:
        config = self.config
        if config.api == "azure" and config.api_version is None:
            raise errors.ConfigError(f"models.{self.role}.api_version is required for api: azure")
        secret = await self._keys.fetch()
        if secret is not None:
            redaction.refuse_key_in(config, self.role, secret)
            self._stack.enter_context(redaction.redact_logs(self._keys.known))
        if config.api == "pydantic_ai":
            self._mode = "json_schema"
            if type(self.transport) is not ReplayTransport:
                # Only here, since it takes a second.
                from reflact.llm.pydantic_ai import PydanticAIModel

                self._answerer = PydanticAIModel(config, self.role, secret).answer
        network = self.transport
        if network is None:
            opened = await anyio.to_thread.run_sync(PooledTransport)  # it reads certificates
            network = await self._stack.enter_async_context(opened)
        # A recording lets agents answer itself, so that it has their answers too.
        if not isinstance(network, ReplayTransport):
            network = completions.AgentTransport(network)
        self._network = redaction.RedactingTransport(network)
        self._limits = self._stack.enter_context(
            rate_limit.endpoint_for(config, secret, on_limit=self.on_limit)
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
        call = Call(call_id, answerer=self._answerer)
        ask = partial(self._ask, call, prompt, reply_type, check)
        async with self._report(call):
            if self.on_event is None or issubclass(reply_type, Text):
                return await ask()
            fields = self._describe_call(call_id)
            call.drafts = drafts = DraftStream(reply_type, fields, self.on_event)
            return await drafts.follow(ask)

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
        if self.config.api == "pydantic_ai" and body.get("tools"):
            raise errors.ConfigError(
                f"models.{self.role}.api: pydantic_ai does not pass on the tools in the agent's "
                "request: name an OpenAI-compatible endpoint instead"
            )
        request = {**body, "model": self.config.model}
        settings = build_settings(self.config, call_id)
        if pricing.read_cap(settings) is not None:
            for name in pricing.CAP_NAMES:
                request.pop(name, None)
        call = Call(call_id, answerer=self._answerer, attempts=1)
        completion = await self._pass_on(call, request | settings, COMPLETIONS_PATH)
        return completion.model_dump_json(exclude_none=True)

    async def _pass_on(self, call: Call, body: Mapping[str, Any], path: str) -> ChatCompletion:
        """Send a request of an agent, whose answer is not validated."""
        async with self._report(call):
            completion, call.usage = await self._complete(call, body, call.id, path=path)
        return completion

    @asynccontextmanager
    async def _report(self, call: Call) -> AsyncIterator[None]:
        """Post an event when a call ends, and add to its error what it used."""
        started = anyio.current_time()
        failure: errors.ReflactError | None = None
        reason: str | None = None
        try:
            yield
        except errors.ReflactError as error:
            failure = error
            reason = str(error)
            if isinstance(error, errors.ModelError):
                error.usage = call.usage
            if isinstance(error, errors.ReplyError) and error.reasons:
                reason = error.reasons[-1]
        if self.on_event is not None:
            is_answered = failure is None or isinstance(failure, errors.ReplyError)
            event = ModelCallFinished(
                outcome="reply" if failure is None else "failed",
                reason=reason,
                attempts=call.attempts,
                usage=call.usage,
                seconds=anyio.current_time() - started,
                from_store=is_answered and call.answer is None,
                **self._describe_call(call.id),
            )
            await self.on_event(event)
        if failure is not None:
            raise failure

    def _describe_call(self, call_id: CallId) -> dict[str, Any]:
        """Return a call as the fields of its events."""
        return {
            "run_id": self.account.run_id,
            "step": call_id.step or 0,
            "role": call_id.role,
            "purpose": call_id.purpose,
            "call_id": call_id.label,
        }

    async def _ask(
        self,
        call: Call,
        prompt: RenderedPrompt,
        reply_type: type[R],
        check: Callable[[R], None] | None,
    ) -> Reply[R]:
        """Ask until a reply is valid, or all re-asks are used."""
        mode: Mode | None = None
        if not issubclass(reply_type, Text):
            mode = self._mode or await self._choose_mode(call, prompt, reply_type)
        conversation = Conversation(prompt.messages, reply_type, mode, check)
        reasons: list[str] = []
        for call.attempts in range(1, self.config.reasks + 2):
            completion, usage = await self._converse(call, conversation, call.attempts)
            call.usage += usage
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
            self.account.rejected.extend(call.keys)
        raise errors.ReplyError(
            f"models.{self.role} {NO_VALID_REPLY} {len(reasons)} attempts ({call.id.title}); "
            f"the last reason: {reasons[-1]}",
            reasons=tuple(reasons),
        )

    async def _converse(
        self, call: Call, conversation: Conversation[R], attempt: int
    ) -> tuple[ChatCompletion, Usage]:
        """Send the next request of a conversation, for the attempt of a number from 1."""
        call_id = call.id
        if attempt > 1:
            call_id = call_id.model_copy(update={"attempt": call_id.attempt + attempt - 1})
        settings = build_settings(self.config, call_id)
        body = {"messages": [], "model": self.config.model, **settings, **conversation.body}
        reply = f"{conversation.reply_type.__name__}@{conversation.reply_type.version}"
        return await self._complete(call, body, call_id, reply=reply)

    async def _choose_mode(
        self, call: Call, prompt: RenderedPrompt, reply_type: type[ReplyModel]
    ) -> Mode:
        """Return the first mode that the endpoint follows; it is logged before its first use."""
        async with self._mode_lock:
            if self._mode is None:
                log = self.account.decision_log
                work = partial(self._try_modes, call, prompt, reply_type)
                mode: Mode = await log.once(0, f"mode/{self.role}", work, MODE_ADAPTER)
                self._mode = mode
            return self._mode

    async def _try_modes(
        self, call: Call, prompt: RenderedPrompt, reply_type: type[ReplyModel]
    ) -> Mode:
        """Return the first mode that the endpoint follows, or else the last one that it answers.

        An answer without any format is sent back once, as in each call, since the next one may have
        it.
        """
        refusal: errors.ProviderError | errors.RequestRefused | None = None
        answered: Mode | None = None
        for mode in structured.MODE_ORDER:
            conversation = Conversation(prompt.messages, reply_type, mode)
            try:
                for attempt in range(1, min(2, self.config.reasks + 1) + 1):
                    completion, _ = await self._converse(call, conversation, attempt)
                    try:
                        conversation.parse(completion)
                    except NoFormat as missing:
                        conversation.send_back(completion, missing)
                    except InvalidReply:
                        return mode
                    else:
                        return mode
                answered = mode
            except (errors.ProviderError, errors.RequestRefused) as error:
                if not structured.refuses_format(error):
                    raise
                refusal = refusal or error
        if answered is None:
            raise refusal or AssertionError("there is at least one mode")
        return answered

    # ---- requests

    async def _complete(
        self,
        call: Call,
        body: Mapping[str, Any],
        call_id: CallId,
        *,
        path: str = COMPLETIONS_PATH,
        reply: str = "",
    ) -> tuple[ChatCompletion, Usage]:
        """Return the stored or new response to a request; equal requests wait for each other.

        Every request has a content key, and is paid once. Each attempt of a call has its own stored
        response, including replies that failed validation. A process that is killed and restarted
        sends only the missing requests. ``reply`` is the reply type, empty for an agent's request.
        """
        url = self._urls[path]
        label = call_id.label
        key = build_cache_key(
            endpoint=self._endpoint, path=url.path, body=body, call_id=label, reply=reply
        )
        call.keys.append(key)
        async with self._locks.setdefault(key, anyio.Lock(fast_acquire=True)):
            stored = await self.account.responses.find_response(key)
            if stored is not None:
                return ChatCompletion.model_validate_json(stored.text), stored.usage
            entry = CallReservation(
                key=key,
                run_id=self.account.run_id,
                call_id=label,
                role=self.role,
                purpose=call_id.purpose,
                endpoint=self._endpoint,
                model=self.config.model,
            )
            answer = await self._send(_Request(call, url, body, entry))
            return ChatCompletion.model_validate_json(answer.text), answer.usage

    async def _send(self, request: _Request) -> StoredResponse:
        """Send a request until it succeeds; raise the error of an outcome that no retry can mend.

        If the endpoint refuses the cap by its name, the request is sent again with the other name,
        and so are all later ones.
        """
        retries = 0
        while True:
            body = {self._cap_names.get(name, name): value for name, value in request.body.items()}
            outcome: rate_limit.Outcome
            pause: float | None = None
            try:
                outcome = await self._try(request, body)
            except rate_limit.RoleRefused as refused:
                outcome = refused.outcome
            except errors.ReflactError:
                raise
            except Exception as failure:  # noqa: BLE001 - a transport or an agent may raise anything
                outcome = failure
                pause = self._plan_retry(outcome, retries)
            else:
                if outcome.is_success:
                    self._limits.observe_answer()
                    assert request.call.answer is not None
                    return request.call.answer
                pause = self._plan_retry(outcome, retries)
            if pause is not None:
                retries += 1
                await anyio.sleep(pause)
            elif not self._rename_cap(outcome, body):
                # Outside the except blocks, so that its context has no error that may quote the
                # key.
                raise failures.translate_outcome(
                    outcome, self.config, self.role, self._keys.known, self._limits
                )

    def _plan_retry(self, outcome: rate_limit.Outcome, retries: int) -> float | None:
        """Return the seconds until a retry; None if a failure is final, for its role perhaps.

        After 429 and 503 a retry waits for the endpoint's back-off (``reflact.llm.rate_limit``).
        Otherwise the delay before retry n is drawn uniformly from 0..min(cap, base * 2**n) seconds
        (full jitter: Brooker, "Exponential Backoff And Jitter", 2015), and is at least the server's
        ``Retry-After``. One above ``PATIENCE_SECONDS`` ends the retries, and so does an outage.
        """
        limits = self._limits
        passing = failures.is_passing(outcome)
        last = retries == self.config.max_retries or not passing
        is_out = limits.endpoint.is_out(served=not passing)
        status = None
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            status = outcome.status_code
            asked = failures.read_retry_after(outcome.headers) or 0.0
        refused = failures.refuses_role(outcome, limits, last=last) or is_out
        if refused:
            limits.refuse(outcome)
        if last or refused or asked > rate_limit.PATIENCE_SECONDS:
            return None
        if status in rate_limit.LIMIT_STATUSES:
            return 0.0
        pause = max(asked, rate_limit.jitter(retries, limits.endpoint.draw()))
        if isinstance(outcome, failures.CONNECT_FAILURES):
            limits.report_unreached(pause)
        return pause

    def _rename_cap(self, outcome: rate_limit.Outcome, body: Mapping[str, Any]) -> bool:
        """Whether the endpoint refuses the name of the cap, and another one is left to try."""
        answer = outcome.text if isinstance(outcome, httpx.Response) else ""
        name = structured.find_refused_cap(answer, body)
        if name is None or name in self._cap_names.values():
            return False
        (self._cap_names[name],) = {*pricing.CAP_NAMES} - {name}
        return True

    async def _try(self, request: _Request, body: Mapping[str, Any]) -> httpx.Response:
        """Make an attempt, with a stream if drafts are watched and the endpoint can stream.

        No stream is asked for any more after a refusal, the second broken stream, or one that
        reports no usage, since such answers are charged at their worst case.
        """
        drafts = request.call.drafts
        if drafts is None or not self._streams:
            return await self._renew(request, body)
        try:
            response = await self._renew(request, {**body, **STREAMED})
        except AnswerFault as fault:
            if fault.fault != "broken stream":
                raise
            drafts.reset("the stream broke off, and the answer is asked for again")
            self._n_broken_streams += 1
            self._streams = self._n_broken_streams < MAX_BROKEN_STREAMS
            if self._streams and fault.__cause__ is not None:
                raise  # the connection broke, which a retry may mend
        else:
            status = response.status_code
            if status not in UNSTREAMABLE_STATUSES or not STREAM_WORDS.search(response.text):
                return response
            self._streams = False
        return await self._renew(request, body)

    async def _renew(self, request: _Request, body: Mapping[str, Any]) -> httpx.Response:
        """Make an attempt; another one if the key is refused and there is a new one."""
        key = await self._keys.fetch()
        response = await self._attempt(request, body, key)
        if response.status_code == 401 and key is not None:
            other = await self._keys.fetch(refused=key)
            if other != key:
                response = await self._attempt(request, body, other)
        return response

    # ---- one attempt

    async def _attempt(
        self, request: _Request, body: Mapping[str, Any], key: str | None
    ) -> httpx.Response:
        """Make one attempt, store its answer, and record its cost.

        It waits for the budget first, so that calls that wait for it occupy no slot of the
        endpoint. An error status is free. A time-out, a broken connection or answer, a
        cancellation, or an answer without usage counts at the worst case, since the provider may
        charge for it. Failed attempts are counted by kind.
        """
        budget = self.account.budget
        responses = self.account.responses
        endpoint = self._limits.endpoint
        at = datetime.now(UTC)
        sent = self._build_request(request, body, key)
        bound = partial(pricing.worst_case, len(sent.content), config=self.config, at=at)
        worst = bound(pricing.read_cap(body))
        lower = budget.find_shorter_cap(self.role)
        is_lower = lower is not None and lower < worst.output_tokens and "n" not in body
        shorter = bound(lower) if is_lower else None
        async with (
            budget.reserve(worst, shorter, role=self.role) as reserved,
            self._limits.admit(worst.input_tokens + worst.output_tokens) as slot,
        ):
            worst = reserved.worst
            if reserved.is_shortened:
                sent = self._shorten(request, body, key, cap=worst.output_tokens)
            entry = request.entry.model_copy(
                update={"worst_case": worst, **vars(budget.current_stage)}
            )
            await self._reserve(entry)
            reserved.mark_sent()
            try:
                whole = await self._exchange(request.call, sent)
                read = partial(self._read, whole, body, redaction.find_keys(sent), worst, at)
                beside = len(whole.content) > LARGE_BYTES
                response, usage, fault = await run_beside_loop(read) if beside else read()
            except Exception as error:
                endpoint.observe(slot, None, None, None)
                if isinstance(error, UNSENT):
                    await responses.release(entry)
                    reserved.release()
                await self._note_attempt(entry, Usage(), failures.classify_failure(error))
                raise
            if reserved.is_shortened and is_cut(response):
                raise budget.end_at_cut_answer(worst.output_tokens)
            tokens = None if usage.uncounted else usage.input_tokens + usage.output_tokens
            asked = failures.read_retry_after(response.headers)
            endpoint.observe(slot, response.status_code, asked, tokens)
            if not response.is_success:
                if self.role in budget.answered_roles:
                    self._limits.note_access()
                await responses.release(entry)
                reserved.release()
                await self._note_attempt(entry, usage, fault)
                return response

            async def store() -> None:
                answer = StoredResponse(key=entry.key, text=response.text, usage=usage)
                await responses.store_response(answer, entry)
                request.call.answer = answer
                reserved.settle(usage)
                await self._note_attempt(entry, usage, fault)

            await finish_if_cancelled(store)
            if usage.uncounted and "stream" in body and request.call.drafts is not None:
                self._streams = False
            return response

    def _build_request(
        self, request: _Request, body: Mapping[str, Any], key: str | None
    ) -> httpx.Request:
        """Return the HTTP request of an attempt; no header but these is sent."""
        config = self.config
        label = request.entry.call_id
        headers = {"accept": JSON, "accept-encoding": "gzip", "user-agent": "reflact"}
        if key is not None and config.api == "azure" and config.auth == "key":
            headers["api-key"] = key
        elif key is not None:
            headers["authorization"] = f"Bearer {key}"
        if config.call_id_header is not None:
            headers[config.call_id_header] = label
        cap = pricing.read_cap({"max_tokens": config.max_tokens, **config.extra_body})
        extensions = {
            "timeout": httpx.Timeout(config.timeout).as_dict(),
            "reflact_call_id": label,
            redaction.MAX_BYTES: SPARE_BYTES
            + TOKEN_BYTES * (UNCAPPED_TOKENS if cap is None else cap),
            completions.ANSWERER: request.call.answerer,
        }
        return httpx.Request("POST", request.url, headers=headers, json=body, extensions=extensions)

    def _shorten(
        self, request: _Request, body: Mapping[str, Any], key: str | None, *, cap: int
    ) -> httpx.Request:
        """Return a request for a shorter answer; a recording has it with its usual caps."""
        caps = {name: body[name] for name in pricing.CAP_NAMES if name in body}
        sent = self._build_request(request, {**body, **dict.fromkeys(caps, cap)}, key)
        sent.extensions[RECORDED_CAPS] = caps
        return sent

    async def _reserve(self, entry: CallReservation) -> None:
        """Store the reservation; release it if the caller is cancelled meanwhile."""
        try:
            await self.account.responses.reserve(entry)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(RELEASE_SECONDS, shield=True):
                await self.account.responses.release(entry)
            raise

    async def _note_attempt(
        self, entry: CallReservation, usage: Usage, fault: FaultKind | None
    ) -> None:
        self.account.on_attempt(entry, usage, fault)
        if fault is not None:
            await self.account.responses.count_fault(entry.run_id, fault)

    async def _exchange(self, call: Call, request: httpx.Request) -> httpx.Response:
        """Send a request once and return its whole answer, which drafts follow as it arrives.

        The body of an error is cut after ``ERROR_BYTES``, and where it broke off or cannot be
        decoded.

        Raises:
            AnswerFault: The answer began, and broke off or cannot be decoded.
            httpx.TransportError: The request failed, or took longer than the time-out in total.
        """
        seconds = self.config.timeout
        drafts: DraftStream[Any] | None = None
        pieces: list[bytes] = []
        size = 0
        try:
            with anyio.fail_after(seconds) as time:
                response = await self._network.handle_async_request(request)
                headers = completions.select_headers(response)
                is_streamed = (
                    response.is_success and headers["content-type"] == completions.EVENT_STREAM
                )
                if is_streamed and call.drafts is not None:
                    drafts = call.drafts
                    drafts.begin(redaction.find_keys(request))
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
    ) -> tuple[httpx.Response, Usage, FaultKind | None]:
        """Return an answer in UTF-8 without API keys, its usage and its fault.

        A rate limit under another status gets the status 429. A sample of the model that its
        provider refuses is an answer, an invalid one.

        Raises:
            AnswerFault: It should be a chat completion and is none.
        """
        text = redaction.remove_keys(keys, completions.decode_text(whole.content))
        status = whole.status_code
        headers = completions.select_headers(whole)
        sample = None if FORMAT_FIELDS.isdisjoint(body) else find_failed_sample(status, text)
        if not whole.is_success and sample is None:
            if failures.is_throttled(status, text):
                status = 429
            refusal = httpx.Response(status, headers=headers, content=text.encode("utf-8"))
            return refusal, Usage(), failures.classify_status(status)

        if sample is None:
            completion = completions.read_completion(headers["content-type"], text)
        else:
            completion = completions.write_completion({"content": sample, "refusal": None}, Usage())
        usage = pricing.read_counts(completion.get("usage"))
        bounded = pricing.bound_usage(usage, worst)
        fault: FaultKind | None = None
        if bounded != usage:
            completion["usage"] = pricing.write_counts(bounded)
            fault = "overcounted"
        elif is_prompt_cut(body, usage.input_tokens):
            fault = "cut prompt"
        elif self.role == "target":
            fault = find_answer_fault(completion, body)
        model = str(completion["model"])
        self._model = self._model or model
        if fault is None and model not in {"", self._model}:
            fault = "other model"
        if not bounded.uncounted:
            usd = pricing.usd_of(bounded, self.config, at=at)
            bounded = bounded.model_copy(update={"usd": usd})
        # Again, since the events of a stream may divide a key.
        text = redaction.remove_keys(
            keys, replace_surrogates(json.dumps(completion, ensure_ascii=False))
        )
        response = httpx.Response(200, headers={"content-type": JSON}, content=text.encode("utf-8"))
        return response, bounded, fault


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
    size = 0
    messages = asked_for.get("messages")
    if isinstance(messages, list):  # an agent may send anything
        texts = [message.get("content") for message in messages if isinstance(message, dict)]
        size = sum(len(text) for text in texts if isinstance(text, str))
    return 0 < tokens * PROMPT_RATIO < size and size >= MIN_PROMPT


def find_answer_fault(completion: Any, asked_for: Any) -> FaultKind | None:
    """Return the fault of a target's answer that was cut, or has no text and no function call."""
    (choice,) = completion["choices"]
    message = choice["message"]
    if choice["finish_reason"] == "length":
        return "cut answer"
    text = structured.remove_thoughts(message["content"] or message["refusal"] or "")
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
