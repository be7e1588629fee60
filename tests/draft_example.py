"""A long reply of a real small model, streamed: what the recording script asks and the tests replay."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.cassettes import open_cassette
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.testing import InMemoryRunStore
from reflact.types import FrozenModel

CASSETTE = Path(__file__).parents[1] / "fixtures" / "drafts" / "cassette.jsonl"

MODEL = ModelConfig(
    model="qwen2.5-coder-0.5b",
    base_url="http://127.0.0.1:8123/v1",
    api_key_env=None,
    mode="json_schema",
    temperature=0.7,
    seed=7,
    max_tokens=4000,
    timeout=3600,
    extra_body={"frequency_penalty": 0.3},
)

SAMPLE = CallId(role="optimizer", purpose="draft", step=1)


class Rule(FrozenModel):
    """One rule of a handbook."""

    title: str = Field(max_length=60, description="A short title.")
    reason: str = Field(max_length=250, description="Why the rule is needed, in two or three sentences.")
    text: str = Field(max_length=250, description="The rule itself, in two or three sentences.")
    weight: int = Field(ge=1, le=9, description="How important it is, from 1 to 9.")


class Handbook(ReplyModel):
    """A handbook with an introduction and rules."""

    introduction: str = Field(description="What the handbook is for, in a long paragraph.")
    rules: list[Rule] = Field(min_length=30, max_length=30, description="Thirty rules, all different.")
    closing: str = Field(max_length=250, description="A last word to the reader, in a paragraph.")


PROMPT = RenderedPrompt(
    name="handbook",
    version=1,
    messages=(
        Message(
            role="system", content="You write handbooks. Be thorough: write whole sentences, never lists."
        ),
        Message(
            role="user",
            content="Write a handbook for people who answer customers of an online book shop by e-mail: "
            "late parcels, damaged books, refunds, invoices, gift cards, wrong editions, angry and grateful "
            "letters. Give thirty different rules, each with a reason of three sentences and a text of "
            "three sentences.",
        ),
    ),
)


async def record() -> int:
    """Record the reply from the small model and return its characters."""

    async def ignore(_: object) -> None:
        pass

    store = InMemoryRunStore()
    await store.open_run("r0", {}, {})
    async with open_cassette(CASSETTE, mode="record") as transport:
        account = Account("r0", store, store.decision_log("r0"))
        async with Client(MODEL, "optimizer", account, transport=transport, on_event=ignore) as client:
            reply = await client.ask(PROMPT, Handbook, call_id=SAMPLE)
    return len(reply.value.model_dump_json())
