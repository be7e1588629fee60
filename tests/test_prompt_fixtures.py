"""Each prompt has a recorded answer of a real small model that its reply type accepts."""

from __future__ import annotations

import pytest

from prompt_examples import CASSETTE, MODEL, examples, outcome
from reflact.errors import ReplyError
from reflact.llm.cassette import open_cassette, read_cassette
from reflact.prompts import load_book

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", ["analyst_failure", "analyst_success", "merge_final", "ranking"])
async def test_a_recorded_answer_passes_its_checks(name: str) -> None:
    """The newest version of the prompt is replayed through the whole door to a validated reply."""
    async with open_cassette(CASSETTE, mode="replay") as transport:
        reply = await outcome(name, transport)
    assert isinstance(reply, examples(load_book())[name].reply_type)


async def test_recorded_answers_that_never_pass_are_a_typed_refusal() -> None:
    """The recorded model gives no valid reply to `merge`; each attempt is told with its reason."""
    async with open_cassette(CASSETTE, mode="replay") as transport:
        refusal = await outcome("merge", transport)
    assert isinstance(refusal, ReplyError)
    assert len(refusal.reasons) == MODEL.reasks + 1


def test_every_version_is_recorded() -> None:
    """The cassette holds an answer for each version of each prompt, and for nothing else."""
    recorded = {
        (i.sample.split("/")[1], i.sample.split("part=")[1].split("/")[0]) for i in read_cassette(CASSETTE)
    }
    versions = {(n, f"v{p.header.version}") for n, p in load_book().prompts.items() if n != "placebo"}
    assert recorded == versions
