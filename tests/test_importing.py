"""Runs of the older trainer, taken over: every action, every oddity, nothing lost in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from reflact.errors import UsageError
from reflact.importing.documents import below
from reflact.importing.run import ImportedRun, read_run
from reflact.records import EpochRecord, Promotion, StepRecord
from reflact.results import RunSummary
from reflact.types import Skill, Split
from skillopt_folder import INITIAL, OUT_ROOT, OlderRun, complete_run, edit, rows


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")


def steps(run: ImportedRun) -> list[StepRecord]:
    """Return the records of a run's steps."""
    return [commit.record for commit in run.commits if isinstance(commit.record, StepRecord)]


def epochs(run: ImportedRun) -> list[EpochRecord]:
    """Return the records of the ends of a run's epochs."""
    return [commit.record for commit in run.commits if isinstance(commit.record, EpochRecord)]


def files(root: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def told(run: ImportedRun, words: str) -> bool:
    """Whether a remark holds some words."""
    return any(words in line for line in run.remarks)


# ------------------------------------------------------------------------------------------ a whole run


def test_a_finished_run_is_taken_over_whole(tmp_path: Path) -> None:
    """Steps, versions, scores, tokens and times of a consistent folder come over without a remark."""
    complete_run(tmp_path / "run7")
    run = read_run(tmp_path / "run7")
    assert run.remarks == ()
    assert [s.verdict.action for s in steps(run)] == ["accept_new_best", "reject", "no_patches", "reject"]
    assert [v.origin for v in run.versions] == ["initial", "step 1", "epoch 1", "epoch 2"]
    summary = run.summary
    assert (summary.status, summary.steps, summary.accepts, summary.rejects, summary.skips) == (
        "completed",
        4,
        1,
        2,
        1,
    )
    assert summary.best is not None
    assert (summary.best.origin, summary.best.score) == ("step 1", 0.5)
    best = summary.score("best", Split.test)
    assert best is not None
    assert (best.n, best.hard, best.successes, best.skill_hash) == (4, 0.5, 2, summary.best.skill_hash)
    assert {entry.role: entry.usage.calls for entry in summary.spend} == {"analyst": 20, "rollout": 20}
    assert {entry.stage: entry.seconds for entry in summary.stages} == {"rollout": 6.0, "reflect": 2.0}
    assert summary.seconds == 12.5


def test_a_step_keeps_what_its_files_say(tmp_path: Path) -> None:
    """Items, failures, patterns, edits and what became of them stand in the record."""
    complete_run(tmp_path / "run7")
    first = steps(read_run(tmp_path / "run7"))[0]
    assert first.item_ids == ("q0", "q1", "q2", "q3")
    assert (first.rollout.n, first.rollout.hard, first.n_failures) == (4, 0.25, 3)
    (report,) = first.reports
    assert [(p.type, p.count) for p in report.patterns] == [("units", 2)]
    assert [e.content for e in report.patch.edits] == ["State the unit."]
    assert first.merged.patch.edits[0].support_count == 3
    assert (first.chosen.budget, first.chosen.pool_size) == (4, 1)
    assert [(r.edit.content, r.status) for r in first.edits] == [("State the unit.", "applied")]
    assert first.verdict.candidate is not None
    assert (first.verdict.candidate.n, first.verdict.candidate.hard) == (4, 0.5)


def test_a_zero_stays_a_zero(tmp_path: Path) -> None:
    """A baseline of 0.0 is a score, before and after the first step (older defect: -1.0)."""
    complete_run(tmp_path / "run7")
    run = read_run(tmp_path / "run7")
    assert run.commits[0].state.current.score == 0.0
    assert steps(run)[0].verdict.current_score == 0.0
    baseline = run.summary.score("baseline", Split.test)
    assert baseline is not None
    assert (baseline.hard, baseline.n) == (0.0, 4)


def test_an_unknown_baseline_is_none(tmp_path: Path) -> None:
    """Where neither summary nor results hold the baseline it is absent, not zero."""
    older = complete_run(tmp_path / "run7")
    (older.root / "selection_eval_baseline/results.jsonl").unlink()
    summary = json.loads((older.root / "summary.json").read_text(encoding="utf-8"))
    older.json("summary.json", summary | {"baseline_selection_hard": None})
    assert read_run(older.root).commits[0].state.current.score is None


ACTIONS = {
    "accept_new_best": "accept_new_best",
    "accept": "accept",
    "reject": "reject",
    "force_accept": "force_accept",
    "skip_no_patches": "no_patches",
    "skip_no_rewrite": "no_rewrite",
}


@pytest.mark.parametrize(("older", "here"), ACTIONS.items())
def test_every_action_has_its_name_here(tmp_path: Path, older: str, here: str) -> None:
    """Each action of the older tool becomes the one of the same meaning, and moves the same documents."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step(older, mark=0.5, edits=[edit("State the unit.")])
    run7.write_ends()
    run = read_run(run7.root)
    (record,) = steps(run)
    assert record.verdict.action == here
    accepted = "accept" in older
    assert (record.current.number, len(record.made)) == ((1, 1) if accepted else (0, 0))
    assert record.best.number == (1 if older == "accept_new_best" else 0)
    assert record.verdict.candidate_score == (None if older.startswith("skip") else 0.5)
    assert run.text(record.current).text == run7.current
    assert run.remarks == ()


SLOW = {
    "inject_placeholder": ("reserved", True),
    "force_accept": ("forced", True),
    "accept": ("accepted", True),
    "accept_new_best": ("accepted", True),
    "reject": ("kept", False),
    "no_content": ("refused", False),
}


@pytest.mark.parametrize(("older", "here"), SLOW.items())
def test_every_slow_update_has_its_name_here(tmp_path: Path, older: str, here: tuple[str, bool]) -> None:
    """A slow update's action, guidance and document come over; an unmeasured one inherits its score."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("accept_new_best", mark=0.5)
    guidance = "" if older in {"inject_placeholder", "no_content"} else "Watch the units."
    run7.slow_update(
        1, older, guidance, mark=0.75 if older.startswith("accept") or older == "reject" else None
    )
    run7.write_ends()
    run = read_run(run7.root)
    (end,) = epochs(run)
    action, moved = here
    assert end.slow is not None
    assert (end.slow.action, len(end.made)) == (action, moved)
    assert end.slow.guidance == (guidance or None)
    assert end.last_hash == steps(run)[0].candidate_hash
    assert run.text(end.current).text == run7.current
    assert end.current.inherited == (older in {"inject_placeholder", "force_accept"})
    assert end.best.origin == ("epoch 1" if older == "accept_new_best" else "step 1")
    gated = older in {"accept", "accept_new_best", "reject"}
    assert (end.slow.verdict is not None) == gated
    assert [c.category for c in end.compared] == (["persistent_failure"] if guidance else [])
    assert run.remarks == ()


@pytest.mark.parametrize(
    ("action", "content", "memory", "fallbacks"),
    [
        ("write_meta_skill", "Short edits help.", "Short edits help.", 0),
        ("skip_first_epoch", "", None, 0),
        ("no_content", "", None, 1),
    ],
)
def test_every_meta_skill_has_its_meaning_here(
    tmp_path: Path, action: str, content: str, memory: str | None, fallbacks: int
) -> None:
    """Written memory comes over; where none could be had a fallback says so and the old one stays."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("skip_no_patches")
    run7.meta_skill(1, action, content)
    run7.write_ends()
    run = read_run(run7.root)
    (end,) = epochs(run)
    assert (end.meta, len(end.fallbacks), end.slow) == (memory, fallbacks, None)
    assert run.commits[-1].state.meta == (memory or "")


def test_the_last_skill_promoted_at_the_end_is_a_promotion(tmp_path: Path) -> None:
    """Where best_skill.md is the last document although no step said so, the end promoted it."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("accept_new_best", mark=0.5)
    run7.slow_update(1, "force_accept", "Watch the units.")
    run7.best, run7.best_score = run7.current, 0.75
    run7.write_ends()
    run = read_run(run7.root)
    assert isinstance(run.commits[-1].record, Promotion)
    assert run.summary.best is not None
    assert (run.summary.best.origin, run.summary.best.score) == ("epoch 1", 0.75)


# ------------------------------------------------------------------------------------ kinds of steps


def test_accumulated_batches_are_told_apart(tmp_path: Path) -> None:
    """Reports and items of a step's batches come in the order of the batches."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("reject", mark=0.0, rollout_n=3)
    place = run7.root / "steps/step_0001"
    (place / "patches/minibatch_fail_000.json").unlink()
    for batch in (0, 1):
        run7.text(f"steps/step_0001/batch_{batch}/rollout/results.jsonl", rows([1], f"b{batch}-"))
        patch = {"patch": {"reasoning": str(batch), "edits": []}}
        run7.json(f"steps/step_0001/batch_{batch}/patches/minibatch_succ_000.json", patch)
    run7.write_ends()
    (record,) = steps(read_run(run7.root))
    assert record.item_ids == ("b0-0", "b1-0")
    assert [(r.batch, r.source_type, r.patch.reasoning) for r in record.reports] == [
        (0, "success", "0"),
        (1, "success", "1"),
    ]


def test_an_autonomous_step_size_keeps_its_reasons(tmp_path: Path) -> None:
    """The optimizer's decision comes over, and a fallback in place of one is named."""
    choice = {"learning_rate": 2, "reasoning": "few", "confidence": 0.75, "risk_notes": ["may overfit"]}
    run7 = OlderRun(tmp_path / "run7")
    run7.step("reject", lr_control_mode="autonomous", lr_decision=choice)
    run7.step("reject", lr_decision={"learning_rate": 0, "fallback": True, "error": "no JSON"})
    run7.write_ends()
    first, second = steps(read_run(run7.root))
    assert first.chosen.decision is not None
    assert first.chosen.decision.model_dump() == {
        "count": 2,
        "reasoning": "few",
        "confidence": 0.75,
        "risks": "may overfit",
    }
    assert [(f.label, f.reason) for f in second.chosen.fallbacks] == [("step size", "no JSON")]


@pytest.mark.parametrize(
    ("payload", "result", "op"),
    [
        ("revise_suggestions", "rewrite_result.json", "suggest"),
        ("skill_candidates", "full_rewrite_result.json", "rewrite"),
    ],
)
def test_rewrites_keep_their_proposals(tmp_path: Path, payload: str, result: str, op: str) -> None:
    """Suggestions and whole documents become edits of their kind, and the rewrite is the applied one."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("accept", mark=0.5, candidate="# Anew\n")
    values = [{"suggestion": "name units", "support_count": 2}, "shorten"]
    patch = {"patch": {"reasoning": "r", payload: values}}
    run7.json("steps/step_0001/patches/minibatch_fail_000.json", patch)
    run7.json("steps/step_0001/merged_patch.json", {"reasoning": "m", payload: values})
    run7.json(f"steps/step_0001/{result}", {"reasoning": "r", "new_skill": "# Anew\n"})
    run7.write_ends()
    (record,) = steps(read_run(run7.root))
    assert [(e.op, e.content, e.support_count) for e in record.reports[0].patch.edits] == [
        (op, "name units", 2),
        (op, "shorten", 1),
    ]
    assert len(record.merged.patch.edits) == 2
    assert [(r.edit.op, r.edit.content) for r in record.edits] == [("rewrite", "# Anew\n")]


def test_what_became_of_edits_is_kept_with_its_reason(tmp_path: Path) -> None:
    """Skipped edits are rejected with the recorded reason; the report's shortened text is not used."""
    long = "word " * 100
    run7 = OlderRun(tmp_path / "run7")
    run7.step("reject", edits=[edit(long), edit("b", "replace", "nowhere")])
    name = "steps/step_0001/edit_apply_report.json"
    report = json.loads((run7.root / name).read_text(encoding="utf-8"))
    report[1] |= {"status": "skipped", "error": "target not found"}
    run7.json(name, report)
    run7.write_ends()
    (record,) = steps(read_run(run7.root))
    assert [(r.status, r.reason) for r in record.edits] == [
        ("applied", None),
        ("rejected", "target not found"),
    ]
    assert record.edits[0].edit.content == long


def test_notes_of_a_skipped_step_make_a_version(tmp_path: Path) -> None:
    """Notes that a step wrote into the appendix change the document although nothing was accepted."""
    run7 = OlderRun(tmp_path / "run7")
    run7.current += "<!-- APPENDIX_START -->\n- Mind the unit.\n<!-- APPENDIX_END -->\n"
    run7.step("skip_no_patches")
    noted = {"step_notes": ["Mind the unit."], "appendix_after": ["Mind the unit."]}
    run7.json("steps/step_0001/appendix_notes.json", noted)
    run7.write_ends()
    run = read_run(run7.root)
    (record,) = steps(run)
    assert record.notes == ("Mind the unit.",)
    assert [(v.origin, v.inherited) for v in record.made] == [("step 1 notes", True)]
    assert run.text(record.current).text == run7.current


# ------------------------------------------------------------------------------------------- oddities


def test_of_duplicate_steps_the_last_wins(tmp_path: Path) -> None:
    """A history [1, 2, 1, 2] gives two steps, those recorded later, and says what was dropped."""
    older = complete_run(tmp_path / "run7")
    stale = [record | {"rollout_hard": 1.0} for record in older.history[:2]]
    older.json("history.json", stale + older.history)
    run = read_run(older.root)
    assert [s.step for s in steps(run)] == [1, 2, 3, 4]
    assert steps(run)[0].rollout.hard == 0.25
    assert told(run, "2 duplicate steps")


def test_without_a_history_the_steps_speak_for_themselves(tmp_path: Path) -> None:
    """A missing or corrupt history.json is replaced by the records that each step left, and it is said."""
    older = complete_run(tmp_path / "run7")
    whole = read_run(older.root)
    older.text("history.json", '[{"step": 1,')
    run = read_run(older.root)
    assert steps(run) == steps(whole)
    assert told(run, "history.json is not JSON")
    assert told(run, "4 files step_record.json were read")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("history.json", "[]"),
        ("skills/skill_v0000.md", None),
        ("steps/step_0001/candidate_skill.md", None),
        ("history.json", json.dumps([{"step": 1, "epoch": 1, "action": "maybe"}])),
        ("history.json", json.dumps([{"step": "one", "epoch": 1, "action": "reject"}])),
    ],
)
def test_what_a_run_cannot_do_without_is_an_error(tmp_path: Path, name: str, content: str | None) -> None:
    """One error names the file that is missing or makes no sense."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("accept", mark=0.5)
    run7.slow_update(1, "force_accept", "g")
    run7.write_ends()
    path = run7.root / name
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=name.split(".", maxsplit=1)[0]):
        read_run(run7.root)


def test_what_can_be_missed_is_a_remark(tmp_path: Path) -> None:
    """Side files that are missing or broken leave the rest standing, each with a sentence."""
    older = complete_run(tmp_path / "run7")
    older.text("steps/step_0001/merged_patch.json", "{")
    older.json("steps/step_0001/edit_apply_report.json", [3])
    (older.root / "steps/step_0002/candidate_skill.md").unlink()
    (older.root / "best_skill.md").unlink()
    (older.root / "slow_update/epoch_02/slow_result.json").write_text("[]", encoding="utf-8")
    older.text("steps/step_0009/candidate_skill.md", "x")
    run = read_run(older.root)
    assert len(steps(run)) == 4
    for words in (
        "merged_patch.json is not JSON",
        "edit 0 is a number instead of an object",
        "steps/step_0002/candidate_skill.md is missing",
        "best_skill.md is missing",
        "slow_result.json holds a list",
        "slow_update/epoch_02 holds no result",
        "steps/step_0009 belongs to no step",
    ):
        assert told(run, words), words


def test_wrong_types_and_numbers_count_as_absent(tmp_path: Path) -> None:
    """NaN, text for numbers and scores beyond 1 are no scores; each is named, none is guessed."""
    older = complete_run(tmp_path / "run7")
    text = json.dumps(older.history).replace('"selection_soft": 0.5', '"selection_soft": NaN', 1)
    history = json.loads(text)
    history[0]["rollout_hard"] = "0.25"
    history[0]["rollout_soft"] = 7
    history[1]["edit_budget"] = -1
    older.text("history.json", json.dumps(history))
    run = read_run(older.root)
    first, second = steps(run)[:2]
    assert (first.rollout.hard, first.rollout.soft, second.chosen.budget) == (None, None, None)
    assert first.verdict.candidate is not None
    assert first.verdict.candidate.soft is None
    for words in ("NaN", "rollout_hard is not a number", "rollout_soft", "edit_budget"):
        assert told(run, words), words


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_texts_are_read_in_the_encodings_that_systems_write(tmp_path: Path, encoding: str) -> None:
    """UTF-8 with and without a mark, UTF-16 with one, and cp1252, which is named."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("skip_no_patches")
    run7.write_ends()
    for name in ("skills/skill_v0000.md", "skills/skill_v0001.md", "best_skill.md"):
        (run7.root / name).write_bytes("Größe prüfen.\n".encode(encoding))
    run = read_run(run7.root)
    assert run.text(run.versions[0]) == Skill(text="Größe prüfen.\n")
    assert told(run, "cp1252") == (encoding == "cp1252")


