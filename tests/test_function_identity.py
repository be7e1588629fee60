"""The identity of a caller's function: its code and what it takes from around it, the same in every process."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from reflact.environments.graders import identify_function
from reflact.types import Item

Function = Callable[..., Any]


def load(folder: Path, source: str, name: str = "grade") -> Function:
    """Return a function of a new module; the file keeps its name, as when a person edits it."""
    path = folder / "own.py"
    path.write_text(source, encoding="utf-8")
    space: dict[str, Any] = {"__name__": "own"}
    exec(compile(source, str(path), "exec"), space)
    function: Function = space[name]
    return function


GRADE = """\
LIMIT, WORDS = 0.5, {"us": "usa"}
def read(text):
    return text.strip()
def grade(item, answer, *, strict=True):
    return any(WORDS.get(read(part)) == item.reference for part in answer.split()) > LIMIT
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("", "", True),
        ("    return text.strip()", "    # a comment\n    return  text . strip()", True),
        ("LIMIT, WORDS = 0.5", "OTHER = 1\nLIMIT, WORDS = 0.5", True),
        (") > LIMIT", ") >= LIMIT", False),
        ("0.5", "0.6", False),
        ("usa", "america", False),
        ("text.strip()", "text.strip().lower()", False),
        ("strict=True", "strict=False", False),
    ],
)
def test_a_functions_code_and_what_it_uses_are_its_identity(
    tmp_path: Path, old: str, new: str, is_same: bool
) -> None:
    """A helper, a table and a default count like the function's own lines; comments, layout and other lines do not."""
    before = identify_function(load(tmp_path, GRADE))
    assert re.fullmatch(r"own\.grade#[0-9a-f]{16}", before)
    assert (identify_function(load(tmp_path, GRADE.replace(old, new))) == before) is is_same


def test_code_without_source_is_read_from_its_bytes() -> None:
    """A function of a prompt has byte code only: its constants, names and inner functions count."""
    bodies = [
        "item.a == 1",
        "item.a == 2",
        "item.b == 1",
        "any(x == 1 for x in item)",
        "any(x == 2 for x in item)",
    ]
    found = [eval(f"lambda item, answer: {body}") for body in (*bodies, bodies[0])]
    names = list(map(identify_function, found))
    assert len(set(names)) == len(bodies)
    assert names[0] == names[-1]


def make_grade(strict: Any) -> Function:
    """Return a function with a value of its own."""

    def grade(item: Item, answer: str) -> bool:
        return bool(strict) or answer == item.reference

    return grade


def log_calls(function: Function) -> Function:
    """Wrap a function so that it keeps its name."""

    @functools.wraps(function)
    def inner(*values: Any) -> Any:
        return function(*values)

    return inner


class Marker:
    """An object that grades, and counts."""

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.calls = 0

    def __call__(self, item: Item, answer: str) -> float:
        self.calls += 1
        return self.mark

    def grade(self, item: Item, answer: str) -> float:
        return self.mark / 2


PAIR = (lambda item, answer: answer == "a"), (lambda item, answer: answer == "b")


def test_functions_of_one_place_are_told_apart() -> None:
    """Closures, lambdas of one line, wrapped functions, partials, methods and objects differ where their scores may."""
    values: list[Any] = [
        True,
        False,
        1,
        "1",
        Decimal(1),
        (1, 2),
        [1, 3],
        {"a": 1},
        {1, 2},
        re.compile("a"),
        make_grade(2),
    ]
    functions = [
        *map(make_grade, values),
        *(log_calls(make_grade(value)) for value in (True, False)),
        *(functools.lru_cache(make_grade(value)) for value in (True, False)),
        *PAIR,
        *(functools.partial(operator.eq, value) for value in (1, 2)),
        *(functools.partial(one, answer="a") for one in (make_grade(True), make_grade(False))),
        *(Marker(mark) for mark in (0.1, 0.2)),
        *(Marker(mark).grade for mark in (0.1, 0.2)),
    ]
    names = list(map(identify_function, functions))
    assert [name for name in names if names.count(name) > 1] == []
    assert identify_function(make_grade({"a": 1})) == names[values.index({"a": 1})]


def test_what_a_function_changes_is_no_part_of_it() -> None:
    """A cache, a log and a counter may grow between two starts of one process."""
    seen: list[str] = []
    total = 0

    def grade(item: Item, answer: str, cache: dict[str, int] = {}) -> int:  # noqa: B006
        nonlocal total
        total += 1
        seen.append(answer)
        cache[answer] = total
        return 1

    marker = Marker(0.5)
    before = [identify_function(function) for function in (grade, marker)]
    for function in (grade, marker):
        function(Item(id="a", input="x"), "b")
    assert [identify_function(function) for function in (grade, marker)] == before


@pytest.mark.parametrize("function", [operator.eq, str.casefold, json.dumps])
def test_code_that_is_not_read_is_told(function: Function, caplog: pytest.LogCaptureFixture) -> None:
    """A function of C or of an installed package has its name alone, and a line says so."""
    assert "#" not in identify_function(function)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_objects_that_answer_to_any_name_end() -> None:
    """A stand-in of a test has every attribute; it counts by its type."""
    names = [identify_function(make_grade(value)) for value in (call, MagicMock(), MagicMock())]
    assert names[1] == names[2] != names[0]


def test_functions_that_call_each_other_end() -> None:
    """A function is read once, however often and wherever it is called."""

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert identify_function(even) != identify_function(odd)


def test_an_identity_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets and texts have another order in each process; the digest has not."""
    (tmp_path / "own.py").write_text(
        "WORDS = {'a', 'b', 'c', 'd'}\ndef grade(item, answer):\n    return answer in WORDS or answer in {'e', 'f', 'g'}\n"
        'plain = eval(\'lambda item, answer: answer in {"e", "f", "g"}\')\n',
        encoding="utf-8",
    )
    code = (
        "import own; from reflact.environments.graders import identify_function as name; "
        "print(name(own.grade), name(own.plain))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
