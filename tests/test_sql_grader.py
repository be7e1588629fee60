"""The grader of SQL queries: equal results, refused queries, and queries that want too much."""

from __future__ import annotations

import gc
import os
import re
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from doubles import check_beside_loop
from processes import is_busy, is_gone, is_locked_in, list_children, until
from reflact.concurrency import fan_out, open_task_group
from reflact.config.training import EnvironmentConfig
from reflact.environments.sql_grader import MAX_QUERY_CHARS, SQLGrader, read_tables
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.processes.sandbox import can_confine
from reflact.types import Grade, Item

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {})"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
LONG_STEP = "SELECT " + " + ".join(f"length(printf('%.{n}c', 'x'))" for n in range(900_000_000, 900_000_005))
COUNT = "SELECT COUNT(*) FROM rivers"


@pytest.fixture
def grader(tmp_path: Path) -> SQLGrader:
    (tmp_path / "rivers.csv").write_text(
        "name,country,km\nElbe,CZ,1094\nRhine,CH,1233\nTagus,ES,1007\nWeser,DE,452.5\n", encoding="utf-8"
    )
    return SQLGrader(tables=read_tables(tmp_path))


async def graded(grader: SQLGrader, reference: str, answer: str) -> Grade:
    return await grader(Item(id="i", input="?", reference=reference), answer)


async def start_process(grader: SQLGrader) -> str:
    """Return the id of the process that serves a grader; it waits for a query."""
    others = list_children()
    await graded(grader, COUNT, "SELECT 4")
    (process,) = list_children() - others
    await until(lambda: not is_busy(process))
    return process


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        (COUNT, "select count(name) from rivers;", True),
        ("SELECT name FROM rivers", "SELECT name FROM rivers ORDER BY km", True),
        ("SELECT name FROM rivers ORDER BY km", "SELECT name FROM rivers", False),
        ("SELECT km FROM rivers", "SELECT km * 1.0 FROM rivers ORDER BY name DESC", True),
        ("SELECT km FROM rivers", "SELECT km + 0.1 FROM rivers", False),
        ("SELECT 1000000", "SELECT 1000000.0001", True),
        ("SELECT 1000000", "SELECT 1000001", False),
        ("SELECT 4111111111111111111", "SELECT 4111111111111111112", False),
        ("SELECT km FROM rivers WHERE name = 'x'", "SELECT name FROM rivers WHERE km < 0", True),
        ("SELECT SUM(km) FROM rivers", "SELECT name, SUM(km) FROM rivers", False),
        ("SELECT '2024-02-29'", "SELECT date('2024-02-28', '+1 day')", True),
        ("SELECT '2024'", "SELECT strftime('%Y', 1709164800, 'unixepoch')", True),
        ("SELECT NULL", "SELECT date(NULL)", True),
        ("SELECT 2460369", "SELECT julianday('2024-02-28 12:00')", True),
        ("SELECT '2024-01-01 00:00:00'", "SELECT datetime('2024-01-01', 'localtime')", True),
        ("SELECT x'00ff', NULL", "SELECT x'00ff', NULL", True),
    ],
)
async def test_results_are_compared(grader: SQLGrader, reference: str, answer: str, right: bool) -> None:
    """Rows decide, not the words of the query; order counts where the reference orders."""
    assert ((await graded(grader, reference, answer)).score.hard == 1) is right


CURRENT = (
    *("date('now')", "date()", "time('NOW')", "datetime()", "julianday()", "strftime('%Y')"),
    *("strftime('%s', 'now')", "unixepoch('now')", "CURRENT_DATE", "current_time", "CURRENT_TIMESTAMP"),
    *("datetime(x'6e6f77')", "date('n' || 'ow')", "date('now' || char(0) || 'x')"),
    *("date(lower('NOW'), '+1 day')", "timediff('2020-01-01', 'now')", "timediff('now', '2020-01-01')"),
    *("unixepoch('subsec')", "date('subsecond')", "date((SELECT 'now'))"),
)


async def test_the_current_time_is_refused(grader: SQLGrader) -> None:
    """A query cannot learn the time, however it asks; the reason says so."""
    queries = [f"SELECT {call}" for call in CURRENT]
    queries.append(f"{NUMBERS.format(2)} SELECT date('now', i || ' days') FROM n")
    for query in queries:
        outcome = await graded(grader, COUNT, query)
        assert outcome.score.hard == 0, query
        assert re.search("not a|no such function", str(outcome.feedback)), query