def test_half_characters_are_replaced_and_named(tmp_path: Path) -> None:
    """JSON may hold half a surrogate pair, which no database stores; it is replaced, and that is said."""
    run7 = OlderRun(tmp_path / "run7")
    run7.step("reject", edits=[edit("a\ud800b")])
    run7.write_ends()
    run = read_run(run7.root)
    assert steps(run)[0].merged.patch.edits[0].content == "a\ufffdb"
    assert told(run, "half surrogate pairs")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    """A link to a file elsewhere is refused where the run needs it, and named where it does not."""
    secret = tmp_path / "secret.md"
    secret.write_text("private", encoding="utf-8")
    older = complete_run(tmp_path / "run7")
    merged = older.root / "steps/step_0001/merged_patch.json"
    merged.unlink()
    merged.symlink_to(secret)
    run = read_run(older.root)
    assert told(run, "merged_patch.json leads out of")
    assert all("private" not in skill.text for skill in run.skills)
    initial = older.root / "skills/skill_v0000.md"
    initial.unlink()
    initial.symlink_to(secret)
    with pytest.raises(UsageError, match=r"skill_v0000\.md leads out of"):
        read_run(older.root)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe in place of a file does not hang the import, nor does a link to itself or a deep value."""
    older = complete_run(tmp_path / "run7")
    for name in ("merged_patch.json", "ranked_edits.json", "trajectory_digest.json"):
        (older.root / "steps/step_0001" / name).unlink()
    os.mkfifo(older.root / "steps/step_0001/merged_patch.json")
    (older.root / "steps/step_0001/ranked_edits.json").symlink_to("ranked_edits.json")
    older.text("steps/step_0001/trajectory_digest.json", "[" * 200_000)
    run = read_run(older.root)
    for words in (
        "merged_patch.json is not a file",
        "ranked_edits.json",
        "trajectory_digest.json is not JSON",
    ):
        assert told(run, words), words


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{OUT_ROOT}/skills/skill_v0002.md", "skills/skill_v0002.md"),
        ("/elsewhere/run7/skills/skill_v0002.md", "skills/skill_v0002.md"),
        (r"C:\runs\run7\skills\skill_v0002.md", "skills/skill_v0002.md"),
        ("/elsewhere/best_skill.md", "best_skill.md"),
        ("skills/skill_v0001.md", "skills/skill_v0001.md"),
    ],
)
def test_of_recorded_paths_only_the_part_below_the_run_counts(path: str, name: str) -> None:
    """A path of another machine is read as what it named within its run."""
    assert below(path, OUT_ROOT) == name


@pytest.mark.parametrize(
    "path", ["/etc/passwd", f"{OUT_ROOT}/../../etc/passwd", "skills/../../x.md", r"C:\x.md", "/"]
)
def test_recorded_paths_that_leave_the_run_are_refused(tmp_path: Path, path: str) -> None:
    """Such a path was not written by the older tool; the error names it and nothing is imported."""
    older = complete_run(tmp_path / "run7")
    state = json.loads((older.root / "runtime_state.json").read_text(encoding="utf-8"))
    older.json("runtime_state.json", state | {"current_skill_path": path})
    with pytest.raises(UsageError, match="recorded path"):
        read_run(older.root)


def test_a_run_that_had_not_ended_says_so(tmp_path: Path) -> None:
    """Without summary.json the run is no completed one, and its tokens are summed up over the steps."""
    older = complete_run(tmp_path / "run7")
    (older.root / "summary.json").unlink()
    summary = read_run(older.root).summary
    assert summary.status == "cancelled"
    assert "summary.json" in (summary.reason or "")
    assert [entry.usage.calls for entry in summary.spend] == [16]


def test_scores_that_contradict_their_items_are_named(tmp_path: Path) -> None:
    """A reported score that the items' own results do not give stands without an interval."""
    older = complete_run(tmp_path / "run7")
    older.text("test_eval/results.jsonl", rows([0, 0, 0, 1], "t"))
    run = read_run(older.root)
    best = run.summary.score("best", Split.test)
    assert best is not None
    assert (best.hard, best.low) == (0.5, None)
    assert told(run, "disagree on the best score on test")


