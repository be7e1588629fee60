"""``reflact gate``: red for a proven regression, green for noise, and reports that a build can read."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from served import asked_of, reflact, send, serving

ROOT = Path(__file__).parent.parent
WORDS = [f"word{n}" for n in range(20)]
RULE = "Write in capitals."


def write_files(folder: Path, url: str, *, skill: str, base: str) -> None:
    """Write the files of a project: items, a configuration, the skill of a build and that of the main branch."""
    items = [{"id": word, "input": word, "reference": word.upper()} for word in WORDS]
    (folder / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    price = {"input": 1, "output": 1}
    model = {"model": "m", "base_url": url, "api_key_env": None, "max_tokens": 8, "price": price}
    config = {
        "out_dir": "runs/ci",
        "data": {"path": "items.jsonl", "ratio": "0:1:0"},
        "environment": {"grader": "exact"},
        "models": {"target": model, "optimizer": {"max_tokens": 8}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "skill.md").write_text(skill, encoding="utf-8")
    (folder / "base.md").write_text(base, encoding="utf-8")


@contextmanager
def target(wrong: Callable[[str, str, int], bool]) -> Iterator[tuple[str, list[str]]]:
    """Serve a target that answers in capitals unless ``wrong`` says so of skill, word and earlier requests for it."""
    asked: list[str] = []
    lock = threading.Lock()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = asked_of(handler)
        skill, word = body["messages"][0]["content"], body["messages"][-1]["content"]
        with lock:
            earlier = asked.count(f"{skill}/{word}")
            asked.append(f"{skill}/{word}")
        text = word if wrong(skill, word, earlier) else word.upper()
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        send(handler, {"model": "m", "choices": [choice], "usage": usage})

    with serving(answer) as url:
        yield url, asked


def is_noisy(skill: str, word: str, earlier: int) -> bool:
    """Whether a target that is right in nine of ten answers is wrong now, whatever its skill is."""
    return hashlib.sha256(f"{skill}/{word}/{earlier}".encode()).digest()[0] < 26


def run_steps(example: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the shell step of an example that calls ``reflact gate``, with this reflact and these files."""
    text = (ROOT / "examples" / example).read_text(encoding="utf-8")
    (line,) = [line.strip().removeprefix("- ") for line in text.splitlines() if "reflact gate" in line]
    shutil.rmtree(folder / "bin", ignore_errors=True)
    (folder / "bin").mkdir()
    program = folder / "bin" / "reflact"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from reflact.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    command = f'PATH="{folder / "bin"}:$PATH"; {line}'
    return subprocess.run(["sh", "-ec", command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gate_github.yml", "gate_gitlab.yml"])
def test_the_steps_of_a_build_fail_for_a_regression_of_one_case_and_not_for_noise(
    example: str, tmp_path: Path
) -> None:
    def forgets_one(skill: str, word: str, earlier: int) -> bool:
        return skill != RULE and word == "word7"

    for name, wrong, code in (("regression", forgets_one, 1), ("noise", is_noisy, 0)):
        folder = tmp_path / name
        folder.mkdir()
        with target(wrong) as (url, asked):
            write_files(folder, url, skill="Shout.", base=RULE)
            done = run_steps(example, folder)
            assert (done.returncode, "error:" in done.stderr) == (code, False), done.stderr
            assert len(asked) == 2 * 4 * len(WORDS)
            run_steps(example, folder)
            assert len(asked) == 2 * 4 * len(WORDS), "answers are paid once"
        comment = (folder / "comment.md").read_text(encoding="utf-8")
        suite = ElementTree.parse(folder / "gate.xml").getroot()
        assert suite.attrib["failures"] == str(code)
        assert comment.startswith("### Failed" if code else "### Passed")
        assert ("`word7`" in comment) == bool(code)


def test_a_report_is_data_and_its_comment_holds_what_an_answer_says(tmp_path: Path) -> None:
    """Conditions decide the exit code; texts of answers stay code in the comment, whatever is in them."""
    evil = "`` | **x** <!-- -->"

    def injects(skill: str, word: str, earlier: int) -> bool:
        return skill == "Shout." and word.startswith("word1")

    with target(injects) as (url, _):
        write_files(tmp_path, url, skill="Shout.", base=RULE)
        items = (
            (tmp_path / "items.jsonl")
            .read_text(encoding="utf-8")
            .replace('"word10"', json.dumps(f"word1{evil}"))
        )
        (tmp_path / "items.jsonl").write_text(items.replace('"WORD10"', json.dumps(f"WORD1{evil}".upper())))
        files = ("--skill", tmp_path / "skill.md", "--against", tmp_path / "base.md")
        paths = (
            "--set",
            f"out_dir={tmp_path / 'out'}",
            "--comment",
            tmp_path / "c.md",
            "--sarif",
            tmp_path / "s.json",
        )
        command = ("gate", tmp_path / "run.yaml", *files, *paths, "--json")
        reported = reflact(*command)
        worse = reflact(*command, "--fail-if-worse")
        low = reflact(*command, "--fail-below", "0.9")
    assert (reported.exit_code, worse.exit_code, low.exit_code) == (0, 1, 1), reported.output
    report = json.loads(worse.stdout)
    assert report["on_cases"]["proven"] == "worse"
    assert len(report["on_cases"]["worse"]) == len(report["changes"]) == 11
    comment = (tmp_path / "c.md").read_text(encoding="utf-8")
    row = next(line for line in comment.splitlines() if "**x**" in line)
    assert "```" in row
    assert row.replace("\\|", "").count("|") == 6
    results = json.loads((tmp_path / "s.json").read_text())["runs"][0]["results"]
    assert {result["ruleId"] for result in results} == {"condition", "worse-case"}
