"""The grader of queries: what counts as the same result, and what a query cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflact.environments.sql_grader import SQLGrader, read_tables
from reflact.errors import ConfigError, DataError
from reflact.types import Grade, Item


@pytest.fixture
def grader(tmp_path: Path) -> SQLGrader:
    (tmp_path / "rivers.csv").write_text(
        "name,country,km\nElbe,CZ,1094\nRhine,CH,1233\nTagus,ES,1007\nWeser,DE,452.5\n", encoding="utf-8"
    )
    return SQLGrader(tables=read_tables(tmp_path))


def graded(grader: SQLGrader, reference: str, answer: str) -> Grade:
    return grader(Item(id="i", input="?", reference=reference), answer)


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("SELECT COUNT(*) FROM rivers", "select count(name) from rivers;", True),
        ("SELECT name FROM rivers", "SELECT name FROM rivers ORDER BY km", True),
        ("SELECT name FROM rivers ORDER BY km", "SELECT name FROM rivers", False),
        ("SELECT km FROM rivers", "SELECT km * 1.0 FROM rivers ORDER BY name DESC", True),
        ("SELECT km FROM rivers", "SELECT km + 0.1 FROM rivers", False),
        ("SELECT km FROM rivers WHERE name = 'x'", "SELECT name FROM rivers WHERE km < 0", True),
        ("SELECT SUM(km) FROM rivers", "SELECT name, SUM(km) FROM rivers", False),
    ],
)
def test_results_are_compared(grader: SQLGrader, reference: str, answer: str, right: bool) -> None:
    """Rows decide, not the words of the query; order counts where the reference orders."""
    assert (graded(grader, reference, answer).score.hard == 1) is right


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "```sql\nSELECT 1\n```",
        "SELECT 1; SELECT 2",
        "DROP TABLE rivers",
        "INSERT INTO rivers VALUES ('a', 'b', 1)",
        "ATTACH DATABASE 'x.db' AS x",
        "PRAGMA writable_schema = 1",
        "SELECT random()",
        "SELECT load_extension('x')",
        "SELECT hex(zeroblob(300000000))",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT a.name FROM rivers a, rivers b, rivers c, rivers d, rivers e, rivers f",
    ],
)
def test_what_is_no_contained_query_fails_with_a_reason(grader: SQLGrader, answer: str) -> None:
    """Writing, attaching, several statements, endless loops and floods of rows score 0 and say why."""
    outcome = graded(grader, "SELECT COUNT(*) FROM rivers", answer)
    assert outcome.score.hard == 0
    assert outcome.feedback
    assert graded(grader, "SELECT COUNT(*) FROM rivers", "SELECT 4").score.hard == 1


def test_a_bad_reference_is_told_before_anything_runs(grader: SQLGrader) -> None:
    """A reference that is no query that runs is an error naming the item."""
    with pytest.raises(DataError, match="'i'"):
        grader.check(Item(id="i", input="?", reference="SELECT nothing FROM nowhere"))


def test_tables_are_part_of_the_identity(tmp_path: Path) -> None:
    """Other tables give another identity, so scores are never mixed."""
    (tmp_path / "t.csv").write_text("a\n1\n", encoding="utf-8")
    before = SQLGrader(tables=read_tables(tmp_path)).identity
    (tmp_path / "t.csv").write_text("a\n2\n", encoding="utf-8")
    assert SQLGrader(tables=read_tables(tmp_path)).identity != before


@pytest.mark.parametrize("content", [None, "a,b\n1\n", "", 'a\n"open'])
def test_tables_that_cannot_be_read_are_one_sentence(tmp_path: Path, content: str | None) -> None:
    """No table, an empty one, ragged rows and broken quotes are configuration errors."""
    if content is not None:
        (tmp_path / "t.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"environment\.tables"):
        read_tables(tmp_path)