CONTAINED = (
    *("", "```sql\nSELECT 1\n```", "SELECT 1; SELECT 2", "SELECT '\ud800'", "SELECT 1\0 2"),
    *("DROP TABLE rivers", "INSERT INTO rivers VALUES ('a', 'b', 1)", "CREATE TEMP TABLE t AS SELECT 1"),
    *("ATTACH DATABASE 'x.db' AS x", "ATTACH DATABASE '/etc/passwd' AS x", "VACUUM INTO 'x.db'"),
    *("PRAGMA writable_schema = 1", "PRAGMA hard_heap_limit = 0", "PRAGMA temp_store_directory = '/tmp'"),
    *("SELECT * FROM pragma_database_list", "SELECT random()", "SELECT hex(randomblob(900000000))"),
    *("SELECT load_extension('x')", "SELECT writefile('x', 'y')", "SELECT hex(zeroblob(300000000))"),
    "SELECT replace(hex(zeroblob(400000)), '0', hex(zeroblob(400000)))",
    "SELECT zeroblob(1000000001)",
    f"{NUMBERS.format(100000)} SELECT group_concat(hex(zeroblob(1000))) FROM n",
    f"{NUMBERS.format(100)} SELECT zeroblob(900000) FROM n",
    f"SELECT {', '.join(['zeroblob(999999)'] * 1000)}",
    f"SELECT {'(' * 2000}1{')' * 2000}",
    f"SELECT 1 {'UNION ALL SELECT 1 ' * 2000}",
    f"SELECT '{'x' * MAX_QUERY_CHARS}'",
    ENDLESS,
    "SELECT a.name FROM rivers a, rivers b, rivers c, rivers d, rivers e, rivers f",
)


async def test_what_is_no_contained_query_fails_with_a_reason(grader: SQLGrader) -> None:
    """Writing, attaching, several statements, endless loops and floods score 0 and say why."""
    for answer in CONTAINED:
        outcome = await graded(grader, COUNT, answer)
        assert outcome.score.hard == 0, answer[:40]
        assert 0 < len(str(outcome.feedback)) <= 400
        assert (await graded(grader, COUNT, "SELECT 4")).score.hard == 1, answer[:40]


GREEDY = (
    f"{NUMBERS.format(1000)} SELECT COUNT(*) FROM (SELECT zeroblob(990000 - i) AS b FROM n ORDER BY b LIMIT 999)",
    f"{NUMBERS.format(1000)} SELECT COUNT(DISTINCT hex(zeroblob(450000 - i))) FROM n",
    f"{NUMBERS.format(100000)} SELECT length(group_concat(b, '')) FROM (SELECT hex(zeroblob(i)) AS b FROM n ORDER BY b)",
)


@pytest.mark.parametrize("answer", GREEDY)
async def test_memory_is_limited(grader: SQLGrader, answer: str) -> None:
    """A query that wants gigabytes ends its process and nothing else; the next answer has a new one."""
    process = await start_process(grader)
    assert "too much memory" in str((await graded(grader, COUNT, answer)).feedback)
    assert is_gone(process)
    assert (await graded(grader, COUNT, "SELECT 4")).score.hard == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        LONG_STEP,
        f"SELECT hex(zeroblob(499999)) LIKE '%{'0' * 40000}1'",
        f"{NUMBERS.format(10000)} SELECT SUM(instr(hex(zeroblob(499999 - i)), hex(zeroblob(200000)) || '1')) FROM n",
    ],
    ids=["printf", "LIKE", "instr"],
)
async def test_time_is_limited_within_a_step(grader: SQLGrader, answer: str) -> None:
    """A step that takes too long ends the process, and the loop goes on meanwhile."""
    process = await start_process(grader)
    outcome = await check_beside_loop(lambda: graded(grader, COUNT, answer))
    assert "seconds of processor time" in str(outcome.feedback)
    assert is_gone(process)
    assert (await graded(grader, COUNT, "SELECT 4")).score.hard == 1


