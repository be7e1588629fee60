"""``reflact ask``: a person says which of two answers is better, without knowing which document gave it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from emulator import Terminal
from reflact import read_run
from reflact.reporting.asking import AnswerFile, list_questions
from reflact.reporting.history import read_matrix
from reflact.testing import ToyEnvironment, ToyTarget
from reflact.types import Split
from served import assert_refused, reflact
from test_live_terminal import run_at
from toy_runs import build_trainer, settings

WORLD = ToyEnvironment(train=8, val=8, test=64, rules=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run whose best skill is right where the initial one is wrong, for half of the items."""
    config = settings(tmp_path / "run", test={"enabled": True}, train={"num_epochs": 1})
    summary = anyio.run(build_trainer(config, environment=WORLD, target=ToyTarget()).train)
    assert summary.status == "completed"
    return tmp_path / "run"


def find_run_id(folder: Path) -> str:
    return anyio.run(read_run, folder).run_id


def right_choices(folder: Path, rater: str) -> dict[str, str]:
    """Return what somebody who likes the new document's answers says of each question: a or b."""
    run_id = find_run_id(folder)
    matrix = anyio.run(lambda: read_matrix(folder, run_id, split=Split.test, ends_only=True))
    questions = list_questions(matrix, run_id, rater)
    return {question.item_id: "a" if question.is_a_new else "b" for question in questions}


