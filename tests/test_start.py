"""The first steps of a new user: `reflact init`, `reflact check`, and a first start that fails for free."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from reflact.config.loading import load_config
from reflact.data import load_dataset
from reflact.training.check import SetupCheck
from reflact.types import Split
from served import MAIN, asked_of, assert_refused, completion, configured, reflact, say_four, send, serving

ANSWERS = {"big": '{"word": "ready"}', "small": "4"}


class ModelServer:
    """Serves the models `small` and `big`, refuses others, and lists the models of all requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body: dict[str, Any] = asked_of(handler)
        model = body["model"]
        self.asked.append(model)
        if model in ANSWERS:
            send(handler, completion(ANSWERS[model]))
        else:
            send(
                handler,
                {"error": {"message": f"The model {model} does not exist", "code": "model_not_found"}},
                404,
            )


def write_questions(path: Path, n: int = 60) -> Path:
    """Write a CSV file of sums with columns of other names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["nr", "prompt", "gold", "level"])
        writer.writerows([k, f"What is {k} + {k}?", 2 * k, "easy"] for k in range(n))
    return path


def optimizer_of(name: str) -> tuple[str, str]:
    return "--set", f"models.optimizer.model={name}"


def test_init_writes_a_configuration_that_works(tmp_path: Path) -> None:
    """It guesses columns and grader, and the file checks and plans without a change."""
    data, config = write_questions(tmp_path / "sums.csv"), tmp_path / "run.yaml"
    server = ModelServer()
    with serving(server.answer) as url:
        options = ("--model", "small", "--optimizer", "big", "--base-url", url)
        result = reflact("init", data, "--out", config, *options)
        assert result.exit_code == 0, result.output
        assert "60 items: 20 train, 20 validation, 20 test" in result.stdout
        checked = reflact("check", config)
        assert checked.exit_code == 0, checked.output
        assert re.search(r"time: \d+ rollouts are likely; at .+ each .+ 4 run at once", checked.stdout)
    loaded = load_config(config)
    assert loaded.data.fields.input == "prompt"
    assert loaded.data.fields.reference == "gold"
    assert loaded.environment.grader == "numeric"
    planned = reflact("check", config, "--dry-run")
    assert "data: 20 train, 20 validation, 20 test" in planned.stdout
    assert "optimizer" in planned.stdout


REVIEWS = [f"Order {k} came {('late and broken', 'in time')[k % 2]}." for k in range(30)]
MOODS = [("bad", "good")[k % 2] for k in range(30)]
EMPTY = [""] * 30

GUESSES = [
    (
        ["question_id", "Prompt (English)", "expected_label"],
        "'Prompt (English)', reference from 'expected_label'",
    ),
    (["Customer message", "Channel", "Correct team", "is_correct"], "reference from 'Correct team'"),
    (["question", "solution", "answer"], "reference from 'answer'\nthe target does not see 'solution'"),
    (["question", "first_answer", "second_answer"], "several columns may be the right answer; name it with"),
    (["input_text", "user_message"], "several columns may be the task; name it with --input"),
    (["foo", "bar"], "no column looks like the task; name it with --input (the columns are 'foo', 'bar')"),
    (["question", "note"], "no column looks like the right answer; name it with --reference"),
    (
        ["What is the problem with this answer?", "yes"],
        "if the first row is an item, write a header above it",
    ),
]
"""Columns of a file, the first one with the tasks, and what `init` says."""


@pytest.mark.parametrize(("columns", "words"), GUESSES)
def test_columns_are_found_by_telling_names(tmp_path: Path, columns: list[str], words: str) -> None:
    cells = [[f"{text} {name}" for text in REVIEWS] for name in columns]
    guess, _ = init_columns(tmp_path, dict(zip(columns, cells, strict=True)))
    assert words in guess


@pytest.mark.parametrize("empty", ["answer", "label"])
def test_an_empty_column_is_never_the_answer(tmp_path: Path, empty: str) -> None:
    """Another one is, or the command says how to let a critic grade."""
    guess, _ = init_columns(tmp_path, {"question": REVIEWS, empty: EMPTY, "output": MOODS})
    assert "reference from 'output'" in guess
    (tmp_path / "run.yaml").unlink()
    assert init_columns(tmp_path, {"question": REVIEWS, empty: EMPTY})[1] == ""
    assert init_columns(tmp_path, {"question": REVIEWS, empty: EMPTY}, "--grader", "critic")[1] == "critic"


def test_without_a_terminal_a_doubt_ends_with_the_complete_command(tmp_path: Path) -> None:
    """It has what was typed, the column that is in doubt, and the model if that is missing too; typed, it works."""
    data = tmp_path / "data.csv"
    with data.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["question", "note"], *zip(REVIEWS, MOODS, strict=True)])
    result = reflact("init", data, "--out", tmp_path / "run.yaml", "--description", "Sort mails.")
    assert_refused(result, "no column looks like the right answer")
    typed = result.stderr.strip().partition("type: reflact ")[2]
    assert typed.endswith(" --description 'Sort mails.' --reference COLUMN --model NAME")
    words = shlex.split(typed.replace("COLUMN", "note").replace("NAME", "m"))
    assert reflact(*words).exit_code == 0
    loaded = load_config(tmp_path / "run.yaml")
    assert (loaded.data.fields.reference, loaded.environment.description) == ("note", "Sort mails.")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_at_a_terminal_init_asks_what_it_doubts(tmp_path: Path) -> None:
    """Three rows are shown; an empty answer takes the guess, and another one is written."""
    import pty

    data, config = tmp_path / "data.csv", tmp_path / "run.yaml"
    with data.open("w", newline="", encoding="utf-8") as file:
        rows = zip(REVIEWS, MOODS, MOODS, strict=True)
        csv.writer(file).writerows([["question", "first_answer", "second_answer"], *rows])
    ours, theirs = pty.openpty()
    os.write(ours, b"second_answer\n\nsmall\nSort mails.\n")
    command = [sys.executable, "-c", MAIN, "init", str(data), "--out", str(config)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = ""
        while chunk := read_terminal(ours):
            said += chunk
    os.close(ours)
    assert process.returncode == 0, said
    assert [f"row {number}: " in said for number in range(1, 5)] == [True, True, True, False]
    loaded = load_config(config)
    assert (loaded.data.fields.reference, loaded.environment.grader) == ("second_answer", "normalized")
    assert (loaded.models.target.model, loaded.environment.description) == ("small", "Sort mails.")


def read_terminal(terminal: int) -> str:
    """Return what a process wrote next; empty at its end."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


