"""The answer in a model's text: thoughts are no part of it, and a draft is never read in place of the reply."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from doubles import PROMPT, Endpoint, ask, call_id, completion, config, connected, opened, stream, watched
from reflact.events import DraftUpdated, Event
from reflact.llm.structured import remove_thoughts
from reflact.messages import ReplyModel, Text

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(
    "text",
    [
        "Split at `</think>` and keep the rest.",
        "```\n<a>\n</think>\n```\nThis page is wrong.",
        "rest = text.split('</think>')[1]",
        'The mark is "</think>".',
        "Some write <think>so</think> before they answer.",
        "Use `re.sub(r'.*</think>', '', text)`.",
        "a < b, and [THINK] is a word",
        "<thought>so</thought><answer>5</answer>",
        "The token <|channel|>final<|message|> begins an answer.",
    ],
)
def test_an_answer_that_quotes_marks_is_left_as_it_is(text: str) -> None:
    assert remove_thoughts(text) == text


class Pick(ReplyModel):
    """A typed reply."""

    word: str


def write(word: str) -> str:
    return Pick(word=word).model_dump_json()


FINAL, DRAFT = write("final"), write("draft")
BLOCK, DRAFT_BLOCK = f"```json\n{FINAL}\n```", f"```json\n{DRAFT}\n```"
MODES = ["json_schema", "tools", "json_object_with_schema", "json"]

READ = {
    "after thoughts": f"<think>maybe {DRAFT}?</think>\n{FINAL}",
    "after thoughts without an opening mark": f"maybe {DRAFT}?\n</think>\n{FINAL}",
    "after a draft in a block of thoughts": f"<think>\n{DRAFT_BLOCK}\n</think>\n{FINAL}",
    "after thoughts with the marks of Mistral": f"[THINK]maybe {DRAFT}?[/THINK]{FINAL}",
    "after thoughts with the marks of Seed": f"<seed:think>maybe {DRAFT}?</seed:think>{FINAL}",
    "after empty thoughts and others": f"<think></think><think>maybe {DRAFT}?</think>{FINAL}",
    "in a block": BLOCK,
    "in a block without a language": f"```\n{FINAL}\n```",
    "in a block with tildes": f"~~~json\n{FINAL}\n~~~",
    "in a block after thoughts": f"<think>\n{DRAFT_BLOCK}\n</think>\nHere:\n{BLOCK}\nIs {{anything}} else needed?",
    "in the last block": f"At first I had\n{DRAFT_BLOCK}\nbut better is\n{BLOCK}",
    "in the final channel": f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|channel|>final<|message|>{FINAL}",
    "in a block with raw line breaks": BLOCK.replace("final", "fi\nnal"),
    "with a mark in a text": write("end thoughts with </think>"),
    "in a block with a mark in a text": f"```json\n{write('end thoughts with </think>')}\n```",
}
REFUSED = {
    "a draft in thoughts that do not end": f"<think>maybe {DRAFT}",
    "a draft in a block of thoughts that do not end": f"<think>\n{DRAFT_BLOCK}\nor not",
    "a draft before a block that is not closed": f"{DRAFT_BLOCK}\nbut better is\n```json\n{FINAL[:9]}",
    "a draft before JSON that is not in a block": f"{DRAFT_BLOCK}\nbut better is\n{FINAL}",
    "a draft in thoughts in the middle": f"Well. <think>\n{DRAFT_BLOCK}\n</think>\nThe word is final.",
    "a draft before a mark that is quoted": f"{DRAFT_BLOCK}\nI end with '</think>' now.",
    "JSON in a sentence": f"It is {FINAL}",
    "two values": f"{FINAL}\n{FINAL}",
}


def answer(text: str, mode: str) -> Any:
    return completion(None, arguments=text) if mode == "tools" else completion(text)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", READ)
async def test_a_typed_reply_is_read_outside_of_thoughts_and_inside_of_a_block(case: str, mode: str) -> None:
    reply = await ask(Pick, Endpoint(answer(READ[case], mode)), config(mode=mode))
    assert reply.attempts == 1
    assert "draft" not in reply.value.word
    assert reply.value.word.replace("\n", "") in {"final", "end thoughts with </think>"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
async def test_what_may_be_a_draft_is_sent_back(case: str, mode: str) -> None:
    provider = Endpoint(answer(REFUSED[case], mode), answer(write("asked again"), mode))
    reply = await ask(Pick, provider, config(mode=mode))
    assert (reply.value.word, reply.attempts) == ("asked again", 2)


async def test_a_text_is_read_without_its_thoughts_and_stored_with_them() -> None:
    store, text = await watched(), "<think>4 or 5?</think>\n\n5"
    reply = await ask(Text, Endpoint(completion(text)), store=store)
    assert reply.value.text == "5"
    (stored,) = store.replies
    assert json.loads(stored.text)["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "message",
    [
        {"content": "5", "reasoning_content": "4 or 5?"},
        {"content": "5", "reasoning": "4 or 5?", "reasoning_details": [{"text": "4 or 5?"}]},
        {"content": [{"type": "thinking", "thinking": [{"text": "4 or 5?"}]}, {"type": "text", "text": "5"}]},
        {"content": [{"type": "reasoning", "text": "4 or 5?"}, {"type": "text", "text": "5"}]},
    ],
)
async def test_thoughts_beside_a_text_are_no_part_of_it(message: dict[str, Any]) -> None:
    body = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]}
    assert (await ask(Text, Endpoint(httpx.Response(200, json=body)))).value.text == "5"


async def test_what_is_sent_back_has_no_thoughts() -> None:
    provider = Endpoint(completion('<think>so</think>\n{"word": 7}'), completion(FINAL))
    await ask(Pick, provider)
    assert provider.bodies[1]["messages"][-2] == {"role": "assistant", "content": '{"word": 7}'}


async def test_a_draft_shows_no_thoughts() -> None:
    events: list[Event] = []

    async def take(event: Event) -> None:
        events.append(event)

    long = "final " * 40
    pieces = stream(f"<think>{DRAFT} or {DRAFT}</think>\n{write(long)}")
    async with connected(Endpoint(pieces), store=await opened(), emit=take) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
    assert reply.value.word == long
    drafts = [event.draft for event in events if isinstance(event, DraftUpdated)]
    assert len(drafts) > 2
    assert all(long.startswith(draft["word"]) for draft in drafts if isinstance(draft, dict))