# ------------------------------------------------------------------------------------- at a terminal


def test_an_imported_run_is_listed_and_shown(tmp_path: Path) -> None:
    """``runs`` and ``show`` present it like any other; the files beside the database are there."""
    older = complete_run(tmp_path / "run7")
    out = tmp_path / "out"
    done = reflact("import-skillopt", older.root, "--out", out)
    assert done.exit_code == 0, done.output
    listed = reflact("runs", out).stdout
    assert "completed" in listed
    assert "0.500" in listed
    shown = reflact("show", out).stdout
    for words in (
        "accept_new_best",
        "no_patches",
        "0.000 -> 0.500",
        "best: v1 from step 1",
        "rollout: 20 calls",
        "epoch 1   slow update reserved  current v2, best v1",
        "epoch 2   slow update forced  meta skill written  current v3, best v1",
    ):
        assert words in shown, shown
    step = reflact("show", out, 1).stdout
    for words in ("pattern: units (2)", "edit applied: append 'State the unit.'", "+State the unit."):
        assert words in step, step
    assert reflact("show", out, 2).exit_code == 0
    assert (out / "best_skill.md").read_text(encoding="utf-8") == older.best
    assert (out / "skills/v0000.md").read_text(encoding="utf-8") == INITIAL
    assert (out / "skills/v0003.md").read_text(encoding="utf-8") == older.current
    assert RunSummary.model_validate_json((out / "summary.json").read_bytes()).steps == 4