def init_columns(folder: Path, columns: dict[str, list[str]], *options: str) -> tuple[str, str]:
    """Return what `init` says of a CSV file with these columns, and the grader that it writes."""
    data, config = folder / "data.csv", folder / "run.yaml"
    with data.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    result = reflact("init", data, "--out", config, "--model", "m", *options)
    return result.output, load_config(config).environment.grader if config.exists() else ""


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://[::1]:8000/v1", True),
        ("http://host.docker.internal:11434/v1", True),
        ("https://localhost.example.com/v1", False),
    ],
)
def test_a_server_on_this_machine_needs_no_key(tmp_path: Path, url: str, is_local: bool) -> None:
    """Its calls may also take longer than those of a provider."""
    path, data = tmp_path / "run.yaml", write_questions(tmp_path / "q.csv", 60)
    reflact("init", data, "--out", path, "--base-url", url, "--model", "m")
    target = load_config(path).models.target
    assert (target.api_key_env is None, target.timeout == 600) == (is_local, is_local)


def test_a_first_row_of_data_is_no_header(tmp_path: Path) -> None:
    """The name of a column that is also one of its values is refused."""
    data = tmp_path / "data.csv"
    data.write_text("\n".join(f"{a},{b}" for a, b in zip(REVIEWS, MOODS, strict=True)), encoding="utf-8")
    named = ("--input", REVIEWS[0], "--reference", "bad")
    result = reflact("init", data, "--out", tmp_path / "run.yaml", "--model", "m", *named)
    assert_refused(result, "'bad' is an answer and no name of a column; if the first row is an item")


