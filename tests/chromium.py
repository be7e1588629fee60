"""Chromium without a window, for tests that look at a page as a reader does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs a browser and its driver; on Debian: apt-get install chromium chromium-driver",
)


@contextmanager
def opened(profile: Path) -> Iterator[Chrome]:
    """Open a browser that notes what its console says and what it asks for."""
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def asked(browser: Chrome, url: str) -> list[str]:
    """Return the addresses that a page asked for; the browser's own pages ask for others."""
    entries = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent")
    return [each["request"]["url"] for each in sent if each["documentURL"].startswith(url)]