def ask_json(folder: Path) -> list[dict[str, object]]:
    result = reflact("ask", folder, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_questions_are_blind_and_answers_of_a_file_make_the_claim(folder: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.csv"
    assert reflact("ask", folder, "--rater", "ada", "--export", questions).exit_code == 0
    with questions.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["rater", "item", "input", "answer a", "answer b", "better"]
    choices = right_choices(folder, "ada")
    assert {row["item"] for row in rows} == set(choices)
    assert 0.2 < sum(choice == "a" for choice in choices.values()) / len(choices) < 0.8
    for row in rows[:30]:
        row["better"] = choices[row["item"]]
    with questions.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    result = reflact("ask", folder, "--answers", questions)
    assert result.exit_code == 0, result.output
    (claim,) = ask_json(folder)
    assert claim["proven"] == "better"
    assert claim["n_answers"] == 30
    assert claim["n_pairs"] == 64
    assert claim["n_same"] == 64 - len(rows)
    assert claim["agreement"] == 1


def test_a_person_who_likes_the_other_answers_turns_the_claim(folder: Path) -> None:
    """The scores say better; the answers correct them."""
    file = AnswerFile(folder / f"answers-{find_run_id(folder)}.jsonl")
    for item_id in list(right_choices(folder, "ada"))[:30]:
        file.add("ada", item_id, -1.0)
    (claim,) = ask_json(folder)
    assert claim["proven"] == "worse"
    assert claim["judged"] > 0  # type: ignore[operator]
    assert claim["is_judge_used"] is False


@pytest.mark.slow
def test_at_a_terminal_it_asks_undoes_and_goes_on(folder: Path) -> None:
    """One question at a time; a stop and a kill lose nothing, and a claim is made after 30 answers."""
    choices = list(right_choices(folder, "ada").values())
    typed = ["x", "exciting", choices[0], "e", "undo", choices[1], "skip", "stop"]
    first = at_terminal(folder, typed)
    assert "2 answers; a claim is made after 30" in first
    (path,) = folder.glob("answers-*.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"time": "2026')  # what a kill leaves
    second = at_terminal(folder, choices[3:31])
    assert "The new document is proven better." in second
    assert "4 of " in second
    assert "1 of " not in second.replace("11 of ", "").replace("21 of ", "").replace("31 of ", "")
    run_id = find_run_id(folder)
    for screen in (first, second):
        for word in ("baseline", "best", "initial", "v0", "v1", "new answer", run_id):
            assert word not in screen.partition("proven")[0]
    assert sum(each is not None for each in AnswerFile(path).list_answers("ada").values()) == 30


def at_terminal(folder: Path, typed: list[str]) -> str:
    """Return what the command wrote at a terminal where somebody types a line at each prompt."""
    waiting = list(typed)
    shown = 0

    def type_next(process: subprocess.Popen[bytes], terminal: Terminal) -> None:
        nonlocal shown
        lines = terminal.scrolled + terminal.screen
        prompts = sum(line.startswith("Which is better?") for line in lines)
        if prompts > shown and waiting:
            shown = prompts
            os.write(terminal.keyboard, f"{waiting.pop(0)}\n".encode())

    code, _ = run_at(terminal := Terminal(90, 40), "ask", folder, "--rater", "ada", watch=type_next)
    assert code == 0
    assert waiting == []
    return "\n".join(terminal.scrolled + terminal.screen)


def test_two_raters_are_compared(folder: Path) -> None:
    run_id = find_run_id(folder)
    file = AnswerFile(folder / f"answers-{run_id}.jsonl")
    for number, item_id in enumerate(list(right_choices(folder, "ada"))[:30]):
        file.add("ada", item_id, 1.0)
        file.add("bob", item_id, 0.0 if number < 6 else 1.0)
    result = reflact("ask", folder, "--answers", write_empty(folder / "none.csv"))
    assert "ada and bob agree in 24 of 30 items." in result.output
    (claim,) = ask_json(folder)
    assert claim["n_answers"] == 30


def test_two_persons_answer_at_one_time(tmp_path: Path) -> None:
    one, other = (AnswerFile(tmp_path / "answers.jsonl") for _ in range(2))
    for number in range(3):
        one.add("ada", f"q{number}", 1.0)
        other.add("bob", f"q{number}", -1.0)
    both = AnswerFile(tmp_path / "answers.jsonl")
    assert both.list_raters() == ("ada", "bob")
    assert both.list_answers() == {"q0": 0.0, "q1": 0.0, "q2": 0.0}


HEADING = "rater,item,input,answer a,answer b,better"


def write_empty(path: Path) -> Path:
    path.write_text(f"{HEADING}\n", encoding="utf-8")
    return path


def fill(folder: Path, path: Path, rater: str, choices: dict[str, str]) -> None:
    """Fill in a file of questions of a rater, and read it."""
    rows = read_questions(folder, path, rater)
    for row in rows:
        row["better"] = choices.get(row["item"], "")
    write_rows(path, rows)


def read_questions(folder: Path, path: Path, rater: str) -> list[dict[str, str]]:
    assert reflact("ask", folder, "--rater", rater, "--export", path).exit_code == 0
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_sheet_that_another_person_fills_in_keeps_its_choices(folder: Path, tmp_path: Path) -> None:
    """The sides were drawn for ada; bob sees them as they stand there."""
    path = tmp_path / "sheet.csv"
    rows = read_questions(folder, path, "ada")
    choices = right_choices(folder, "ada")
    for row in rows:
        row["rater"] = "bob"
        row["better"] = choices[row["item"]]
    write_rows(path, rows)
    assert reflact("ask", folder, "--answers", path).exit_code == 0
    file = AnswerFile(folder / f"answers-{find_run_id(folder)}.jsonl")
    assert set(file.list_answers("bob").values()) == {1.0}
    rows[0]["answer a"] = "another answer"
    write_rows(path, rows)
    assert_refused(reflact("ask", folder, "--answers", path), "are not those of this run")


def test_answers_after_a_gap_wait(folder: Path, tmp_path: Path) -> None:
    """Whoever answers only what is in favour of a document does not choose the sample."""
    path = tmp_path / "sheet.csv"
    choices = right_choices(folder, "ada")
    fill(folder, path, "ada", dict(list(choices.items())[1:]))
    assert reflact("ask", folder, "--answers", path).exit_code == 0
    assert ask_json(folder) == []
    fill(folder, path, "ada", choices)
    assert reflact("ask", folder, "--answers", path).exit_code == 0
    assert ask_json(folder)[0]["n_answers"] == 30


def test_what_is_wrong_is_refused(folder: Path, tmp_path: Path) -> None:
    assert_refused(reflact("ask", folder), "needs a terminal", "--export")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(f"{HEADING}\nada,x,,,,left\n", encoding="utf-8")
    assert_refused(reflact("ask", folder, "--answers", wrong), "line 2", "left")
    wrong.write_text(f"{HEADING}\nada,x,,,,a\n", encoding="utf-8")
    assert_refused(reflact("ask", folder, "--answers", wrong), "names x")
    wrong.write_bytes(f"{HEADING}\nad\xe9,x,,,,a\n".encode("latin-1"))
    assert_refused(reflact("ask", folder, "--answers", wrong), "UTF-8")
    wrong.write_text("item\nx\n", encoding="utf-8")
    assert_refused(reflact("ask", folder, "--answers", wrong), "no column rater")
    run_id = find_run_id(folder)
    (folder / f"answers-{run_id}.jsonl").write_text("{}\n{}\n", encoding="utf-8")
    assert_refused(reflact("ask", folder, "--json"), "line 1 is no answer")


def test_without_test_answers_nothing_can_be_asked(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", train={"num_epochs": 1})
    anyio.run(build_trainer(config).train)
    assert_refused(reflact("ask", tmp_path / "run"), "test")


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
