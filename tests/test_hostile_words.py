"""A run whose data, answers and edits attack those who look at it: at a terminal, in a browser and in an export."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import uvicorn
import yaml
from anyio.from_thread import start_blocking_portal
from selenium.webdriver.common.by import By

from chromium import asked, needs_chromium, opened, resize, violations
from emulator import Terminal
from reflact import Trainer, read_run
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Session
from reflact.reporting.html.serve import create_run_pages
from reflact.skills.package import read_front_matter
from reflact.testing import TOY_RULES, ToyEnvironment, toy_optimizer
from reflact.types import Grade, Item, Skill, Split
from served import reflact
from test_html_browser import SCROLLED
from test_live_terminal import run_at
from toy_runs import Actor, build_trainer

pytestmark = pytest.mark.slow

STEERING = "\x1b]0;owned\x07\x1b[2J\x9b2J\x9d0;owned\x9c\r\u202e\u2066\u200b"
MARKUP = (
    "</script></pre></style><script>window.owned=1</script><img src=x onerror=window.owned=1>"
    "<svg onload=window.owned=1><a href='javascript:window.owned=1'>[x](javascript:window.owned=1)"
    "\"onfocus='window.owned=1'{{7*7}}${owned}[red][/nothing][link=javascript:owned]"
)
WORDS = f"{MARKUP}{STEERING}"
SHOWN = "\\x1b]0;owned"
"""How a terminal and a page show the first of the controls."""

PLAIN_KEYS = {"op", "target", "helped", "type"}
"""Fields of replies that are no free text."""

COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""What reflact itself writes at a terminal."""

CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
MARKED = (
    "[onerror], [onload], [onfocus], svg a, a[href^='javascript:'], form[action^='javascript:'], img, iframe"
)

AT_TERMINAL = """
import json, sys
from reflact.cli.app import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
"""


LIVE = """
import logging, pathlib, sys
import anyio
from test_hostile_words import build_hostile_trainer
logging.basicConfig()
trainer = build_hostile_trainer(pathlib.Path(sys.argv[1]), epochs=1, fails="train-001")
anyio.run(lambda: trainer.train(show=True))
"""


class HostileWorld(ToyEnvironment):
    """The toy world with hostile words behind each text of an item; of the item ``fails`` it knows no answer."""

    fails: str | None = None

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        if self.fails is not None and item.id.startswith(self.fails):
            raise ValueError(f"bad{STEERING}\n{WORDS}")
        return await super().run(item, session, seed=seed)

    def items(self, split: Split) -> list[Item]:
        return [
            Item(
                id=f"{item.id}{WORDS}",
                input=f"{item.input}{WORDS}",
                task_type=f"{item.task_type}{WORDS}",
                reference=f"{item.reference}{WORDS}",
                metadata={f"key{WORDS}": WORDS},
            )
            for item in super().items(split)
        ]


def answer(skill: Skill, message: str, _: int) -> str:
    name, number = message.partition(WORDS)[0].split()
    known = TOY_RULES[name].line in skill.text.splitlines()
    return f"{TOY_RULES[name].answer(int(number)) if known else 'unknown'}{WORDS}"


def spoil(value: object, key: str = "") -> object:
    match value:
        case str() if key not in PLAIN_KEYS:
            return f"{value}\n{WORDS}"
        case dict():
            return {name: spoil(inner, name) for name, inner in value.items()}
        case list():
            return [spoil(inner, key) for inner in value]
    return value