def test_a_rejected_document_that_is_gone_can_still_be_listed(tmp_path: Path) -> None:
    """``show`` presents such a step without its diff instead of failing."""
    older = complete_run(tmp_path / "run7")
    (older.root / "steps/step_0002/candidate_skill.md").unlink()
    out = tmp_path / "out"
    assert reflact("import-skillopt", older.root, "--out", out).exit_code == 0
    shown = reflact("show", out, 2)
    assert shown.exit_code == 0, shown.output
    assert "is not stored" in shown.stdout


def test_importing_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    """No byte of the imported folder changes, and nothing may be written into it."""
    older = complete_run(tmp_path / "run7")
    before = files(older.root)
    assert reflact("import-skillopt", older.root, "--out", tmp_path / "out").exit_code == 0
    assert files(older.root) == before
    (tmp_path / "link").symlink_to(older.root)
    for out in (older.root, older.root / "new", tmp_path / "link" / "new"):
        refused = reflact("import-skillopt", older.root, "--out", out)
        assert refused.exit_code == 2
        assert "stays as it is" in refused.stderr
    assert files(older.root) == before


def test_secrets_do_not_come_over(tmp_path: Path) -> None:
    """Keys in clear text are in no file that an import writes and in nothing it prints; their names are."""
    older = complete_run(tmp_path / "run7")
    out = tmp_path / "out"
    done = reflact("import-skillopt", older.root, "--out", out)
    assert "qwen_chat_api_key, azure_openai_api_key: left out" in done.stdout
    secret = b"live0123456789"
    assert secret in (older.root / "config.json").read_bytes()
    assert secret not in done.output.encode()
    assert not any(secret in content for content in files(out).values())


