"""Pages of runs and calibrations in a real browser: quiet, in place at any width, readable, and searchable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from calibration_reports import NOTHING, everything, hostile
from chromium import asked, needs_chromium, opened, resize, unreached, violations
from reflact.records import Usage
from reflact.reporting import RunReport, read_report, render_calibration_page, render_run_page
from reflact.reporting.history import RunListing
from reflact.reporting.html.runs import ServedRun, render_index
from test_html_run import enlarge, poison
from toy_runs import build_learning_trainer

pytestmark = [pytest.mark.slow, needs_chromium]

OWNED = (
    "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    + "w" * 400
)
OPEN_ALL = "for (const one of [...document.querySelectorAll('details')].slice(0, 50)) one.open = true"
NAMES = ("toy", "hostile", "large", "calibration", "empty calibration", "hostile calibration")

OUTSIDE = """
return [...document.querySelectorAll('svg')].filter(one => one.checkVisibility()).flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text, line, circle, polygon, rect')].filter(part => {
    const box = part.getBoundingClientRect();
    const empty = part.matches('.whisker, .link') ? false : box.width + box.height === 0;
    return empty || box.left < frame.left - 1.5 || box.right > frame.right + 1.5
      || box.top < frame.top - 1.5 || box.bottom > frame.bottom + 1.5;
  }).map(part => svg.querySelector('title').textContent + ': ' + part.outerHTML);
});
"""
"""Parts of charts that have no size or stick out of their chart."""

SCROLLED = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    folder = tmp_path_factory.mktemp("reports") / "run"
    anyio.run(build_learning_trainer(folder).train)
    return anyio.run(read_report, folder)


@pytest.fixture(scope="module")
def pages(report: RunReport) -> Mapping[str, str]:
    return {
        "toy": render_run_page(report),
        "hostile": render_run_page(poison(report, OWNED)),
        "large": render_run_page(enlarge(report, steps=200, items=10_000)),
        "calibration": render_calibration_page(everything()),
        "empty calibration": render_calibration_page(NOTHING),
        "hostile calibration": render_calibration_page(hostile(OWNED)),
    }


def show(browser: Chrome, folder: Path, page: str, *, width: int = 1280, dark: bool = False) -> str:
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    resize(browser, width, dark=dark)
    browser.get(path.as_uri())
    return path.as_uri()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_quiet_and_keeps_to_its_width(
    browser: Chrome, tmp_path: Path, pages: Mapping[str, str], name: str
) -> None:
    """It asks for nothing but itself and its empty icon, nothing runs, and nothing scrolls sideways."""
    for width in (400, 1280):
        browser.get_log("performance")
        browser.get_log("browser")
        url = show(browser, tmp_path, pages[name], width=width)
        assert set(asked(browser, url)) - {"data:,"} == {url}
        assert browser.get_log("browser") == []
        assert browser.title.startswith(("Run r", "Calibration: "))
        browser.execute_script(OPEN_ALL)
        assert browser.execute_script(SCROLLED) == 0
        if "hostile" not in name:  # names that are longer than any chart are cut off by it
            assert browser.execute_script(OUTSIDE) == []


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False), (1280, True)])
@pytest.mark.parametrize("name", ["toy", "calibration"])
def test_everything_can_be_read(
    browser: Chrome, tmp_path: Path, pages: Mapping[str, str], *, name: str, width: int, dark: bool
) -> None:
    show(browser, tmp_path, pages[name], width=width, dark=dark)
    assert unreached(browser) == []
    browser.execute_script(OPEN_ALL)
    assert violations(browser) == []


def test_items_are_filtered_and_sorted(browser: Chrome, tmp_path: Path, report: RunReport) -> None:
    show(browser, tmp_path, render_run_page(enlarge(report, steps=1, items=40)))

    def count() -> int:
        return sum(row.is_displayed() for row in browser.find_elements(By.CSS_SELECTOR, ".items > li"))

    assert count() == 40
    button = browser.find_element(By.CSS_SELECTOR, ".controls button")
    button.click()
    outcome = button.get_attribute("data-outcome")
    chosen = len(browser.find_elements(By.CSS_SELECTOR, f".items > li[data-outcome={outcome}]"))
    assert count() == chosen
    assert f"{chosen} of 40 shown" in browser.find_element(By.TAG_NAME, "output").text
    button.click()
    browser.find_element(By.CSS_SELECTOR, ".controls input").send_keys("item-17")
    assert count() == 1
    Select(browser.find_element(By.CSS_SELECTOR, ".controls select")).select_by_value("id")
    ids = [one.get_attribute("textContent") for one in browser.find_elements(By.CSS_SELECTOR, ".items .id")]
    assert ids == [f"item-{n}" for n in range(40)]
    (summary,) = (
        one for one in browser.find_elements(By.CSS_SELECTOR, ".items summary") if one.is_displayed()
    )
    summary.send_keys(Keys.ENTER)
    assert "v4, score 1" in summary.find_element(By.XPATH, "..").text


def test_the_skill_is_copied_exactly_and_another_version_opens_by_key(
    browser: Chrome, tmp_path: Path, report: RunReport
) -> None:
    show(browser, tmp_path, render_run_page(report))
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", permissions)

    def copy() -> str:
        (button,) = (one for one in browser.find_elements(By.CLASS_NAME, "copy") if one.is_displayed())
        button.click()
        return browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")

    texts = {text.version.number: text.skill.text for text in report.texts}
    assert copy() == texts[report.best]
    first = browser.find_elements(By.CSS_SELECTOR, ".versions summary")[1]
    first.send_keys(Keys.ENTER)
    assert copy() == texts[1] != texts[report.best]
    link = next(one for one in browser.find_elements(By.CSS_SELECTOR, ".origin a") if one.is_displayed())
    link.send_keys(Keys.ENTER)
    assert browser.find_element(By.ID, link.get_attribute("href").partition("#")[2]).is_displayed()


def test_the_list_of_runs_is_sorted_by_any_column(browser: Chrome, tmp_path: Path) -> None:
    def build_run(number: int, score: float | None, usd: float | None) -> ServedRun:
        listing = RunListing(
            folder=f"run-{number}",
            run_id=f"r{number}",
            status="completed",
            steps=number,
            val=score,
            test=None,
            baseline=0.25,
            usage=Usage(calls=1, usd=usd),
            created=datetime(2026, 1, number, tzinfo=UTC),
        )
        return ServedRun(f"k{number}", tmp_path, listing)

    runs = [build_run(10, 0.5, 0.002), build_run(9, None, None), build_run(2, 0.75, 12.5)]
    show(browser, tmp_path, render_index(tmp_path, runs, (), version=""))

    def sort(place: int) -> list[str]:
        browser.find_elements(By.CSS_SELECTOR, "thead button")[place].send_keys(Keys.ENTER)
        return [one.text for one in browser.find_elements(By.CSS_SELECTOR, "tbody th small")]

    assert sort(0) == ["r10", "r9", "r2"], "folders are compared by their numbers"
    assert sort(0) == ["r2", "r9", "r10"]
    assert sort(1) == ["r10", "r9", "r2"], "the time"
    assert sort(4) == ["r10", "r9", "r2"], "the steps"
    assert sort(5) == ["r2", "r10", "r9"], "the score; one that is missing comes last"
    assert sort(6) == ["r2", "r10", "r9"], "the cost"


def test_the_page_is_complete_without_a_script(
    browser: Chrome, tmp_path: Path, pages: Mapping[str, str]
) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, tmp_path, pages["toy"])
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert not any(one.is_displayed() for one in browser.find_elements(By.CSS_SELECTOR, ".controls, .copy"))
    rows = browser.find_elements(By.CSS_SELECTOR, ".items > li")
    assert len(rows) == 8
    rows[0].find_element(By.TAG_NAME, "summary").click()
    assert "expected" in rows[0].text
