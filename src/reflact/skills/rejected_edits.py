"""Rejected-edit memory: collects rejected edits and selects those relevant to given cases."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from reflact.records import StepRecord
from reflact.types import EditKind, EditResult, FrozenModel

# Characters of scripts without spaces between words, as the inside of a character class: Thai, Lao,
# Tibetan, Burmese, Khmer, kana and Han.
UNSPACED_SCRIPTS = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

# Minimum share of an edit's weight that its words in the text must have.
MIN_RELEVANCE = 0.25

_RUN = re.compile(rf"[{UNSPACED_SCRIPTS}]+|[^\W{UNSPACED_SCRIPTS}]+")
_UNSPACED_RUN = re.compile(rf"[{UNSPACED_SCRIPTS}]+")
_FUNCTION_WORDS = frozenset(
    _RUN.findall(
        "about after all also always an and any are as at be because been before being but by can "
        "could did do does doing each either else every few for from had has have having he her "
        "here him his how if in into is it its itself just like may me might more most much must "
        "my neither never no nor not now of off on once one only onto or other our out over own "
        "per rather same shall she should since so some still such than that the their them then "
        "there these they this those through thus to too under until up upon us use used using "
        "very via was we were what when where whether which while who whom whose why will with "
        "within without would yet you your"
    )
)


class RejectedEdit(FrozenModel):
    """An edit of a rejected candidate, whose scores in the gate's metric it has.

    ``origin`` is its step, such as ``step 3``, or the id of another run.
    """

    op: EditKind
    target: str = ""
    content: str = ""
    score_before: float | None = None
    score_after: float | None = None
    origin: str

    @cached_property
    def words(self) -> frozenset[str]:
        """The content words of its text."""
        return content_words(f"{self.target}\n{self.content}")

    @property
    def key(self) -> tuple[str, str, str]:
        """What it does; white space makes no difference."""
        return self.op, " ".join(self.target.split()), " ".join(self.content.split())


def collect_rejected_edits(
    records: Sequence[StepRecord], *, known: Sequence[RejectedEdit] = (), run_id: str | None = None
) -> tuple[RejectedEdit, ...]:
    """Return the rejected edits of committed steps, oldest first, without duplicates.

    ``known`` is the result for all steps before these, so that each step is read once.

    An edit counts if it was applied to a candidate that was shown not to help or that the approver
    vetoed, and no later step accepted it. If suggestions rewrote a document, the suggestions count,
    not the whole text. Their origin is the step, or ``run_id``.
    """
    edits = list(known)
    for record in records:
        origin = f"step {record.step}" if run_id is None else run_id
        tried = [
            RejectedEdit(
                op=result.edit.op,
                target=result.edit.target,
                content=result.edit.content,
                score_before=record.verdict.current_score,
                score_after=record.verdict.candidate_score,
                origin=origin,
            )
            for result in _list_tried_edits(record.edits)
        ]
        if record.verdict.refuted:
            edits.extend(tried)
        elif record.verdict.accepted:
            accepted = {edit.key for edit in tried}
            edits = [edit for edit in edits if edit.key not in accepted]
    return deduplicate_edits(edits)


def deduplicate_edits(edits: Iterable[RejectedEdit]) -> tuple[RejectedEdit, ...]:
    """Return the last occurrence of each edit, in order."""
    last: dict[tuple[str, str, str], RejectedEdit] = {}
    for edit in edits:
        last.pop(edit.key, None)
        last[edit.key] = edit
    return tuple(last.values())


def select_relevant_edits(
    edits: Sequence[RejectedEdit], text: str, *, limit: int = 5
) -> tuple[RejectedEdit, ...]:
    """Return at most ``limit`` edits that share content words with a text, the most relevant first.

    An edit's relevance is the share of its words' weight that belongs to words of the text. If n of
    N edits contain a word, its weight is ``ln(1 + (N - n + 0.5) / (n + 0.5))``: the inverse
    document frequency of BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance
    Framework"); the added one keeps it positive. Edits below ``MIN_RELEVANCE``, or with fewer than
    two words of the text, are left out. Among equals the later one comes first. Content words
    exclude English function words, numbers and single letters; scripts without spaces are compared
    by pairs of neighbouring characters.
    """
    terms = [edit.words for edit in edits]
    frequencies = Counter(term for each in terms for term in each)
    weights = {t: math.log1p((len(edits) - n + 0.5) / (n + 0.5)) for t, n in frequencies.items()}
    text_words = content_words(text)
    ranked: list[tuple[float, int]] = []
    for index, each in enumerate(terms):
        shared = each & text_words
        if len(shared) < 2:
            continue
        relevance = math.fsum(weights[t] for t in shared) / math.fsum(weights[t] for t in each)
        if relevance >= MIN_RELEVANCE:
            ranked.append((relevance, index))
    return tuple(edits[index] for _, index in sorted(ranked, reverse=True)[:limit])


def content_words(text: str) -> frozenset[str]:
    """Return the content words of a text; see ``select_relevant_edits``."""
    words: set[str] = set()
    for run in set(_RUN.findall(unicodedata.normalize("NFKC", text).casefold())):
        if _UNSPACED_RUN.fullmatch(run):
            words.update(run[i : i + 2] for i in range(max(1, len(run) - 1)))
        elif len(run) > 1 and not run.isnumeric() and run not in _FUNCTION_WORDS:
            words.add(run)
    return frozenset(words)


def _list_tried_edits(results: Sequence[EditResult]) -> list[EditResult]:
    # Examples that did not help are no rule to avoid, and their text is long.
    applied = [
        result for result in results if result.status == "applied" and result.edit.op != "examples"
    ]
    suggested = [result for result in applied if result.edit.op == "suggest"]
    return suggested or applied
