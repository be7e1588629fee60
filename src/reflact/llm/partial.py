"""JSON that is still being written, as the value that can be seen of it so far.

Well-kept parsers either read the text anew with each piece (jiter's partial mode, which instructor uses) or
tell of a string only once it has closed (ijson), so this is a scanner of its own. It looks at each character
once, and leaves what has closed to the parser that reads whole replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from pydantic import JsonValue
from pydantic_core import from_json

SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
"""Characters of a string that stand for themselves."""

SCALAR = re.compile(r"[^\s,\]}]*")
BARE = re.compile(r'[^"\[\]{}]*')
"""What stands between strings and brackets."""

PAIRED = re.compile(r"\\u[dD][89abAB]")
"""How an escape begins that is a character only together with the next one."""

DEEPEST = 32
"""Objects within objects that are followed; what is nested deeper is not drafted."""

Fits = Callable[[tuple[str, ...], str], bool]
"""Whether a text is an element of the list at a path of names."""

Reading = Generator[None, None, None]
Raw = Generator[None, None, str]


class Partial:
    """An object that is being written.

    Texts grow, objects grow by their members, and lists by one element as it closes; anything else is seen
    once it is whole. What was seen is never taken back. A text that is no JSON object, names a member twice,
    or holds an element that does not fit, stops to grow; nothing is raised.

    Args:
        fits: Asked about each element of a list.

    Attributes:
        read: Characters taken in.
        closed: Members and elements that have closed.
        broken: Whether it stopped to grow for good.
    """

    def __init__(self, fits: Fits | None = None) -> None:
        self._fits = fits
        self._piece, self._at = "", 0
        self._open: list[dict[str, JsonValue]] = []
        self._names: list[str] = []
        self._list: list[JsonValue] | None = None
        self._text: list[str] | None = None
        self._root: JsonValue = None
        self._reading = self._document()
        self.read = 0
        self.closed = 0
        self.broken = False

    def feed(self, piece: str) -> None:
        """Take in the next piece of the text, cut anywhere."""
        self.read += len(piece)
        self._piece, self._at = piece, 0
        if not self.broken:
            try:
                next(self._reading)
            except (ValueError, RecursionError):
                self.broken = True

    @property
    def growing(self) -> bool:
        """Whether a text that is seen is being written."""
        return self._text is not None and not self.broken

    @property
    def value(self) -> JsonValue:
        """What can be seen so far, never changed afterwards; None before the object begins."""
        if not self._open:
            return self._root
        inner: JsonValue = None
        if self._text is not None:
            self._text[:] = ["".join(self._text)]
            inner = self._text[0]
        elif self._list is not None:
            inner = self._list.copy()
        for depth in range(len(self._open) - 1, -1, -1):
            members = self._open[depth].copy()
            if inner is not None:
                members[self._names[depth]] = inner
            inner = members
        return inner

    # ------------------------------------------------------------------------------------- what is followed

    def _document(self) -> Reading:
        yield from self._mark("{")
        self._root = yield from self._object()
        yield from self._mark("")

    def _object(self) -> Generator[None, None, dict[str, JsonValue]]:
        if len(self._open) == DEEPEST:
            raise ValueError("too deep")
        members: dict[str, JsonValue] = {}
        self._open.append(members)
        char = yield from self._next()
        while char != "}":
            name = str(_parsed((yield from self._string())))
            if name in members:
                raise ValueError("named twice")
            yield from self._mark(":")
            self._names.append(name)
            members[name] = yield from self._member()
            self._names.pop()
            self._text = self._list = None
            self.closed += 1
            char = yield from self._more("}")
        self._at += 1
        self._open.pop()
        return members

    def _member(self) -> Generator[None, None, JsonValue]:
        char = yield from self._next()
        if char == "{":
            self._at += 1
            return (yield from self._object())
        if char == "[":
            return (yield from self._elements())
        if char == '"':
            return (yield from self._growing())
        return _parsed((yield from self._scalar()))

    def _elements(self) -> Generator[None, None, list[JsonValue]]:
        self._at += 1
        elements: list[JsonValue] = []
        self._list = elements
        char = yield from self._next()
        while char != "]":
            raw = yield from self._whole()
            value = _parsed(raw)
            if self._fits is not None and not self._fits(tuple(self._names), raw):
                raise ValueError("no element of this list")
            elements.append(value)
            self.closed += 1
            char = yield from self._more("]")
        self._at += 1
        return elements

    def _growing(self) -> Raw:
        self._at += 1
        text: list[str] = []
        self._text = text
        while (char := (yield from self._run(text))) != '"':
            escape = char + (yield from self._take(1))
            if escape == "\\u":
                escape += yield from self._take(4)
            if PAIRED.match(escape):
                escape += yield from self._take(6)
            text.append(str(_parsed(f'"{escape}"')))
        return "".join(text)

    # ----------------------------------------------------------------------------- what is taken as a whole

    def _whole(self) -> Raw:
        char = yield from self._next()
        if char == '"':
            return (yield from self._string())
        if char not in "[{":
            return (yield from self._scalar())
        parts: list[str] = []
        depth = 0
        while True:
            parts.append(self._matched(BARE))
            char = yield from self._char()
            if char == '"':
                parts.append((yield from self._string()))
            elif char in "[]{}":
                parts.append((yield from self._take(1)))
                depth += 1 if char in "[{" else -1
                if depth == 0:
                    return "".join(parts)

    def _string(self) -> Raw:
        yield from self._mark('"')
        parts = ['"']
        while (char := (yield from self._run(parts))) != '"':
            parts += char, (yield from self._take(1))
        return "".join([*parts, '"'])

    def _scalar(self) -> Raw:
        parts = [self._matched(SCALAR)]
        while self._at == len(self._piece):
            yield
            parts.append(self._matched(SCALAR))
        return "".join(parts)

    # ------------------------------------------------------------------------------------------- characters

    def _run(self, parts: list[str]) -> Raw:
        """Add the characters that stand for themselves, and go past the quote or backslash after them."""
        while True:
            parts.append(self._matched(PLAIN))
            if self._at < len(self._piece):
                return (yield from self._take(1))
            yield

    def _more(self, end: str) -> Raw:
        """Go past a comma to what comes next, or stand at the end."""
        char = yield from self._next()
        if char == end:
            return char
        yield from self._mark(",")
        char = yield from self._next()
        if char == end:
            raise ValueError("nothing after a comma")
        return char

    def _mark(self, mark: str) -> Reading:
        if (yield from self._next()) != mark:
            raise ValueError("no JSON object")
        self._at += 1

    def _next(self) -> Raw:
        """Skip space and return the next character."""
        while (char := (yield from self._char())) in " \t\n\r":
            self._matched(SPACE)
        return char

    def _char(self) -> Raw:
        while self._at == len(self._piece):
            yield
        return self._piece[self._at]

    def _take(self, count: int) -> Raw:
        taken = self._piece[self._at : self._at + count]
        self._at += len(taken)
        while len(taken) < count:
            yield
            more = self._piece[self._at : self._at + count - len(taken)]
            self._at += len(more)
            taken += more
        return taken

    def _matched(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._piece, self._at)
        assert found is not None
        self._at = found.end()
        return found.group()


def _parsed(raw: str) -> JsonValue:
    value: JsonValue = from_json(raw.encode("utf-8"), allow_inf_nan=False)
    return value
