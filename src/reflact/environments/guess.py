"""A guess at the grader that fits the references of a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

from pydantic import JsonValue

from reflact.environments.comparison import parse_number
from reflact.environments.graders import Grader, NormalizedGrader, TokenF1Grader
from reflact.types import Grade, Item

# The mean length above which references are graded by the overlap of words.
LONG_ANSWER_WORDS = 6

# Answers are labels if there are at most so many, each used so often on average.
MAX_LABELS = 20
LABEL_USES = 5

FORGIVEN = "Case, spaces, quotes around it and punctuation at its end do not count."

# A text that is read as a number and looks like a code, such as 00501 or 1E2.
CODE = re.compile(r"[+-]?0\d.*|\d+E\d+", re.IGNORECASE)


def guess_grader(references: Sequence[JsonValue]) -> tuple[str, str] | None:
    """Return the name of a grader that fits the references, and the reason, if there are any."""
    answers = _list_answers(references)
    if not answers:
        return None
    name, reason = _choose_grader(answers)
    if name != "python" and any(isinstance(reference, list) for reference in references):
        reason += " A list holds several right answers: one of them is enough."
    return name, reason


def _choose_grader(answers: Sequence[JsonValue]) -> tuple[str, str]:  # noqa: PLR0911 - a rule each
    if all(isinstance(one, dict) and "sentences" in one for one in answers):
        if all(isinstance(one, dict) and one["checks"] for one in answers):
            return "checks", "Each case has checks, so a program grades."
        return "rubric", "The cases have sentences about a good answer, which a model judges."
    if all(isinstance(one, dict) for one in answers):
        if all(isinstance(one, dict) and {"tests", "stdout"} & one.keys() for one in answers):
            return "python", "The references are tests or expected outputs of programs."
        reason = "The references are objects: an answer needs their fields and values."
        return "json_fields", reason
    texts = [str(one) for one in answers]
    numbers = [None if isinstance(one, bool) else parse_number(str(one)) for one in answers]
    if None not in numbers:
        return _choose_for_numbers(answers, numbers)
    if all(text.lstrip().lower().startswith(("select ", "with ")) for text in texts):
        return "sql", "The references are queries: an answer must return the same rows."
    if _is_labels(texts):
        return _choose_for_labels(texts)
    if sum(len(text.split()) for text in texts) > LONG_ANSWER_WORDS * len(texts):
        return "token_f1", "The references are long: the score is the overlap of words."
    if all(map(_is_capitals, texts)):
        words = "The letters of the references are capitals, as in codes, so an answer must be"
        return "exact", f"{words} equal to the letter."
    words = f"The references are short texts. {FORGIVEN} If that counts, choose exact."
    return "normalized", words


def _choose_for_labels(texts: Sequence[str]) -> tuple[str, str]:
    words = (
        f"The references are {len(set(texts))} labels: an answer must be the right one and "
        "nothing else"
    )
    if all(map(_is_capitals, texts)):
        return "exact", f"{words}, to the letter, because they are in capitals."
    joined = find_joined_labels(NormalizedGrader(), texts)
    if joined is not None:
        reason = f"because {joined[0]} and {joined[1]} are nearly equal."
        return "exact", f"{words}, to the letter, {reason}"
    return "normalized", f"{words}. {FORGIVEN}"


def _choose_for_numbers(
    answers: Sequence[JsonValue], numbers: Sequence[float | None]
) -> tuple[str, str]:
    """Return `exact` if a text is a code, or if two are the same number (3.1 and 3.10)."""
    first: dict[float | None, str] = {}
    for answer, number in zip(answers, numbers, strict=True):
        plain = str(answer).strip().lstrip("+").replace(",", "")
        is_other = first.setdefault(number, plain) != plain
        if isinstance(answer, str) and (is_other or CODE.fullmatch(plain)):
            words = (
                f"References such as {plain} may be codes, so an answer must be equal to the "
                "letter."
            )
            return "exact", f"{words} If they are numbers, choose numeric."
    is_whole = all(isinstance(number, int) for number in numbers)
    rounding = "" if is_whole else ", up to rounding,"
    return (
        "numeric",
        f"The references are numbers: an answer must be that number{rounding} and nothing else.",
    )


def find_joined_labels(grade: Grader, references: Sequence[JsonValue]) -> tuple[str, str] | None:
    """Return two labels that a grader of texts takes for one, although one is wrong."""
    texts = [text.strip() for text in _list_answers(references) if isinstance(text, str)]
    if not isinstance(grade, NormalizedGrader | TokenF1Grader) or not _is_labels(texts):
        return None
    for one, other in combinations(sorted(set(texts)), 2):
        graded: Grade = grade(Item(id="-", input="-", reference=one), other)
        if graded.score.soft == 1:
            return one, other
    return None


def _list_answers(references: Sequence[JsonValue]) -> list[JsonValue]:
    answers = [one for ref in references for one in (ref if isinstance(ref, list) else [ref])]
    return [one for one in answers if one is not None and one != ""]


def _is_labels(texts: Sequence[str]) -> bool:
    """Whether the texts are a few ones that repeat, such as the names of classes."""
    return 2 <= len(set(texts)) <= min(MAX_LABELS, len(texts) / LABEL_USES)


def _is_capitals(text: str) -> bool:
    """Whether most letters are capitals, as in codes; a single letter is a label."""
    letters = [letter for letter in text if letter.isalpha()]
    return len(letters) > 1 and 2 * sum(letter.isupper() for letter in letters) > len(letters)
