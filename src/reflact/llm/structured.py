"""Typed replies: instructor's handlers write each mode's format, validate and send back.

``AsyncInstructor.create`` never sends back a truncated reply or a refusal, quotes validation errors
without a limit, logs each failure, and reports the usage of the last attempt only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import instructor
from instructor.v2 import Provider, mode_registry
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError

from reflact.errors import ProviderError, RequestRefused, UnknownModel
from reflact.jsonutil import describe_problems, replace_surrogates
from reflact.llm.pricing import CAP_NAMES
from reflact.messages import CUT_OFF, Message, ReplyModel

# A JSON request body, or a part of one.
Body = dict[str, Any]

Mode = Literal["json_schema", "tools", "json_object_with_schema", "json"]

# Instructor's name for each mode; it has none for ``json_object`` with a schema.
HANDLERS: dict[Mode, instructor.Mode] = {
    "json_schema": instructor.Mode.JSON_SCHEMA,
    "tools": instructor.Mode.TOOLS,
    "json_object_with_schema": instructor.Mode.JSON_SCHEMA,
    "json": instructor.Mode.JSON,
}

# The order in which ``auto`` tries modes; the only mode that lengthens the prompt comes last.
MODE_ORDER = tuple(HANDLERS)
# The largest ``maxLength`` that a schema states.
MAX_LENGTH_BOUND = 256
# The most characters of the reason with which a reply is sent back.
REASON_CHARACTERS = 500
# Statuses with which endpoints refuse an unknown format.
FORMAT_REFUSALS = frozenset({400, 404, 415, 422, 501})

# Words of endpoints that do not know a field of a request.
UNKNOWN_FIELD = re.compile(
    "(un|not )(supported|recogni[sz]ed|known|expected|permitted)|extra", re.IGNORECASE
)

# The names of thoughts: of DeepSeek, Qwen and many others, of Seed, and of Magistral in brackets.
NAMES = "think|seed:think|THINK"
OPENING = re.compile(rf"[<\[](?:{NAMES})[>\]]")
# The mark after thoughts; one between quotes or backticks is a quotation.
CLOSING = re.compile(rf"(?<![`'\"])[<\[]/(?:{NAMES})[>\]]|[<\[]/(?:{NAMES})[>\]](?![`'\"])")
MARK = re.compile(rf"[<\[]/?(?:{NAMES})[>\]]")
CHANNEL = re.compile(r"\s*<\|(?:channel|start)\|>")
FINAL_CHANNEL = re.compile(r"<\|channel\|>final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
MESSAGE_END = re.compile(r"<\|(?:end|return|start|call)\|>")

# A code block, with its text and its closing fence; one that is not closed reaches to the end.
BLOCK = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[^`\n]*\n(.*?)(?:^[ \t]*(\1)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)

OBJECT_START = re.compile(r'\{\s*"')
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})
R = TypeVar("R", bound=ReplyModel)


class InvalidReply(Exception):
    """An answer holds no valid reply; the message gives the reason on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(replace_surrogates(" ".join(reason.split())[:REASON_CHARACTERS]))


class NoFormat(InvalidReply):
    """An answer has nothing of the format that was asked for, as if its endpoint ignored that."""


