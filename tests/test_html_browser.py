"""The page of a calibration, in a real browser: quiet, in place at any width, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from calibration_reports import NOTHING, everything, hostile
from chromium import asked, needs_chromium, opened, resize, violations
from reflact.calibration.report import CalibrationReport
from reflact.reporting.html.calibration import render_calibration_page

pytestmark = [pytest.mark.slow, needs_chromium]

OWNED = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>" + "w" * 400
REPORTS = {"everything": everything(), "nothing": NOTHING, "hostile": hostile(OWNED)}
WIDTHS = (360, 1280)

OUTSIDE = """
return [...document.querySelectorAll('svg')].flatMap(svg => {
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

SIZES = """
return [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return [box.left, box.right, box.height, document.documentElement.clientWidth];
});
"""

FAINT = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = colour => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = colour => rgba(colour).slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
const paper = one => {
  for (let at = one; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  return 'white';
};
const contrast = (one, colour) => {
  const [a, b] = [light(colour), light(paper(one))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
};
const found = [];
for (const one of document.querySelectorAll('body *')) {
  const written = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const style = getComputedStyle(one);
  if (one.closest('svg title, svg desc')) continue;
  if (written) {
    const ratio = contrast(one, one.closest('svg') ? style.fill : style.color);
    if (ratio < 4.5) found.push(ratio.toFixed(2) + ' ' + one.outerHTML.slice(0, 120));
  }
  if (one.matches('svg .before, svg .after, svg .plain, svg .axis, svg .guide')) {
    const ratio = contrast(one, style.stroke);
    if (ratio < 3) found.push(ratio.toFixed(2) + ' ' + one.outerHTML.slice(0, 120));
  }
}
return [getComputedStyle(document.body).backgroundColor, found];
"""
"""Texts with a contrast below 4.5 and marks with one below 3, as WCAG 2.2 defines it for AA."""


SEEN = "return arguments[0].checkVisibility() && arguments[0].getBoundingClientRect().height > 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser without a window."""
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def show(browser: Chrome, folder: Path, report: CalibrationReport, *, width: int, dark: bool = False) -> str:
    """Open a report's page and return its address."""
    path = folder / "calibration.html"
    path.write_text(render_calibration_page(report), encoding="utf-8")
    resize(browser, width, dark=dark)
    browser.get(path.as_uri())
    return path.as_uri()


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_quiet(browser: Chrome, tmp_path: Path, name: str) -> None:
    """It asks for nothing but itself and its empty icon, nothing runs, and the console has nothing to say."""
    browser.get_log("performance")
    browser.get_log("browser")
    url = show(browser, tmp_path, REPORTS[name], width=1280)
    assert set(asked(browser, url)) - {"data:,"} == {url}
    assert browser.get_log("browser") == []
    assert browser.title.startswith("Calibration: ")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_a_page_keeps_to_its_width(browser: Chrome, tmp_path: Path, name: str, width: int) -> None:
    """Nothing makes the page scroll sideways; charts stand inside it, and their parts inside the charts."""
    show(browser, tmp_path, REPORTS[name], width=width)
    assert browser.execute_script(SCROLLED) == 0
    sizes = browser.execute_script(SIZES)
    assert (len(sizes) > 0) is (name != "nothing")
    assert all(0 <= left < right <= inner and height > 60 for left, right, height, inner in sizes)
    if name != "hostile":  # names that are longer than any chart are cut off by it
        assert browser.execute_script(OUTSIDE) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read(browser: Chrome, tmp_path: Path, dark: bool) -> None:
    """In both schemes texts and marks have the contrast of WCAG's level AA."""
    show(browser, tmp_path, everything(), width=1280, dark=dark)
    assert violations(browser) == []
    paper, faint = browser.execute_script(FAINT)
    assert faint == []
    red = int(paper.removeprefix("rgb(").split(",")[0])
    assert (red < 64) is dark


def test_numbers_are_as_large_as_text_on_a_narrow_page(browser: Chrome, tmp_path: Path) -> None:
    """A chart at 360 pixels has letters of at least ten."""
    show(browser, tmp_path, everything(), width=360)
    heights = [
        text.rect["height"] for text in browser.find_elements(By.CSS_SELECTOR, "svg text:not([transform])")
    ]
    assert heights
    assert min(heights) >= 10


def test_a_printed_page_shows_what_is_folded(browser: Chrome, tmp_path: Path) -> None:
    """On paper nothing can be opened: the settings of the critic are printed, links to sections are not."""
    show(browser, tmp_path, everything(), width=1280)
    (folded, *_) = browser.find_elements(By.CSS_SELECTOR, "details pre")
    assert not browser.execute_script(SEEN, folded)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script(SEEN, folded)
    assert not browser.find_element(By.TAG_NAME, "nav").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