def test_importing_twice_changes_nothing(tmp_path: Path) -> None:
    """The same folder gives the same run, so that a broken import is mended by another one."""
    older = complete_run(tmp_path / "run7")
    out = tmp_path / "out"
    first = reflact("import-skillopt", older.root, "--out", out)
    shown = reflact("show", out).stdout
    again = reflact("import-skillopt", older.root, "--out", out)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert reflact("show", out).stdout == shown


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    """An import never joins a run that is there."""
    out = tmp_path / "out"
    assert reflact("import-skillopt", complete_run(tmp_path / "run7").root, "--out", out).exit_code == 0
    other = reflact("import-skillopt", complete_run(tmp_path / "run8").root, "--out", out)
    assert other.exit_code == 2
    assert "imported from SkillOpt" in other.stderr


def test_an_imported_run_cannot_be_continued(tmp_path: Path) -> None:
    """``train`` pointed at its folder says that it was imported, and leaves it as it is."""
    out = tmp_path / "out"
    assert reflact("import-skillopt", complete_run(tmp_path / "run7").root, "--out", out).exit_code == 0
    before = (out / "summary.json").read_bytes()
    items = [{"id": f"q{n}", "input": f"{n} + {n}?", "reference": str(2 * n)} for n in range(10)]
    (tmp_path / "items.json").write_text(json.dumps(items), encoding="utf-8")
    settings = f"out_dir: {out}\ndata: {{path: items.json}}\n"
    settings += "models: {target: {model: m, base_url: 'http://127.0.0.1:9/v1', api_key_env: null}}\n"
    (tmp_path / "run.yaml").write_text(settings, encoding="utf-8")
    refused = reflact("train", tmp_path / "run.yaml")
    assert refused.exit_code == 2
    assert "was imported from SkillOpt: it can be looked at, but not continued" in refused.stderr
    assert (out / "summary.json").read_bytes() == before


