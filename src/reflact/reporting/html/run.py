"""The page of a run: the skill, what it achieved, what was answered, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import htpy as h
from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import flatten_fields
from reflact.records import SkillScore, Spend, Usage
from reflact.reporting import facts
from reflact.reporting.history import (
    RunHistory,
    VersionText,
    open_run,
    read_matrix,
    read_run,
    read_versions,
)
from reflact.reporting.html import page
from reflact.reporting.html.items import build_items_section
from reflact.reporting.html.skill import build_skill_section
from reflact.reporting.html.steps import build_steps_section
from reflact.reporting.items import ItemMatrix
from reflact.reporting.lineage import sort_commits, trace_versions
from reflact.text import escape_line, format_value, name_count, shorten
from reflact.types import FrozenModel, Split

SCRIPT = "run.js"

# The room for texts in a section without one of its own.
OTHER_BYTES = 300_000

MAX_ROWS = 60
MAX_NAME_CHARS = 200


class RunReport(FrozenModel):
    """What the page of a run, or of an ``eval``, shows.

    ``config`` is the configuration, as it is stored at the start. ``texts`` are all versions;
    ``best`` and ``final`` are numbers of versions. ``matrices`` are the items of each measured
    split; if there is none, ``note`` says why.
    """

    history: RunHistory
    config: JsonValue = None
    texts: tuple[VersionText, ...] = ()
    best: int = 0
    final: int = 0
    matrices: tuple[ItemMatrix, ...] = ()
    note: str | None = None


async def read_report(path: Path | str, run_id: str | None = None) -> RunReport:
    """Read the report of a run, which may be under way; arguments and errors are those of
    ``read_run``.
    """
    history = await read_run(path, run_id)
    async with open_run(path, history.run_id) as (_, row):
        report = RunReport(history=history, config=row.config)
    splits = (Split.test, Split.val) if history.evaluation is None else (None,)
    update: dict[str, object] = {"matrices": ()}
    matrices = []
    for split in splits:
        try:
            matrices.append(await read_matrix(path, history.run_id, split=split))
        except UsageError as error:  # nothing is measured on it
            update["note"] = str(error)
    update["matrices"] = tuple(matrices)
    if history.versions:
        names = [str(version.number) for version in history.versions]
        *texts, best, final = await read_versions(path, [*names, "best", "final"], history.run_id)
        numbers = {"best": best.version.number, "final": final.version.number}
        update |= {"texts": tuple(texts), **numbers}
    return report.model_copy(update=update)


def render_run_page(report: RunReport, *, live: page.LiveBar | None = None) -> str:
    """Return a run as one HTML document that needs no network and can be read without a script.

    Equal reports are equal documents. The page stays below 10 MB: it says what it leaves out. With
    ``live``, a server tells the page when there is something new.
    """
    history = report.history
    stored = report.config if history.summary is None else history.summary.config
    config = stored if isinstance(stored, dict) else {}
    name = shorten(escape_line(Path(str(config.get("out_dir", ""))).name), MAX_NAME_CHARS)
    run_id = escape_line(history.run_id)
    sections = [
        _build_verdict_section(history),
        build_items_section(report.matrices, report.note),
        _build_cost_section(history),
        _build_settings_section(history, config),
    ]
    if history.evaluation is None:
        versions = [each.version for each in report.texts]
        origins = trace_versions(versions, sort_commits(history.steps, history.epochs))
        skill = build_skill_section(origins, report.texts, best=report.best, final=report.final)
        sections.insert(0, skill)
        sections.insert(3, build_steps_section(history))
    return page.build_document(
        f"Run {run_id} · {name}".removesuffix(" · "),
        [h.h1[name or f"Run {run_id}"], _build_headline(history)],
        sections,
        script=SCRIPT,
        live=live,
    )


def _build_headline(history: RunHistory) -> h.Element:
    """Return the result in words, or how far the run is."""
    summary = history.summary
    limit = page.TextLimit(OTHER_BYTES)
    note = f"Run {escape_line(history.run_id)}, started {history.created:%Y-%m-%d %H:%M} UTC"
    if history.evaluation is not None:
        gains = [each for one in history.evaluations for each in facts.list_evaluation_gains(one)]
        title = limit.fit(history.evaluation.title.capitalize(), MAX_NAME_CHARS)
        return h.div(".verdict")[
            h.p(".headline")[title], [h.p[limit.fit(gain)] for gain in gains], h.p(".note")[note]
        ]
    if summary is None or history.is_open:
        steps = name_count(len(history.steps), "step")
        headline = h.p(".headline")[f"The run is under way: {steps} so far."]
        return h.div(".verdict")[headline, h.p(".note")[f"{note}."]]
    fact = facts.ResultFact(summary=summary)
    words = f"{note}, {summary.status}: {fact.decisions}. Cost: {fact.cost}."
    return h.div(class_=["verdict", fact.tone])[
        h.p(".headline")[limit.fit(summary.verdict or fact.verdict, 2_000)],
        h.p(".note")[words],
        [h.p[f"Warning: {limit.fit(warning, 1_000)}."] for warning in summary.warnings[:MAX_ROWS]],
    ]


# ----------------------------------------------------------------------------- verdict and scores


def _build_verdict_section(history: RunHistory) -> page.PageSection:
    summary = history.summary
    heading = "Verdict and scores"
    if history.evaluation is not None:
        compared = [_build_scores((each.skill, *each.others)) for each in history.evaluations]
        nothing = h.p["Not all items are measured yet."]
        return page.PageSection("verdict", heading, (compared or nothing,))
    if summary is None:
        sealed = h.p["The test split stays sealed until the run ends."]
        return page.PageSection("verdict", heading, (sealed,))
    limit = page.TextLimit(OTHER_BYTES)
    tables = []
    for split in (Split.test, Split.val):
        scores = [score for score in summary.scores if score.split is split]
        if scores:
            tables.append(_build_scores(scores))
    has_test = any(score.split is Split.test for score in summary.scores)
    notes = list(facts.ResultFact(summary=summary).list_notes())[:MAX_ROWS]
    content = (
        not summary.scores and h.p["Nothing was measured at the end."],
        bool(tables)
        and not has_test
        and h.p["There was no sealed test, so these scores are those of the validation items."],
        tables,
        bool(notes) and h.ul(".note")[(h.li[limit.fit(note, 1_000)] for note in notes)],
    )
    return page.PageSection("verdict", heading, content)


def _build_scores(scores: Sequence[SkillScore]) -> h.Node:
    rows: list[dict[str, h.Node]] = []
    named = facts.name_scores(scores)
    for (name, score), row in zip(named, facts.list_score_rows(scores), strict=True):
        words = h.small[escape_line(facts.describe_document(score))]
        counts = {"items": f"{score.n // score.trials:,}", "trials": f"{score.trials:,}"}
        figures = {key: row[key] for key in row if key not in {"document", "split", "answers"}}
        rows.append({"document": [shorten(name, MAX_NAME_CHARS), words], **counts, **figures})
    split = facts.SPLIT_WORDS[scores[0].split].capitalize()
    return page.build_row_table(f"{split} scores", rows)


# ------------------------------------------------------------------------------ cost and settings


def _build_cost_section(history: RunHistory) -> page.PageSection:
    summary = history.summary
    if summary is None:
        state = f"So far: {facts.SpendFact(usage=history.usage).words}."
        spend = [entry for cost in history.costs for entry in cost.spend]
    else:
        state = f"In total: {facts.ResultFact(summary=summary).cost}."
        spend = [*summary.spend]
    return page.PageSection("cost", "Cost and time", (h.p[state], _build_spend(spend)))


def _build_spend(spend: Sequence[Spend]) -> h.Node:
    usage: dict[str, Usage] = {}
    for entry in spend:
        if entry.usage.calls or entry.unsettled:
            name = escape_line(f"{entry.role}: {entry.purpose}").replace("_", " ")
            name = shorten(name, MAX_NAME_CHARS)
            usage[name] = usage[name] + entry.usage if name in usage else entry.usage
    if not usage:
        return h.p(".note")["Calls of models that were passed as objects are not counted."]
    usage["total"] = sum(usage.values(), Usage())
    rows = [{"role and purpose": n, **facts.build_usage_row(used)} for n, used in usage.items()]
    return page.build_row_table("Calls by role", rows)


def _build_settings_section(
    history: RunHistory, config: Mapping[str, JsonValue]
) -> page.PageSection:
    usual = dict(flatten_fields(TrainerConfig().model_dump(mode="json")))
    limit = page.TextLimit(OTHER_BYTES)
    rows: list[list[h.Node]] = []
    for key, value in flatten_fields(dict(config)):
        if key not in usual or usual[key] != value:
            text = limit.fit(format_value(value), 1_000)
            rows.append([page.break_key(limit.fit(key, 200)), text])
    caption = "Settings that differ from the defaults"
    content: list[h.Node] = []
    if history.summary is not None:
        content.append(h.p[f"Trained with reflact {escape_line(history.summary.version or '')}."])
    if rows:
        content.append(page.build_table(caption, ("setting", "value"), rows, prose={1}))
    return page.PageSection("settings", "Settings", tuple(content))
