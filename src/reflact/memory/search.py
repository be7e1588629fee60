"""Full-text search: the indexed words and tags of a unit, and the match expression of a query.

This module splits texts into words instead of SQLite, so that scripts without spaces can be searched: their
runs are indexed as overlapping pairs of characters. Filters are indexed as tags beside the words, so a filter
stays fast if few of many units match. Of a query, only quoted letters, digits and underscores reach SQLite.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import regex

from reflact.memory.cards import NEXT_STATUSES
from reflact.memory.models import CardKind, CardQuery, CardStatus, Scope
from reflact.skills.document import UNSPACED_SCRIPTS
from reflact.store.database import Tables

MAX_INDEXED_CHARS = 20_000
"""Characters of each text that are indexed; the rest is stored but not searched."""

MAX_QUERY_WORDS = 32
"""Distinct words of a query that count, the first ones."""

MAX_COMMON_WORDS = 3
"""Words that count if every word matches more units than can be ranked."""

MAX_RANKED_UNITS = 1_024
"""Units that are ranked for a query: the newest that match."""

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
    """Return the words of a text in order: case-folded, with runs of unspaced scripts as character pairs.

    ``concurrent=False`` keeps ``regex`` from releasing the interpreter's lock at each word. Two threads that
    alternate so fast would starve the event loop.
    """
    return [
        word
        for run in _find_runs(text)
        for word in ([run[at : at + 2] for at in range(len(run))] if _is_unspaced(run) else [run])
    ]


def _find_runs(text: str) -> list[str]:
    return _WORD_RUN.findall(unicodedata.normalize("NFKC", text).casefold(), concurrent=False)


def _is_unspaced(run: str) -> bool:
    return _UNSPACED.search(run, concurrent=False) is not None


def build_index_text(texts: Iterable[str]) -> str:
    """Return the indexed words of a unit's texts; a line that several texts share counts once."""
    lines = dict.fromkeys(line for text in texts for line in text[:MAX_INDEXED_CHARS].splitlines())
    return " ".join(" ".join(split_words(line)) for line in lines)


def build_tags(status: CardStatus, kinds: Iterable[CardKind], scope: Scope) -> str:
    """Return the tags of a unit: its status, its kinds and its scope."""
    tags = [f"status_{status}", *(f"kind_{kind}" for kind in kinds)]
    for name, values in _list_scope_fields(scope):
        tags.extend([_build_tag(name, value) for value in values] or [f"{name}_any"])
    return " ".join(tags)


def build_filter(query: CardQuery) -> str:
    """Return the match expression for the filters of a query, without its words."""
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
    """Return the numbers of the units that match a query, with their relevance.

    The relevance is BM25 over the rarest words that together match few enough units to be ranked. If every
    word matches more, the relevance is the number of the first words that a unit contains. Without words it
    is 0.
    """
    filters, words = build_filter(query), list(dict.fromkeys(_split_query(query.text)))[:MAX_QUERY_WORDS]
    if not words:
        return tables.execute(NEWEST_QUERY, (filters, MAX_RANKED_UNITS)).fetchall()
    rare = _select_rare_words(tables, words)
    if rare:
        match_rare = _match_any("words", rare)
        return tables.execute(BEST_QUERY, (match_rare, f"{filters} AND {match_rare}")).fetchall()
    counts: Counter[int] = Counter()
    for word in words[:MAX_COMMON_WORDS]:
        match = f"{filters} AND {_match_any('words', [word])}"
        counts.update(number for number, _ in tables.execute(NEWEST_QUERY, (match, MAX_RANKED_UNITS)))
    return list(counts.items())


def _select_rare_words(tables: Tables, words: Sequence[str]) -> list[str]:
    """Return the rarest words that together match at most ``MAX_RANKED_UNITS`` units."""
    counts = sorted((_count_units_with(tables, word), index, word) for index, word in enumerate(words))
    sums = accumulate(count for count, _, _ in counts)
    return [word for (_, _, word), units in zip(counts, sums, strict=True) if units <= MAX_RANKED_UNITS]


def _split_query(text: str) -> Iterator[str]:
    """Yield the words of a query; a single character of an unspaced script matches as a prefix."""
    for run in _find_runs(text):
        if not _is_unspaced(run):
            yield run
        elif len(run) == 1:
            yield f"{run}*"
        else:
            yield from (run[at : at + 2] for at in range(len(run) - 1))


def _count_units_with(tables: Tables, word: str) -> int:
    """Return how many units contain a word; at most ``MAX_RANKED_UNITS + 1``."""
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
    return ("role", scope.roles), ("tool", scope.tools), ("task", scope.task_categories), ("user", user)


def _build_tag(name: str, value: str) -> str:
    return f"{name}_{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
