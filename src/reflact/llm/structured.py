"""Typed replies through instructor's handlers, which write each mode's format, validate, and send back.

``AsyncInstructor.create`` never sends back a truncated reply or a refusal, quotes validation errors without a
limit, logs each failure, and reports the usage of the last attempt only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, cast

import instructor
from instructor.core.exceptions import IncompleteOutputException
from instructor.v2 import Provider, mode_registry
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator

from reflact.errors import ProviderError, RequestRefused, UnknownModel
from reflact.jsonutil import describe_problems, replace_surrogates
from reflact.messages import CUT_OFF, Message, ReplyModel

Body = dict[str, Any]
"""A JSON request body, or a part of one."""

Mode = Literal["json_schema", "tools", "json_object_with_schema", "json"]

HANDLERS: dict[Mode, instructor.Mode] = {
    "json_schema": instructor.Mode.JSON_SCHEMA,
    "tools": instructor.Mode.TOOLS,
    "json_object_with_schema": instructor.Mode.JSON_SCHEMA,
    "json": instructor.Mode.JSON,
}
"""Instructor's name for each mode; it has none for ``json_object`` with a schema."""

MODE_ORDER = tuple(HANDLERS)
"""The order in which ``auto`` tries modes; the only mode that lengthens the prompt comes last."""

MAX_LENGTH_BOUND = 256
"""The largest ``maxLength`` that a schema states."""

REASON_CHARACTERS = 500
"""The most characters of the reason with which a reply is sent back."""

FORMAT_REFUSALS = frozenset({400, 404, 415, 422, 501})
"""Statuses with which endpoints refuse an unknown format."""

R = TypeVar("R", bound=ReplyModel)

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})


class InvalidReply(Exception):
    """An answer holds no valid reply; the message gives the reason on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(replace_surrogates(" ".join(reason.split())[:REASON_CHARACTERS]))


class Conversation(Generic[R]):
    """One call; ``body`` holds the next request's format and messages, which grow with each reply sent back.

    Args:
        mode: Format of the reply; None for plain text.
        check: Raises ``ValueError`` if a reply does not fit the data.
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
        """Return the reply of an answer, validated and checked.

        Raises:
            InvalidReply: The answer holds no valid reply.
        """
        message = completion.choices[0].message
        try:
            if self._handlers is None:
                text = message.content if message.content is not None else message.refusal
                plain = self._type.model_validate({"text": text or ""})
                if self._check is not None:
                    self._check(plain)
                return plain
            if message.refusal:
                raise InvalidReply(f"it was a refusal: {message.refusal}")
            parsed = self._read(completion)
        except IncompleteOutputException:
            raise InvalidReply(f"it was {CUT_OFF}; be shorter") from None
        except ValidationError as error:
            raise InvalidReply(describe_problems(error)) from None
        except ValueError as error:
            raise InvalidReply(str(error)) from None
        return cast("R", self._type.model_construct(parsed.model_fields_set, **parsed.__dict__))

    def _read(self, completion: ChatCompletion) -> BaseModel:
        """Return the validated value; if its texts hold raw line breaks, which JSON forbids, they are read as meant."""

        def read() -> BaseModel:
            value: BaseModel = self._handlers.response_parser(
                completion, self._bound, validation_context={"check": self._check}, strict=True
            )
            return value

        try:
            return read()
        except ValidationError as error:
            message = completion.choices[0].message
            escaped = escape_line_breaks(message.content or "")
            if escaped == message.content or error.errors()[0]["type"] != "json_invalid":
                raise
            message.content = escaped
        return read()

    def send_back(self, completion: ChatCompletion, invalid: InvalidReply) -> None:
        """Add an invalid reply and its reason to the conversation."""
        message = completion.choices[0].message
        message.content = message.content or ""
        ask = f"This reply cannot be used: {invalid}. Reply again, whole and corrected."
        if self._handlers is None:
            written = [{"role": "assistant", "content": message.content}] if message.content else []
            self.body["messages"] += [*written, {"role": "user", "content": ask}]
            return
        self.body = self._handlers.reask_handler(self.body, completion, invalid)
        # Instructor's own sentence speaks of JSON alone, and shouts.
        self.body["messages"][-1]["content"] = ask


def escape_line_breaks(text: str) -> str:
    """Return JSON whose strings have escapes in place of raw line breaks and tabs, as some local servers need."""
    return _JSON_STRING.sub(lambda match: match[0].translate(_ESCAPES), text)


class _Bound(instructor.OpenAISchema):
    """Adds the simplified schema and the call's check to a reply type."""

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
    """Return a reply type for instructor's handlers; mode ``tools`` needs a title in the schema."""
    schema = build_schema(reply_type)
    if mode == "tools":
        schema = {"title": reply_type.__name__, **schema}
    names = {"__doc__": reply_type.__doc__, "__module__": __name__, "wire_schema": schema}
    return type(reply_type.__name__, (reply_type, _Bound), names)


def build_schema(reply_type: type[ReplyModel]) -> Body:
    """Return a reply type's JSON schema with inlined definitions, no titles, and every field required.

    Fields keep the order of the class, since constrained samplers write them in that order. The schema omits
    a ``maxLength`` above ``MAX_LENGTH_BOUND``, which some local servers cannot express; validation checks it.
    """
    schema = reply_type.model_json_schema()
    plain: Body = _simplify(schema, schema.pop("$defs", {}))
    return plain


def _simplify(node: Any, definitions: Body) -> Any:
    if isinstance(node, list):
        return [_simplify(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return _simplify({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    plain = {
        k: _simplify(v, definitions)
        for k, v in node.items()
        if k != "properties"
        and not (k == "title" and isinstance(v, str))
        and not (k == "maxLength" and v > MAX_LENGTH_BOUND)
    }
    if "properties" in node:
        plain["properties"] = {k: _simplify(v, definitions) for k, v in node["properties"].items()}
        plain["required"] = list(node["properties"])
        plain["additionalProperties"] = False
    return plain


def refuses_format(error: ProviderError | RequestRefused) -> bool:
    """Whether an endpoint refuses the format of a request; some fail with 500 and name the unknown field."""
    if isinstance(error, UnknownModel) or error.status is None:
        return False
    named = any(field in str(error) for field in ("response_format", "tool_choice"))
    return error.status in FORMAT_REFUSALS or (named and error.status >= 500)
