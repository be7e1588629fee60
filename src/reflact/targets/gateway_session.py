"""A rollout of an agent that asks its model through a gateway, and the test that its requests have
the skill.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from reflact.adapters import CatchExits, adapt_target
from reflact.concurrency import run_in_thread
from reflact.config.models import ModelConfig
from reflact.errors import EnvironmentFailure, ReflactError, ReplyError
from reflact.messages import AgentAnswer, CallId
from reflact.protocols import ConnectedTarget, Environment, RequestSender, Session
from reflact.types import Item, Skill, Turn, digest_json

# Fields that the run sets itself, that differ between equal rollouts, or that ask for several
# answers.
DROPPED_FIELDS = frozenset(
    {"model", "n", "stream", "stream_options", "user", "prompt_cache_key", "safety_identifier"}
)

# The line that a test adds to a skill, and looks for in the agent's requests.
PROBE = "This line tests whether an agent reads these instructions: 7f3b91c2d4."

# The requests that a test answers before it ends the agent, and the tasks that it tries if the
# agent asks nothing.
MAX_PROBED_REQUESTS = 5
MAX_PROBED_ITEMS = 3

# What a model sees instead of the folder of a rollout, whose name differs between equal rollouts.
SHOWN_FOLDER = "/reflact-rollout"


class GatewaySession:
    """One rollout of an agent that asks its model through a gateway; subclasses run the agent.

    Args:
        sender: The run, which answers the agent's requests.
        skill: The instructions.
        rollout: The rollout's key.
        seed: The text in the agent's requests that the skill replaces; None if the agent gets the
            skill itself.
        side_call: A text in the first message of requests that are no part of the task. They have
            no seed, and are booked under a purpose of their own.
    """

    def __init__(
        self,
        sender: RequestSender,
        skill: Skill,
        rollout: str,
        *,
        seed: str | None,
        side_call: str | None = None,
    ) -> None:
        self._sender = sender
        self.skill = skill
        self.rollout = rollout
        self._seed = seed
        self._side_call = side_call
        self._copied: tuple[Turn, ...] | None = None
        self._asked: Counter[str] = Counter()
        self._last: list[Mapping[str, Any]] = []
        self._failure: ReflactError | None = None
        self._stop: Callable[[], None] = lambda: None
        self._task: str | None = None
        self._folder = SHOWN_FOLDER

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The agent's longest conversation with its model, without instructions."""
        if self._copied is not None:
            return self._copied
        task = () if self._task is None else (Turn(role="user", content=self._task),)
        spoken = [turn for message in self._last for turn in _read_turns(message)]
        begin = next((n for n, turn in enumerate(spoken, 1) if turn.content == self._task), 0)
        return (*task, *spoken[begin:])

    async def forward(
        self, request: Mapping[str, Any], *, purpose: str, number: int, part: str
    ) -> str:
        """Pass on a request of this session's copy in another process, which keeps its own
        conversation.
        """
        call_id = CallId(
            role="target", purpose=purpose, rollout=self.rollout, number=number, part=part
        )
        return await self._sender.forward(request, call_id=call_id)

    def adopt(self, turns: tuple[Turn, ...]) -> None:
        """Take the turns of the copy as those of this session."""
        self._copied = turns

    def _refuse(self, reason: str) -> None:
        """End the command, which asks for something that the gateway does not have."""
        self._failure = self._failure or EnvironmentFailure(
            f"the gateway refused a request of the agent: {reason}"
        )
        self._stop()

    async def _answer(self, body: dict[str, Any]) -> str:
        """Answer one request of the agent; a failure ends the command."""
        try:
            request, is_side, digest = await run_in_thread(lambda: self._prepare(body), body)
            if not is_side:
                self._last = max(self._last, request["messages"], key=len)
            number, self._asked[digest] = self._asked[digest], self._asked[digest] + 1
            call_id = CallId(
                role="target",
                purpose="side_call" if is_side else "rollout",
                rollout=self.rollout,
                number=number,
                part=digest[:16],
            )
            completion = await self._sender.forward(request, call_id=call_id)
        except ReflactError as error:
            self._failure = self._failure or error
            self._stop()
            raise
        completion = completion.replace(SHOWN_FOLDER, self._folder)
        return completion.replace(_flatten(SHOWN_FOLDER), _flatten(self._folder))

    def _prepare(self, body: dict[str, Any]) -> tuple[dict[str, Any], bool, str]:
        """Return a request as the run sends it, whether it is a side call, and its digest."""
        body = json.loads(self._hide_folder(json.dumps(body, ensure_ascii=False)))
        request = {name: value for name, value in body.items() if name not in DROPPED_FIELDS}
        is_side = self._side_call is not None and has_text(request["messages"][:1], self._side_call)
        if self._seed is not None and not is_side:
            request["messages"] = self._replace_seed(request["messages"])
        return request, is_side, digest_json(request)

    def _hide_folder(self, text: str) -> str:
        """Return a text with the name that all rollouts' folders have in place of that of
        this one.
        """
        text = text.replace(self._folder, SHOWN_FOLDER)
        return text.replace(_flatten(self._folder), _flatten(SHOWN_FOLDER))

    def _replace_seed(self, messages: Any) -> list[Any]:
        seed = self._seed or ""
        count = 0

        def replace_in(value: Any) -> Any:
            nonlocal count
            if isinstance(value, str):
                count += value.count(seed)
                return value.replace(seed, self.skill.text)
            if isinstance(value, list):
                return [replace_in(part) for part in value]
            if isinstance(value, dict):
                return {name: replace_in(part) for name, part in value.items()}
            return value

        replaced = [replace_in(message) for message in messages]
        if count != 1:
            raise EnvironmentFailure(
                f"a request of the command has the seed {count} times instead of once, so the "
                "skill cannot replace it; give a longer or shorter part of the agent's "
                "instructions as seed"
            )
        return replaced


