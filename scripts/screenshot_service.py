"""Takes docs/service.png: the page of examples/service.py in the middle of the demo, in Chromium.

Usage: python scripts/screenshot_service.py [FILE]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "service.png"
DECISIONS = 7
"""How many steps the picture waits for, and then for the next draft."""


def main() -> None:
    """Take the picture."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,1040"):
        options.add_argument(argument)
    command = [sys.executable, str(ROOT / "examples" / "service.py"), "--port", "0", "--delay", "0.05"]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process,
        Chrome(options=options, service=Service("/usr/bin/chromedriver")) as browser,
    ):
        assert process.stderr is not None
        address = next(
            found[0] for line in process.stderr if (found := re.search(r"http://[\d.]+:\d+", line))
        )
        browser.get(address)
        wait = WebDriverWait(browser, 120, poll_frequency=0.05)
        wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#runs button"))[0].click()
        wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#decisions tr")) > DECISIONS)
        browser.execute_script("document.getElementById('draft').textContent = ''")
        wait.until(lambda _: len(browser.find_element(By.ID, "draft").text) > 150)
        browser.save_screenshot(str(target))
        process.terminate()
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