def test_the_store_holds_the_ends_of_epochs(tmp_path: Path) -> None:
    """Slow updates, memory and the identity of an imported run can be read back from its database."""
    from reflact.store.runs import open_store

    out = tmp_path / "out"
    assert reflact("import-skillopt", complete_run(tmp_path / "run7").root, "--out", out).exit_code == 0

    async def read() -> tuple[EpochRecord, ...]:
        async with open_store(out / "run.db") as store:
            (row,) = await store.runs()
            assert row.run_id.startswith("i")
            return await store.epochs(row.run_id)

    first, second = anyio.run(read)
    assert (first.slow and first.slow.action, second.slow and second.slow.action) == ("reserved", "forced")
    assert second.meta == "Short edits help."


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3),
    max_leaves=6,
)
FILES = (
    "history.json",
    "runtime_state.json",
    "summary.json",
    "config.json",
    "steps/step_0001/merged_patch.json",
    "steps/step_0001/patches/minibatch_fail_000.json",
    "steps/step_0001/edit_apply_report.json",
    "slow_update/epoch_02/slow_result.json",
    "slow_update/epoch_02/comparison_pairs_all.json",
    "meta_skill/epoch_02/meta_skill_result.json",
)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), data=st.data())
def test_any_value_in_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Whatever stands in a field, the run is read as a valid one, or refused with a sentence."""
    older = complete_run(tmp_path_factory.mktemp("run7"))
    value = json.loads((older.root / name).read_text(encoding="utf-8"))
    place = value
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(anything)
            break
        place = place[key]
    older.json(name, value)
    try:
        run = read_run(older.root)
    except UsageError:
        return
    assert ImportedRun.model_validate_json(run.model_dump_json()) == run
