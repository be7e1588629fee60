"""``reflact serve``: pages of runs that follow their stores, refuse strangers, and never run what a run wrote."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import anyio
import httpx
import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from chromium import asked, needs_chromium, opened, resize, unreached, violations
from html_page import read, tables
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.reporting.html.serve import create_run_pages
from reflact.testing import toy_optimizer
from reflact.types import Skill, Split
from served import reflact_process
from toy_runs import build_learning_trainer, document

HOSTILE = "<img src=x onerror=alert(1)>"

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "runs"
    anyio.run(build_learning_trainer(folder / "first", train={"num_epochs": 1, "batch_size": 4}).train)
    copytree(folder / "first", folder / HOSTILE)
    return folder


@asynccontextmanager
async def client(
    folder: Path, *, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_run_pages(folder, **options))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as asking:
        yield asking


async def test_runs_are_listed_and_shown(runs: Path) -> None:
    async with client(runs) as asking:
        listing = read((await asking.get("/")).text)
        rows = tables(listing)["Runs, the newest first"][1:]
        names = [re.sub(r"r[0-9a-f]{12}$", "", row[0]) for row in rows]
        assert sorted(names) == sorted(["first", HOSTILE])
        assert {tuple(row[2:5]) for row in rows} == {("completed", "toygrade_toy", "2")}
        assert all(re.fullmatch(r"[01]\.\d{3}test, baseline 0\.000", row[5]) for row in rows)
        addresses = [a.attributes["href"] for a in listing.all("a") if "/runs/" in a.attributes["href"]]
        for address in addresses:
            page = await asking.get(address)
            assert page.status_code == 200
            live = next(node for node in read(page.text).all("div") if node.attributes.get("id") == "live")
            assert live.attributes["data-events"] == f"{address}/events"
            assert "Completed: 2 steps" in live.text
        assert not [*listing.all("img")]
        assert (await asking.get("/runs/unknown")).status_code == 404


async def test_an_eval_has_a_page_of_its_own(tmp_path: Path) -> None:
    """Its documents are the columns of its items, and its page has no steps and no skill of the run."""
    measured = Skill(text=document("double"))
    trainer = build_learning_trainer(tmp_path)
    await trainer.compare(measured, [Skill(text=document("square"))], Split.val)
    async with client(tmp_path) as asking:
        listing = read((await asking.get("/")).text)
        (row,) = tables(listing)["Runs, the newest first"][1:]
        assert "eval of skill" in row[0]
        (link,) = (
            a for a in listing.all("a") if "/runs/e" in a.attributes["href"] or "-e" in a.attributes["href"]
        )
        page = read((await asking.get(link.attributes["href"])).text)
    assert [node.attributes["id"] for node in page.all("section")] == ["verdict", "items", "cost", "settings"]
    assert [row[0] for row in tables(page)["Validation scores"][1:]] == ["skill", "other_1"]
    cells = [
        node.attributes["aria-label"] for node in page.all("span") if node.attributes.get("role") == "img"
    ]
    assert sorted(cells) == [
        "other_1 right, skill wrong",
        "other_1 wrong, skill right",
        "other_1 wrong, skill wrong",
        "other_1 wrong, skill wrong",
    ]


async def test_strangers_are_refused(runs: Path) -> None:
    """A foreign name of this machine and a request that would change something get nothing."""
    async with client(runs, host="rebound.example") as asking:
        for path in ("/", "/events"):
            assert (await asking.get(path)).status_code == 400
    async with client(runs, host="team.example", hosts=["team.example"]) as asking:
        answer = await asking.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert (await asking.post("/")).status_code == 405


async def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A damaged database is an error on the list; a folder without runs says so."""
    async with client(tmp_path) as asking:
        assert "There is no run yet" in (await asking.get("/")).text
        (tmp_path / "run.db").write_bytes(b"no database" * 100)
        assert "A database cannot be read" in (await asking.get("/")).text


@pytest.mark.slow
@needs_chromium
def test_a_browser_follows_a_run_of_another_process(tmp_path: Path) -> None:
    """The list and the page of a run show each step when it is committed; Ctrl-C ends cleanly."""
    (tmp_path / "runs").mkdir()
    with (
        reflact_process("serve", tmp_path / "runs", "--port", 0) as process,
        opened(tmp_path / "profile") as browser,
    ):
        try:
            found = ADDRESS.search(process.stdout.readline())
            assert found
            wait = WebDriverWait(browser, 30, 0.05, [StaleElementReferenceException])

            def look(step: int) -> None:
                if step == 1:
                    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "td.prose + td, td.figure"))
                    wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, "tbody a").click() is None)
                wait.until(lambda _: f"{step} step" in browser.find_element(By.ID, "live").text)
                wait.until(lambda _: f'id="step-{step}"' in browser.page_source)
                wait.until(lambda _: f"step {step + 1} of 4" in browser.find_element(By.ID, "live").text)
                assert "answer" in browser.find_element(By.ID, "live").text

            answer, seen = toy_optimizer(edits=2), set()

            def look_and_answer(
                prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
            ) -> object:
                if call_id.step in {2, 3} - seen:  # the run waits until the step before is seen
                    seen.add(call_id.step)
                    look(call_id.step - 1)
                return answer(prompt, reply_type, call_id)

            browser.get(found[0])
            anyio.run(build_learning_trainer(tmp_path / "runs" / "toy", script=look_and_answer).train)
            assert seen == {2, 3}
            wait.until(lambda _: "Completed: 4 steps" in browser.find_element(By.ID, "live").text)
            wait.until(lambda _: "The run is under way" not in browser.page_source)
            assert not browser.find_element(By.CSS_SELECTOR, "#live dl").is_displayed()
            for width, dark in ((1280, False), (400, True)):
                resize(browser, width, dark=dark)
                assert violations(browser) == []
            browser.get(found[0])
            assert violations(browser) == []
            assert unreached(browser) == []
            browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("nothing like this")
            assert not any(row.is_displayed() for row in browser.find_elements(By.CSS_SELECTOR, "tbody tr"))
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
            assert all(url.startswith((found[0], "data:")) for url in asked(browser, found[0]))
        finally:
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, ("", "ended\n"))
