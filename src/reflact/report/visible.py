"""Text of unknown origin at a terminal."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t\u200c\u200d"
"""Line breaks and tabs, and what joins letters and signs in ordinary text."""

ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that are written out: controls, formats, surrogates, breaks of lines."""


def visible(text: str) -> str:
    """Return a text with its unseen characters written out as escapes, so that it cannot steer a terminal.

    Controls move cursors, change titles and fill clipboards; formats hide letters and turn lines around; half
    a surrogate pair cannot be written at all.
    """
    text = text.replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def in_line(text: str) -> str:
    """Return a text for one line of many: as ``visible`` does, its line breaks and tabs written out too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in ESCAPED:
        return character
    return character.encode("unicode_escape").decode("ascii")
