"""The steps on the page of a run: its lineage as a chart, and each commit with what led to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import htpy as h

from reflact import events
from reflact.gate.intervals import wilson_interval
from reflact.records import EpochRecord, StepCost, StepRecord, sum_step_costs
from reflact.reporting import facts
from reflact.reporting.history import RunHistory
from reflact.reporting.html.charts import Edge, MarkStyle, ScorePoint, draw_series
from reflact.reporting.html.page import PageSection, TextLimit, build_figure, build_texts
from reflact.reporting.html.skill import name_commit, use_arrows
from reflact.reporting.lineage import sort_commits
from reflact.text import format_duration, name_count
from reflact.types import Verdict

# The room for texts of all commits, and the most commits with their details.
COMMIT_BYTES = 1_500_000
MAX_COMMITS = 1_000
MAX_LINES = 40
MAX_EDITS = 40
MAX_TEXT_CHARS = 1_000


def build_steps_section(history: RunHistory) -> PageSection:
    """Return the lineage of versions, and the commits in order; the newest get the room."""
    commits = sort_commits(history.steps, history.epochs)
    points = list(_list_points(history, commits))
    if not points:
        return PageSection("steps", "Steps", (h.p["Nothing is measured yet."],))
    limit = TextLimit(COMMIT_BYTES)
    costs = {cost.step: cost for cost in sum_step_costs(history.costs)}
    shown = [_build_commit(each, costs, limit) for each in reversed(commits[-MAX_COMMITS:])]
    left_out = len(commits) - len(shown)
    content = (
        _draw_lineage(points, commits),
        left_out > 0 and h.p(".note")[f"The first {name_count(left_out, 'commit')} are left out."],
        limit.build_note(),
        h.ol(".steps.rows")[shown[::-1]],
    )
    return PageSection("steps", "Steps", content)


# ------------------------------------------------------------------------------------- the lineage


def _draw_lineage(
    points: Sequence[ScorePoint], commits: Sequence[StepRecord | EpochRecord]
) -> h.Element:
    """Return each measured document by step and score, joined with the one it was made from."""
    places = {point.at: (point.at, point.value) for point in points}
    root = (points[0].at, points[0].value)
    versions: dict[int, tuple[float, float]] = {}
    edges = []
    current = root
    for commit in commits:
        place = places.get(_place(commit))
        if place is not None and commit.verdict is not None:
            look: MarkStyle = "after" if commit.verdict.accepted else "before"
            edges.append(Edge(current, place, look))
        for version in commit.created_versions:
            versions[version.number] = place or current
        current = versions.get(commit.current.number, root)
    chart = draw_series(
        "lineage",
        "Lineage: validation score of each document",
        points[-MAX_COMMITS:],
        edges[-MAX_COMMITS:],
        unit="step",
    )
    caption = (
        "Filled diamonds are accepted versions, hollow circles are other documents; a line leads "
        "to each from the version that it was made from. Vertical lines are 95% intervals."
    )
    return build_figure(caption, chart)


def _place(commit: StepRecord | EpochRecord) -> float:
    """Return where a commit stands in the chart: the end of an epoch half a step later."""
    return commit.step + 0.5 if isinstance(commit, EpochRecord) else commit.step


def _list_points(
    history: RunHistory, commits: Sequence[StepRecord | EpochRecord]
) -> Iterator[ScorePoint]:
    """Yield the measured documents: the initial one first, then those of the commits."""
    for event in history.events:
        if isinstance(event, events.BaselineMeasured):
            yield _build_point(0, "initial document", event.score, event.n, name="v0")
    for commit in commits:
        verdict = commit.verdict
        if verdict is not None and verdict.candidate_score is not None:
            name = ""
            if verdict.accepted and commit.created_versions:
                name = f"v{commit.created_versions[0].number}"
            label = facts.describe_commit(commit)
            n = _count_items(verdict)
            yield _build_point(_place(commit), label, verdict.candidate_score, n, name=name)


def _count_items(verdict: Verdict) -> int:
    """Return how many items a candidate's score covers; several trials of an item count once."""
    measured = verdict.candidate
    if measured is None:
        return 0
    passes = () if verdict.ranked is None else verdict.ranked.passes
    trials = [each.trial for each in passes if each.skill_hash == measured.skill_hash]
    return measured.n // (max(trials, default=0) + 1)


def _build_point(at: float, label: str, score: float, n: int, *, name: str) -> ScorePoint:
    look: MarkStyle = "after" if name else "before"
    label = f"{label}: {score:.2f}"
    if not n:
        return ScorePoint(at, label, score, None, look, name)
    low, high = wilson_interval(min(max(score, 0.0), 1.0) * n, n)
    return ScorePoint(at, f"{label} [{low:.2f}, {high:.2f}]", score, (low, high), look, name)


# ------------------------------------------------------------------------------------- the commits


def _build_commit(
    commit: StepRecord | EpochRecord, costs: Mapping[int, StepCost], limit: TextLimit
) -> h.Element:
    if isinstance(commit, EpochRecord):
        heading = h.span(".id")[f"Epoch {commit.epoch}"]
        end = use_arrows(facts.describe_epoch(commit)).removeprefix(f"epoch {commit.epoch}").strip()
        words = [h.span(".preview")[limit.fit(end, 600)]]
        texts = list(facts.list_epoch_details(commit))
        edits: list[h.Node] = []
    else:
        fact = facts.StepFact.of(commit)
        heading = h.span(".id")[f"Step {commit.step}"]
        scores = use_arrows(fact.scores)
        words = [
            h.span(class_=["mark", {"after": commit.verdict.accepted}])[fact.decision],
            h.span(".preview")[limit.fit(commit.verdict.veto or commit.verdict.reason, 300)],
            h.span(".figure")[scores],
        ]
        texts = [*facts.list_step_details(commit)]
        if commit.step in costs:
            texts.append(("cost", _describe_cost(costs[commit.step])))
        edits = [_build_edit(each, limit) for each in facts.list_edit_facts(commit)[:MAX_EDITS]]
    return h.li[
        h.details[
            h.summary[heading, words],
            h.div(id=name_commit(commit))[
                build_texts(texts, limit, max_lines=MAX_LINES, length=MAX_TEXT_CHARS),
                bool(edits) and h.ol(".edits")[edits],
            ],
        ]
    ]


def _describe_cost(cost: StepCost) -> str:
    return f"{facts.SpendFact(usage=cost.usage).words}; {format_duration(cost.seconds)}"


def _build_edit(fact: facts.EditFact, limit: TextLimit) -> h.Element:
    edit = fact.edit
    target: h.Node = None
    if edit.target and edit.op == "insert_after":
        target = h.p(".note")["after: ", limit.fit(edit.target, 300)]
    elif edit.target:
        target = h.pre[h.del_[limit.fit(edit.target)]]
    evidence = f"; evidence: {limit.fit(edit.evidence, MAX_TEXT_CHARS)}" if edit.evidence else ""
    words = limit.fit(f"{fact.outcome}; {fact.origin}", MAX_TEXT_CHARS)
    return h.li(".edit")[
        h.p[h.strong[facts.EDIT_WORDS[edit.op]], ", ", words, evidence],
        target,
        bool(edit.content) and h.pre[h.ins[limit.fit(edit.content)]],
    ]
