"""The page of the example service, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from chromium import asked, needs_chromium, opened
from pure_world import rows
from service_process import PATIENCE, Provider, configured, seconds_until_free, service

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    """A browser without a window."""
    with opened(tmp_path / "profile") as driver:
        yield driver


class Page:
    """The page of a service, opened."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self._browser = browser
        self._url = url
        browser.get(url)

    def press(self, text: str) -> None:
        """Press the button with a text, as soon as it is there."""
        button = (By.XPATH, f"//button[text()='{text}']")
        self._wait(lambda browser: browser.find_element(*button).is_displayed())
        self._browser.find_element(*button).click()

    def text(self, place: str) -> str:
        """Return what a reader sees in an element."""
        return self._browser.find_element(By.ID, place).text

    def shows(self, place: str, text: str) -> None:
        """Wait until an element shows a text."""
        try:
            self._wait(lambda _: text in self.text(place))
        except TimeoutException as error:
            said = f"{place} shows {self.text(place)!r}, not {text!r}"
            raise AssertionError(f"{said}; {self.text('status')}, {self.text('log')}") from error

    def count(self, selector: str) -> int:
        """Return how many elements there are."""
        return len(self._browser.find_elements(By.CSS_SELECTOR, selector))

    def asked(self) -> list[str]:
        """Return the addresses that the page asked for; the browser's own pages ask for others."""
        return asked(self._browser, self._url)

    def _wait(self, condition: Callable[[Chrome], bool]) -> None:
        WebDriverWait(self._browser, PATIENCE, poll_frequency=0.05).until(condition)


def test_the_page_shows_a_run_and_trusts_no_text(browser: Chrome, tmp_path: Path) -> None:
    """Draft, scores, decisions, spend and end appear; markup stays text; no other host is asked."""
    provider = Provider(holds="optimizer/analyst_failure/step=1/part=1/", hostile=HOSTILE)
    with configured(tmp_path, provider) as config, service(tmp_path, f"mine={config}") as url:
        page = Page(browser, url)
        page.press("mine")
        page.shows("draft", HOSTILE)
        page.shows("about", "analyst failure")
        assert "running" in page.text("status")
        assert re.search(r"rollout\s+\S", page.text("stages"))
        provider.released.set()
        page.shows("status", "completed")
        assert re.match(r"completed after 2 steps: \d accepted", page.text("outcome"))
        for name in ("baseline", "best", "final"):
            assert re.search(rf"test {name} [01]\.\d{{3}} ", page.text("scores")), page.text("scores")
        assert HOSTILE in page.text("decisions")
        assert page.count("#decisions tr") == 1 + 2
        assert page.count("#chart circle") == 1 + 2
        assert re.search(r"current\s+[01]\.\d{3}", page.text("numbers"))
        assert re.search(r"calls\s+[1-9]", page.text("spend"))
        assert page.count("img, script:not([nonce])") == 0
        assert browser.title == "reflact"
        assert set(page.asked()) - {"data:,"} == {
            f"{url}/",
            f"{url}/runs",
            f"{url}/runs/mine/events?view=latest",
        }
        assert browser.get_log("browser") == []


def test_leaving_the_page_cancels_the_run(browser: Chrome, tmp_path: Path) -> None:
    """Going elsewhere and the stop button both end the run; who comes back sees all of it, and its end."""
    provider = Provider(holds="optimizer/analyst_failure/step=2/")
    with configured(tmp_path, provider) as config, service(tmp_path, f"mine={config}") as url:
        for leave in (lambda page: browser.get("about:blank"), lambda page: page.press("Stop")):
            provider.held.clear()
            page = Page(browser, url)
            page.press("mine")
            assert provider.held.wait(PATIENCE)
            page.shows("decisions", "rule")
            leave(page)
            assert seconds_until_free(tmp_path / "run") < 3
            assert rows(tmp_path / "run", "SELECT status FROM runs") == (("cancelled",),)
        provider.released.set()
        page.press("mine")
        page.shows("status", "completed")
        assert page.count("#decisions tr") == 1 + 2
