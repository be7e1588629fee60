"""A small terminal: what a person sees after a program has written to it."""

from __future__ import annotations

import re

UNFINISHED = re.compile(r"\x1b(\[[?0-9;]*)?\Z")
TOKEN = re.compile(r"\x1b\[(?P<args>[?0-9;]*)(?P<code>[A-Za-z])|(?P<escape>\x1b)|(?P<character>[\s\S])")


class Terminal:
    """A grid of characters that knows the sequences that the live view uses, and refuses all others.

    Attributes:
        scrolled: Lines that have left the screen at its top.
        cursor_shown: Whether the cursor can be seen.
        keyboard: The file that a program reads from, if it runs here.
    """

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.scrolled: list[str] = []
        self.cursor_shown = True
        self.keyboard = -1
        self._held = ""
        self._lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """Take what a program has written; a sequence may come in parts."""
        text, self._held = self._held + text, ""
        if unfinished := UNFINISHED.search(text):
            text, self._held = text[: unfinished.start()], unfinished.group()
        for token in TOKEN.finditer(text):
            if token["escape"]:
                raise AssertionError(f"an unknown sequence: {text[token.start() :][:20]!r}")
            if token["code"]:
                self._control(token["code"], token["args"])
            else:
                self._put(token["character"])

    @property
    def screen(self) -> list[str]:
        """The lines on the screen, without blanks at their ends and empty lines below them."""
        lines = [line.rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, width: int, height: int) -> None:
        """Change the size as a terminal does that leaves its lines as they are but for what is cut off."""
        self.width, self.height = width, height
        self._lines = [line[:width] for line in self._lines]
        while len(self._lines) > height:
            self._scroll()
            self._row = max(self._row - 1, 0)

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._next_line()
        else:
            assert character.isprintable(), f"the terminal was sent {character!r}"
            if self._column >= self.width:
                self._next_line()
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _next_line(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._lines):
            self._lines.append("")
        if len(self._lines) > self.height:
            self._scroll()
            self._row -= 1

    def _scroll(self) -> None:
        self.scrolled.append(self._lines.pop(0).rstrip())

    def _control(self, code: str, arguments: str) -> None:
        match code, arguments:
            case "m", _:
                pass
            case "A", count:
                self._row = max(self._row - int(count or 1), 0)
            case "K", "2":
                self._lines[self._row] = ""
            case "J", "2":
                self._lines = [""] * len(self._lines)
            case "H", "":
                self._row = self._column = 0
            case "h" | "l", "?25":
                self.cursor_shown = code == "h"
            case _:
                raise AssertionError(f"an unknown sequence: {arguments}{code}")
