"""A model whose replies come from a function."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, TypeAlias, get_args

from annotated_types import MaxLen, MinLen
from anyio.lowlevel import checkpoint
from pydantic import JsonValue, ValidationError

from reflact.errors import ReplyError
from reflact.jsonutil import describe_problems
from reflact.messages import NO_VALID_REPLY, CallId, RenderedPrompt, Reply, ReplyModel, Text
from reflact.protocols import R
from reflact.records import Usage

# An answer of a script; see ``ScriptedLLM``.
ScriptedAnswer: TypeAlias = ReplyModel | JsonValue | Exception

# Answers a prompt; may be async.
Script: TypeAlias = Callable[
    [RenderedPrompt, type[ReplyModel], CallId], ScriptedAnswer | Awaitable[ScriptedAnswer]
]


class ScriptedCall(NamedTuple):
    """One attempt of a call to a ``ScriptedLLM``."""

    prompt: RenderedPrompt
    reply_type: type[ReplyModel]
    call_id: CallId


@dataclass(eq=False)
class ScriptedLLM:
    """Implements ``protocols.LLM`` with a function instead of a model.

    The function returns the answer of the model. A string is the reply's text: plain for ``Text``,
    else JSON. A value of the reply type, or another JSON value, is validated as that type. An
    exception that the function *returns* is raised, like a provider's error. If an answer is
    invalid or fails ``check``, the function is called again with ``call_id.attempt`` increased by
    one and the same prompt.

    Args:
        script: Called with the prompt, the reply type and the call's identity.
        identity: The model's name in keys.
        reasks: The most repeated calls after an invalid answer.

    Attributes:
        calls: All attempts so far, in order.
    """

    script: Script
    _: KW_ONLY
    identity: str = "scripted"
    reasks: int = 2
    calls: list[ScriptedCall] = field(default_factory=list, init=False)

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Return the script's answer, validated; every attempt counts as one call without tokens.

        Raises:
            ReplyError: No attempt gave a valid reply; holds the reason of each refusal.
        """
        reasons: list[str] = []
        for attempt in range(1 + self.reasks):
            numbered = call_id.model_copy(update={"attempt": call_id.attempt + attempt})
            self.calls.append(ScriptedCall(prompt, reply_type, numbered))
            await checkpoint()
            answer = self.script(prompt, reply_type, numbered)
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Exception):
                raise answer
            try:
                value = _read(answer, reply_type)
                if check is not None:
                    check(value)
            except ValidationError as error:
                reasons.append(describe_problems(error))
            except ValueError as error:
                reasons.append(str(error))
            else:
                return Reply(value=value, attempts=attempt + 1, usage=Usage(calls=attempt + 1))
        failure = ReplyError(
            f"{call_id.label} {NO_VALID_REPLY} {len(reasons)} attempts; the last reason: "
            f"{reasons[-1]}",
            reasons=tuple(reasons),
        )
        failure.usage = Usage(calls=len(reasons))
        raise failure


def _read(answer: ReplyModel | JsonValue, reply_type: type[R]) -> R:
    if isinstance(answer, reply_type):
        return answer
    if isinstance(answer, ReplyModel):
        raise ValueError(f"expected a {reply_type.__name__}, got a {type(answer).__name__}")  # noqa: TRY004
    if isinstance(answer, str) and issubclass(reply_type, Text):
        return reply_type(text=answer)
    return reply_type.model_validate_json(answer if isinstance(answer, str) else json.dumps(answer))


def append_reply(reply_type: type[ReplyModel], *contents: str) -> dict[str, JsonValue]:
    """Return an analyst's whole reply that appends texts to the document; as many as it may hold.

    ``reply_type`` is what the stage asks for; the first text is the most important one.
    """
    most = find_bounds(reply_type, "edits")[1]
    edits: list[JsonValue] = [append_edit(reply_type, content) for content in contents[:most]]
    reply: dict[str, JsonValue] = {"edits": edits}
    if "patterns" in reply_type.model_fields:
        pattern = describe_pattern(reply_type, "missing rule", 1, "The document lacks a rule.")
        reply["patterns"] = [pattern]
    return add_reasoning(reply_type, reply)


def add_reasoning(
    reply_type: type[ReplyModel], reply: dict[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return a reply with reasoning before the rest, if its type has any."""
    return {"reasoning": "As seen.", **reply} if "reasoning" in reply_type.model_fields else reply


def describe_pattern(
    reply_type: type[ReplyModel], name: str, count: int, description: str
) -> dict[str, JsonValue]:
    """Return a failure pattern of the first ``count`` cases, in the reply type's shape."""
    (kind,) = get_args(reply_type.model_fields["patterns"].annotation)
    share: dict[str, JsonValue] = {"count": count}
    if "cases" in kind.model_fields:
        share = {"cases": list(range(1, 1 + count))}
    return {"type": name, "description": description, **share}


def append_edit(reply_type: type[ReplyModel], content: str) -> dict[str, JsonValue]:
    """Return one edit that appends a text, in the shape of the reply type's edits."""
    (kind,) = get_args(reply_type.model_fields["edits"].annotation)
    values = {"op": "append", "target": "", "content": content, "evidence": "All cases."}
    return {name: value for name, value in values.items() if name in kind.model_fields}


def find_bounds(reply_type: type[ReplyModel], field: str) -> tuple[int, int | None]:
    """Return how many elements a list of the reply type must and may have; None: any number."""
    known = {type(bound): bound for bound in reply_type.model_fields[field].metadata}
    low = known.get(MinLen)
    high = known.get(MaxLen)
    return low.min_length if low else 0, high.max_length if high else None
