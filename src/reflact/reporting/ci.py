"""The report of ``reflact gate`` on a document beside another one: Markdown, JUnit and SARIF."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from reflact.errors import RunFailed
from reflact.gate.cases import find_repeats
from reflact.records import (
    CaseComparison,
    Improvement,
    ItemSides,
    JudgeDescription,
    SkillComparison,
    Usage,
)
from reflact.reporting.facts import SpendFact, describe_judge
from reflact.text import escape_line, shorten
from reflact.types import FrozenModel, Split

# The most cases of a kind that a comment lists, and the most characters of a text in it.
MAX_LISTED = 20
MAX_CHARS = 160


class GateReport(FrozenModel):
    """What a build is told about a document beside another one.

    Args:
        skill: The document's name.
        base: The name of the document that it is measured against.
        split: The split whose cases were run.
        score: The document's mean score, 0..1.
        on_cases: What repeats say about these cases.
        on_new: What the differences say about new cases; None without a common case.
        changes: The cases that flip.
        unmeasured: The ids of cases without a score on one side.
        usage: What the measurement has paid so far.
        judge: The model that judged sentences, and its error.
        failed: The conditions of this build that are not met, each in a sentence.
    """

    skill: str
    base: str
    split: Split
    score: float
    on_cases: CaseComparison
    on_new: Improvement | None
    changes: tuple[ItemSides, ...] = ()
    unmeasured: tuple[str, ...] = ()
    usage: Usage = Usage()
    judge: JudgeDescription | None = None
    failed: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What is proven, and about which cases, in one sentence."""
        found = self.on_cases
        points = f"{100 * found.gain:+.0f} points"
        here = f"on these {found.n_cases} cases"
        match found.proven:
            case "better":
                return f"Better {here}: {points} (chance {found.chance_better:.2g})."
            case "worse":
                return f"Worse {here}: {points} (chance {found.chance_worse:.2g})."
        repeats = find_repeats(found.n_cases)
        hint = ""
        if repeats is not None and found.repeats < repeats:
            hint = f" At least {repeats} repeats could prove a change of all cases."
        return f"No difference is proven {here}: {points}.{hint}"

    @property
    def words_on_new(self) -> str:
        """What follows for cases that nobody has tried yet, in one sentence."""
        gain = self.on_new
        if gain is None:
            return "Nothing follows for new cases."
        interval = f"95% interval {100 * gain.low:+.0f} to {100 * gain.high:+.0f} points"
        if gain.low > 0 or gain.high < 0:
            return f"New cases probably differ in the same way: {interval}."
        return f"Nothing is proven for new cases: {interval}."


def build_gate_report(
    compared: SkillComparison,
    *,
    skill: str,
    base: str,
    usage: Usage,
    fail_if_worse: bool,
    fail_unless_better: bool,
    fail_below: float | None,
) -> GateReport:
    """Return the report on a comparison with one other document, and which conditions fail.

    Raises:
        RunFailed: No item was measured under both documents.
    """
    if not compared.on_cases:
        raise RunFailed("no item was measured under both documents")
    (found,) = compared.on_cases
    score = compared.skill.value or 0.0
    failed: list[str] = []
    if found.proven == "worse" and (fail_if_worse or fail_unless_better):
        failed.append("It is proven worse on these items.")
    elif found.proven != "better" and fail_unless_better:
        failed.append("It is not proven better on these items.")
    if fail_below is not None and score < fail_below:
        failed.append(f"The mean score is {score:.3g}, below {fail_below:g}.")
    lost = [item.item_id for item in compared.items if None in {item.before, item.after}]
    return GateReport(
        skill=skill,
        base=base,
        split=compared.skill.split,
        score=score,
        on_cases=found,
        on_new=next(iter(compared.improvements), None),
        changes=tuple(item for item in compared.items if item.item_id not in lost),
        unmeasured=tuple(lost),
        usage=usage,
        judge=compared.judge,
        failed=tuple(failed),
    )


def render_comment(report: GateReport) -> str:
    """Return a comment in Markdown: the verdict, the cases that flip, and the cost."""
    mark = "Failed" if report.failed else "Passed"
    lines = [f"### {mark}: {_quote(report.skill)} against {_quote(report.base)}", ""]
    lines += [f"- {reason}" for reason in report.failed]
    lines += [f"- {report.verdict}", f"- {report.words_on_new}"]
    if report.on_cases.flips_by_chance is not None:
        flips = report.on_cases.flips_by_chance
        lines.append(
            f"- Between two runs of the same document, {flips:.1f} cases differ by chance."
        )
    if report.judge is not None:
        lines.append(f"- {describe_judge(report.judge)}")
    if report.unmeasured:
        lines.append(f"- Not measured: {', '.join(map(_quote, report.unmeasured[:MAX_LISTED]))}.")
    lines.append(f"- Cost: {SpendFact(usage=report.usage).words}.")
    if report.changes:
        lines += [
            "",
            "| case | before | after | answer before | answer after |",
            "|---|---|---|---|---|",
        ]
        lines += [_show_change(change) for change in report.changes[:MAX_LISTED]]
    return "\n".join(lines) + "\n"


def render_junit(report: GateReport) -> str:
    """Return a JUnit file: a test for the conditions, and one for each case that flips."""
    suite = ElementTree.Element("testsuite", name=f"reflact gate {report.skill}")
    conditions = ElementTree.SubElement(
        suite, "testcase", name="conditions", classname="reflact.gate"
    )
    for reason in report.failed:
        ElementTree.SubElement(conditions, "failure", message=reason)
    ElementTree.SubElement(conditions, "system-out").text = report.verdict
    for change in report.changes:
        case = ElementTree.SubElement(
            suite, "testcase", name=escape_line(change.item_id), classname="reflact.gate.flips"
        )
        ElementTree.SubElement(
            case, "system-out"
        ).text = f"{_show_score(change.before)} -> {_show_score(change.after)}"
    suite.set("tests", str(1 + len(report.changes)))
    suite.set("failures", str(int(bool(report.failed))))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def render_sarif(report: GateReport) -> str:
    """Return a SARIF file with the conditions that failed and the cases that got worse."""
    results = [_build_result("condition", reason, "error") for reason in report.failed]
    results += [
        _build_result(
            "worse-case",
            f"case {change.item_id}: {_show_score(change.before)} -> {_show_score(change.after)}",
            "warning",
        )
        for change in report.changes
        if change.after is not None and change.before is not None and change.after < change.before
    ]
    tool = {"driver": {"name": "reflact", "rules": [{"id": "condition"}, {"id": "worse-case"}]}}
    return json.dumps({"version": "2.1.0", "runs": [{"tool": tool, "results": results}]}, indent=1)


def _build_result(rule: str, text: str, level: str) -> dict[str, object]:
    return {"ruleId": rule, "level": level, "message": {"text": escape_line(text)}}


def _show_score(score: float | None) -> str:
    return "not measured" if score is None else f"{score:.2g}"


def _show_change(change: ItemSides) -> str:
    texts = (change.item_id, _show_score(change.before), _show_score(change.after))
    answers = (change.answer_before, change.answer_after)
    return f"| {' | '.join([*map(_quote, texts), *map(_quote, answers)])} |"


def _quote(text: str) -> str:
    """Return a text as code that no Markdown in it can leave."""
    shown = shorten(escape_line(text), MAX_CHARS).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"
