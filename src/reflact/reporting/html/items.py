"""The items on the page of a run: what is still wrong first, and a cell for each version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import htpy as h

from reflact.records import ComparisonCategory
from reflact.reporting import facts
from reflact.reporting.html.page import PageSection, TextLimit, build_texts, render_node
from reflact.reporting.items import CELL_MARKS, CELL_WORDS, OUTCOME_WORDS, ItemMatrix, MatrixRow
from reflact.text import escape_line, format_value, name_count, shorten

# The room for texts of models and data.
ITEM_BYTES = 2_000_000

# The most items of a split, and the most versions beside each other.
MAX_ITEMS = 1_000
MAX_COLUMNS = 16

# On a wide page, a list of more items scrolls by itself.
MAX_UNSCROLLED = 12

# The longest name of a column, and the longest in a narrow one.
NAME_CHARS = 16
NARROW_NAME_CHARS = 3

MAX_TEXTS = 40
ID_CHARS = 72
QUESTION_CHARS = 110
ANSWER_CHARS = 160

# What is still wrong comes first, then what changed.
ORDER: tuple[ComparisonCategory | None, ...] = (
    "regressed",
    "persistent_failure",
    "improved",
    None,
    "stable_success",
)


def build_items_section(matrices: Sequence[ItemMatrix], note: str | None) -> PageSection:
    """Return the items of each split; of very many, those that are wrong or changed."""
    limit = TextLimit(ITEM_BYTES)
    if not matrices:
        reason = note or "No item is measured."
        return PageSection("items", "Items", (h.p[limit.fit(reason)],))
    content = [_build_matrix(matrix, limit) for matrix in matrices]
    return PageSection("items", "Items", (limit.build_note(), content))


def _build_matrix(matrix: ItemMatrix, limit: TextLimit) -> h.Element:
    places = range(len(matrix.columns))
    n_measured = sum(any(row.results[place].rollouts for row in matrix.rows) for place in places)
    matrix = matrix.choose_columns(min(n_measured, MAX_COLUMNS)).sort()
    names = [shorten(escape_line(column.name), NAME_CHARS) for column in matrix.columns]
    ranked = sorted(matrix.rows, key=lambda row: ORDER.index(matrix.find_outcome(row)))
    counts = Counter(map(matrix.find_outcome, ranked))
    rows = [
        render_node(_build_item(place, matrix, row, names, limit))
        for place, row in enumerate(ranked[:MAX_ITEMS])
    ]
    words = [f"{counts[n]:,} {word}" for n, word in OUTCOME_WORDS.items() if counts[n] or n]
    items_left = name_count(len(ranked) - len(rows), "item")
    columns_left = name_count(n_measured - len(names), "version")
    is_wide = any(len(name) > NARROW_NAME_CHARS for name in names)
    kinds = {"wide": is_wide, "long": len(rows) > MAX_UNSCROLLED}
    return h.div(class_=["matrix", kinds])[
        h.h3[facts.SPLIT_WORDS[matrix.split].capitalize()],
        h.p[f"{name_count(len(ranked), 'item')}: {', '.join(words)}."],
        len(rows) < len(ranked)
        and h.p(".note")[f"{items_left} are not on this page. reflact show --items lists all."],
        len(names) < n_measured
        and h.p(".note")[f"{columns_left} are left out. reflact show --matrix has all."],
        _build_controls(counts),
        h.div(".heads", aria_hidden="true")[
            h.span["item"], h.span(".cells")[(h.i[name] for name in names)]
        ],
        h.ol(".items.rows")[rows],
    ]


def _build_controls(counts: Counter[ComparisonCategory | None]) -> h.Element:
    buttons = [
        h.button(type="button", aria_pressed="false", data_outcome=outcome or "unknown")[
            f"{OUTCOME_WORDS[outcome]} ({counts[outcome]:,})"
        ]
        for outcome in ORDER
        if counts[outcome]
    ]
    orders = (("place", "outcome"), ("id", "id"), ("tokens", "tokens, most first"))
    return h.div(".controls", hidden=True)[
        h.div(role="group", aria_label="Show only")[buttons],
        h.label["Search ", h.input(type="search", autocomplete="off")],
        h.label["Sort by ", h.select[(h.option(value=value)[words] for value, words in orders)]],
        h.output(aria_live="polite"),
    ]


def _build_item(
    place: int, matrix: ItemMatrix, row: MatrixRow, names: Sequence[str], limit: TextLimit
) -> h.Element:
    outcome = matrix.find_outcome(row)
    usage = row.usage
    tokens = 0 if usage is None else usage.input_tokens + usage.output_tokens
    states = matrix.list_states(row)
    words = [f"{name} {CELL_WORDS[state]}" for name, state in zip(names, states, strict=True)]
    cells = [h.i(class_=state)[CELL_MARKS[state]] for state in states]
    data = {"data_outcome": outcome or "unknown", "data_place": str(place)}
    return h.li(**data, data_tokens=str(tokens))[
        h.details[
            h.summary[
                h.span(".id")[shorten(escape_line(row.item_id), ID_CHARS)],
                h.span(".preview")[_flatten(format_value(row.input), QUESTION_CHARS)],
                h.span(class_=["mark", outcome])[OUTCOME_WORDS[outcome]],
                h.span(".cells", role="img", aria_label=", ".join(words))[cells],
                outcome in {"regressed", "persistent_failure"} and _build_answers(matrix, row),
            ],
            build_texts(_list_texts(row, names), limit, max_lines=MAX_TEXTS),
        ]
    ]


def _build_answers(matrix: ItemMatrix, row: MatrixRow) -> h.Element:
    """Return what was expected and what was answered under the best version, for a closed row."""
    answers = zip(matrix.columns, row.list_answers(), strict=True)
    answer = [answer for column, answer in answers if column.in_focus][-1]
    expected = format_value(row.expected)
    return h.span(".answers")[
        bool(expected) and h.span[h.small["expected"], _flatten(expected, ANSWER_CHARS)],
        h.span[h.small["answered"], _flatten(answer, ANSWER_CHARS)],
    ]


def _list_texts(row: MatrixRow, names: Sequence[str]) -> list[facts.LabelledText]:
    """Return all texts of an item; versions with the same answer and score are together."""
    groups: dict[tuple[str, float | None], list[int]] = {}
    for place, answer in enumerate(row.list_answers()):
        groups.setdefault((answer, row.results[place].hard), []).append(place)
    joined = [", ".join(names[place] for place in places) for places in groups.values()]
    results = tuple(row.results[places[0]] for places in groups.values())
    return list(facts.list_row_parts(row.model_copy(update={"results": results}), joined))


def _flatten(text: str, length: int) -> str:
    return shorten(escape_line(" ".join(text.split())), length)
