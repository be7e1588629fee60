"""Each prompt has a recorded answer of a real small model that its reply type accepts."""

from __future__ import annotations

import pytest

from prompt_examples import CASSETTE, ask, examples
from reflact.llm.cassette import open_cassette, read_cassette
from reflact.prompts import NAMES, load_book

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", [name for name in NAMES if name != "placebo"])
async def test_a_recorded_answer_passes_its_checks(name: str) -> None:
    """The newest version of the prompt is replayed through the whole door to a validated reply."""
    example = examples(load_book())[name]
    async with open_cassette(CASSETTE, mode="replay") as transport:
        reply = await ask(name, transport)
    assert isinstance(reply, example.reply_type)


def test_every_version_is_recorded() -> None:
    """The cassette holds an answer for each version of each prompt, and for nothing else."""
    recorded = {
        (i.sample.split("/")[1], i.sample.split("part=")[1].split("/")[0]) for i in read_cassette(CASSETTE)
    }
    versions = {(n, f"v{p.header.version}") for n, p in load_book().prompts.items() if n != "placebo"}
    assert recorded == versions