SQUAD = [
    {"id": f"s{k}", "title": "T", "context": f"The well {k} is deep.", "question": f"Which well is it, {k}?"}
    for k in range(12)
]


@pytest.mark.parametrize("form", ["rows", "articles", "list"])
def test_files_of_reading_comprehension_are_read_as_they_are(tmp_path: Path, form: str) -> None:
    """SQuAD's own form, and that of its rows elsewhere, give the texts of the answers as right answers."""
    path, config = tmp_path / "squad.json", tmp_path / "run.yaml"
    starts = [{"text": "well", "answer_start": 4}, {"text": "The well", "answer_start": 0}]
    columns = {"text": ["well", "The well", "well"], "answer_start": [4, 0, 4]}
    rows: list[Any] = [
        {**row, "answers": columns if form == "rows" else [*starts, starts[0]]} for row in SQUAD
    ]
    if form == "articles":
        questions = [{name: row[name] for name in ("id", "question", "answers")} for row in rows]
        parts = [
            {"context": row["context"], "qas": [each]} for row, each in zip(rows, questions, strict=True)
        ]
        rows = [{"title": "T", "paragraphs": parts[:5]}, {"title": "U", "paragraphs": parts[5:]}]
    path.write_text(json.dumps(rows if form == "list" else {"version": "1", "data": rows}), encoding="utf-8")
    result = reflact("init", path, "--out", config, "--model", "m")
    assert result.exit_code == 0, result.output
    assert load_config(config).environment.grader == "normalized"
    items = {item.id: item for split in Split for item in load_dataset(path, None).items(split)}
    assert items["s3"].input == "The well 3 is deep.\n\nQuestion: Which well is it, 3?"
    assert items["s3"].reference == ["well", "The well"]


