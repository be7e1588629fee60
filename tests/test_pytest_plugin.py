"""The pytest plugin: a user's tests record once, replay from then on, and say what was not recorded."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from reflact.config.loading import load_config
from reflact.integrations.pytest import build_name
from reflact.training.plan import Overrides, import_collaborators
from served import configured, say_four_and_append, serving

pytest_plugins = ["pytester"]

PLUGIN = "reflact.integrations.pytest"
TEST = """
import asyncio
import pytest
from reflact import Trainer

@pytest.mark.parametrize("epochs", [1])
def test_run(reflact_cassette, epochs):
    config = reflact_cassette.configure(
        {path!r}, train__num_epochs=epochs, report=False, test__enabled=False, environment__template={template!r}
    )
    summary = asyncio.run(Trainer(config).train())
    assert summary.status == "completed", summary.reason
    assert (reflact_cassette.out_dir / "best_skill.md").exists()
"""


def run_tests(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run the tests of a user in this process; only this plugin is loaded, whatever else is installed."""
    return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", *options)


@pytest.fixture(autouse=True)
def without_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_a_test_records_once_and_replays_without_a_network(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """Without a cassette a test is an error; it records with the option, replays after that, and a miss has its difference.

    A miss names no line of the library.
    """
    with serving(say_four_and_append) as url:
        path = str(configured(tmp_path, url))
        import_collaborators(load_config(path), Overrides())  # pytester forgets what its sessions import
        pytester.makepyfile(test_user=TEST.format(path=path, template="{input}"))
        missing = run_tests(pytester)
        missing.assert_outcomes(errors=1)
        missing.stdout.fnmatch_lines(["*there is no cassette *; record it with pytest --reflact-record"])
        run_tests(pytester, "--reflact-record").assert_outcomes(passed=1)
    (cassette,) = (pytester.path / "cassettes").iterdir()
    assert cassette.name == build_name("test_user.py::test_run[1]")
    run_tests(pytester).assert_outcomes(passed=1)
    recorded = cassette.read_bytes()
    pytester.makepyfile(test_user=TEST.format(path=path, template="Please: {input}"))
    failed = run_tests(pytester)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            "the cassette * holds no answer to this request *",
            "--- recorded",
            "+*Please: *",
            "if the change is intended: pytest --reflact-record",
        ]
    )
    assert "reflact/llm" not in failed.stdout.str()
    assert cassette.read_bytes() == recorded


def test_a_mark_names_the_cassette_and_other_failures_stay(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.reflact_cassette("shared.jsonl")
        def test_named(reflact_cassette):
            assert reflact_cassette.path.name == "shared.jsonl"
            assert reflact_cassette.keys["replay__mode"] == "record"
            raise RuntimeError("mine")
    """)
    result = run_tests(pytester, "--reflact-record", "--strict-markers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*raise RuntimeError*", "*mine*"])


def test_pytest_finds_the_plugin_and_loads_nothing_heavy(pytester: pytest.Pytester) -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    (name,) = project["entry-points"]["pytest11"].values()
    assert hasattr(import_module(name), "reflact_cassette")
    assert not [one for one in project["dependencies"] if one.startswith("pytest")]
    code = f"import sys, pytest; before = {{*sys.modules}}; import {name}; print(*{{*sys.modules}} - before)"
    loaded = {one.partition(".")[0] for one in pytester.run(sys.executable, "-c", code).outlines[0].split()}
    assert loaded - set(sys.stdlib_module_names) == {"reflact"}
