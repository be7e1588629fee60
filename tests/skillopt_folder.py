"""Builds folders as the older trainer leaves them: the same names and shapes, with made-up content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUT_ROOT = "/data/outputs/run7"
SECRET = "sk-" + "live0123456789abcdefghij"
INITIAL = "# Skill\n\nAnswer briefly.\n"
GUIDANCE = "<!-- SLOW_UPDATE_START -->{}<!-- SLOW_UPDATE_END -->\n"

Record = dict[str, Any]


def short_hash(text: str) -> str:
    """Return a document's hash as the older tool records it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows(marks: Sequence[float], prefix: str = "q") -> str:
    """Return results of items, one JSON object a line."""
    lines = ({"id": f"{prefix}{n}", "hard": mark, "soft": mark, "n_turns": 1} for n, mark in enumerate(marks))
    return "".join(json.dumps(line) + "\n" for line in lines)


def edit(content: str, op: str = "append", target: str = "") -> Record:
    """Return an edit as the older tool writes it."""
    return {"op": op, "target": target, "content": content, "support_count": 3, "source_type": "failure"}


@dataclass
class OlderRun:
    """A run folder in the making: steps are added in order, ``write_ends`` completes it.

    The current document and scores are kept as the older tool keeps them, so that the files agree.
    """

    root: Path
    current: str = INITIAL
    best: str = INITIAL
    current_score: float = 0.0
    best_score: float = 0.0
    best_step: int = 0
    history: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text("skills/skill_v0000.md", self.current)
        self.text("selection_eval_baseline/results.jsonl", rows([0, 0, 0, 0], "v"))

    def text(self, name: str, text: str) -> Path:
        """Write a file and return its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return path

    def json(self, name: str, value: object) -> Path:
        """Write a JSON file and return its path."""
        return self.text(name, json.dumps(value))

    def step(
        self,
        action: str,
        *,
        epoch: int = 1,
        candidate: str | None = None,
        mark: float = 0.0,
        edits: Sequence[Record] = (),
        **more: Any,
    ) -> Record:
        """Add a step that the older tool finished, with its files, and return its record."""
        number = len({record["step"] for record in self.history}) + 1
        place = f"steps/step_{number:04d}"
        self.text(f"{place}/rollout/results.jsonl", rows([1, 0, 0, 0]))
        skipped = action.startswith("skip_")
        failures = {"failure_type": "units", "count": 2, "description": "forgets the unit"}
        analysed = {"reasoning": "units are missing", "edits": list(edits)}
        if action != "skip_no_patches":
            self.json(
                f"{place}/patches/minibatch_fail_000.json",
                {"batch_size": 3, "source_type": "failure", "failure_summary": [failures], "patch": analysed},
            )
        record: Record = {
            "step": number,
            "epoch": epoch,
            "step_in_epoch": 1 + sum(known["epoch"] == epoch for known in self.history),
            "timing": {"rollout_s": 1.5, "reflect_s": 0.5},
            "tokens": {"rollout": {"calls": 4, "prompt_tokens": 100, "completion_tokens": 10}},
            "rollout_hard": 0.25,
            "rollout_soft": 0.25,
            "rollout_n": 4,
            "n_patches": 0 if action == "skip_no_patches" else 1,
            "n_failure_patches": 0 if action == "skip_no_patches" else 1,
            "n_success_patches": 0,
            "action": action,
        }
        if not skipped:
            document = self.current + "\nState the unit.\n" if candidate is None else candidate
            self._decide(record, place, document, mark, edits)
        self.text(f"skills/skill_v{number:04d}.md", self.current)
        record |= more
        self.json(f"{place}/step_record.json", record)
        self.history.append(record)
        return record

    def _decide(
        self, record: Record, place: str, document: str, mark: float, edits: Sequence[Record]
    ) -> None:
        self.json(f"{place}/merged_patch.json", {"reasoning": "merged", "edits": list(edits)})
        self.json(f"{place}/ranked_edits.json", {"reasoning": "ranked", "edits": list(edits)})
        report = [
            {"index": n, "op": e["op"], "target": e["target"][:200], "content_preview": e["content"][:200]}
            | {"status": "applied"}
            for n, e in enumerate(edits)
        ]
        self.json(f"{place}/edit_apply_report.json", report)
        self.text(f"{place}/candidate_skill.md", document)
        self.text(f"{place}/selection_eval/results.jsonl", rows([mark] * 4, "v"))
        self.json(f"{place}/trajectory_digest.json", {"step": record["step"], "n_total": 4, "n_fail": 3})
        if record["action"] != "reject":
            self.current, self.current_score = document, mark
        if record["action"] == "accept_new_best":
            self.best, self.best_score, self.best_step = document, mark, record["step"]
        record |= {
            "n_edits_merged": len(edits),
            "n_edits_ranked": len(edits),
            "edit_budget": 4,
            "lr_control_mode": "fixed",
            "candidate_hash": short_hash(document),
            "selection_hard": mark,
            "selection_soft": mark,
            "gate_metric": "hard",
            "candidate_gate_score": mark,
            "current_score": self.current_score,
            "best_score": self.best_score,
            "best_step": self.best_step,
            "wall_time_s": 2.0,
        }

    def slow_update(self, epoch: int, action: str, guidance: str = "", mark: float | None = None) -> Record:
        """End an epoch with a slow update, which writes over the last step's document."""
        place = f"slow_update/epoch_{epoch:02d}"
        body = self.current.split("<!--")[0]
        document = body + GUIDANCE.format(f"\n{guidance}\n" if guidance else "\n")
        result: Record = {"action": action, "reasoning": "units again", "slow_update_content": guidance}
        result |= {"time_s": 1.0, "prev_hard": 0.0, "curr_hard": 0.5, "candidate_hash": short_hash(document)}
        if mark is not None:
            result |= {"selection_hard": mark, "selection_soft": mark}
        self.json(f"{place}/slow_result.json", result)
        if action not in {"no_content", "inject_placeholder"}:
            self.text(f"{place}/candidate_skill.md", document)
            side = {"predicted_answer": "3", "fail_reason": ""}
            pair: Record = {"id": "q0", "task": "2 m + 1 m", "category": "persistent_fail"}
            pair |= {"prev": side | {"hard": 0.0, "soft": 0.0}, "curr": side | {"hard": 0.0, "soft": 0.5}}
            self.json(f"{place}/comparison_pairs_all.json", [pair])
        if action not in {"no_content", "reject"}:
            self.current = document
            self.text(f"skills/skill_v{len({r['step'] for r in self.history}):04d}.md", document)
        if action in {"accept", "accept_new_best"} and mark is not None:
            self.current_score = mark
        if action == "accept_new_best" and mark is not None:
            self.best, self.best_score = document, mark
        return result

    def meta_skill(self, epoch: int, action: str, content: str = "") -> None:
        """End an epoch with a meta skill."""
        result = {"action": action, "reasoning": "r", "meta_skill_content": content, "time_s": 1.0}
        self.json(f"meta_skill/epoch_{epoch:02d}/meta_skill_result.json", result)

    def write_ends(self, **more: Any) -> None:
        """Write history, state, configuration, summary and the best document."""
        last = max(record["step"] for record in self.history)
        self.json("history.json", self.history)
        self.text("best_skill.md", self.best)
        self.json(
            "runtime_state.json",
            {
                "last_completed_step": last,
                "current_skill_path": f"{OUT_ROOT}/skills/skill_v{last:04d}.md",
                "current_score": self.current_score,
                "best_skill_path": f"{OUT_ROOT}/best_skill.md",
                "best_score": self.best_score,
                "best_step": self.best_step,
            },
        )
        config = {
            "out_root": OUT_ROOT,
            "env": "searchqa",
            "batch_size": 4,
            "edit_budget": 3,
            "num_epochs": 2,
            "qwen_chat_api_key": SECRET,
            "azure_openai_api_key": "abcd****wxyz",
            "steps_per_epoch": 2,
        }
        self.json("config.json", config | more)
        actions = [record["action"] for record in self.history]
        self.text("test_eval_baseline/results.jsonl", rows([0, 0, 0, 0], "t"))
        self.text("test_eval/results.jsonl", rows([1, 0, 1, 0], "t"))
        tokens = {"calls": 20, "prompt_tokens": 900, "completion_tokens": 80, "total_tokens": 980}
        self.json(
            "summary.json",
            {
                "version": "skillopt-0.1.0",
                "config": config,
                "baseline_selection_hard": 0.0,
                "best_selection_hard": self.best_score,
                "best_step": self.best_step,
                "total_steps": len(self.history),
                "total_accepts": sum("accept" in action for action in actions),
                "total_rejects": actions.count("reject"),
                "total_skips": sum(action.startswith("skip") for action in actions),
                "baseline_test_hard": 0.0,
                "baseline_test_soft": 0.0,
                "test_hard": 0.5,
                "test_soft": 0.5,
                "total_wall_time_s": 12.5,
                "token_summary": {"rollout": tokens, "analyst": tokens, "_total": tokens},
            },
        )


def complete_run(root: Path) -> OlderRun:
    """Write the folder of a finished run of two epochs, and return its builder."""
    run = OlderRun(root)
    run.step("accept_new_best", mark=0.5, edits=[edit("State the unit.")])
    run.step("reject", mark=0.25, candidate=run.current + "\nShout.\n", edits=[edit("Shout.")])
    run.slow_update(1, "inject_placeholder")
    run.meta_skill(1, "skip_first_epoch")
    run.step("skip_no_patches", epoch=2)
    run.step("reject", epoch=2, mark=0.5, edits=[edit("State the unit twice.")])
    run.slow_update(2, "force_accept", "Watch the units.")
    run.meta_skill(2, "write_meta_skill", "Short edits help.")
    run.write_ends()
    return run
