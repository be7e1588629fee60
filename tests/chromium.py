"""Chromium without a window, for tests that look at a page as a reader does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs a browser and its driver; on Debian: apt-get install chromium chromium-driver",
)


@contextmanager
def opened(profile: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    for switch in ("background-networking", "component-update", "quic", "sync"):
        options.add_argument(f"--disable-{switch}")
    options.add_argument("--no-first-run")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


VIOLATIONS = """
const done = arguments[0];
axe.run({resultTypes: ['violations']}).then(
  found => done(found.violations.map(each => each.help + ': ' + each.nodes.map(one => one.html.slice(0, 200)))),
  error => done([String(error)]));
"""
CONTROLS = """
return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')].filter(
  one => one.checkVisibility())
"""
FOCUSED = """
const one = document.activeElement, style = getComputedStyle(one);
return [one, one.matches(':focus-visible') && style.outlineStyle !== 'none' && style.outlineWidth !== '0px'];
"""


def resize(browser: Chrome, width: int, *, dark: bool = False) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def violations(browser: Chrome) -> list[str]:
    code = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": code})
    return browser.execute_async_script(VIOLATIONS)


def unreached(browser: Chrome) -> list[str]:
    controls = browser.execute_script(CONTROLS)
    seen = set()
    for _ in controls:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused, is_marked = browser.execute_script(FOCUSED)
        if is_marked:
            seen.add(focused)
    return [one.get_attribute("outerHTML")[:200] for one in controls if one not in seen]


def asked(browser: Chrome, url: str) -> list[str]:
    entries = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent")
    return [each["request"]["url"] for each in sent if each["documentURL"].startswith(url)]
