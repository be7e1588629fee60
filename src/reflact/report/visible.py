"""Text of unknown origin at a terminal."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t\u200c\u200d"
"""Line breaks and tabs, and what joins letters and signs in ordinary text."""


def visible(text: str) -> str:
    """Return a text with its unseen characters written out as escapes, so that it cannot steer a terminal.

    Controls move cursors, change titles and fill clipboards; formats hide letters and turn lines around.
    """
    text = text.replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in {"Cc", "Cf", "Zl", "Zp"}:
        return character
    return character.encode("unicode_escape").decode("ascii")
