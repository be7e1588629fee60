"""How long hostile answers take to grade, and how long they keep the event loop from other work.

Beside each answer a task sleeps for five milliseconds at a time, and how much later it wakes is the lag. Printed
are the lag without any answer, and for each answer the time until it is graded, the longest lag, and the growth of
this process's largest memory.

    python benchmarks/graders.py
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from pydantic import JsonValue

from reflact.environments.graders import (
    Grader,
    JsonFieldsGrader,
    NormalizedGrader,
    NumericGrader,
    RegexGrader,
    TokenF1Grader,
    apply_grader,
)
from reflact.environments.python_grader import PythonGrader
from reflact.environments.sql_grader import SQLGrader, read_tables
from reflact.types import Item

SIZE = 1_500_000
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000)"
TEXTS = {"dots": ".", "words of dots": "... ", "marks on a letter": "\u0315\u0300", "articles": "the "}


def list_attacks(tables: bytes) -> list[tuple[str, Grader, JsonValue, str]]:
    """Return a name, a grader, a reference and an answer for each attack."""
    texts: list[tuple[str, Grader, JsonValue, str]] = [
        (f"{grade.name}: {name}", grade, "7", (text * SIZE)[:SIZE])
        for grade in (NormalizedGrader(), TokenF1Grader())
        for name, text in TEXTS.items()
    ]
    sql, python = SQLGrader(tables=tables), PythonGrader(seconds=2)
    steps = {
        "a huge printf": "SELECT printf('%.900000000c', 'x')",
        "ten huge printf": f"SELECT {', '.join(['printf(chr, 1)'.replace('chr', repr('%.900000000c'))] * 10)}",
        "a thousand megabytes": f"{NUMBERS} SELECT zeroblob(999999) FROM n",
        "gigabytes to sort": f"{NUMBERS} SELECT COUNT(*) FROM (SELECT zeroblob(990000 - i) b FROM n ORDER BY b LIMIT 999)",
        "a pattern": f"SELECT hex(zeroblob(499999)) LIKE '%{'0' * 40000}1'",
    }
    programs = {
        "a million lines": "print('\\n'.join('a' * 490000), 'x')",
        "bytes that are no text": "import os; os.write(1, b'\\xff' * 999999)",
        "memory": "x = bytearray(8 << 30)",
        "time": "while True: pass",
    }
    return [
        *texts,
        ("numeric: digits", NumericGrader(), "7", "1" * SIZE),
        ("json_fields: numbers", JsonFieldsGrader(), {"a": 1}, f'{{"b": [{"1," * 240_000}1]}}'),
        ("regex: nested repetitions", RegexGrader(), r"([a-z]+)*\d", "ab" * 20_000),
        *((f"sql: {name}", sql, "SELECT COUNT(*) FROM t", query) for name, query in steps.items()),
        *((f"python: {name}", python, {"stdout": "1"}, program) for name, program in programs.items()),
    ]


async def measure(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the seconds that work takes, and the longest lag of the loop meanwhile."""
    lags = [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await anyio.sleep(0.005)
            lags.append(time.monotonic() - before - 0.005)

    start = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.sleep(0.02)
        await work()
        await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    return time.monotonic() - start, max(lags)


async def main() -> None:
    """Measure all attacks and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.csv").write_text("a\n1\n", encoding="utf-8")
        attacks = list_attacks(read_tables(Path(folder)))

    async def grade(grader: Grader, reference: JsonValue, answer: str) -> None:
        try:
            await apply_grader(grader, Item(id="i", input="?", reference=reference), answer)
        except Exception as error:  # noqa: BLE001 - a failed item is an outcome
            outcomes.append(type(error).__name__)

    print("| answer | seconds | longest lag, ms | memory, MB | |")
    print("|---|---|---|---|---|")
    _, lag = await measure(lambda: anyio.sleep(2))
    print(f"| none | 2.0 | {lag * 1000:.0f} | 0 | |")
    for name, grader, reference, answer in attacks:
        outcomes: list[str] = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, lag = await measure(lambda: grade(grader, reference, answer))  # noqa: B023 - awaited at once
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"| {name} | {seconds:.1f} | {lag * 1000:.0f} | {grown:.0f} | {' '.join(outcomes)} |", flush=True
        )


if __name__ == "__main__":
    anyio.run(main)