def _flatten(path: str) -> str:
    """Return a path as a single name, as Claude Code writes it into texts."""
    return re.sub(r"[^A-Za-z0-9]", "-", path)


def _read_turns(message: Mapping[str, Any]) -> list[Turn]:
    """Return a chat message as turns; instructions are none."""
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    turns = []
    if content and role in {"user", "assistant", "tool"}:
        turns.append(Turn(role=role, content=str(content)))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        turns.append(
            Turn(
                role="assistant",
                content=f"calls {function.get('name')}({function.get('arguments')})",
            )
        )
    return turns


def has_text(value: object, text: str) -> bool:
    """Whether a text is part of a string in a JSON value."""
    return count_text(value, text) > 0


def count_text(value: object, text: str) -> int:
    """Return how often a text is part of the strings in a JSON value."""
    if isinstance(value, str):
        return value.count(text)
    if isinstance(value, Mapping):
        return sum(count_text(part, text) for part in value.values())
    return sum(count_text(part, text) for part in value) if isinstance(value, Sequence) else 0


async def test_skill(
    target: ConnectedTarget,
    environment: Environment,
    items: Sequence[Item],
    skill: Skill,
    config: ModelConfig,
    *,
    place: str,
    name: str | None,
    seconds: float,
) -> str | None:
    """Run an agent without its model; see ``adapters.TargetAdapter.test_skill``.

    Args:
        target: The agent, not connected.
        environment: Gives it its task, as in a rollout.
        items: Its tasks; another one is tried if the agent asks nothing.
        skill: The initial skill; a line is added to it.
        config: The settings of ``models.target``.
        place: Where the agent gets the skill, and what to change if it does not, in words.
        name: The name of a skill that the agent loads if it seems useful, so that a request has
            this name alone.
        seconds: The agent's limit of time; no further item is tried after it, so an agent that
            hangs costs it once.
    """
    begin = anyio.current_time()
    probed = Skill(text=f"{skill.text}\n\n{PROBE}\n".lstrip())
    for item in items[:MAX_PROBED_ITEMS]:
        probe = _ProbeSender(name or PROBE)
        connected = adapt_target(target.connect(probe, config))
        session = _ProbeSession(connected.session_for(item, probed, rollout="probe"))
        reason = "it asked the agent nothing"
        try:
            with CatchExits():
                await environment.run(item, session, seed=0)
        except Exception as caught:  # noqa: BLE001 - environments may raise anything
            reason = f"{type(caught).__name__}: {caught}"
        if probe.requests or anyio.current_time() - begin >= seconds:
            break
    error = session.error
    if probe.count:
        is_sound = probe.count == 1 or name is not None
        return (
            None
            if is_sound
            else f"a request of the agent has the skill {probe.count} times: {place}"
        )
    if not session.is_asked:
        return (
            "it was not tested whether the agent gets the skill, because of the environment: "
            f"{reason}"
        )
    if error is not None and not isinstance(error, ReplyError | _ProbeEnded):
        raise error
    if probe.requests:
        what = "the skill" if name is None else f"the name of the skill, {name}"
        if isinstance(error, ReplyError):
            raise EnvironmentFailure(
                f"{error}; before, no request of the agent had {what}: {place}"
            )
        end = "" if error is None else f"; {error}"
        raise EnvironmentFailure(
            f"no request of the agent has {what}, so the skill has no effect: {place}{end}"
        )
    if error is not None:
        raise EnvironmentFailure(
            f"{error}; the agent sent no request to the gateway before, so the skill could not be "
            "tested: solve this problem, or switch `preflight` off if the agent works on other "
            "tasks"
        )
    raise EnvironmentFailure(
        "the agent sent no request to the gateway, so it has neither its model nor the skill: let "
        "it call its model at the address and with the token that it gets"
    )


class _ProbeSession:
    """Lets an agent answer the first message of an environment, and ends the environment before it
    grades.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_asked = False
        self.error: Exception | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The agent's conversation."""
        return self._session.turns

    async def reply(self, message: str) -> str:
        """Run the agent, if it has not run, and note its error."""
        if not self.is_asked:
            self.is_asked = True
            try:
                with CatchExits():
                    await self._session.reply(message)
            except Exception as error:  # agents may raise anything
                self.error = error
                raise
        raise _ProbeEnded("the test of the agent is over")


class _ProbeEnded(EnvironmentFailure):
    """A test of an agent is over."""


class _ProbeSender:
    """Plays the model in a test, counts a text in the agent's requests, and ends the agent when it
    was seen.
    """

    identity = "probe"

    def __init__(self, sought: str) -> None:
        self._sought = sought
        self.count = self.requests = 0

    async def forward(self, body: Mapping[str, Any], *, call_id: CallId) -> str:
        """Answer with a few words."""
        self.count = max(self.count, count_text(body["messages"], self._sought))
        self.requests += 1
        if self.count or self.requests == MAX_PROBED_REQUESTS:
            raise _ProbeEnded(f"the agent was ended after {self.requests} requests")
        message = {"role": "assistant", "content": "This is a test of the connection."}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return json.dumps(
            {
                "id": "probe",
                "object": "chat.completion",
                "created": 0,
                "model": "probe",
                "choices": [choice],
                "usage": usage,
            }
        )

    async def send(
        self,
        body: Mapping[str, Any],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Refuse; agents behind a gateway do not ask so."""
        raise NotImplementedError
