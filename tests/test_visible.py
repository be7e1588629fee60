"""Terminals: what a model or an item says cannot steer the one that it is shown at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pure_server
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer
from reflact.cli.app import app
from reflact.reporting.lines import escape_controls, escape_line

STEERING = "\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"


@given(st.text())
def test_nothing_that_steers_is_left(text: str) -> None:
    """Whatever the text, no control and no hidden format stays; ordinary text stays as it is."""
    shown = escape_controls(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any(c in shown for c in "\x7f\x9b\u202e\u2066\u200b\ufeff")
    assert escape_controls(shown) == shown


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "Grüße, 世界", "\U0001f468\u200d\U0001f469", "می\u200cخواهم"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    """Scripts and signs that need joiners keep them."""
    assert escape_controls(text) == text


@given(st.text(st.characters() | st.sampled_from("\n\r\t\v\x85\u2028\ud800\udfff")))
def test_one_line_stays_one(text: str) -> None:
    """A text in a line of many breaks no line, and can be written as UTF-8 whatever is in it."""
    shown = escape_line(text)
    assert len(shown.splitlines()) <= 1
    assert escape_controls(text).encode().decode() == escape_controls(text)
    assert "\t" not in shown


def test_steering_characters_are_written_out() -> None:
    """They are shown as escapes, so that whoever reviews a document sees them."""
    assert escape_controls(STEERING) == r"\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"


def answer(body: dict[str, Any], sample: str) -> str:
    """Answer as the pure server does, with steering characters in what is proposed."""
    said = pure_server.answer(body, sample)
    return said.replace(".", f".{json.dumps(STEERING)[1:-1]}") if said.startswith('{"patterns"') else said


def test_commands_print_nothing_that_steers(tmp_path: Path) -> None:
    """A run whose proposals hold terminal codes is shown without them."""
    world = write_world(tmp_path / "world", train=4, val=3, test=2)
    plain = settings(world, tmp_path / "run", train={"num_epochs": 1, "batch_size": 4})
    assert anyio.run(Trainer(plain, transport=PureNetwork(answer)).train).status == "completed"
    for command in (["show", tmp_path / "run"], ["show", tmp_path / "run", 1]):
        result = CliRunner().invoke(app, [str(part) for part in command])
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u200b"} & set(result.output)
    assert r"\x1b[2J" in result.output