class Conversation(Generic[R]):
    """One call; ``body`` is the next request's, and grows with each reply sent back.

    ``mode`` is None for plain text. ``check`` raises ValueError if a reply does not fit the data.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        reply_type: type[R],
        mode: Mode | None,
        check: Callable[[R], None] | None = None,
    ) -> None:
        self.reply_type = reply_type
        self._mode = mode
        self._check = check
        self.body: Body = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        self._handlers: Any = None
        if mode is not None:
            self._handlers = mode_registry.get_handlers(Provider.OPENAI, HANDLERS[mode])
            self._bound, self.body = self._handlers.request_handler(
                bind(reply_type, mode), self.body
            )
        if mode == "json_object_with_schema":
            schema = self.body["response_format"]["json_schema"]["schema"]
            self.body["response_format"] = {"type": "json_object", "schema": schema}

    def parse(self, completion: ChatCompletion) -> R:
        """Return the reply of an answer, validated and checked; InvalidReply if it has none."""
        choice = completion.choices[0]
        message = choice.message
        try:
            if self._handlers is None:
                text = message.content if message.content is not None else message.refusal
                value = self.reply_type.model_validate({"text": remove_thoughts(text or "")})
            elif message.refusal:
                raise InvalidReply(f"it was a refusal: {message.refusal}")
            elif choice.finish_reason == "length":
                raise InvalidReply(f"it was {CUT_OFF}; be shorter")
            else:
                bound = self._read(completion)
                fields = bound.__dict__
                value = cast("R", self.reply_type.model_construct(bound.model_fields_set, **fields))
            if self._check is not None:
                self._check(value)
        except ValidationError as error:
            raise InvalidReply(describe_problems(error)) from None
        except ValueError as error:
            raise InvalidReply(str(error)) from None
        return value

    def _read(self, completion: ChatCompletion) -> BaseModel:
        """Return the value of the first reading that is JSON, which is then the answer's text.

        Some servers write a function's arguments as text, or a text as a function's arguments.
        """
        message = completion.choices[0].message
        holder: Any = message
        name = "content"
        mode = HANDLERS["json_schema"]
        if message.tool_calls and (self._mode == "tools" or not message.content):
            holder = cast("Any", message.tool_calls[0]).function
            name = "arguments"
            mode = HANDLERS["tools"]
        handlers: Any = mode_registry.get_handlers(Provider.OPENAI, mode)
        failure: ValidationError | None = None
        for reading in list_readings(getattr(holder, name) or ""):
            setattr(holder, name, reading)
            try:
                value: BaseModel = handlers.response_parser(completion, self._bound, strict=True)
            except ValidationError as error:
                if error.errors()[0]["type"] != "json_invalid":
                    raise
                failure = error
            else:
                return value
        assert failure is not None
        kind = InvalidReply if reading.lstrip()[:1] in {"", "{"} else NoFormat
        raise kind(describe_problems(failure))

    def send_back(self, completion: ChatCompletion, invalid: InvalidReply) -> None:
        """Add an invalid reply and its reason to the conversation."""
        message = completion.choices[0].message
        message.content = message.content or ""
        ask = f"This reply cannot be used: {invalid}. Reply again, whole and corrected."
        if self._handlers is None:
            if message.content:
                self.body["messages"].append({"role": "assistant", "content": message.content})
            self.body["messages"].append({"role": "user", "content": ask})
            return
        self.body = self._handlers.reask_handler(self.body, completion, invalid)
        # Instructor's own sentence speaks of JSON alone, and shouts.
        self.body["messages"][-1]["content"] = ask


def remove_thoughts(text: str) -> str:
    """Return an answer without the thoughts before it; it is empty if there are thoughts alone.

    Thoughts begin the text and end at the first closing mark that is not quoted. The opening mark
    may be missing, since many servers put it into the prompt; then a closing mark in code, or after
    an opening one, belongs to the answer. Of the channels of harmony, the last final one is the
    answer.
    """
    if CHANNEL.match(text):
        _, *finals = FINAL_CHANNEL.split(text)
        return MESSAGE_END.split(finals[-1])[0].strip() if finals else ""
    answer = start = text.lstrip()
    while opening := OPENING.match(answer):
        closing = CLOSING.search(answer, opening.end())
        answer = "" if closing is None else answer[closing.end() :].lstrip()
    if answer is not start:
        return answer
    closing = CLOSING.search(text) if "</think>" in text else None
    if closing is None:
        return text
    before = text[: closing.start()]
    in_code = before.count("```") % 2 or before.rpartition("\n")[2].count("`") % 2
    if in_code or OPENING.search(before):
        return text
    return text[closing.end() :].lstrip()


def list_readings(text: str) -> Iterator[str]:
    """Yield what may be a reply's JSON: all of it, its answer, and the last code block.

    Only a whole block counts, with no JSON after it and no mark of thoughts beside it, since it
    could be a draft. Each is also read with escapes in place of raw line breaks and tabs in
    strings, as some local servers need.
    """
    yield text
    yield escape_line_breaks(text)
    answer = remove_thoughts(text)
    for reading in (answer, _find_last_block(answer)):
        if reading != text:
            yield reading
            yield escape_line_breaks(reading)


def escape_line_breaks(text: str) -> str:
    """Return JSON whose strings have escapes in place of raw line breaks and tabs."""
    return _JSON_STRING.sub(lambda match: match[0].translate(_ESCAPES), text)


def _find_last_block(answer: str) -> str:
    """Return the text of the last code block if it can be no draft, or else all of the answer."""
    *_, last = [None, *BLOCK.finditer(answer)]
    if last is None or not last[3]:
        return answer
    before = answer[: last.start()]
    after = answer[last.end() :]
    if MARK.search(before + after) or OBJECT_START.search(after):
        return answer
    return last[2]


class _Bound(instructor.OpenAISchema):
    """Adds the simplified schema to a reply type."""

    wire_schema: ClassVar[Body]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> Body:
        return cls.wire_schema


@lru_cache(maxsize=256)
def bind(reply_type: type[ReplyModel], mode: Mode) -> type[BaseModel]:
    """Return a reply type for instructor's handlers; mode ``tools`` needs a title in the schema."""
    schema = build_schema(reply_type)
    if mode == "tools":
        schema = {"title": reply_type.__name__, **schema}
    names = {"__doc__": reply_type.__doc__, "__module__": __name__, "wire_schema": schema}
    return type(reply_type.__name__, (reply_type, _Bound), names)


def build_schema(reply_type: type[ReplyModel]) -> Body:
    """Return a reply type's schema with inlined definitions, no titles, all fields required.

    Fields keep the order of the class, since constrained samplers write them in that order. The
    schema omits a ``maxLength`` above ``MAX_LENGTH_BOUND``, which some local servers cannot
    express; validation checks it.
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
    """Whether an endpoint refuses a request's format; some name the field in a 500."""
    if isinstance(error, UnknownModel) or error.status is None:
        return False
    named = any(field in error.answer for field in ("response_format", "tool_choice"))
    return error.status in FORMAT_REFUSALS or (named and error.status >= 500)


def find_refused_cap(refusal: str, body: Mapping[str, Any]) -> str | None:
    """Return the name of a request's cap if an endpoint does not know it; else None."""
    sent = [name for name in CAP_NAMES if name in body]
    is_named = len(sent) == 1 and re.search(rf"\b{sent[0]}\b", refusal)
    return sent[0] if is_named and UNKNOWN_FIELD.search(refusal) else None
