"""The skill on the page of a run: each version in full, each line with what brought it."""

from __future__ import annotations

from collections.abc import Sequence

import htpy as h

from reflact.records import EpochRecord, SkillVersion, StepRecord
from reflact.reporting import facts
from reflact.reporting.history import VersionText
from reflact.reporting.html.page import PageSection, TextLimit
from reflact.reporting.lineage import (
    LineBlock,
    LineOrigin,
    VersionOrigin,
    blame_lines,
    group_lines,
)
from reflact.skills.document import diff_texts
from reflact.text import format_score, name_count

# The room for all documents, and for their differences.
DOCUMENT_BYTES = 1_500_000
DIFF_BYTES = 750_000

# Of more versions, the initial one, the best, the last and the newest are shown.
MAX_VERSIONS = 40
MAX_BLOCK_CHARS = 200_000
MAX_NOTE_CHARS = 300
MAX_DIFF_LINES = 4_000


def build_skill_section(
    origins: Sequence[VersionOrigin], texts: Sequence[VersionText], *, best: int, final: int
) -> PageSection:
    """Return the best version, open, and the others beside it."""
    if not texts:
        return PageSection("skill", "The skill", (h.p["There is no document yet."],))
    documents = {each.version.number: each.skill.text for each in texts}
    blamed = blame_lines(origins, documents)
    numbers = choose_versions(list(documents), best=best, final=final)
    limit = TextLimit(DOCUMENT_BYTES)
    diff_limit = TextLimit(DIFF_BYTES)
    by_number = {origin.version.number: origin for origin in origins}
    panels = {}
    for number in [best, *(each for each in reversed(numbers) if each != best)]:
        # The best version gets the room first, then the newest ones.
        text = documents[number]
        n_shortened = limit.shortened
        blocks = _build_blocks(group_lines(text, blamed[number]), by_number, limit)
        panels[number] = h.details(name="version", open=number == best)[
            h.summary[f"v{number}", h.small[_name_role(by_number[number].version, best, final)]],
            h.div(".document", id=f"v{number}")[
                h.div(".bar")[
                    h.p[
                        limit.fit(facts.describe_version(by_number[number].version), MAX_NOTE_CHARS)
                    ],
                    limit.shortened == n_shortened
                    and h.button(".copy", type="button", hidden=True)["Copy"],
                ],
                blocks or h.p(".note")["The document is empty."],
                number != 0 and _build_difference(documents[0], text, diff_limit),
            ],
        ]
    left_out = name_count(len(documents) - len(numbers), "version")
    content = (
        h.div(".versions", role="group", aria_label="Versions")[
            (panels[number] for number in numbers)
        ],
        len(numbers) < len(documents)
        and h.p(".note")[f"{left_out} are left out; reflact show --skill prints each."],
        limit.build_note(),
    )
    return PageSection("skill", "The skill", content)


def choose_versions(numbers: Sequence[int], *, best: int, final: int) -> list[int]:
    """Return the numbers of the versions that are shown, in order."""
    chosen = {min(numbers), best, final}
    for number in sorted(numbers, reverse=True):
        if len(chosen) < MAX_VERSIONS:
            chosen.add(number)
    return sorted(chosen)


def _name_role(version: SkillVersion, best: int, final: int) -> str:
    roles = {0: "initial", final: "last"} | {best: "best"}
    words = [roles[version.number]] if version.number in roles else []
    if version.score is not None:
        words.append(format_score(version.score))
    return " ".join(words)


def _build_blocks(
    blocks: Sequence[LineBlock], origins: dict[int, VersionOrigin], limit: TextLimit
) -> list[h.Node]:
    shown: list[h.Node] = []
    for block in blocks:
        record = origins[block.origin.version].record
        kind = "first" if record is None else "later"
        text = h.pre[limit.fit(block.text, MAX_BLOCK_CHARS)]
        shown.append(h.div(class_=["block", kind])[text, _build_origin(block.origin, record)])
    return shown


def _build_origin(origin: LineOrigin, record: StepRecord | EpochRecord | None) -> h.Element:
    """Return the note beside lines: the commit that brought them, its decision and its cases."""
    if record is None:
        return h.p(".origin")["initial document"]
    words = facts.describe_commit(record)
    cases = ""
    if origin.edit is not None:
        cases = f", {name_count(origin.edit.support_count, 'case')}"
    return h.p(".origin")[h.a(href=f"#{name_commit(record)}")[use_arrows(words)], cases]


def use_arrows(words: str) -> str:
    """Return a sentence of a terminal with the arrows that a page has."""
    return words.replace("->", "→")


def name_commit(record: StepRecord | EpochRecord) -> str:
    """Return the id of a commit on the page."""
    if isinstance(record, EpochRecord):
        return f"epoch-{record.epoch}"
    return f"step-{record.step}"


def _build_difference(before: str, after: str, limit: TextLimit) -> h.Node:
    """Return the unified diff from the initial document, its lines told apart by sign too."""
    lines = diff_texts(before, after).removesuffix("\n").split("\n")[2:]
    kinds = {"+": h.ins, "-": h.del_}
    shown: list[h.Node] = []
    for line in lines[:MAX_DIFF_LINES]:
        if not line.startswith("@@"):
            shown.append(kinds.get(line[:1], h.span)[limit.fit(line, 2_000), "\n"])
        elif shown:
            shown.append(h.span[" ...\n"])
    left_out = len(lines) - MAX_DIFF_LINES
    more = f"{left_out:,} more lines are left out; reflact show --skill A..B prints all."
    return (
        bool(lines)
        and h.details(".difference")[
            h.summary["Difference from the initial document"],
            h.pre(".diff")[shown],
            left_out > 0 and h.p(".note")[more],
        ]
    )