@pytest.mark.parametrize(
    ("row", "task", "answer", "grader"),
    [
        ({"instruction": "Count {}.", "input": "", "output": "n{}"}, "Count {}.", "n{}", "normalized"),
        ({"instruction": "Do {}.", "input": "Up.", "output": "n{}"}, "Do {}.\n\nUp.", "n{}", "normalized"),
        ({"question": "Add {}.", "answer": "It is so.\n#### {}"}, "Add {}.", "{}", "numeric"),
    ],
)
def test_rows_of_well_known_sets_are_read_as_they_are(
    tmp_path: Path, row: dict[str, str], task: str, answer: str, grader: str
) -> None:
    """Alpaca's instruction is not lost beside its input, and of GSM8K's answers the result counts."""
    path, config = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows = [{name: text.replace("{}", str(k)) for name, text in row.items()} for k in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = reflact("init", path, "--out", config, "--model", "m")
    assert result.exit_code == 0, result.output
    loaded = load_config(config)
    assert loaded.environment.grader == grader
    dataset = load_dataset(path, None, fields=loaded.data.fields)
    found = {str(item.input): item.reference for split in Split for item in dataset.items(split)}
    assert found[task.replace("{}", "7")] == answer.replace("{}", "7")


def test_assertions_of_promptfoo_are_refused(tmp_path: Path) -> None:
    """They are not right answers, and are not graded as if they were."""
    path = tmp_path / "promptfoo.json"
    path.write_text(json.dumps([{"input": "p", "__expected": "contains: x"}] * 2), encoding="utf-8")
    result = reflact("init", path, "--out", tmp_path / "run.yaml", "--model", "m")
    assert_refused(result, "has assertions about an answer", "--reference")


@pytest.mark.parametrize(
    ("answers", "grader"),
    [
        (["00501", "12345"], "exact"),
        (["1E2", "2E5"], "exact"),
        (["3.1", "3.10"], "exact"),
        (["1,000", "1000"], "numeric"),
        (["20240115", "20240101"], "numeric"),
        (["0.5", "-0.25"], "numeric"),
        (["+", "-"], "normalized"),
        ([") ] >", "} >"], "normalized"),
        (["a", "A"], "exact"),
        (["Paris", "Rome"], "normalized"),
        (["Yes.", "yes"], "exact"),
        (["10²", "102"], "normalized"),
    ],
)
def test_the_grader_tells_the_answers_of_the_data_apart(
    tmp_path: Path, answers: list[str], grader: str
) -> None:
    """Codes, versions and labels that differ in their case alone are compared to the letter."""
    guess, name = init_columns(tmp_path, {"question": REVIEWS, "answer": [answers[k % 2] for k in range(30)]})
    assert name == grader, guess


def test_fields_inside_of_objects_are_columns(tmp_path: Path) -> None:
    """`init` finds the task and the answer inside of objects, and `outer.inner` names them in the configuration."""
    path, config = tmp_path / "nested.jsonl", tmp_path / "run.yaml"
    rows = [
        {"row": {"question": f"Which one, {k}?", "hint": "h"}, "out": {"answer": f"a{k}", "at": k}}
        for k in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = reflact("init", path, "--out", config, "--model", "m")
    assert result.exit_code == 0, result.output
    assert "input from 'row.question', reference from 'out.answer'" in result.stdout
    assert "the target does not see 'row.hint', 'out.at'" in result.stdout
    fields = load_config(config).data.fields
    item = load_dataset(path, None, fields=fields).train[0]
    assert (str(item.input)[:9], str(item.reference)[0]) == ("Which one", "a")
    assert item.metadata.keys() == {"row.hint", "out.at"}


def test_init_never_overwrites(tmp_path: Path) -> None:
    """An existing file stays as it is; a model has to be named, and two columns differ."""
    data, config = write_questions(tmp_path / "sums.csv"), tmp_path / "run.yaml"
    assert "--model" in reflact("init", data, "--out", config).stderr
    same = ("--model", "m", "--input", "gold", "--reference", "gold")
    assert_refused(reflact("init", data, "--out", config, *same), "name two columns")
    config.write_text("mine", encoding="utf-8")
    assert_refused(reflact("init", data, "--out", config, "--model", "m"), "exists already")
    assert config.read_text(encoding="utf-8") == "mine"


def test_init_takes_the_instructions_to_begin_with(tmp_path: Path) -> None:
    """The configuration names the skill relative to itself; one that cannot be read stops the command."""
    data, skill = write_questions(tmp_path / "sums.csv"), tmp_path / "prompt.md"
    result = reflact("init", data, "--out", tmp_path / "run.yaml", "--model", "m", "--skill", skill)
    assert_refused(result, "cannot read the skill")
    assert not (tmp_path / "run.yaml").exists()
    skill.write_text("Add.", encoding="utf-8")
    config = tmp_path / "inner" / "run.yaml"
    config.parent.mkdir()
    result = reflact("init", data, "--out", config, "--model", "m", "--skill", skill)
    assert result.exit_code == 0, result.output
    assert 'skill: "../prompt.md"' in config.read_text(encoding="utf-8")
    assert (load_config(config).skill or Path()).resolve() == skill.resolve()


def test_hostile_names_and_texts_stay_inert(tmp_path: Path) -> None:
    """A model, a column and a cell that look like YAML or steer a terminal change nothing else; names are quoted."""
    path = tmp_path / "a.csv"
    config = tmp_path / "my run.yaml"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", "x\nbudget: {max_calls: 0}"])
        writer.writerows([f"q{k}", ["SELECT 1", "select 2"][k % 2], "\x1b[31m"] for k in range(9))
    result = reflact("init", path, "--out", config, "--model", "m: {a}\n")
    assert result.exit_code == 0, result.output
    assert f"next: reflact check '{config}'" in result.stdout
    assert "the target is also its own optimizer; --optimizer" in result.stdout
    assert "#   reflact train 'my run.yaml'\n" in config.read_text(encoding="utf-8")
    loaded = load_config(config)
    assert (loaded.environment.grader, loaded.models.target.model) == ("sql", "m: {a}\n")
    assert loaded.budget.max_calls is None


def test_check_grades_an_item_and_writes_nothing(tmp_path: Path) -> None:
    server = ModelServer()
    with serving(server.answer) as url:
        result = reflact("check", configured(tmp_path, url), *optimizer_of("big"))
        checked = reflact("check", configured(tmp_path, url), *optimizer_of("big"), "--json")
    assert result.exit_code == 0, result.output
    trial = SetupCheck.model_validate_json(checked.stdout).trial
    assert trial is not None
    assert trial.grade.answer == "4"
    for words in (
        "typed replies by json_schema",
        "price unknown",
        "answer: 4",
        "4 train, 3 validation, 3 test",
    ):
        assert words in result.stdout
    assert "hint: environment.description is empty" in result.stdout
    assert set(server.asked) == {"small", "big"}
    assert len(server.asked) <= 6
    assert not (tmp_path / "run").exists()


def refuse_key(handler: BaseHTTPRequestHandler) -> None:
    asked_of(handler)
    send(handler, {"error": {"message": "wrong key"}}, 401)


@pytest.mark.parametrize(
    ("answer", "change", "words"),
    [
        (refuse_key, "models.target.model=small", "refused the key"),
        (ModelServer().answer, "models.target.model=none", "models.target.model"),
        (ModelServer().answer, "models.optimizer.model=none", "models.optimizer.model"),
        (ModelServer().answer, "data.fields.input=ask", "row 1: there is no column 'ask'"),
    ],
)
def test_check_says_what_is_wrong(
    tmp_path: Path, answer: Callable[[BaseHTTPRequestHandler], None], change: str, words: str
) -> None:
    """A wrong key, model or file is exit code 2 and one sentence."""
    with serving(answer) as url:
        result = reflact("check", configured(tmp_path, url), *optimizer_of("big"), "--set", change)
    assert_refused(result, words)


def test_a_check_says_that_the_optimizer_cannot_reply_in_a_form(tmp_path: Path) -> None:
    """A model that answers no JSON is named with the keys that mend it, and without names of the program's parts."""
    with serving(say_four) as url:
        result = reflact("check", configured(tmp_path, url))
    assert_refused(
        result, "models.optimizer: small at", "none of its 3 replies had it", "models.optimizer.model"
    )
    assert "ReadyReply" not in result.stderr


@pytest.mark.parametrize(
    ("content", "finish", "tokens", "words"),
    [
        ("4", "stop", 9, None),
        ("4", "length", 9, "1 were cut off at models.target.max_tokens (50)"),
        (None, "length", 9, "1 were cut off at models.target.max_tokens (50)"),
        ("<think>4", "stop", 9, "1 were empty"),
        ("4", "stop", 2050, "for each token that its server counted: 1"),
    ],
)
def test_a_check_warns_of_a_cut_answer_and_a_cut_prompt(
    tmp_path: Path, content: str | None, finish: str, tokens: int, words: str | None
) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        is_target = asked_of(handler)["model"] == "small"
        whole = completion(ANSWERS["big"])
        if is_target:
            choice = {**whole["choices"][0], "finish_reason": finish}
            usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
            whole |= {
                "choices": [{**choice, "message": {"role": "assistant", "content": content}}],
                "usage": usage,
            }
        send(handler, whole)

    with serving(answer) as url:
        config = configured(tmp_path, url)
        if tokens > 2000:
            items = [{"id": str(n), "input": f"{n} + {n}? " * 3000, "reference": "2"} for n in range(10)]
            lines = [json.dumps(item) for item in items]
            (tmp_path / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
        result = reflact("check", config, *optimizer_of("big"), "--set", "models.target.max_tokens=50")
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert [words in line for line in warnings if words is not None] == ([] if words is None else [True])
    assert bool(warnings) is (words is not None)


def test_a_start_that_paid_nothing_does_not_lock_its_folder(tmp_path: Path) -> None:
    server = ModelServer()
    with serving(server.answer) as url:
        config = configured(tmp_path, url)
        failed = reflact("train", config, *optimizer_of("none"), "--show", "quiet")
        assert failed.exit_code == 2
        paid = reflact(
            "train", config, *optimizer_of("big"), "--set", "budget.max_calls=4", "--show", "quiet"
        )
        assert "max_calls" in paid.stderr
        other = reflact("train", config, *optimizer_of("big"), "--set", "seed=7", "--show", "quiet")
    assert_refused(other, "seed was 42 and is now 7")
