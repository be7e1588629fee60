"""An optimizer for the toy world: plays every part that the stages ask for, without a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from reflact.calls import CallId, RenderedPrompt, ReplyModel
from reflact.stages.appendix import CompactReply
from reflact.stages.lapses import LapseReply, ReminderReply
from reflact.stages.meta_skill import MemoryReply
from reflact.stages.replies import (
    AnalystReply,
    DraftMergeReply,
    DraftReply,
    MergeReply,
    RankReply,
    SuccessDraftReply,
    SuccessReply,
)
from reflact.stages.select import StepSizeReply
from reflact.stages.slow_update import GuidanceReply
from reflact.stages.update import RewriteReply
from reflact.testing.llm import Script
from reflact.testing.replies import append_edit, append_reply, find_bounds
from reflact.testing.toy import TOY_RULES, ToyRule

ReplyScript = Callable[[type[ReplyModel], str], JsonValue]


def toy_optimizer(*, edits: int = 1) -> Script:
    """Return a script for ``ScriptedLLM`` that does every part of an optimizer in the toy world.

    The failure analyst proposes the missing rules that its cases name, most frequent first, and those
    that the document lacks before others; a rule that stands in the document is a lapse. The success
    analyst has nothing to add; merges join equal proposals; rankings take the first ones; rewrites and
    drafts hold the lines of the document and of the rules asked for; guidance holds the lines of missing
    rules; all offered edits are applied.

    Args:
        edits: Rules that an analyst proposes at most.
    """

    def analyse(reply_type: type[ReplyModel], shown: str) -> JsonValue:
        document = shown.splitlines()
        lines = sorted(
            (TOY_RULES[name].line for name, _ in _find_missing_rules(shown)), key=lambda x: x in document
        )
        most = find_bounds(reply_type, "edits")[1]
        proposed = [append_edit(reply_type, line) for line in lines[:edits][:most]]
        return {"patterns": _reply_patterns(reply_type, shown), "edits": [*proposed]}

    parts: tuple[tuple[type[ReplyModel], ReplyScript], ...] = (
        (AnalystReply, analyse),
        (SuccessReply, lambda reply_type, _: append_reply(reply_type)),
        (MergeReply, lambda reply_type, shown: {"edits": _reply_merge(reply_type, shown)}),
        (RankReply, _reply_ranking),
        (StepSizeReply, _reply_step_size),
        (RewriteReply, lambda _, shown: {"summary": "Rules added.", "document": _reply_document(shown)}),
        (DraftReply, _reply_draft),
        (SuccessDraftReply, lambda _, shown: {"strengths": "They fit.", "document": _reply_document(shown)}),
        (DraftMergeReply, lambda _, shown: {"document": _reply_document(shown)}),
        (LapseReply, lambda _, shown: {"lapses": _reply_lapses(shown)}),
        (ReminderReply, lambda *_: {"reminders": []}),
        (CompactReply, _reply_notes),
        (GuidanceReply, _reply_guidance),
        (MemoryReply, lambda *_: {"reasoning": "Lines helped.", "memory": "Add the lines of rules."}),
    )

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue | Exception:
        shown = "\n".join(message.content for message in prompt.messages if message.role == "user")
        for kind, part in parts:
            if issubclass(reply_type, kind):
                return part(reply_type, shown)
        return TypeError(f"the toy optimizer has no {reply_type.__name__} for {call_id.label}")

    return answer


_MISSING = re.compile(r"missing rule: (\w+)")
_TAGGED = r"<({}_*)>\n(.*?)\n</\1>"
_PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)
_CASE = re.compile(r"<(case_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)
DEFAULT_GUIDANCE = "Answer every task."


def _find_missing_rules(shown: str) -> list[tuple[str, int]]:
    return Counter(_MISSING.findall(shown)).most_common()


def _read_tag(tag: str, shown: str) -> str:
    found = re.search(_TAGGED.format(tag), shown, re.DOTALL)
    return found[2] if found else ""


def _reply_patterns(reply_type: type[ReplyModel], shown: str) -> list[JsonValue]:
    counted = _find_missing_rules(shown) or [("unknown", 1)]
    return [
        {"type": name, "count": count, "description": f"It does not know the rule {name}."}
        for name, count in counted[: find_bounds(reply_type, "patterns")[1]]
    ]


def _reply_merge(reply_type: type[ReplyModel], shown: str) -> list[JsonValue]:
    proposed = {int(number): text for _, number, text in _PROPOSAL.findall(shown)}
    sources: dict[str, list[JsonValue]] = {}
    for number, text in proposed.items():
        for rule in TOY_RULES.values():
            if rule.line in text:
                sources.setdefault(rule.line, []).append(number)
    return [{**append_edit(reply_type, line), "sources": numbers} for line, numbers in sources.items()]


def _reply_ranking(reply_type: type[ReplyModel], _: str) -> JsonValue:
    first = range(1, 1 + find_bounds(reply_type, "selected")[0])
    return {"reasoning": "First come, first served.", "selected": list(first)}


def _reply_step_size(reply_type: type[ReplyModel], _: str) -> JsonValue:
    most = reply_type.model_json_schema()["properties"]["count"]["maximum"]
    return {"reasoning": "All are sound.", "count": most, "confidence": 1.0, "risks": ""}


def _reply_document(shown: str) -> str:
    """The document's own lines, then those of the rules that proposals, drafts and cases call for."""
    kept = [line for line in _read_tag("document", shown).splitlines() if line.strip()]
    wanted = [rule.line for _, _, text in _PROPOSAL.findall(shown) for rule in _rules_in(text)]
    wanted += [TOY_RULES[name].line for name, _ in _find_missing_rules(shown)]
    return "\n".join(dict.fromkeys([*kept, *wanted])) or DEFAULT_GUIDANCE


def _rules_in(text: str) -> Sequence[ToyRule]:
    return [rule for rule in TOY_RULES.values() if rule.line in text]


def _reply_draft(reply_type: type[ReplyModel], shown: str) -> JsonValue:
    return {"patterns": _reply_patterns(reply_type, shown), "document": _reply_document(shown)}


def _reply_lapses(shown: str) -> list[JsonValue]:
    document = _read_tag("document", shown)
    return [
        {"case": int(number), "rule": TOY_RULES[name].line, "reminder": f"Mind the rule {name}."}
        for _, number, text in _CASE.findall(shown)
        for name in _MISSING.findall(text)[:1]
        if TOY_RULES[name].line in document
    ]


def _reply_notes(reply_type: type[ReplyModel], shown: str) -> JsonValue:
    notes = [line.removeprefix("- ") for line in _read_tag("notes", shown).splitlines()]
    return {"notes": [*notes[: find_bounds(reply_type, "notes")[1]]]}


def _reply_guidance(_: type[ReplyModel], shown: str) -> JsonValue:
    document = _read_tag("document", shown)
    lines = [
        TOY_RULES[name].line for name, _ in _find_missing_rules(shown) if TOY_RULES[name].line not in document
    ]
    return {
        "reasoning": "Some rules are still missing.",
        "helped": "unclear",
        "guidance": "\n".join(lines) or DEFAULT_GUIDANCE,
    }
