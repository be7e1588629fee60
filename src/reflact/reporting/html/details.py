"""The long sections of a run's page: changes with their origin, memory by epoch, and items.

Each has room for so many texts, and says on the page what it leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import htpy as h

from reflact.records import ComparisonCategory, EpochRecord, ItemResult, StepRecord
from reflact.reporting import facts
from reflact.reporting.history import RunHistory, VersionText
from reflact.reporting.html.page import PageSection, TextLimit, render_node
from reflact.skills.document import diff_texts
from reflact.text import escape_line, name_count, shorten

# Filters and sorts the list; without it, the list is complete and in the order of outcomes.
SCRIPT = "items.js"

# The room for texts of models and data.
ITEM_BYTES = 2_000_000
DIFF_BYTES = 750_000
EDIT_BYTES = 1_000_000
EPOCH_BYTES = 750_000

MAX_ITEMS = 1_000
MAX_DIFF_LINES = 4_000
MAX_EDITS = 200
MAX_EPOCHS = 100
MAX_LINES = 40
PREVIEW_CHARS = 72
QUESTION_CHARS = 110

# The outcomes of items by shape, because not everyone sees colours.
MARKS: dict[ComparisonCategory | None, str] = {
    "improved": "▲",
    "regressed": "▼",
    "persistent_failure": "✕",
    "stable_success": "●",
    None: "–",
}


# ----------------------------------------------------------------------------------------- changes


def list_changes(history: RunHistory, best_hash: str) -> list[StepRecord | EpochRecord]:
    """Return the steps and ends of epochs that changed the current document, up to the best one."""
    records: list[StepRecord | EpochRecord] = sorted(
        (*history.steps, *history.epochs),
        key=lambda record: (record.step, isinstance(record, EpochRecord)),
    )
    changes = []
    for record in records:
        is_return = record.verdict is not None and record.verdict.action == "return"
        if record.created_versions or is_return:
            changes.append(record)
        if best_hash in {version.skill_hash for version in record.created_versions}:
            break
    return changes


def build_changes_section(
    history: RunHistory, baseline: VersionText | None, best: VersionText | None
) -> PageSection:
    """Return the difference of the initial and the best document, and the edits behind it."""
    name = "changes"
    heading = "What changed in the skill"
    if best is None or baseline is None:
        return PageSection(name, heading, (h.p["There is no document yet."],))
    if best.skill == baseline.skill:
        nothing = h.p["No better document was found; the best one is the initial one."]
        return PageSection(name, heading, (nothing,))
    changes = list_changes(history, best.skill.hash)
    limit = TextLimit(EDIT_BYTES)
    room = MAX_EDITS
    blocks: list[h.Node] = []
    for record in reversed(changes):  # the newest get the room
        room -= len(record.edits) if isinstance(record, StepRecord) else 1
        if room >= 0:
            blocks.append(_build_change(record, limit))
    left_out = len(changes) - len(blocks)
    before, after = (name_count(len(each.skill.text), "character") for each in (baseline, best))
    words = f"From the initial document ({before}) to v{best.version.number} ({after})."
    content = (
        h.p[words],
        build_diff(diff_texts(baseline.skill.text, best.skill.text)),
        h.h3["The accepted changes"],
        left_out > 0 and h.p(".note")[f"The first {name_count(left_out, 'change')} are left out."],
        limit.build_note(),
        blocks[::-1],
    )
    return PageSection(name, heading, content)


def build_diff(diff: str) -> list[h.Node]:
    """Return a unified diff, its lines told apart by sign and colour."""
    lines = diff.removesuffix("\n").split("\n")[2:]
    limit = TextLimit(DIFF_BYTES)
    kinds = {"+": h.ins, "-": h.del_}
    shown: list[h.Node] = []
    for line in lines[:MAX_DIFF_LINES]:
        if line.startswith("@@") and shown:
            shown.append(h.span(".at")["...\n"])
        elif not line.startswith("@@"):
            shown.append(kinds.get(line[:1], h.span(".same"))[limit.fit(line, 2_000), "\n"])
    left_out = len(lines) - MAX_DIFF_LINES
    note = f"{left_out:,} more lines are left out. reflact show --skill A..B prints all."
    return [
        h.pre(".diff", tabindex="0", role="region", aria_label="Difference of the documents")[
            shown
        ],
        left_out > 0 and h.p(".note")[note],
        limit.build_note(),
    ]


def _build_change(record: StepRecord | EpochRecord, limit: TextLimit) -> h.Element:
    if isinstance(record, EpochRecord):
        return h.article[
            h.h4[f"The end of epoch {record.epoch} made v{record.current.number}: slow update"],
            h.p["See ", h.a(href=f"#epoch-{record.epoch}")[f"epoch {record.epoch}"], "."],
        ]
    decision = facts.ACTION_WORDS[record.verdict.action]
    edits = [fact for fact in facts.list_edit_facts(record) if fact.outcome != "not chosen"]
    return h.article(f"#step-{record.step}")[
        h.h4[f"Step {record.step}: {decision}, now v{record.current.number}"],
        _build_texts(facts.list_step_details(record), limit),
        h.ol(".edits")[[_build_edit(fact, limit) for fact in edits]],
    ]


def _build_texts(texts: Iterable[facts.LabelledText], limit: TextLimit) -> h.Element:
    entries = list(texts)
    rows = [_build_text(name, limit.fit(text, 1_000)) for name, text in entries[:MAX_LINES]]
    left_out = len(entries) - len(rows)
    more = left_out > 0 and h.div[h.dt["left out"], h.dd[f"{left_out} more lines"]]
    return h.dl(".facts")[rows, more]


def _build_edit(fact: facts.EditFact, limit: TextLimit) -> h.Element:
    edit = fact.edit
    target: h.Node = None
    if edit.target and edit.op == "insert_after":
        target = h.p(".note")["after: ", limit.fit(edit.target, 300)]
    elif edit.target:
        target = h.pre[h.del_[limit.fit(edit.target)]]
    texts = [("outcome", fact.outcome), ("origin", fact.origin)]
    if edit.evidence:
        texts.append(("evidence", edit.evidence))
    return h.li(".edit")[
        h.p[h.strong[facts.EDIT_WORDS[edit.op]]],
        target,
        bool(edit.content) and h.pre[h.ins[limit.fit(edit.content)]],
        _build_texts(texts, limit),
    ]


# ------------------------------------------------------------------------------ memory and items


def build_memory_section(epochs: Sequence[EpochRecord]) -> PageSection:
    """Return what the ends of epochs wrote: guidance for the target, memory for the optimizer."""
    limit = TextLimit(EPOCH_BYTES)
    shown = epochs[-MAX_EPOCHS:]
    left_out = len(epochs) - len(shown)
    blocks = [
        h.details(id=f"epoch-{end.epoch}", open=end is shown[-1])[
            h.summary[limit.fit(facts.describe_epoch(end), 600)],
            _build_texts(facts.list_epoch_details(end), limit),
        ]
        for end in shown
    ]
    content = (
        left_out > 0 and h.p(".note")[f"The first {name_count(left_out, 'epoch')} are left out."],
        limit.build_note(),
        blocks,
    )
    return PageSection("memory", "Guidance and memory by epoch", content)


def build_items_section(items: Sequence[ItemResult], note: str | None) -> PageSection:
    """Return the items with their answers; of very many, those whose score changed come first."""
    limit = TextLimit(ITEM_BYTES)
    if not items:
        reason = note or "No item is measured."
        return PageSection("items", "Items", (h.p[limit.fit(reason)],))
    order = list(facts.OUTCOME_WORDS)
    ranked = sorted(items, key=lambda item: order.index(item.category))
    rows = [
        render_node(_build_item(place, item, limit))
        for place, item in enumerate(ranked[:MAX_ITEMS])
    ]
    left_out = name_count(len(items) - len(rows), "item")
    help_text = (
        "A row ends with the score under the initial and the best skill. Open it to read "
        "the answers."
    )
    not_shown = f"{left_out} are not on this page. reflact show --items lists all."
    content = (
        h.p[f"{facts.summarize_items(items)}. {help_text}"],
        note is not None and h.p(".note")[limit.fit(note)],
        len(items) > len(rows) and h.p(".note")[not_shown],
        limit.build_note(),
        _build_controls(Counter(item.category for item in items)),
        h.ol("#item-list.items")[rows],
    )
    return PageSection("items", "Items", content)


def _build_controls(counts: Counter[ComparisonCategory | None]) -> h.Element:
    buttons = [
        h.button(type="button", aria_pressed="false", data_outcome=outcome or "unknown")[
            f"{MARKS[outcome]} {words} ({counts[outcome]:,})"
        ]
        for outcome, words in facts.OUTCOME_WORDS.items()
        if counts[outcome]
    ]
    orders = (("place", "outcome"), ("id", "id"), ("tokens", "tokens, most first"))
    return h.div("#item-controls.controls", hidden=True)[
        h.div(role="group", aria_label="Show only")[buttons],
        h.label["Search ", h.input(type="search", autocomplete="off")],
        h.label["Sort by ", h.select[(h.option(value=value)[words] for value, words in orders)]],
        h.output(aria_live="polite"),
    ]


def _build_item(place: int, item: ItemResult, limit: TextLimit) -> h.Element:
    fact = facts.ItemFact(item=item)
    outcome = item.category or "unknown"
    tokens = 0 if fact.usage is None else fact.usage.input_tokens + fact.usage.output_tokens
    preview = shorten(escape_line(" ".join(fact.texts["input"].split())), QUESTION_CHARS)
    parts = list(fact.list_parts())
    shown = [_build_text(name, limit.fit(text)) for name, text in parts[:MAX_LINES]]
    left_out = len(parts) - len(shown)
    return h.li(data_outcome=outcome, data_place=str(place), data_tokens=str(tokens))[
        h.details[
            h.summary[
                h.span(class_=f"mark {outcome}")[f"{MARKS[item.category]} {fact.outcome}"],
                h.span(".id")[shorten(fact.item_id, PREVIEW_CHARS)],
                h.span(".preview")[preview],
                h.span(".scores")[fact.scores],
            ],
            h.dl[shown],
            left_out > 0 and h.p(".note")[f"{left_out} more turns are left out."],
        ]
    ]


def _build_text(name: str, text: str) -> h.Element:
    shown = h.pre[text] if text else h.span(".note")["(empty)"]
    return h.div[h.dt[escape_line(name)], h.dd[shown]]
