"""The test that an agent's requests have the skill, before anything is paid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from reflact.adapters import CatchExits, adapt_target
from reflact.errors import EnvironmentFailure, ReplyError
from reflact.messages import CallId
from reflact.protocols import Environment, RequestForwarder, Session
from reflact.types import Item, Skill, Turn

# The line that a test adds to a skill, and looks for in the agent's requests.
PROBE = "This line tests whether an agent reads these instructions: 7f3b91c2d4."

# The requests that a test answers before it ends the agent, and the tasks that it tries if the
# agent asks nothing.
MAX_PROBED_REQUESTS = 5
MAX_PROBED_ITEMS = 3


async def run_skill_test(
    connect: Callable[[RequestForwarder], Any],
    environment: Environment,
    items: Sequence[Item],
    skill: Skill,
    *,
    advice: str,
    name: str | None,
    seconds: float,
) -> str | None:
    """Run an agent on items without its model, until a request has the skill.

    Another item is tried if the agent asks nothing, but none after so many ``seconds``. A line is
    added to the skill, which is sought; or else ``name``, if a request may have that in place of
    the skill. ``advice`` says where the agent gets the skill, and what to change if it does not.
    Return a warning if the environment fails before the agent gets its task; else None.

    Raises:
        EnvironmentFailure: No request has the skill, or the agent failed before it asked.
    """
    begin = anyio.current_time()
    probed = Skill(text=f"{skill.text}\n\n{PROBE}\n".lstrip())
    for item in items[:MAX_PROBED_ITEMS]:
        probe = _Probe(name or PROBE)
        target = adapt_target(connect(probe))
        probe.session = target.session_for(item, probed, rollout="probe")
        reason = "it asked the agent nothing"
        try:
            with CatchExits():
                await environment.run(item, probe, seed=0)
        except Exception as caught:  # noqa: BLE001 - environments may raise anything
            reason = f"{type(caught).__name__}: {caught}"
        if probe.requests or anyio.current_time() - begin >= seconds:
            break

    if probe.has_skill:
        return None
    if not probe.is_asked:
        return (
            "it was not tested whether the agent gets the skill, because of the environment: "
            f"{reason}"
        )
    error = probe.error
    if error is not None and not isinstance(error, ReplyError | _ProbeEnded):
        raise error
    if probe.requests:
        what = "the skill" if name is None else f"the name of the skill, {name}"
        problem = f"no request of the agent has {what}, so the skill has no effect: {advice}"
    else:
        problem = (
            "the agent sent no request to the gateway, so it has neither its model nor the skill: "
            "let it call its model at the address and with the token that it gets, or switch "
            "`preflight` off if it works on other tasks"
        )
    if isinstance(error, ReplyError):
        problem = f"{error}; {problem}"
    raise EnvironmentFailure(problem)


def count_text(value: object, text: str) -> int:
    """Return how often a text is part of the strings in a JSON value."""
    if isinstance(value, str):
        return value.count(text)
    if isinstance(value, Mapping):
        return sum(count_text(part, text) for part in value.values())
    return sum(count_text(part, text) for part in value) if isinstance(value, Sequence) else 0


class _ProbeEnded(EnvironmentFailure):
    """A test of an agent is over."""


class _Probe:
    """Plays the model until a request has the skill, and is the session of the environment.

    The session lets the agent answer the first message, and ends the environment before it grades.
    """

    identity = "probe"
    session: Session

    def __init__(self, sought: str) -> None:
        self._sought = sought
        self.has_skill = False
        self.requests = 0
        self.is_asked = False
        self.error: Exception | None = None

    @property
    def has_files(self) -> bool:
        """Whether the agent finds the files of a case in its folder."""
        return getattr(self.session, "has_files", False)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The agent's conversation."""
        return self.session.turns

    async def reply(self, message: str) -> str:
        """Run the agent, if it has not run, and note its error."""
        if not self.is_asked:
            self.is_asked = True
            try:
                with CatchExits():
                    await self.session.reply(message)
            except Exception as error:  # agents may raise anything
                self.error = error
                raise
        raise _ProbeEnded("the test of the agent is over")

    async def forward(self, body: Mapping[str, Any], *, call_id: CallId) -> str:
        """Answer with a few words."""
        self.has_skill = self.has_skill or count_text(body["messages"], self._sought) > 0
        self.requests += 1
        if self.has_skill or self.requests == MAX_PROBED_REQUESTS:
            raise _ProbeEnded(f"the agent was ended after {self.requests} requests")
        message = {"role": "assistant", "content": "This is a test of the connection."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        frame = {"id": "probe", "object": "chat.completion", "created": 0, "model": "probe"}
        return json.dumps({**frame, "choices": [choice], "usage": usage})
