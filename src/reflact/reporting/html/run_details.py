"""The long sections of a run's page: edits with their provenance, memory by epoch, and items with their answers.

Each has room for so many texts, and says on the page what it leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import htpy as h

from reflact.records import ComparisonCategory, EpochRecord, StepRecord
from reflact.reporting.html.page import PageSection, TextLimit, build_svg, format_coordinate, render_node
from reflact.reporting.lines import (
    ACTION_WORDS,
    escape_line,
    format_change,
    format_fallback,
    name_count,
    shorten_middle,
)
from reflact.reporting.tables import (
    CATEGORY_WORDS,
    describe_score,
    format_scores,
    format_value,
)
from reflact.reporting.verdict import SPLIT_WORDS, describe_entry
from reflact.skills.document import diff_texts
from reflact.training.history import RunHistory, VersionText
from reflact.training.items import DocumentResult, ItemResult
from reflact.types import AnalystReport, EditKind, EditResult, FailurePattern, Verdict

SCRIPT = "items.js"
"""Filters and sorts the list; without it, the list is complete and in the order of ``OUTCOMES``."""

ITEM_BYTES, DIFF_BYTES, EDIT_BYTES, EPOCH_BYTES = 2_000_000, 750_000, 1_000_000, 750_000
"""The room for texts of models and data."""

MAX_ITEMS, MAX_TURNS, MAX_DIFF_LINES, MAX_EDITS, MAX_EPOCHS, MAX_FALLBACKS = 1_000, 20, 4_000, 200, 100, 20
MAX_NAMED_ITEMS, MAX_PATTERNS, PREVIEW_CHARS, QUESTION_CHARS = 5, 12, 72, 110

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

EDIT_WORDS: dict[EditKind, str] = {
    "append": "Addition at the end",
    "insert_after": "Insertion",
    "replace": "Replacement",
    "delete": "Deletion",
    "suggest": "Suggestion",
    "rewrite": "New document",
    "examples": "Worked examples",
}

CLASSES: dict[ComparisonCategory | None, str] = {outcome: outcome or "unknown" for outcome in OUTCOMES}


def format_verdict(verdict: Verdict) -> str:
    """Return the scores that a gate compared."""
    return format_change(verdict.current_score, verdict.candidate_score).replace("->", "→")


# ------------------------------------------------------------------------------------------- the edits


def list_lineage(history: RunHistory, *, baseline: str, best: str) -> tuple[StepRecord | EpochRecord, ...]:
    """Return the steps and ends of epochs that made the best document out of the initial one (hashes), in order."""
    origins: dict[str, tuple[str, StepRecord | EpochRecord]] = {}
    records: list[StepRecord | EpochRecord] = sorted(
        (*history.steps, *history.epochs), key=lambda record: (record.step, isinstance(record, EpochRecord))
    )
    for record in records:
        parent = record.skill_before if isinstance(record, StepRecord) else record.last_hash
        if isinstance(record, StepRecord) and record.verdict.action == "return" and record.verdict.ranked:
            parent = record.verdict.ranked.chosen
        for version in record.created_versions:
            origins.setdefault(version.skill_hash, (parent, record))
            parent = version.skill_hash
    found: list[StepRecord | EpochRecord] = []
    while best != baseline and best in origins:
        best, record = origins.pop(best)
        if not found or found[-1] is not record:
            found.append(record)
    return tuple(reversed(found))


def build_changes_section(
    history: RunHistory, baseline: VersionText | None, best: VersionText | None
) -> PageSection:
    """Return the difference of the initial and the best document, and the edits behind it."""
    name, heading = "changes", "What changed in the skill"
    if best is None or baseline is None:
        return PageSection(name, heading, (h.p["There is no document yet."],))
    if best.skill == baseline.skill:
        return PageSection(
            name, heading, (h.p["No better document was found; the best one is the initial one."],)
        )
    lineage = list_lineage(history, baseline=baseline.skill.hash, best=best.skill.hash)
    sizes = [name_count(len(each.skill.text), "character") for each in (baseline, best)]
    limit, room = TextLimit(EDIT_BYTES), MAX_EDITS
    blocks: list[h.Node] = []
    for record in reversed(lineage):  # newest first get the room
        count = len(record.edits) if isinstance(record, StepRecord) else 1
        room -= count
        if room >= 0:
            blocks.append(
                _build_step(record, limit) if isinstance(record, StepRecord) else _build_slow_update(record)
            )
    left_out, changes = len(lineage) - len(blocks), name_count(len(lineage), "accepted change")
    return PageSection(
        name,
        heading,
        (
            h.p[
                f"From the initial document ({sizes[0]}) to the best one, v{best.version.number} ({sizes[1]})"
                f"{f', in {changes}' if lineage else ''}."
            ],
            build_diff(diff_texts(baseline.skill.text, best.skill.text)),
            bool(lineage) and h.h3["Where each change came from"],
            left_out > 0
            and h.p(".note")[
                f"The first {name_count(left_out, 'change')} are left out, to keep the page small."
            ],
            _note_limit(limit),
            blocks[::-1],
        ),
    )


def build_diff(diff: str) -> list[h.Node]:
    """Return a unified diff, its lines told apart by sign and colour."""
    lines = diff.removesuffix("\n").split("\n")[2:]
    limit = TextLimit(DIFF_BYTES)
    kinds = {"+": h.ins, "-": h.del_}
    shown: list[h.Node] = []
    for line in lines[:MAX_DIFF_LINES]:
        if line.startswith("@@"):
            shown.append(h.span(".at")["...\n" if shown else ""])
            continue
        shown.append(kinds.get(line[:1], h.span(".same"))[limit.fit(line, 2_000), "\n"])
    left_out = len(lines) - len(shown)
    return [
        h.pre(".diff", tabindex="0", role="region", aria_label="Difference of the documents")[shown],
        left_out > 0 and h.p(".note")[f"{left_out:,} more lines are left out. reflact diff prints all."],
        _note_limit(limit),
    ]


def _note_limit(limit: TextLimit) -> h.Node:
    return (
        limit.shortened > 0 and h.p(".note")[f"{name_count(limit.shortened, 'long text')} lost the middle."]
    )


def _build_step(record: StepRecord, limit: TextLimit) -> h.Element:
    versions = ", ".join(f"v{version.number}" for version in record.created_versions)
    verdict = record.verdict
    notes = [] if not record.notes else [h.p[f"Notes of the appendix: {limit.fit(' / '.join(record.notes))}"]]
    race = [h.li[limit.fit(describe_entry(entry))] for entry in record.race]
    return h.article(f"#step-{record.step}")[
        h.h4[f"Step {record.step} made {versions}: {ACTION_WORDS[verdict.action]}"],
        h.p[f"Gate: {limit.fit(verdict.reason, 600)} Validation {format_verdict(verdict)}."],
        record.rewrite_summary and h.p[f"Rewritten as a whole: {limit.fit(record.rewrite_summary)}"],
        race and [h.p[f"Raced candidates of the source {record.source}:"], h.ul(".edits")[race]],
        [_build_patterns(record.patterns, limit)],
        h.ol(".edits")[[_build_edit(result, record, limit) for result in record.edits]],
        notes,
    ]


def _build_edit(result: EditResult, record: StepRecord, limit: TextLimit) -> h.Element:
    edit, chosen, pool = result.edit, record.chosen.patch.edits, record.merged.patch.edits
    sources = [report for report in record.reports if edit in report.patch.edits]
    merged = not sources
    if merged:
        sources = [
            report
            for report in record.reports
            if report.patch.edits and edit.source_type in {None, report.source_type}
        ]
    rank = f"number {chosen.index(edit) + 1} of {len(pool)} in the pool" if edit in chosen else ""
    by = f"{rank}, ranked by the optimizer" if rank and record.chosen.ranked else rank
    support = name_count(edit.support_count, "case")
    facts = [
        (
            "outcome",
            "" if result.reason is None else f"{result.status}: {limit.fit(result.reason, 300)}",
        ),
        ("support", f"{support}{'' if edit.source_type is None else f' ({edit.source_type})'}"),
        ("rank", by),
        ("asked for by", _describe_sources(sources, merged=merged, limit=limit)),
        ("evidence", limit.fit(edit.evidence, 1_000)),
    ]
    return h.li(".edit")[
        h.p[h.strong[EDIT_WORDS[edit.op]]],
        edit.target and h.pre[h.del_[limit.fit(edit.target)]]
        if edit.op != "insert_after"
        else h.p(".note")["after: ", limit.fit(edit.target, 300)],
        edit.content and h.pre[h.ins[limit.fit(edit.content)]],
        h.dl(".facts")[[h.div[h.dt[name], h.dd[text]] for name, text in facts if text]],
    ]


def _describe_sources(sources: Sequence[AnalystReport], *, merged: bool, limit: TextLimit) -> str:
    ids = list(dict.fromkeys(item_id for report in sources for item_id in report.item_ids))
    if not ids:
        return ""
    kinds = " and ".join(dict.fromkeys(report.source_type for report in sources))
    named = ", ".join(limit.fit(item_id, 100) for item_id in ids[:MAX_NAMED_ITEMS])
    more = f" and {len(ids) - MAX_NAMED_ITEMS} more" if len(ids) > MAX_NAMED_ITEMS else ""
    how = f", merged from {name_count(len(sources), 'report')}" if merged else ""
    return f"an analysis of {kinds} cases: {named}{more}{how}"


def _build_patterns(patterns: Sequence[FailurePattern], limit: TextLimit) -> h.Node:
    if not patterns:
        return None
    rows = [
        h.li[f"{limit.fit(one.type, 200)} ({one.count}): {limit.fit(one.description, 600)}"]
        for one in list(dict.fromkeys(patterns))[:MAX_PATTERNS]
    ]
    return [h.p["Failures that were seen:"], h.ul[rows]]


def _build_slow_update(record: EpochRecord) -> h.Element:
    return h.article[
        h.h4[f"The end of epoch {record.epoch} made v{record.current.number}: slow update"],
        h.p["See ", h.a(href=f"#epoch-{record.epoch}")[f"epoch {record.epoch}"], "."],
    ]


# -------------------------------------------------------------------------------- guidance and memory


def build_memory_section(epochs: Sequence[EpochRecord]) -> PageSection:
    """Return what the ends of epochs wrote: guidance for the target, memory for the optimizer."""
    limit = TextLimit(EPOCH_BYTES)
    shown = epochs[-MAX_EPOCHS:]
    blocks = [_build_epoch(end, limit, is_open=end is shown[-1]) for end in shown]
    left_out = len(epochs) - len(shown)
    return PageSection(
        "memory",
        "Guidance and memory by epoch",
        (
            left_out > 0 and h.p(".note")[f"The first {name_count(left_out, 'epoch')} are left out."],
            _note_limit(limit),
            blocks,
        ),
    )


def _build_epoch(end: EpochRecord, limit: TextLimit, *, is_open: bool) -> h.Element:
    slow, counts = end.slow_update, Counter(each.category for each in end.comparisons)
    words = "" if slow is None else f": slow update {slow.action.replace('_', ' ')}"
    compared = ", ".join(f"{count} {_describe(name)}" for name, count in counts.items())
    parts: list[tuple[str, str]] = [("items compared with the epoch before", compared)]
    if slow is not None:
        parts += [
            ("guidance", limit.fit(slow.guidance or "")),
            ("reasons of the guidance", limit.fit(slow.reasoning)),
            ("did earlier guidance help?", "" if slow.helped == "none" else slow.helped),
            ("gate", "" if slow.verdict is None else limit.fit(slow.verdict.reason, 600)),
        ]
    parts += [
        ("memory of the optimizer", limit.fit(end.meta_skill or "")),
        ("reasons of the memory", limit.fit(end.meta_skill_reasoning)),
        *(
            ("fallback", limit.fit(format_fallback(fallback), 600))
            for fallback in end.fallbacks[:MAX_FALLBACKS]
        ),
    ]
    return h.details(id=f"epoch-{end.epoch}", open=is_open)[
        h.summary[f"Epoch {end.epoch}{words}: v{end.current.number} at its end"],
        h.dl[[h.div[h.dt[name], h.dd[h.pre[text]]] for name, text in parts if text]],
    ]


# ----------------------------------------------------------------------------------------- the items


def build_items_section(items: Sequence[ItemResult], note: str | None) -> PageSection:
    """Return the items with their answers; of very many, those whose score changed are on the page first."""
    name, heading = "items", "Items"
    if not items:
        return PageSection(name, heading, (h.p[TextLimit(ITEM_BYTES).fit(note or "No item is measured.")],))
    counts = Counter(item.category for item in items)
    ranked = sorted(items, key=lambda item: OUTCOMES.index(item.category))
    limit = TextLimit(ITEM_BYTES)
    rows = [render_node(_build_row(place, item, limit)) for place, item in enumerate(ranked[:MAX_ITEMS])]
    split = SPLIT_WORDS[items[0].split]
    summary = ", ".join(
        f"{counts[outcome]:,} {_describe(outcome)}" for outcome in OUTCOMES if counts[outcome]
    )
    left_out = len(items) - len(rows)
    return PageSection(
        name,
        heading,
        (
            h.p[
                f"{name_count(len(items), f'{split} item')}: {summary}. A row ends with the score under the initial and the best "
                "skill. Open it to read the answers."
            ],
            note is not None and h.p(".note")[limit.fit(note)],
            left_out > 0
            and h.p(".note")[
                f"{name_count(left_out, 'item')} are not on this page, to keep it small. "
                "reflact show --items lists all."
            ],
            limit.shortened > 0
            and h.p(".note")[
                f"{name_count(limit.shortened, 'long text')} lost the middle. reflact show --item ID shows all of it."
            ],
            _draw_outcomes(counts),
            _build_controls(counts),
            h.ol("#item-list.items")[rows],
        ),
    )


def _draw_outcomes(counts: Counter[ComparisonCategory | None]) -> h.Element:
    """Return a bar of the outcomes, as long as their shares."""
    total, x, parts = counts.total(), 0.0, []
    for outcome in OUTCOMES:
        width = 960 * counts[outcome] / total
        if width:
            size = {"width": format_coordinate(max(width - 2, 1)), "height": "9"}
            parts.append(h.rect({"x": format_coordinate(x), "y": "0", **size}, class_=CLASSES[outcome]))
        x += width
    described = ", ".join(f"{_describe(outcome)}: {counts[outcome]:,}" for outcome in OUTCOMES)
    return h.div(".outcomes")[build_svg("outcomes", "Items by outcome", described, 9, parts, width=960)]


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
    kind = "" if item.task_type is None else f" ({limit.fit(item.task_type, PREVIEW_CHARS)})"
    preview = shorten_middle(escape_line(" ".join(format_value(item.input).split())), QUESTION_CHARS)
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
        spent = ""
        if number == 1 and result.usage is not None:
            price = "" if result.usage.usd is None else f", ${result.usage.usd:.4f}"
            spent = f", {name_count(result.usage.input_tokens + result.usage.output_tokens, 'token')}{price}"
        heading = f"{name}{trial}: score {describe_score(rollout.score)}{spent}"
        parts.append(_build_text(heading, limit.fit(rollout.answer)))
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
