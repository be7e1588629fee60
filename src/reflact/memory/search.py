"""What the full-text index holds of a unit, and how a question becomes an expression over it.

Words are cut here and not by SQLite, so that scripts without spaces are found too: their runs are indexed as
overlapping pairs of characters. What can be filtered by is indexed as tags beside the words, so that a
filter costs nothing where few of many match. No character of a question reaches SQLite but letters, digits
and underscores, in quotes.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import regex

from reflact.memory.cards import NEXT_STATUSES
from reflact.memory.models import CardKind, CardStatus, Scope
from reflact.memory.protocols import CardQuery
from reflact.skills.document import UNSPACED_SCRIPTS
from reflact.store.database import Tables

MAX_INDEXED_CHARS = 20_000
"""Characters of a card that can be found; what stands after them is kept, but not searched."""

MAX_QUERY_WORDS = 32
"""Distinct words of a question that count, the first ones."""

MAX_COMMON_WORDS = 3
"""Words that count where all are in more units than can be ranked."""

MAX_RANKED_UNITS = 1_024
"""Units that are ranked for a question: the newest of those that match."""

NEWEST_QUERY = (
    "SELECT rowid, 0 FROM memory_units_fts WHERE memory_units_fts MATCH ? ORDER BY rowid DESC LIMIT ?"
)
BEST_QUERY = """
SELECT rowid, -bm25(memory_units_fts) FROM memory_units_fts WHERE memory_units_fts MATCH ?
AND +rowid IN (SELECT rowid FROM memory_units_fts WHERE memory_units_fts MATCH ?)
"""

_WORD_RUN = regex.compile(
    rf"[{UNSPACED_SCRIPTS}\p{{M}}]*[{UNSPACED_SCRIPTS}][{UNSPACED_SCRIPTS}\p{{M}}]*|[^\W{UNSPACED_SCRIPTS}][^\W{UNSPACED_SCRIPTS}]*"
)
_UNSPACED = regex.compile(rf"[{UNSPACED_SCRIPTS}]")


def split_words(text: str) -> list[str]:
    """Return a text's words as they are indexed, in order: folded, with runs of unspaced scripts in pairs.

    Other threads are not let in at each word, as ``regex`` would: two that take turns so fast leave none to
    an event loop that waits for its own.
    """
    found: list[str] = []
    for run in _WORD_RUN.findall(unicodedata.normalize("NFKC", text).casefold(), concurrent=False):
        if _UNSPACED.search(run, concurrent=False):
            found.extend(run[at : at + 2] for at in range(len(run)))
        else:
            found.append(run)
    return found


def build_index_text(texts: Iterable[str]) -> str:
    """Return what the index holds of a unit's texts; a line that stands in several of them counts once."""
    lines = dict.fromkeys(line for text in texts for line in text[:MAX_INDEXED_CHARS].splitlines())
    return " ".join(" ".join(split_words(line)) for line in lines)


def build_tags(status: CardStatus, kinds: Iterable[CardKind], scope: Scope) -> str:
    """Return the tags of a unit: what it may be filtered by."""
    named = [f"status_{status}", *(f"kind_{kind}" for kind in kinds)]
    for name, values in _list_scope_fields(scope):
        named.extend(_build_tag(name, value) for value in values) if values else named.append(f"{name}_any")
    return " ".join(named)


def build_filter(query: CardQuery) -> str:
    """Return the expression that all units match which a query may find, whatever its words."""
    groups: list[Sequence[str]] = [
        [f"status_{status}" for status in query.statuses or NEXT_STATUSES],
        [f"kind_{kind}" for kind in query.kinds],
    ]
    if not query.all_scopes:
        groups.extend(
            [f"{name}_any", *(_build_tag(name, value) for value in values)]
            for name, values in _list_scope_fields(query.scope)
        )
    return " AND ".join(_match_any("tags", group) for group in groups if group)


def compute_relevances(tables: Tables, query: CardQuery) -> list[tuple[int, float]]:
    """Return the numbers of the units that match a query, with how relevant they are.

    Relevance is BM25 over the rarest words, as many as together stand in few enough units to be ranked;
    where every word is in more, it is how many of the first of them a unit has. Without words it is 0.
    """
    filters, asked = build_filter(query), list(dict.fromkeys(_split_query(query.text)))[:MAX_QUERY_WORDS]
    if not asked:
        return tables.execute(NEWEST_QUERY, (filters, MAX_RANKED_UNITS)).fetchall()
    rare = _select_rare_words(tables, asked)
    if rare:
        told = _match_any("words", rare)
        return tables.execute(BEST_QUERY, (told, f"{filters} AND {told}")).fetchall()
    held: Counter[int] = Counter()
    for word in asked[:MAX_COMMON_WORDS]:
        match = f"{filters} AND {_match_any('words', [word])}"
        held.update(number for number, _ in tables.execute(NEWEST_QUERY, (match, MAX_RANKED_UNITS)))
    return list(held.items())


def _select_rare_words(tables: Tables, asked: Sequence[str]) -> list[str]:
    """Return the rarest words that together stand in at most as many units as are ranked."""
    counts = sorted((_count_units_with(tables, word), place, word) for place, word in enumerate(asked))
    sums = accumulate(count for count, _, _ in counts)
    return [word for (_, _, word), units in zip(counts, sums, strict=True) if units <= MAX_RANKED_UNITS]


def _split_query(text: str) -> Iterator[str]:
    """Yield a question's words; a single character of an unspaced script finds the pairs it begins."""
    for run in _WORD_RUN.findall(unicodedata.normalize("NFKC", text).casefold()):
        if not _UNSPACED.search(run):
            yield run
        elif len(run) == 1:
            yield f"{run}*"
        else:
            yield from (run[at : at + 2] for at in range(len(run) - 1))


def _count_units_with(tables: Tables, word: str) -> int:
    """Return in how many units a word stands, LOOKED_AT + 1 for any number above."""
    (count,) = tables.execute(
        "SELECT count(*) FROM (SELECT 1 FROM memory_units_fts WHERE memory_units_fts MATCH ? LIMIT ?)",
        (_match_any("words", [word]), MAX_RANKED_UNITS + 1),
    ).fetchone()
    return int(count)


def _match_any(column: str, names: Sequence[str]) -> str:
    quoted = (f'"{name[:-1]}" *' if name.endswith("*") else f'"{name}"' for name in names)
    return f"{column} : ({' OR '.join(quoted)})"


def _list_scope_fields(scope: Scope) -> tuple[tuple[str, Sequence[str]], ...]:
    user = () if scope.user is None else (scope.user,)
    return (
        ("role", scope.roles),
        ("tool", scope.tools),
        ("task", scope.task_categories),
        ("user", user),
    )


def _build_tag(name: str, value: str) -> str:
    return f"{name}_{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
