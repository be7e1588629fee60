"""Typed replies through instructor.

Instructor's handlers write the schema and the format of each mode into the request, parse and validate the
answer, and send an invalid reply back with the reason. ``AsyncInstructor.create`` does not fit around them.
It never sends back a reply that was cut off or refused, it quotes validation errors without a bound, it logs
each failure, and it counts the usage of all attempts as that of the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, cast

import instructor
from instructor.core.exceptions import IncompleteOutputException
from instructor.v2 import Provider, mode_registry
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator

from reflact.errors import ProviderError, UnknownModel
from reflact.messages import Message, ReplyModel

Body = dict[str, Any]
"""A request body, or a part of one, as it goes on the wire."""

Mode = Literal["json_schema", "tools", "json_object_with_schema", "json"]

ORDER: tuple[Mode, ...] = ("json_schema", "tools", "json_object_with_schema", "json")
"""What ``auto`` tries; the only one that adds to the prompt comes last."""

HANDLERS: dict[Mode, instructor.Mode] = {
    "json_schema": instructor.Mode.JSON_SCHEMA,
    "tools": instructor.Mode.TOOLS,
    "json_object_with_schema": instructor.Mode.JSON_SCHEMA,
    "json": instructor.Mode.JSON,
}
"""Instructor's name for each mode; it has none for a schema beside ``json_object``."""

LONGEST_BOUND = 256

REASON_CHARACTERS = 500
"""Length of the reason with which a reply is sent back, on one line: it may quote the reply."""

REFUSED = frozenset({400, 404, 415, 422, 501})
"""Statuses with which an endpoint says that it does not know a format."""

R = TypeVar("R", bound=ReplyModel)


class InvalidReply(Exception):
    """An answer that holds no valid reply; the message says why, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(replace_surrogates(" ".join(reason.split())[:REASON_CHARACTERS]))


class Conversation(Generic[R]):
    """The messages of one call, and what instructor makes of them; it grows with each reply sent back.

    Args:
        messages: The prompt.
        reply_type: What the reply must be.
        mode: How it is asked for; None: in plain text.
        check: Raises ``ValueError`` for a reply that does not fit the data at hand.

    Attributes:
        body: The fields of the next request: messages, and in which format to answer.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        reply_type: type[R],
        mode: Mode | None,
        check: Callable[[R], None] | None = None,
    ) -> None:
        self._type = reply_type
        self._check = check
        self.body: Body = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        self._handlers: Any = None
        if mode is not None:
            self._handlers = mode_registry.get_handlers(Provider.OPENAI, HANDLERS[mode])
            self._bound, self.body = self._handlers.request_handler(bind(reply_type, mode), self.body)
        if mode == "json_object_with_schema":
            schema = self.body["response_format"]["json_schema"]["schema"]
            self.body["response_format"] = {"type": "json_object", "schema": schema}

    def parse(self, completion: ChatCompletion) -> R:
        """Return the valid reply that an answer holds.

        Raises:
            InvalidReply: There is none.
        """
        message = completion.choices[0].message
        try:
            if self._handlers is None:
                text = message.content if message.content is not None else message.refusal
                plain = self._type.model_validate({"text": replace_surrogates(text or "")})
                if self._check is not None:
                    self._check(plain)
                return plain
            if message.refusal:
                raise InvalidReply(f"it was a refusal: {message.refusal}")
            parsed: BaseModel = self._handlers.response_parser(
                completion, self._bound, validation_context={"check": self._check}, strict=True
            )
        except IncompleteOutputException:
            raise InvalidReply("it was cut off at the token limit; be shorter") from None
        except ValidationError as error:
            raise InvalidReply(describe(error)) from None
        except ValueError as error:
            raise InvalidReply(str(error)) from None
        return cast("R", self._type.model_construct(parsed.model_fields_set, **parsed.__dict__))

    def send_back(self, completion: ChatCompletion, invalid: InvalidReply) -> None:
        """Add an invalid reply, and why it is one."""
        message = completion.choices[0].message
        message.content = replace_surrogates(message.content or "")
        for call in message.tool_calls or ():
            if call.type == "function":
                call.function.arguments = replace_surrogates(call.function.arguments)
        ask = f"This reply cannot be used: {invalid}. Reply again, whole and corrected."
        if self._handlers is None:
            written = [{"role": "assistant", "content": message.content}] if message.content else []
            self.body["messages"] += [*written, {"role": "user", "content": ask}]
            return
        self.body = self._handlers.reask_handler(self.body, completion, invalid)
        self.body["messages"][-1]["content"] = (
            ask  # instructor's own sentence speaks of JSON alone, and shouts
        )


class _Bound(instructor.OpenAISchema):
    """What makes a reply type instructor's: its plain schema, and the check of the call at hand."""

    wire_schema: ClassVar[Body]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> Body:
        return cls.wire_schema

    @model_validator(mode="after")
    def fit_data(self, info: ValidationInfo) -> Self:
        check = info.context and info.context["check"]
        if check:
            check(self)
        return self


@lru_cache(maxsize=256)
def bind(reply_type: type[ReplyModel], mode: Mode) -> type[BaseModel]:
    """Return a reply type as instructor's handlers take it; in mode ``tools`` its schema needs a title."""
    schema = schema_of(reply_type)
    if mode == "tools":
        schema = {"title": reply_type.__name__, **schema}
    names = {"__doc__": reply_type.__doc__, "__module__": __name__, "wire_schema": schema}
    return type(reply_type.__name__, (reply_type, _Bound), names)


@lru_cache(maxsize=256)
def schema_of(reply_type: type[ReplyModel]) -> Body:
    """Return a reply type's JSON schema: definitions in place, no titles, every field required.

    Fields are required in the order of the class, since constrained samplers write them in that order.
    Bounds on the length of texts beyond ``LONGEST_BOUND`` are left out and checked in the reply alone: local
    servers turn them into one grammar rule for each character, and some of those fail on it.
    """
    schema = copy.deepcopy(reply_type.model_json_schema())
    definitions = schema.pop("$defs", {})
    plain: Body = _simplify(schema, definitions)
    return plain


def _simplify(node: Any, definitions: Body) -> Any:
    if isinstance(node, list):
        return [_simplify(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return _simplify({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    kept = {k: v for k, v in node.items() if not (k == "title" and isinstance(v, str)) and k != "properties"}
    plain = {
        k: _simplify(v, definitions) for k, v in kept.items() if not (k == "maxLength" and v > LONGEST_BOUND)
    }
    if "properties" in node:
        plain["properties"] = {k: _simplify(v, definitions) for k, v in node["properties"].items()}
        plain["required"] = list(node["properties"])
        plain["additionalProperties"] = False
    return plain


def refuses_format(error: ProviderError) -> bool:
    """Whether an endpoint's answer says that it does not know the format.

    Some local servers fail with 500 on a field they cannot read; the answer then names the field. An unknown
    model is unknown in every format.
    """
    if isinstance(error, UnknownModel):
        return False
    if error.status is not None and error.status >= 500 and error.status not in REFUSED:
        return any(field in str(error) for field in ("response_format", "tool_choice"))
    return error.status in REFUSED


def describe(error: ValidationError) -> str:
    """Return what is wrong with a reply, and where in it."""
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        cause = problem.get("ctx", {}).get("error")
        says = str(cause) if isinstance(cause, ValueError) and not where else problem["msg"]
        problems.append(f"{where}: {says}" if where else says)
    return "; ".join(problems)


def replace_surrogates(text: str) -> str:
    """Return text with U+FFFD for halves of surrogate pairs, which JSON can name and nothing can store."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
