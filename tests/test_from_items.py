"""Training on lists and a function, and what a start in a busy event loop costs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reflact import Item, Trainer, __version__
from reflact.errors import ConfigError, DataError
from reflact.testing import TOY_RULES, ScriptedLLM, ToyTarget, toy_optimizer

pytestmark = pytest.mark.anyio


def pairs(first: int, count: int) -> list[tuple[str, str]]:
    """Return questions and answers of the toy world."""
    names = list(TOY_RULES)[:2]
    return [(f"{names[n % 2]} {n}", TOY_RULES[names[n % 2]].answer(n)) for n in range(first, first + count)]


def trainer(out: Path, **config: object) -> Trainer:
    """Return a trainer on lists, with stand-ins for both models."""
    return Trainer.from_items(
        train=pairs(10, 4),
        val=pairs(20, 4),
        test=[Item(id="t", input="double 40", reference="80")],
        grade=lambda item, answer: answer == item.reference,
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
        out_dir=out,
        **config,
    )


async def test_lists_and_a_function_are_enough(tmp_path: Path) -> None:
    """A run on pairs, items and a function completes, and its summary names the version."""
    summary = await trainer(tmp_path, train__num_epochs=2, train__batch_size=4).train()
    assert (summary.status, summary.version) == ("completed", __version__)
    assert summary.steps == 2


def test_equal_pairs_have_equal_ids(tmp_path: Path) -> None:
    """The ids of pairs come from their content, so the run's identity does not change between starts."""
    assert trainer(tmp_path).run_id == trainer(tmp_path).run_id


async def test_a_pair_given_twice_is_refused(tmp_path: Path) -> None:
    """An item that occurs twice is refused when the run starts."""
    twice = Trainer.from_items(
        train=pairs(10, 2) * 2,
        val=pairs(20, 2),
        test=pairs(30, 2),
        grade=lambda item, answer: answer == item.reference,
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
        out_dir=tmp_path,
    )
    with pytest.raises(DataError, match="used 2 times"):
        await twice.train()


def test_an_unknown_key_is_refused_at_once(tmp_path: Path) -> None:
    """Constructing a trainer checks the names of configuration keys."""
    with pytest.raises(ConfigError, match="num_epoch"):
        trainer(tmp_path, train__num_epoch=2)


def test_models_are_named_by_text(tmp_path: Path) -> None:
    """Text in place of a target or an optimizer names a model of the configuration."""
    named = Trainer.from_items(
        train=pairs(10, 2),
        val=pairs(20, 2),
        test=pairs(30, 2),
        grade=lambda item, answer: answer == item.reference,
        target="small",
        optimizer="large",
        out_dir=tmp_path,
    )
    models = named.config.models
    assert (models.target.model, models.optimizer.model) == ("small", "large")


def test_the_command_prints_its_version() -> None:
    """``reflact --version`` prints the version of the package."""
    code = "from reflact.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"reflact {__version__}\n"
