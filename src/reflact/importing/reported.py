"""What an older run reports of itself at its end: scores, consumption, times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from reflact.importing.reading import Fields, Folder
from reflact.intervals import interval_of
from reflact.results import Bucket, Scored, Spend, StageTime, Usage
from reflact.types import Split

MEASURED = (
    ("baseline", Split.val, "selection_eval_baseline", "baseline_selection"),
    ("final", Split.val, "final_selection_eval", "final_selection"),
    ("baseline", Split.test, "test_eval_baseline", "baseline_test"),
    ("best", Split.test, "test_eval", "test"),
    ("final", Split.test, "test_eval_final", "final_test"),
)
"""Name, split, folder of the items' results, and the summary's fields without ``_hard`` and ``_soft``."""

SAME = 1e-6
"""Means that differ by no more are equal: summaries may be rounded."""


def scores(folder: Folder, summary: Fields, documents: Mapping[str, str]) -> tuple[Scored, ...]:
    """Return the scores that a run reports.

    Args:
        folder: The run's folder.
        summary: Its summary.
        documents: The hash of the document by name: ``baseline``, ``best``, ``final``.
    """
    found = []
    for name, split, place, field in MEASURED:
        rows = folder.rows(f"{place}/results.jsonl")
        hard, soft = summary.share(f"{field}_hard"), summary.share(f"{field}_soft")
        if hard is None and soft is None and not rows:
            continue
        told = Scored(
            name=name,
            skill_hash=documents[name],
            split=split,
            n=0,
            selected=split is Split.val,
            hard=hard,
            soft=soft,
        )
        found.append(_by_rows(told, place, rows, folder) if rows else _by_total(told, place, folder))
    return tuple(found)


def _by_total(told: Scored, place: str, folder: Folder) -> Scored:
    counts = folder.object(f"{place}/summary.json")
    overall = None if counts is None else counts.fields("overall")
    total = None if overall is None else overall.count("total")
    if total is None:
        folder.remarks.add(
            f"How many items the {told.name} score on {told.split.value} covers is not recorded."
        )
        return told
    return told.model_copy(update={"n": total, "successes": total * (told.hard or 0.0)})


def _by_rows(told: Scored, place: str, rows: tuple[Fields, ...], folder: Folder) -> Scored:
    marked = [row for row in rows if row.share("hard") is not None]
    hards = [hard for row in marked if (hard := row.share("hard")) is not None]
    softs = [soft for row in marked if (soft := row.share("soft")) is not None]
    counted = told.model_copy(update={"n": len(marked), "unmeasured": len(rows) - len(marked)})
    if not marked:
        return counted
    mean = math.fsum(hards) / len(hards)
    if told.hard is not None and abs(told.hard - mean) > SAME:
        folder.remarks.add(
            f"summary.json and {place}/results.jsonl disagree on the {told.name} score on "
            f"{told.split.value}; the summary's was taken, without an interval."
        )
        return counted.model_copy(update={"successes": len(hards) * told.hard})
    soft = math.fsum(softs) / len(softs) if told.soft is None and len(softs) == len(hards) else told.soft
    low, high = interval_of(hards)
    ends = {"hard": mean, "soft": soft, "successes": math.fsum(hards), "low": low, "high": high}
    return counted.model_copy(update={**ends, "buckets": _buckets(marked)})


def _buckets(rows: Iterable[Fields]) -> tuple[Bucket, ...]:
    by_type: dict[str, list[Fields]] = {}
    for row in rows:
        if row.text("task_type") and row.share("soft") is not None:
            by_type.setdefault(row.text("task_type"), []).append(row)
    return tuple(
        Bucket(
            task_type=name,
            n=len(group),
            hard=math.fsum(row.share("hard") or 0.0 for row in group) / len(group),
            soft=math.fsum(row.share("soft") or 0.0 for row in group) / len(group),
        )
        for name, group in sorted(by_type.items())
    )


def spend(summary: Fields | None, history: Iterable[Fields]) -> tuple[Spend, ...]:
    """Return the tokens by stage; the older tool tells stages apart, not roles.

    Without a summary they are summed up over the steps.
    """
    stages = None if summary is None else summary.fields("token_summary")
    sources = [step.fields("tokens") for step in history] if stages is None else [stages]
    totals: dict[str, Usage] = {}
    for source in sources:
        for stage in source or ():
            counts = None if source is None or stage.startswith("_") else source.fields(stage)
            if counts is not None:
                totals[stage] = totals.get(stage, Usage()) + Usage(
                    calls=counts.count("calls") or 0,
                    input_tokens=counts.count("prompt_tokens") or 0,
                    output_tokens=counts.count("completion_tokens") or 0,
                )
    return tuple(Spend(role=stage, purpose=stage, usage=totals[stage]) for stage in sorted(totals))


def times(history: Iterable[Fields]) -> tuple[StageTime, ...]:
    """Return the wall time of each stage over all steps, in seconds."""
    totals: dict[str, float] = {}
    for step in history:
        timing = step.fields("timing")
        for name in timing or ():
            seconds = None if timing is None else timing.number(name)
            if seconds is not None and seconds >= 0:
                stage = name.removesuffix("_s")
                totals[stage] = totals.get(stage, 0.0) + seconds
    return tuple(StageTime(stage=stage, seconds=totals[stage]) for stage in sorted(totals))
