"""Takes pictures of the pages of runs in Chromium, and measures them: the demo, a large run, and pages that are served.

Usage: python scripts/screenshot_pages.py FOLDER

A long page is several pictures, one below the other. The large run has 200 steps and 20,000 rollouts, made with the public names for tests and stored by the run itself.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from reflact import Trainer
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer

COMMAND = [sys.executable, "-c", "from reflact.cli import main; main()"]
WIDTHS, SCHEMES, PICTURE_HEIGHT = (1280, 400), ("light", "dark"), 1_500
LOADED = (
    "const [e] = performance.getEntriesByType('navigation'); return e.loadEventEnd - e.startTime"
)
STEPS, VALIDATION_ITEMS = 200, 120


async def train_large(folder: Path) -> None:
    """Train in the toy world: 200 steps that measure 120 validation items each."""
    settings: Mapping[str, Any] = {
        "out_dir": folder,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 10, "batch_size": 2, "accumulation": 1},
        "select": {"max_edits": 1, "min_edits": 1},
        "slow_update": {"enabled": False},
    }
    environment = ToyEnvironment(train=2 * STEPS // 10, val=VALIDATION_ITEMS, test=200)
    answer, asked = toy_optimizer(), count(1)

    def propose(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> Any:
        """Propose a rule in a few steps, and a useless remark in all others."""
        reply = answer(prompt, reply_type, call_id)
        if isinstance(reply, dict) and reply.get("edits") and (number := next(asked)) % 45:
            for edit in reply["edits"]:
                edit["content"] = f"Remark {number} helps nobody."
        return reply

    trainer = Trainer(
        settings, environment=environment, target=ToyTarget(), optimizer=ScriptedLLM(propose)
    )
    summary = await trainer.train()
    with sqlite3.connect(folder / "run.db") as database:
        ((rollouts,),) = database.execute("SELECT count(*) FROM outcomes WHERE kind = 'rollout'")
    print(
        f"the large run: {sum(each.count for each in summary.actions)} steps, {rollouts:,} rollouts"
    )


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the pages of a folder for the length of the block; gives the address."""
    command = [*COMMAND, "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)


def take(browser: Chrome, name: str, url: str, folder: Path) -> None:
    """Take pictures of a page in both widths and schemes, and print the time to open it."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get(url)
            took = browser.execute_script(LOADED)
            height = browser.execute_script("return document.documentElement.scrollHeight")
            for number, top in enumerate(range(0, height, PICTURE_HEIGHT), start=1):
                metrics["height"] = min(PICTURE_HEIGHT, height - top)
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                browser.execute_script("window.scrollTo(0, arguments[0])", top)
                browser.save_screenshot(str(folder / f"{name}-{width}-{scheme}-{number:02}.png"))
            print(
                f"{name}, {width} pixels, {scheme}: open after {took / 1000:.2f} s, {height} pixels high"
            )


def main() -> None:
    """Make the runs and take the pictures."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "hide-scrollbars",
        "no-first-run",
    ):
        options.add_argument(f"--{argument}")
    with TemporaryDirectory() as place:
        runs = Path(place, "runs")
        subprocess.run(
            [*COMMAND, "demo", "--out", str(runs / "demo")], check=True, stdout=subprocess.DEVNULL
        )
        anyio.run(train_large, runs / "large")
        pages = {name: runs / name / "report.html" for name in ("demo", "large")}
        with (
            Chrome(options=options, service=Service("/usr/bin/chromedriver")) as browser,
            serve(runs) as address,
        ):
            for name, page in pages.items():
                print(f"{page.name} of {name}: {page.stat().st_size / 1e6:.2f} MB")
                take(browser, name, page.as_uri(), folder)
            take(browser, "served-list", address, folder)
            links = re.findall(r'"(/runs/[\w-]+)"', browser.page_source)
            take(browser, "served-run", f"{address}{links[-1]}", folder)


if __name__ == "__main__":
    main()