def build_hostile_trainer(folder: Path, *, epochs: int, fails: str | None = None) -> Trainer:
    obey = toy_optimizer(edits=2)

    def reply(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> object:
        return spoil(obey(prompt, reply_type, call_id))

    settings = {
        "out_dir": folder,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": epochs, "batch_size": 4},
        "environment": {"description": f"Epochs: {epochs}. {WORDS}"},
    }
    world = HostileWorld()
    world.fails = fails
    return build_trainer(settings, environment=world, target=Actor(answer), script=reply)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    above = tmp_path_factory.mktemp("hostile")
    folders = tuple(above / f"{n}{WORDS[-60:].replace('/', '')}" for n in (1, 2))
    for epochs, folder in enumerate(folders, start=1):
        fails = "train-001" if epochs == 2 else None
        anyio.run(build_hostile_trainer(folder, epochs=epochs, fails=fails).train)
    return folders


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_words_of_others_steer_no_terminal(runs: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = map(str, runs)
    plain = [
        ["show", second],
        ["show", second, "--items"],
        ["show", second, "--skill", "best"],
        ["compare", first, second],
        ["runs", str(runs[0].parent)],
    ]
    commands = [
        *plain,
        *([*command, "--json"] for command in plain),
        *(["show", second, str(step.step)] for step in anyio.run(read_run, runs[1]).steps),
        ["show", second, "--item", f"test-000{WORDS}"],
        ["show", second, "--costs"],
        ["show", second, "--skill", "baseline..best"],
        ["export", second, "--name", "words", "--description", "Use it.", "--out", str(tmp_path / STEERING)],
    ]
    code, written = run_at(Terminal(100, 40), json.dumps(commands), program=AT_TERMINAL)
    assert code == 0, written[-2000:]
    left = COLOURS.sub("", written)
    assert CONTROLS.findall(left) == []
    assert left.count(SHOWN) > len(commands)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_words_of_others_steer_no_live_view(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, written = run_at(Terminal(100, 40), folder, program=LIVE, PYTHONPATH=os.pathsep.join(sys.path))
    assert code == 0, written[-2000:]
    for steering in ("\x1b]", "\x07", "\x9b", "\x9d", "\u202e", "\u2066", "\u200b", "\x1b[2J"):
        assert steering not in written
    assert "Next: reflact show" in written
    code, shown = run_at(
        Terminal(100, 40),
        json.dumps([["show", str(folder), "--item", f"train-001{WORDS}"]]),
        program=AT_TERMINAL,
    )
    assert code == 0, shown[-2000:]
    assert f"ValueError: bad{SHOWN}" in shown
    assert CONTROLS.findall(COLOURS.sub("", shown)) == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_run_pages(folder), port=0, log_level="error"))
    with start_blocking_portal() as portal:
        ended = portal.start_task_soon(server.serve)
        while not server.started:
            portal.call(anyio.sleep, 0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            ended.result()


@needs_chromium
def test_words_of_others_run_in_no_browser(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """On the list, the pages of runs and a stored report they are text: no script, link or request."""
    with served(runs[0].parent) as address, opened(tmp_path / "profile") as browser:
        browser.get(address)
        links = [one.get_attribute("href") for one in browser.find_elements(By.CSS_SELECTOR, "tbody a")]
        assert len(links) == 2
        pages = [address, *links, (runs[1] / "report.html").as_uri()]
        for page in pages:
            for width in (400, 1280):
                resize(browser, width, dark=width == 400)
                browser.get(page)
                browser.execute_script(
                    "for (const one of document.querySelectorAll('details')) one.open = true"
                )
                assert browser.execute_script("return window.owned") is None
                assert browser.find_elements(By.CSS_SELECTOR, MARKED) == []
                text = browser.execute_script("return document.body.textContent + document.title")
                assert CONTROLS.findall(text) == []
                assert SHOWN in text
                assert (page, browser.execute_script(SCROLLED)) == (page, 0)
                assert violations(browser) == []
        assert browser.get_log("browser") == []
        assert all(url.startswith((address, "data:")) for url in asked(browser, address))


def test_words_of_others_stay_in_the_body_of_an_export(runs: tuple[Path, Path], tmp_path: Path) -> None:
    chosen = ("--name", "words", "--description", 'A "quoted": text --- # with signs', "--out", tmp_path)
    assert reflact("export", runs[1], *chosen).exit_code == 0
    text = (tmp_path / "words" / "SKILL.md").read_bytes().decode("utf-8")
    assert read_front_matter(text) == {"name": "words", "description": chosen[3]}
    assert yaml.safe_load(text.split("---\n")[1]) == read_front_matter(text)
    assert text.endswith(reflact("show", runs[1], "--skill", "best").stdout_bytes.decode("utf-8"))
    refused = reflact("export", runs[1], "--name", "words", "--out", tmp_path)
    assert refused.exit_code != 0
    assert CONTROLS.findall(refused.output) == []
