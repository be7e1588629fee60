"""Quirks of endpoints through a short training: what each run ends as, measures, asks and says.

Plays ``benchmarks/endpoint_quirks.py``, which also writes the table of ``docs/reliability.md``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest

from reflact import Trainer
from reflact.reporting.facts import ResultFact
from reflact.testing import Fault, FaultyTransport

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import endpoint_quirks as quirks
from endpoint_quirks import QUIRKS, TOWNS, HurriedLoop, Outcome, QuirkyEndpoint

LEARNED, IDLE = (0, 10, 10), (0, 0, 10)
HURRIED = {"loop_factory": HurriedLoop}


class Expected(NamedTuple):
    """How a run ends, its test (solved before and after, with a score), the most requests, and words that it says."""

    status: str = "completed"
    solved: tuple[int, int, int] | None = LEARNED
    target: int = 60
    optimizer: int = 2
    words: str = ""


ITEM = Expected(target=61, words=f"1 item: {quirks.FLAGGED}; the first reason: models.target: m at")
"""One item is never measured, and named."""

MUTE = Expected("failed", None, 18, 6, "gave no valid reply in 3 attempts")
"""No analyst gives a reply that can be read."""

REFUSALS: dict[tuple[str, str], Expected] = {
    ("none", "no_quirk"): Expected(),
    ("target", "filtered_prompt"): ITEM,
    ("target", "flagged_prompt"): ITEM,
    ("target", "firewall_page"): ITEM,
    ("target", "words_of_an_unknown_model"): ITEM,
    ("target", "not_found_for_one_item"): ITEM,
    ("target", "first_prompt_flagged"): Expected(target=61, words=f"1 item: {TOWNS['val'][0]}; "),
    ("target", "two_test_items_refused"): Expected(solved=(0, 8, 8), words="2 items: sion, thun; "),
    ("target", "filtered_skill"): Expected(solved=IDLE, target=38),
    ("optimizer", "filtered_prompt"): Expected(optimizer=5, words=f"4 items: glarus, {quirks.TRAIN}, "),
    ("optimizer", "flagged_prompt"): Expected(words=f"4 items: glarus, {quirks.TRAIN}, "),
    ("target", "wrong_key"): Expected("failed", None, 8, 0, "refused the key (401)"),
    ("target", "forbidden_model"): Expected("failed", None, 11, 0, "refused the key (403)"),
    ("target", "unknown_model"): Expected("failed", None, 11, 0, "set models.target.model"),
    ("optimizer", "wrong_key"): Expected("failed", None, 18, 1, "refused the key (401)"),
    ("optimizer", "forbidden_model"): Expected("failed", None, 18, 2, "refused the key (403)"),
    ("optimizer", "unknown_model"): Expected("failed", None, 18, 4, "set models.optimizer.model"),
    ("target", "key_revoked_in_the_run"): Expected("failed", None, 20, 0, "refused the key (401)"),
    ("target", "permission_revoked_in_the_run"): Expected("failed", None, 30, 2, "refused the key (403)"),
    ("target", "credit_spent_in_the_run"): Expected("budget", None, 20, 0, "no quota or credit left (402)"),
    ("optimizer", "context_too_small"): Expected("failed", None, 18, 4, "lower reflect.trajectory_tokens"),
    ("optimizer", "refused_sample"): Expected(optimizer=3),
    ("optimizer", "refused_first_sample"): Expected(optimizer=3),
    ("optimizer", "refused_tool_call"): Expected(optimizer=3),
    ("target", "failed_dependency"): Expected(target=90),
    ("optimizer", "failed_dependency"): Expected(optimizer=4),
}

OTHERS: dict[tuple[str, str], Expected] = {
    ("target", "thoughts_before_the_answer"): Expected(),
    ("optimizer", "thoughts_before_the_answer"): Expected(),
    ("target", "thoughts_without_their_start"): Expected(),
    ("optimizer", "thoughts_without_their_start"): Expected(),
    ("target", "thoughts_take_the_whole_reply"): Expected(solved=IDLE, words="max_tokens"),
    ("optimizer", "thoughts_take_the_whole_reply"): MUTE,
    ("target", "thoughts_and_an_empty_answer"): Expected(solved=IDLE, words="max_tokens"),
    ("optimizer", "thoughts_and_an_empty_answer"): MUTE,
    ("target", "harmony_channels"): Expected(),
    ("optimizer", "harmony_channels"): Expected(),
    ("target", "every_answer_cut"): Expected(solved=IDLE, words="max_tokens"),
    ("target", "other_word_for_cut"): Expected(solved=IDLE, words="max_tokens"),
    ("optimizer", "other_word_for_cut"): MUTE,
    ("optimizer", "cut_at_the_models_limit"): MUTE,
    ("optimizer", "cut_and_called_whole"): MUTE,
    ("optimizer", "json_in_a_fence"): Expected(),
    ("optimizer", "json_twice"): MUTE,
    ("optimizer", "json_in_a_string"): MUTE,
    ("optimizer", "prose_in_place_of_json"): MUTE._replace(optimizer=12),
    ("optimizer", "only_tools_are_heeded"): Expected(optimizer=9),
    ("optimizer", "formats_refused_with_404"): Expected(optimizer=3),
    ("optimizer", "formats_refused_with_500"): Expected(optimizer=9),
    ("target", "other_name_of_the_cap"): Expected(target=70),
    ("optimizer", "other_name_of_the_cap"): Expected(optimizer=4),
    ("target", "tool_call_for_text"): Expected(solved=IDLE),
    ("optimizer", "stream_without_end_mark"): Expected(optimizer=8),
    ("optimizer", "stream_held_open"): Expected(optimizer=8),
    ("optimizer", "stream_with_comments"): Expected(),
    ("optimizer", "stream_with_pings"): Expected(),
    ("target", "no_usage"): Expected(),
    ("optimizer", "no_usage"): Expected(),
    ("target", "usage_in_fractions"): Expected(),
    ("target", "prompt_cut_by_the_server"): Expected(),
    ("target", "empty_while_loading"): Expected(),
    ("target", "compressed_unasked"): Expected("failed", None, 30, 0, "no chat completion"),
    ("target", "busy_in_an_array"): Expected(target=80),
    ("target", "delay_with_its_unit"): Expected(target=80),
    ("target", "error_with_success"): Expected(target=90),
    ("optimizer", "error_with_success"): Expected(optimizer=4),
    ("target", "no_message"): Expected(target=80, words=f"1 item: {quirks.FLAGGED}; "),
    ("target", "no_choice"): Expected(target=80, words=f"1 item: {quirks.FLAGGED}; "),
    ("target", "no_content"): Expected(),
}

PLAYED = {(role, play.__name__): (role, play, settings) for role, play, settings in QUIRKS}


def check(folder: Path, key: tuple[str, str], expected: Expected) -> Outcome:
    """Play a quirk, and compare its outcome."""
    quirks.write_data(folder / "data")
    outcome = anyio.run(quirks.play, *PLAYED[key], folder / "run", backend_options=HURRIED)
    assert (outcome.summary.status, outcome.solved) == (expected.status, expected.solved)
    assert outcome.requests["target"] <= expected.target
    assert outcome.requests["optimizer"] <= expected.optimizer
    said = "\n".join(filter(None, (outcome.summary.reason, *outcome.warnings)))
    assert expected.words in said
    assert said or not expected.words
    return outcome


@pytest.mark.parametrize("key", REFUSALS)
def test_a_refusal_ends_what_it_is_about(tmp_path: Path, key: tuple[str, str]) -> None:
    """One item, one analyst or one sample; the role only if the first calls or many in a row say so."""
    outcome = check(tmp_path, key, REFUSALS[key])
    if outcome.summary.status == "completed":
        assert ResultFact(summary=outcome.summary).describe_next(tmp_path).startswith("reflact show ")
        assert not outcome.summary.missing


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHERS)
def test_other_quirks_are_read_or_told(tmp_path: Path, key: tuple[str, str]) -> None:
    check(tmp_path, key, OTHERS[key])


def test_every_quirk_has_its_outcome_and_its_row() -> None:
    assert PLAYED.keys() == REFUSALS.keys() | OTHERS.keys()
    table = quirks.PAGE.read_text("utf-8").partition(quirks.BEGIN)[2].partition(quirks.END)[0]
    shown = []
    for line in [line for line in table.splitlines() if line.startswith("| ")][1:]:
        does, target, optimizer = line.removeprefix("| ").removesuffix(" |").split(" | ")
        shown += [
            (role, does) for role, cell in (("target", target), ("optimizer", optimizer)) if cell.strip()
        ]
    played = [
        (role.replace("none", "target"), " ".join(play.__doc__.split())) for role, play, _ in PLAYED.values()
    ]
    assert sorted(shown) == sorted(played)


def start(folder: Path, role: str, name: str) -> Any:
    _, play, settings = PLAYED[role, name]
    config = quirks.configure(folder / "run", role, settings)
    trainer = Trainer(config, transport=QuirkyEndpoint(role, play))
    return anyio.run(trainer.train, backend_options=HURRIED)


@pytest.mark.parametrize(
    ("role", "name"), [("optimizer", "flagged_prompt"), ("target", "two_test_items_refused")]
)
def test_a_refusal_for_ever_is_no_endless_loop(tmp_path: Path, role: str, name: str) -> None:
    """Each start ends alike, says which items have no part in the result, and advises no other start."""
    quirks.write_data(tmp_path / "data")
    first, again = start(tmp_path, role, name), start(tmp_path, role, name)
    assert (first.status, again.status) == ("completed", "completed")
    assert (first.claim, first.warnings, first.scores) == (again.claim, again.warnings, again.scores)
    assert len(first.warnings) == 1
    assert "again" not in ResultFact(summary=first).describe_next(tmp_path)
    if role == "target":
        assert ResultFact(summary=first).result.startswith("Better: 8 of 8 test items solved instead of 0 ")
        assert "Not counted: 2 rollouts without a score." in ResultFact(summary=first).result
        assert first.claim.improvement.n == 8


class Killing:
    """Ends the line after so many requests."""

    def __init__(self, requests: int) -> None:
        self._left = requests

    def __call__(self, request: httpx.Request, number: int) -> Fault | None:
        self._left -= 1
        return httpx.ConnectError("the line is dead", request=request) if self._left < 0 else None


@pytest.mark.parametrize("requests", [5, 25])
def test_a_run_may_resume_with_what_is_refused(tmp_path: Path, requests: int) -> None:
    """The first request of a resumed run may be the refused one, since its role was answered before."""
    quirks.write_data(tmp_path / "data")
    _, play, _ = PLAYED["target", "flagged_prompt"]
    config = partial(quirks.configure, tmp_path / "run", "target", {"concurrency": 1, "max_retries": 0})
    broken = FaultyTransport(QuirkyEndpoint("target", play), Killing(requests))
    assert anyio.run(Trainer(config(), transport=broken).train, backend_options=HURRIED).status == "failed"
    whole = Trainer(config(), transport=QuirkyEndpoint("target", play))
    summary = anyio.run(whole.train, backend_options=HURRIED)
    assert (summary.status, summary.score("best", quirks.Split.test).successes) == ("completed", 10)
    assert quirks.FLAGGED in summary.warnings[0]
