"""Rejected-edit memory: what was tried and did not help, and which of it bears on the cases at hand. Pure."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from reflact.records import StepRecord
from reflact.skills.document import UNSPACED_SCRIPTS
from reflact.types import EditKind, EditResult, FrozenModel

MIN_RELEVANCE = 0.25
"""The share of a card's weight that the text at hand must hold."""

_RUN = re.compile(rf"[{UNSPACED_SCRIPTS}]+|[^\W{UNSPACED_SCRIPTS}]+")
_UNSPACED_RUN = re.compile(rf"[{UNSPACED_SCRIPTS}]+")
_FUNCTION_WORDS = frozenset(
    _RUN.findall(
        "about after all also always an and any are as at be because been before being but by can could "
        "did do does doing each either else every few for from had has have having he her here him his "
        "how if in into is it its itself just like may me might more most much must my neither never no "
        "nor not now of off on once one only onto or other our out over own per rather same shall she "
        "should since so some still such than that the their them then there these they this those "
        "through thus to too under until up upon us use used using very via was we were what when where "
        "whether which while who whom whose why will with within without would yet you your"
    )
)


class RejectedEdit(FrozenModel):
    """A card: an edit that was part of a rejected candidate.

    The scores are those of the whole candidate, in the gate's metric. ``origin`` says where it was tried:
    ``step 3``, or the id of another run.
    """

    op: EditKind
    target: str = ""
    content: str = ""
    score_before: float | None = None
    score_after: float | None = None
    origin: str

    @property
    def text(self) -> str:
        """What its relevance is judged by."""
        return f"{self.target}\n{self.content}"


def collect_rejected_edits(
    records: Sequence[StepRecord], *, run_id: str | None = None
) -> tuple[RejectedEdit, ...]:
    """Return the cards of committed steps, oldest first, each edit once (see ``distinct``).

    An edit counts if it was applied to a candidate that the gate rejected or the approver vetoed. One that
    a later step accepted is no card any more. Of a document that was rewritten by suggestions these count,
    not the whole text.

    Args:
        records: Steps in their order.
        run_id: The origin to name, where the cards are for other runs.
    """
    cards: list[RejectedEdit] = []
    for record in records:
        tried = [_build_rejected_edit(result, record, run_id) for result in _list_tried_edits(record.edits)]
        if record.verdict.action == "reject":
            cards.extend(tried)
        elif record.verdict.accepted:
            taken = {_key(card) for card in tried}
            cards = [card for card in cards if _key(card) not in taken]
    return deduplicate_edits(cards)


def deduplicate_edits(cards: Iterable[RejectedEdit]) -> tuple[RejectedEdit, ...]:
    """Return each edit once, compared without regard to white space: the last card of it, in order."""
    last: dict[tuple[str, str, str], RejectedEdit] = {}
    for card in cards:
        last.pop(_key(card), None)
        last[_key(card)] = card
    return tuple(last.values())


def select_relevant_edits(
    cards: Sequence[RejectedEdit], text: str, *, most: int = 5
) -> tuple[RejectedEdit, ...]:
    """Return the cards that share content words with a text, at most ``most``, the most relevant first.

    A card's relevance is the share of its words' weight that falls on words of the text. A word weighs
    ``ln(1 + (N - n + 0.5) / (n + 0.5))`` where n of the N cards hold it: the inverse document frequency of
    BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework"), kept positive by the added
    one. Cards below ``FLOOR``, or with fewer than two words in common with the text, are left out; of equal
    ones the later comes first. Content words are all but English function words, numbers and single
    letters; scripts without spaces are compared by pairs of neighbouring characters.
    """
    terms = [content_words(card.text) for card in cards]
    held = Counter(term for each in terms for term in each)
    weights = {t: math.log1p((len(cards) - n + 0.5) / (n + 0.5)) for t, n in held.items()}
    at_hand = content_words(text)
    ranked: list[tuple[float, int]] = []
    for place, each in enumerate(terms):
        shared = each & at_hand
        if len(shared) < 2:
            continue
        relevance = math.fsum(weights[t] for t in shared) / math.fsum(weights[t] for t in each)
        if relevance >= MIN_RELEVANCE:
            ranked.append((relevance, place))
    return tuple(cards[place] for _, place in sorted(ranked, reverse=True)[:most])


def content_words(text: str) -> frozenset[str]:
    """Return the words of a text that say what it is about; see ``relevant``."""
    found: set[str] = set()
    for run in _RUN.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _UNSPACED_RUN.fullmatch(run):
            found.update(run[i : i + 2] for i in range(max(1, len(run) - 1)))
        elif len(run) > 1 and not run.isnumeric() and run not in _FUNCTION_WORDS:
            found.add(run)
    return frozenset(found)


def _list_tried_edits(results: Sequence[EditResult]) -> list[EditResult]:
    applied = [result for result in results if result.status == "applied"]
    suggested = [result for result in applied if result.edit.op == "suggest"]
    return suggested or applied


def _build_rejected_edit(result: EditResult, record: StepRecord, run_id: str | None) -> RejectedEdit:
    return RejectedEdit(
        op=result.edit.op,
        target=result.edit.target,
        content=result.edit.content,
        score_before=record.verdict.current_score,
        score_after=record.verdict.candidate_score,
        origin=f"step {record.step}" if run_id is None else run_id,
    )


def _key(card: RejectedEdit) -> tuple[str, str, str]:
    return card.op, " ".join(card.target.split()), " ".join(card.content.split())
