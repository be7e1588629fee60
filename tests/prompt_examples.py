"""One fixed use of each prompt: what the recording script asks and the test replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from reflact.calls import Rendered, ReplyModel, Sample
from reflact.config import ModelConfig
from reflact.errors import ReplyError
from reflact.llm.cassette import open_cassette
from reflact.llm.client import Client
from reflact.prompts import PromptBook, load_book
from reflact.stages.material import show_cases, show_edits, show_skill
from reflact.stages.replies import (
    analysing,
    analyst_check,
    merge_check,
    merging,
    praising,
    rank_check,
    ranking,
    success_check,
)
from reflact.testing import MemoryStore
from reflact.types import Edit, Item, Rollout, Score, Skill, Turn

CASSETTE = Path(__file__).parents[1] / "fixtures" / "prompts" / "cassette.jsonl"

MODEL = ModelConfig(
    model="qwen2.5-coder-0.5b",
    base_url="http://127.0.0.1:8123/v1",
    api_key_env=None,
    mode="json_schema",
    temperature=0.5,
    seed="per_sample",
    max_tokens=300,
    timeout=600,
    reasks=2,
)

SKILL = Skill(text="Answer with one query and nothing else.\n")
TABLE = "Table: airports(iata, name, city, state, latitude, longitude)\nQuestion: "
TASKS = (f"{TABLE}How many airports are in Ohio?", f"{TABLE}How many airports are in Iowa?")
RIGHT = (
    "SELECT COUNT(*) FROM airports WHERE state = 'OH'",
    "SELECT COUNT(*) FROM airports WHERE state = 'IA'",
)
WRONG = (
    "SELECT COUNT(*) FROM airports WHERE state = 'Ohio'",
    "SELECT COUNT(*) FROM airports WHERE city = 'Iowa'",
)
PROPOSALS = (
    Edit(op="append", content=RIGHT[0], support_count=3),
    Edit(op="append", content=RIGHT[1], support_count=2),
    Edit(
        op="append", content="SELECT MAX(temp_max) FROM weather WHERE date LIKE '2014-06%'", support_count=1
    ),
)


@dataclass(frozen=True)
class Example:
    """A rendered prompt with the reply type and check that its stage uses."""

    prompt: Rendered
    reply_type: type[ReplyModel]
    check: Callable[..., None]


def examples(book: PromptBook) -> dict[str, Example]:
    """Return an example of each prompt that a model answers, by the prompt's name."""
    items = [Item(id=str(n), input=task, reference=RIGHT[n]) for n, task in enumerate(TASKS)]
    proposals = {"document": show_skill(Skill(text="")), "proposals": show_edits(PROPOSALS)}
    merge = (merging(("append",), proposals=3), merge_check(SKILL, proposals=3))
    return {
        "analyst_failure": Example(
            book.render("analyst_failure", _reading(items, WRONG, hard=0)),
            analysing(("append",), cases=2, most=1),
            analyst_check(SKILL, cases=2, max_edits=1),
        ),
        "analyst_success": Example(
            book.render("analyst_success", _reading(items, RIGHT, hard=1)),
            praising(("append",), most=1),
            success_check(SKILL, max_edits=1),
        ),
        "merge": Example(book.render("merge", proposals), *merge),
        "merge_final": Example(book.render("merge_final", proposals), *merge),
        "ranking": Example(
            book.render("ranking", {**proposals, "count": "3", "budget": "2"}),
            ranking(proposals=3, budget=2),
            rank_check(proposals=3, budget=2),
        ),
    }


async def ask(name: str, transport: httpx.AsyncBaseTransport) -> ReplyModel:
    """Ask one example's question and return the validated reply."""
    example = examples(load_book())[name]
    store = MemoryStore()
    client = Client(
        MODEL, role="optimizer", run_id="r", effects=store, journal=store.journal("r"), transport=transport
    )
    async with client:
        sample = Sample(role="optimizer", purpose=name, step=0, part=f"v{example.prompt.version}")
        reply = await client.ask(example.prompt, example.reply_type, sample=sample, check=example.check)
    return reply.value


async def outcome(name: str, transport: httpx.AsyncBaseTransport) -> ReplyModel | ReplyError:
    """Return the validated reply, or the typed refusal where the model gave none in all its attempts."""
    try:
        return await ask(name, transport)
    except ReplyError as refusal:
        return refusal


async def record() -> dict[str, ReplyModel | ReplyError]:
    """Ask all examples of the live endpoint and write the cassette."""
    async with open_cassette(CASSETTE, mode="record") as transport:
        return {name: await outcome(name, transport) for name in examples(load_book())}


def _reading(items: list[Item], answers: tuple[str, ...], *, hard: float) -> dict[str, str]:
    rollouts = [
        Rollout(
            key=item.id,
            item_id=item.id,
            skill_hash=SKILL.hash,
            turns=(Turn(role="user", content=str(item.input)), Turn(role="assistant", content=answer)),
            answer=answer,
            score=Score.of(hard),
        )
        for item, answer in zip(items, answers, strict=True)
    ]
    cases = show_cases(rollouts, items, chars=1000)
    return {"max_edits": "1", "document": show_skill(SKILL), "cases": cases, "attempts": ""}
