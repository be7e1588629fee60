"""Each version of each prompt has a recorded answer of a real small model to what its stage asks."""

from __future__ import annotations

import pytest

from prompt_examples import CASSETTE, MODEL, examples, outcome
from reflact.errors import ReplyError
from reflact.llm.cassettes import open_cassette, read_cassette
from reflact.prompts import find_data_folder

pytestmark = pytest.mark.anyio

VERSIONS = sorted(
    f"{path.parent.name}/{path.stem}"
    for path in find_data_folder("prompts").glob("*/v*.md")
    if path.parent.name != "placebo"
)
REFUSED = ("merge/v1", "draft_failure/v1", "rewrite/v1")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in REFUSED])
async def test_a_recorded_answer_passes_its_checks(version: str) -> None:
    """The version is rendered, replayed through the whole door and read as what its stage asks for."""
    example = (await examples())[version]
    async with open_cassette(CASSETTE, mode="replay") as transport:
        reply = await outcome(example, transport)
    assert isinstance(reply, example.reply_type)


@pytest.mark.parametrize("version", REFUSED)
async def test_recorded_answers_that_never_pass_are_a_typed_refusal(version: str) -> None:
    """The recorded model gives no valid reply to this one; each attempt is told with its reason."""
    async with open_cassette(CASSETTE, mode="replay") as transport:
        refusal = await outcome((await examples())[version], transport)
    assert isinstance(refusal, ReplyError)
    assert len(refusal.reasons) == MODEL.reasks + 1


async def test_every_version_is_recorded() -> None:
    """Examples and cassette hold each version of each prompt, and nothing else."""
    recorded = {
        f"{i.call_id.split('/')[1]}/{i.call_id.split('part=')[1].split('/')[0]}"
        for i in read_cassette(CASSETTE)
    }
    assert recorded == set(await examples()) == set(VERSIONS)
