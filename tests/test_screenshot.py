"""The picture of the live view in the documents."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def rows(picture: Path) -> list[str]:
    """Return the lines of text of a picture, from top to bottom."""
    lines: dict[float, str] = {}
    for text in ET.parse(picture).getroot().iter(f"{SVG}text"):
        place = float(text.attrib["y"])
        lines[place] = lines.get(place, "") + (text.text or "").replace("\u00a0", " ")
    return [lines[place] for place in sorted(lines)]


def test_the_picture_shows_what_the_code_draws(tmp_path: Path) -> None:
    """A scripted moment has the rows that stand in the documents; the script that draws it still runs."""
    script = ROOT / "scripts" / "screenshot.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "drawn.svg")], check=True)
    drawn = rows(tmp_path / "drawn.svg")
    assert drawn == rows(ROOT / "docs" / "live-view.svg"), "run scripts/screenshot.py"
    assert len(drawn) <= 24
    for label in (
        "step 5",
        "run ",
        "val ",
        "decisions",
        "budget",
        "spend",
        "stages",
        "reflect",
        "limits",
        "draft",
        "  + ",
    ):
        assert any(row.startswith(label) for row in drawn), label


def test_the_picture_has_both_sets_of_colours(tmp_path: Path) -> None:
    """Each class of text has a colour in light surroundings and another in dark ones."""
    text = (ROOT / "docs" / "live-view.svg").read_text(encoding="utf-8")
    light, _, dark = text.partition("prefers-color-scheme: dark")
    classes = {f"live-r{number}" for number in range(1, 30) if f'live-r{number}"' in text}
    assert classes
    for name in classes:
        assert f".{name} {{ fill: " in light
        assert f".{name} {{ fill: " in dark
