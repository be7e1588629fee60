"""Approval: who is asked about a candidate, what they see, and what a veto does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reflact.records import CandidateReview
from reflact.stages.reply_models import AnalystReply
from reflact.testing import append_reply
from reflact.types import Skill
from served import MAIN, reflact
from toy_runs import LINES, Part, playing, run

DOUBLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, LINES["double"]))
IDLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))


class Reviewer:
    """Answers the same to every review, and keeps what it was shown."""

    def __init__(self, answer: bool | str) -> None:
        self._answer = answer
        self.reviews: list[CandidateReview] = []

    async def __call__(self, review: CandidateReview) -> bool | str:
        self.reviews.append(review)
        return self._answer


async def test_the_reviewer_sees_candidate_difference_and_evidence(tmp_path: Path) -> None:
    """Asked only about what the gate would accept, with all that the gate rested on."""
    reviewer = Reviewer(answer=True)
    done = await run(tmp_path, initial="Answer.\n", script=playing(DOUBLE), approve=reviewer)
    assert done.actions == ["accept_new_best", "no_change"]
    (review,) = reviewer.reviews
    assert (review.step, review.part) == (1, "step")
    assert review.current == Skill(text="Answer.\n")
    assert review.candidate.text == done.current == f"Answer.\n\n{LINES['double']}\n"
    assert f"+{LINES['double']}" in review.diff
    assert review.verdict == done.records[0].verdict


async def test_only_a_veto_changes_a_run(tmp_path: Path) -> None:
    """A reviewer who approves everything changes nothing, and rejected candidates are not reviewed."""
    asked = await run(tmp_path / "a", approve=Reviewer(answer=True))
    alone = await run(tmp_path / "b")
    assert (asked.records, asked.summary.scores) == (alone.records, alone.summary.scores)
    reviewer = Reviewer(answer=True)
    done = await run(tmp_path / "c", script=playing(IDLE), approve=reviewer)
    assert done.actions == ["reject", "no_change"]
    assert reviewer.reviews == []


@pytest.mark.parametrize(
    ("answer", "veto"),
    [(False, "no reason was given"), ("Too blunt.", "Too blunt."), ("", "no reason was given")],
)
async def test_a_veto_rejects(tmp_path: Path, answer: bool | str, veto: str) -> None:
    """Skill and best stay, the reason is in the record, and the same document is not reviewed again."""
    reviewer = Reviewer(answer)
    done = await run(tmp_path, script=playing(DOUBLE), approve=reviewer)
    verdict = done.records[0].verdict
    assert (verdict.action, verdict.veto, verdict.accepted) == ("reject", veto, False)
    assert f"Vetoed: {veto}" in verdict.reason
    assert verdict.candidate_score == 0.25
    assert done.actions == ["reject", "no_change"]
    assert done.records[1].verdict.repeats == "in step 1"
    assert len(reviewer.reviews) == 1
    assert (done.current, done.best) == ("", "")
    assert done.summary.rejects == 1


async def test_guidance_promotion_and_ungated_candidates_are_reviewed(tmp_path: Path) -> None:
    """All decisions that put a text into force are reviewed, each under its own name, also without a gate."""
    reviewer = Reviewer("No.")
    done = await run(tmp_path, script=playing(IDLE), approve=reviewer, gate={"enabled": False})
    assert [review.verdict.action for review in reviewer.reviews] == ["force_accept"]
    assert done.actions == ["reject", "no_change"]

    gated: dict[str, Any] = {"slow_update": {"enabled": True}, "train": {"num_epochs": 2}}
    reviewer = Reviewer("Not that.")
    done = await run(tmp_path / "a", script=playing(IDLE), approve=reviewer, **gated)
    assert [(r.part, r.step) for r in reviewer.reviews] == [("slow update", 4)]
    closed = done.epochs[-1]
    assert (closed.slow_update.action, closed.slow_update.verdict.veto) == ("unchanged", "Not that.")
    assert closed.created_versions == ()

    forced = {**gated, "slow_update": {"enabled": True, "gated": False}}
    reviewer = Reviewer("Nor that.")
    done = await run(tmp_path / "b", script=playing(IDLE), approve=reviewer, **forced)
    assert [(r.part, r.step) for r in reviewer.reviews] == [("promotion", 4)]
    assert (done.promotions[0].verdict.veto, done.promotions[0].best.number) == ("Nor that.", 0)


DEMO = Path(__file__).parent.parent / "fixtures" / "demo" / "demo.yaml"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("reason", ["", "too narrow"])
def test_a_person_approves_or_vetoes_with_a_reason(tmp_path: Path, reason: str) -> None:
    """Each accepted candidate is shown with its diff; an empty answer approves, and any other text vetoes.

    The reason stands in the record, and a run whose rollouts are used ends with its initial document.
    """
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "train", str(DEMO), "--review", "--set", f"out_dir={tmp_path}/run"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said, answers = "", [reason]
        while True:
            try:
                chunk = os.read(ours, 65536).decode(errors="replace")
            except OSError:
                break
            if not chunk:
                break
            asked_before = said.count("take it?")
            said += chunk
            for _ in range(said.count("take it?") - asked_before):
                os.write(ours, (answers.pop(0) + "\n").encode())
        os.close(ours)
    assert process.returncode == 0
    assert (said.count("take it?"), "+++ after" in said) == (1, True)
    versions = [path.name for path in (tmp_path / "run" / "skills").iterdir()]
    assert sorted(versions) == (["v0000.md"] if reason else ["v0000.md", "v0001.md"])
    shown = reflact("show", tmp_path / "run", 1)
    assert ("Vetoed: too narrow" in shown.output) is bool(reason)
