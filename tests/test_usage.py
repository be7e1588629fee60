"""Usage: what the provider counted, exactly, from whole and streamed answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reflact.llm.sse import read_usage
from reflact.records import Usage

COUNTED: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
CACHED: dict[str, Any] = COUNTED | {"prompt_tokens_details": {"cached_tokens": 4}}
ONE = Usage(calls=1, input_tokens=10, output_tokens=3)
SILENT = Usage(calls=1, uncounted=1)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"choices": [], "usage": COUNTED}, ONE),
        ({"choices": [], "usage": CACHED}, ONE.model_copy(update={"cached_tokens": 4})),
        ({"choices": [], "usage": COUNTED | {"prompt_tokens_details": None}}, ONE),
        ({"choices": [], "usage": None}, SILENT),
        ({"choices": []}, SILENT),
        ({"choices": [], "usage": {"prompt_tokens": 10}}, SILENT),
        ([1], SILENT),
    ],
)
def test_whole_answers(body: object, usage: Usage) -> None:
    """One call, with the tokens that the body names; uncounted where it does not name them all."""
    assert read_usage("application/json", [json.dumps(body)]) == usage


@pytest.mark.parametrize("count", [-1, True, "7", 1.5, None, 10**30])
def test_what_is_no_count_counts_nothing(count: object) -> None:
    """A provider's nonsense neither fails nor reaches the ledger."""
    counted = COUNTED | {"prompt_tokens": count}
    assert read_usage("application/json", [json.dumps({"usage": counted})]) == SILENT


def test_no_more_is_cached_than_was_read() -> None:
    """Cached tokens are part of the input; what goes beyond it is no count of them."""
    body = {"usage": COUNTED | {"prompt_tokens_details": {"cached_tokens": 99}}}
    assert read_usage("application/json", [json.dumps(body)]).cached_tokens == 10


def test_streamed_answers_count_in_their_last_chunk() -> None:
    """Usage arrives once, at the end, wherever the pieces are cut."""
    events = [{"choices": [{}], "usage": None}, {"choices": [], "usage": CACHED}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    for cut in range(0, len(text), 7):
        found = read_usage("text/event-stream; charset=utf-8", [text[:cut], text[cut:]])
        assert found == ONE.model_copy(update={"cached_tokens": 4})


def test_a_body_that_is_no_json_is_a_call_without_tokens() -> None:
    """Nothing is guessed."""
    assert read_usage("text/html", ["<html>"]) == SILENT