async def test_a_process_serves_many_answers(grader: SQLGrader) -> None:
    others = list_children()
    first = await start_process(grader)
    await graded(grader, COUNT, "SELECT nothing")
    assert list_children() - others == {first}
    await fan_out(lambda _: graded(grader, COUNT, "SELECT 4"), range(50))
    assert len(list_children() - others) <= (os.cpu_count() or 1)


@pytest.mark.skipif(not can_confine(), reason="this system cannot confine a process")
async def test_the_process_is_confined(grader: SQLGrader) -> None:
    assert is_locked_in(await start_process(grader))


def test_a_process_ends_with_its_grader(tmp_path: Path) -> None:
    (tmp_path / "rivers.csv").write_text("name\nElbe\n", encoding="utf-8")
    grader = SQLGrader(tables=read_tables(tmp_path))
    process = anyio.run(start_process, grader)
    assert not is_gone(process)
    del grader
    gc.collect()
    anyio.run(until, lambda: is_gone(process))


async def test_a_process_that_was_killed_is_no_wrong_answer(grader: SQLGrader) -> None:
    """If it is ended during an answer, this has no score; if it is idle, nobody notices."""
    process = await start_process(grader)

    async def grade_and_kill() -> None:
        async with open_task_group() as tasks:
            tasks.start_soon(partial(graded, grader, COUNT, LONG_STEP))
            await until(lambda: is_busy(process))
            os.kill(int(process), 9)

    with pytest.raises(EnvironmentFailure, match="killed"):
        await grade_and_kill()
    assert (await graded(grader, COUNT, "SELECT 4")).score.hard == 1


async def test_a_process_that_died_idle_is_replaced(grader: SQLGrader) -> None:
    """If it ends between two answers, nobody notices."""
    process = await start_process(grader)
    os.kill(int(process), 9)
    await until(lambda: is_gone(process))
    several = Item(id="i", input="?", reference=["SELECT 1", "SELECT 2"])
    assert [(await grader(several, f"SELECT {n}")).score.hard for n in (1, 2, 3)] == [1, 1, 0]


async def test_cancelling_ends_the_query(grader: SQLGrader) -> None:
    process = await start_process(grader)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(graded, grader, COUNT, LONG_STEP)
        await until(lambda: is_busy(process))
        tasks.cancel_scope.cancel()
    await until(lambda: is_gone(process))
    assert (await graded(grader, COUNT, "SELECT 4")).score.hard == 1


@pytest.mark.parametrize("reference", ["SELECT nothing FROM nowhere", "SELECT date('now')", ENDLESS, "", 3])
async def test_a_bad_reference_is_told_before_anything_runs(grader: SQLGrader, reference: str | int) -> None:
    item = Item(id="i", input="?", reference=reference)
    with pytest.raises(DataError, match="'i'"):
        grader.check(item)
    with pytest.raises(DataError, match="'i'"):
        await grader(item, "SELECT 4")


@pytest.mark.parametrize("content", [None, "a,b\n1\n", "", 'a\n"open'])
def test_tables_that_cannot_be_read_are_one_sentence(tmp_path: Path, content: str | None) -> None:
    """No table, an empty one, ragged rows and broken quotes are configuration errors."""
    if content is not None:
        (tmp_path / "t.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"environment\.tables"):
        read_tables(tmp_path)


@pytest.mark.parametrize("journal", ["delete", "wal"])
async def test_a_database_is_only_read(tmp_path: Path, journal: str) -> None:
    """A SQLite file is read with what its log has, and queries change nothing in it."""
    file = tmp_path / "shop#1.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("CREATE TABLE item (price INTEGER)")
        connection.execute("INSERT INTO item VALUES (3)")
        connection.commit()
        before = file.read_bytes()
        grader = SQLGrader(tables=read_tables(file))
        item = Item(id="q", input="?", reference="SELECT 3")
        assert (await grader(item, "SELECT price FROM item")).score.hard == 1
        assert (await grader(item, "DELETE FROM item")).score.hard == 0
        assert file.read_bytes() == before
    with pytest.raises(ConfigError, match="name a SQLite file or a folder"):
        read_tables(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


def test_a_connection_string_is_a_file() -> None:
    assert EnvironmentConfig.model_validate({"tables": "sqlite:///a/b.db"}).tables == Path("a/b.db")
    with pytest.raises(ValidationError, match="only SQLite files can be read"):
        EnvironmentConfig.model_validate({"tables": "postgresql://host/shop"})
