"""Answers that say nothing, so that nobody needs to be asked what they are worth. Pure."""

from __future__ import annotations

from typing import Final

from reflact.calibration.evidence import words_of

NOT_KNOWING: Final = (
    "do not know",
    "don't know",
    "I do not know",
    "I don't know",
    "I do not know the answer",
    "I don't know the answer",
    "sorry, I do not know",
    "sorry, I don't know",
    "I'm sorry, I don't know",
    "no idea",
    "I have no idea",
    "not sure",
    "I am not sure",
    "I'm not sure",
    "I cannot answer",
    "I can't answer",
    "I cannot answer this question",
    "I can't answer this question",
    "I am unable to answer",
    "I'm unable to answer",
)
"""What is said instead of an answer; spelling of capitals and signs aside, and nothing else beside it."""


def nothing_said(answer: str, *, question: str, purpose: str) -> str | None:
    """Return in words why an answer says nothing, or None where it says something.

    It is empty, or the question again, or says only that it does not know, unless the question or the purpose
    has these words, as one that asks for them where nothing is known. Where the purpose is the question,
    capitals and spaces make no other text of it.

    Args:
        answer: The answer.
        question: What was asked.
        purpose: What an answer is to achieve.
    """
    if not answer.strip():
        return "the answer is empty"
    repeated = purpose == question and _plain(answer) == _plain(question)
    if repeated or answer.strip() == question.strip():
        return "the answer is the question again"
    said, asked = words_of(answer), words_of(question)
    if said in map(words_of, NOT_KNOWING) and not (_hold(asked, said) or _hold(words_of(purpose), said)):
        return "the answer says that it does not know"
    return None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _hold(words: list[str], others: list[str]) -> bool:
    """Whether words stand among others, side by side."""
    places = range(len(words) - len(others) + 1)
    return any(words[at : at + len(others)] == others for at in places)
