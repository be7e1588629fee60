"""The items of a run as a list that can be opened: input, right answer, and the answers before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import htpy as h

from reflact.records import ComparisonCategory
from reflact.reporting.html.page import PageSection, TextLimit, format_count
from reflact.reporting.items import CATEGORY_WORDS, format_scores, format_value, shorten_middle
from reflact.reporting.lines import escape_line
from reflact.reporting.verdict import SPLIT_WORDS
from reflact.training.items import DocumentResult, ItemResult

SCRIPT = "items.js"
"""Filters and sorts the list; without it, the list is complete and in the order of ``OUTCOMES``."""

OUTCOMES: tuple[ComparisonCategory | None, ...] = (
    "improved",
    "regressed",
    "persistent_failure",
    "stable_success",
    None,
)
MARKS: dict[ComparisonCategory | None, str] = {
    "improved": "▲",
    "regressed": "▼",
    "persistent_failure": "✕",
    "stable_success": "●",
    None: "–",
}
"""The outcomes of items by shape, because not everyone sees colours."""

CLASSES: dict[ComparisonCategory | None, str] = {outcome: outcome or "unknown" for outcome in OUTCOMES}

MAX_ITEMS, ITEM_BYTES, MAX_TURNS = 1_000, 3_000_000, 20
PREVIEW_CHARS = 72


def build_items_section(items: Sequence[ItemResult], note: str | None) -> PageSection:
    """Return the items with their answers; of very many, those whose score changed are on the page first."""
    name, heading = "items", "Items"
    if not items:
        return PageSection(name, heading, (h.p[escape_line(note or "No item is measured.")],))
    counts = Counter(item.category for item in items)
    ranked = sorted(items, key=lambda item: OUTCOMES.index(item.category))
    limit = TextLimit(ITEM_BYTES)
    rows = [_build_row(place, item, limit) for place, item in enumerate(ranked[:MAX_ITEMS])]
    split = SPLIT_WORDS[items[0].split]
    summary = ", ".join(
        f"{counts[outcome]:,} {_describe(outcome)}" for outcome in OUTCOMES if counts[outcome]
    )
    left_out = len(items) - len(rows)
    return PageSection(
        name,
        heading,
        (
            h.p[f"{format_count(len(items), f'{split} item')}: {summary}. Open one to read its answers."],
            note is not None and h.p(".note")[escape_line(note)],
            left_out > 0
            and h.p(".note")[
                f"{format_count(left_out, 'item')} are not on this page, to keep it small. "
                "reflact show --items lists all."
            ],
            limit.shortened > 0
            and h.p(".note")[
                f"{format_count(limit.shortened, 'long text')} lost the middle. reflact show --item ID shows all of it."
            ],
            _build_controls(counts),
            h.ol("#item-list.items")[rows],
        ),
    )


def _describe(outcome: ComparisonCategory | None) -> str:
    return "not measured under both" if outcome is None else CATEGORY_WORDS[outcome]


def _build_controls(counts: Counter[ComparisonCategory | None]) -> h.Element:
    buttons = [
        h.button(type="button", aria_pressed="false", data_outcome=CLASSES[outcome])[
            f"{MARKS[outcome]} {_describe(outcome)} ({counts[outcome]:,})"
        ]
        for outcome in OUTCOMES
        if counts[outcome]
    ]
    orders = (("place", "outcome"), ("id", "id"), ("tokens", "tokens, most first"))
    return h.div("#item-controls.controls", hidden=True)[
        h.div(role="group", aria_label="Show only")[buttons],
        h.label["Search ", h.input(type="search", autocomplete="off")],
        h.label["Sort by ", h.select[(h.option(value=value)[words] for value, words in orders)]],
        h.output(aria_live="polite"),
    ]


def _build_row(place: int, item: ItemResult, limit: TextLimit) -> h.Element:
    outcome = CLASSES[item.category]
    usages = [result.usage for result in (item.baseline, item.best) if result.usage is not None]
    tokens = sum(usage.input_tokens + usage.output_tokens for usage in usages)
    kind = "" if item.task_type is None else f" ({item.task_type})"
    preview = shorten_middle(escape_line(" ".join(format_value(item.input).split())), PREVIEW_CHARS)
    return h.li(data_outcome=outcome, data_place=str(place), data_tokens=str(tokens))[
        h.details[
            h.summary[
                h.span(class_=f"mark {outcome}")[f"{MARKS[item.category]} {_describe(item.category)}"],
                h.span(".id")[shorten_middle(escape_line(item.item_id), PREVIEW_CHARS)],
                h.span(".preview")[preview],
                h.span(".scores")[format_scores(item).replace("->", "→")],
            ],
            h.dl[
                _build_text(f"input{kind}", limit.fit(format_value(item.input))),
                item.expected is not None and _build_text("expected", limit.fit(format_value(item.expected))),
                _build_answers("initial skill", item.baseline, limit),
                _build_answers("best skill", item.best, limit),
            ],
        ]
    ]


def _build_answers(name: str, result: DocumentResult, limit: TextLimit) -> list[h.Element]:
    if not result.rollouts:
        return [_build_text(name, f"not measured: {limit.fit(result.error or 'no stored rollout')}")]
    parts: list[h.Element] = []
    for number, rollout in enumerate(result.rollouts, start=1):
        trial = f", trial {number}" if len(result.rollouts) > 1 else ""
        score = "–" if rollout.score is None else f"{rollout.score.hard:.3g}"
        spent = ""
        if number == 1 and result.usage is not None:
            price = "" if result.usage.usd is None else f", ${result.usage.usd:.4f}"
            spent = (
                f", {format_count(result.usage.input_tokens + result.usage.output_tokens, 'token')}{price}"
            )
        parts.append(_build_text(f"{name}{trial}: score {score}{spent}", limit.fit(rollout.answer)))
        if rollout.feedback:
            parts.append(_build_text("feedback", limit.fit(rollout.feedback)))
        if len(rollout.turns) > 2:
            turns = [_build_text(turn.role, limit.fit(turn.content)) for turn in rollout.turns[:MAX_TURNS]]
            left_out = len(rollout.turns) - len(turns)
            parts.append(
                h.div[
                    h.dt["conversation"],
                    h.dd[h.dl(".turns")[turns], left_out > 0 and h.p[f"{left_out} more turns are left out."]],
                ]
            )
    return parts


def _build_text(name: str, text: str) -> h.Element:
    return h.div[h.dt[escape_line(name)], h.dd[h.pre[text] if text else h.span(".note")["(empty)"]]]
