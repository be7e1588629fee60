"""The identity of a caller's function: its code and what it takes from around it, the same in every process."""

from __future__ import annotations

import functools
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

from reflact.environments.function_identity import identify_function
from reflact.types import Item

Function = Callable[..., Any]

GRADE = """\
LIMIT, WORDS = 0.5, {"us": "usa"}
def read(text):
    return text.strip()
def grade(item, answer, *, strict=True):
    return any(WORDS.get(read(part)) == item.reference for part in answer.split()) > LIMIT
"""


def load(source: str) -> Function:
    space: dict[str, Any] = {"__name__": "own"}
    exec(compile(source, "own.py", "exec"), space)
    function: Function = space["grade"]
    return function


def test_a_functions_code_and_what_it_uses_are_its_identity() -> None:
    """A helper, a table and a default count like its own lines; comments and layout do not."""
    before = identify_function(load(GRADE))
    assert re.fullmatch(r"own\.grade#[0-9a-f]{16}", before)
    same = {
        "    return text.strip()": "    # a comment\n    return  text . strip()",
        "LIMIT, WORDS = 0.5": "OTHER = 1\nLIMIT, WORDS = 0.5",
    }
    other = {") > LIMIT": ") >= LIMIT", "0.5": "0.6", "usa": "us", "text.strip()": "text", "True": "False"}
    for old, new in {**same, **other}.items():
        is_same = identify_function(load(GRADE.replace(old, new))) == before
        assert is_same == (old in same), old


def make_grade(strict: Any) -> Function:

    def grade(item: Item, answer: str) -> bool:
        return bool(strict) or answer == item.reference

    return grade


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


VALUES: list[Any] = [True, False, 1, "1", Decimal(1), (1, 2), [1, 3], {"a": 1}, {1, 2}, re.compile("a")]


def test_functions_of_one_place_are_told_apart() -> None:
    functions = [
        *map(make_grade, [*VALUES, make_grade(2)]),
        *(functools.lru_cache(make_grade(value)) for value in (True, False)),
        lambda item, answer: answer == "a",
        lambda item, answer: answer == "b",
        *(functools.partial(operator.eq, value) for value in (1, 2)),
        *(functools.partial(one, answer="a") for one in (make_grade(True), make_grade(False))),
        *(Marker(mark) for mark in (0.1, 0.2)),
        *(Marker(mark).grade for mark in (0.1, 0.2)),
    ]
    names = list(map(identify_function, functions))
    assert [name for name in names if names.count(name) > 1] == []
    assert identify_function(make_grade({"a": 1})) == names[VALUES.index({"a": 1})]


def test_changes_that_a_function_makes_are_no_part_of_it() -> None:
    seen: list[str] = []
    total = 0

    def grade(item: Item, answer: str, cache: dict[str, int] = {}) -> int:  # noqa: B006
        nonlocal total
        total += 1
        seen.append(answer)
        cache[answer] = total
        return 1

    functions = (grade, Marker(0.5))
    before = list(map(identify_function, functions))
    for function in functions:
        function(Item(id="a", input="x"), "b")
    assert list(map(identify_function, functions)) == before


def test_values_that_contain_each_other_end() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert identify_function(even) != identify_function(odd)
    names = [identify_function(make_grade(value)) for value in (call, MagicMock(), MagicMock())]
    assert names[1] == names[2] != names[0]


def test_an_identity_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = "WORDS = {'a', 'b', 'c', 'd'}\ndef grade(item, answer):\n    return answer in WORDS or answer in {'e', 'f'}\n"
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    code = "import own; from reflact.environments.function_identity import identify_function; print(identify_function(own.grade))"
    names = set()
    for seed in ("1", "2"):
        variables = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        names.add(subprocess.check_output(command, cwd=tmp_path, env=variables, text=True))
    assert len(names) == 1
