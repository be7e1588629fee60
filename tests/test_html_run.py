"""The page of a run: whole, self-contained, safe, bounded, and with what the run found."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from html_page import Node, assert_named, assert_self_contained, read, tables
from reflact import events
from reflact.reporting import RunReport, read_report, render_run_page
from reflact.reporting.html.items import MAX_ITEMS
from reflact.types import FrozenModel
from toy_runs import build_learning_trainer

MARKUP = (
    "</script></style></title><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'&amp;{{7*7}}\x1b[31m\u202ehttps://example.com/"
)
Model = TypeVar("Model", bound=FrozenModel)
SECTIONS = ["skill", "verdict", "items", "steps", "cost", "settings"]
MOST_BYTES = 10_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "run"
    anyio.run(build_learning_trainer(out).train)
    return out


@pytest.fixture(scope="module")
def report(folder: Path) -> RunReport:
    return anyio.run(read_report, folder)


@pytest.mark.parametrize(("source", "words"), [("examples", "Worked examples"), ("rewrite", "New document")])
async def test_the_page_shows_a_document_of_each_source(tmp_path: Path, source: str, words: str) -> None:
    await build_learning_trainer(tmp_path, search={"sources": [source]}).train()
    page = render_run_page(await read_report(tmp_path))
    assert f"<strong>{words}</strong>" in page
    assert "<dt>raced</dt>" in page


def find_section(root: Node, name: str) -> Node:
    return next(node for node in root.all("section") if node.attributes["id"] == name)


def poison(model: Model, text: str) -> Model:
    def change(value: Any) -> Any:
        if type(value) is str:
            return value + text
        match value:
            case FrozenModel():
                return poison(value, text)
            case tuple() | list():
                return type(value)(map(change, value))
            case dict():
                return {change(key): change(inner) for key, inner in value.items()}
        return value

    free = {
        name: getattr(model, name)
        for name, field in type(model).model_fields.items()
        if not name.endswith(("hash", "skill_before", "chosen")) or not isinstance(getattr(model, name), str)
        if not (isinstance(getattr(model, name), str) and "Literal" in repr(field.annotation))
    }
    return model.model_copy(update={name: change(value) for name, value in free.items()})


def enlarge(report: RunReport, *, steps: int, items: int, text: str = "") -> RunReport:
    report = poison(report, text) if text else report
    history = report.history
    matrix = report.matrices[0]
    copies = [
        matrix.rows[n % len(matrix.rows)].model_copy(update={"item_id": f"item-{n}"}) for n in range(items)
    ]
    matrices = (matrix.model_copy(update={"rows": tuple(copies)}),)
    records = [history.steps[0].model_copy(update={"step": n + 1}) for n in range(steps)]
    ends = [history.epochs[0].model_copy(update={"epoch": n + 1, "step": n + 1}) for n in range(steps)]
    update = {"steps": tuple(records), "epochs": tuple(ends)}
    return report.model_copy(update={"history": history.model_copy(update=update), "matrices": matrices})


def test_a_page_has_what_the_run_found(report: RunReport) -> None:
    root = read(render_run_page(report))
    assert_named(root)
    assert [node.attributes["id"] for node in root.all("section")] == SECTIONS
    summary = report.history.summary
    assert summary is not None
    assert summary.verdict in next(root.all("header")).text
    commits = [
        node.attributes["id"] for node in find_section(root, "steps").all("div") if "id" in node.attributes
    ]
    assert commits == ["step-1", "step-2", "epoch-1", "step-3", "step-4", "epoch-2"]
    steps = find_section(root, "steps").text
    for words in ("verdict", "supported by", "asked for by an analysis of", "applied", "guidance", "cost"):
        assert words in steps
    items = find_section(root, "items")
    assert [node.text for node in items.all("h3")] == ["Test", "Validation"]
    rows = [row for row in items.all("li") if "data-outcome" in row.attributes]
    assert {
        next(row.all("details")).text.count(text) > 0 for row in rows for text in ("input", "expected")
    } == {True}
    assert len(rows) == sum(len(matrix.rows) for matrix in report.matrices) == 8
    assert report.note is None
    scores = {row[0]: row[3] for row in tables(root)["Test scores"][1:]}
    assert [name.split("the")[0].split("a text")[0].split("always")[0] for name in scores][:2] == [
        "baseline",
        "placebo",
    ]
    settings = dict(tables(root)["Settings that differ from the defaults"][1:])
    assert settings["train.num_epochs"] == "2"


def test_each_line_of_the_skill_names_the_commit_that_brought_it(report: RunReport) -> None:
    """Versions are complete, the best one is open, and each note leads to a commit on the page."""
    root = read(render_run_page(report))
    versions = list(find_section(root, "skill").all("details"))
    shown = {
        next(node.all("div")).attributes["id"]: node
        for node in versions
        if node.attributes.get("name") == "version"
    }
    assert list(shown) == [f"v{text.version.number}" for text in report.texts]
    assert [name for name, node in shown.items() if "open" in node.attributes] == [f"v{report.best}"]
    for text, node in zip(report.texts, shown.values(), strict=True):
        blocks = [part for part in node.all("div") if "block" in part.attributes.get("class", "")]
        assert "".join(next(block.all("pre")).text for block in blocks) == text.skill.text
        for block in blocks:
            (note,) = block.all("p")
            (link,) = note.all("a")
            record = next(each for each in report.history.steps if f"step {each.step}:" in link.text)
            assert link.attributes["href"] == f"#step-{record.step}"
            assert record.created_versions
            assert re.search(r", \d+ cases?$", note.text)


def test_a_page_asks_for_nothing_and_runs_one_script(report: RunReport) -> None:
    for shown in (report, poison(report, MARKUP)):
        root = read(render_run_page(shown))
        policy = assert_self_contained(root)
        assert not [node for node in root.all() if "style" in node.attributes]
        (script,) = root.all("script")
        assert "alert" not in script.text
        assert not re.search(r"https?:|innerHTML|eval|fetch", script.text)
        digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
        assert policy.endswith(f"; script-src 'sha256-{digest}'")


def test_hostile_text_stays_text(report: RunReport) -> None:
    page = render_run_page(poison(report, MARKUP))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)
    root = read(page)
    for section in set(SECTIONS) - {"cost"}:
        assert "<img src=x onerror=alert(2)>" in find_section(root, section).text, section
    clean = read(render_run_page(report))
    kinds = [{node.name for node in one.all()} for one in (root, clean)]
    assert kinds[0] <= kinds[1] | {"del", "small", "ul"}


def test_equal_runs_are_equal_pages(folder: Path, report: RunReport) -> None:
    page = render_run_page(report)
    assert page == render_run_page(report.model_copy(deep=True))
    assert page.encode() == (folder / "report.html").read_bytes()


async def test_a_page_says_what_is_not_there_yet(tmp_path: Path, report: RunReport) -> None:
    empty = {"steps": (), "epochs": (), "versions": (), "events": (), "summary": None}
    history = report.history.model_copy(update=empty)
    page = render_run_page(RunReport(history=history, note="nothing is measured"))
    assert "The run is under way: 0 steps so far." in page
    assert "nothing is measured" in page
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    seen = [event async for event in build_learning_trainer(tmp_path / "run").stream()]
    warnings = [event.message for event in seen if isinstance(event, events.WarningIssued)]
    assert [message for message in warnings if "the page of the run could not be written" in message]
    assert isinstance(seen[-1], events.RunFinished)
    assert seen[-1].summary.status == "completed"


@pytest.mark.slow
def test_large_runs_and_long_texts_have_a_small_page(report: RunReport) -> None:
    page = render_run_page(enlarge(report, steps=200, items=10_000))
    assert len(page.encode()) < MOST_BYTES
    root = read(page)
    assert f"{10_000 - MAX_ITEMS:,} items are not on this page" in find_section(root, "items").text
    assert len([node for node in find_section(root, "steps").all("div") if "id" in node.attributes]) == 400
    long = render_run_page(enlarge(report, steps=200, items=5_000, text='"' * 9_000))
    assert len(long.encode()) < MOST_BYTES
    assert "long texts lost the middle" in long
