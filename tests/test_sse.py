"""Streams of events: reading in pieces of any size, joining to one answer, and the usage of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import COUNTS, chunk, stream
from reflact.llm.errors import classify_body
from reflact.llm.sse import EventReader, join_stream, parse_chunk, read_delta, read_events, read_usage
from reflact.records import Usage

STREAM = "text/event-stream; charset=utf-8"
TEXT = json.dumps({"say": "zwölf \u2028 \U0001f600", "more": ["\r\n", "data: x"]}, ensure_ascii=False)


def put(pieces: list[bytes]) -> Any:
    """Return the completion that pieces of a stream make up."""
    return json.loads(join_stream(b"".join(pieces).decode()))


@given(st.lists(st.text(max_size=8), max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_are_the_same_however_they_are_cut(texts: list[str], end: str, data: Any) -> None:
    """Data is found in all three kinds of lines, between comments and fields, and in any pieces."""
    said = [json.dumps(text) for text in texts]
    text = "".join(f": ping{end}event: x{end}data: {line}{end}id: 1{end}{end}" for line in said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = EventReader()
    found: list[str] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.feed(text[start:stop])
    assert found == said == list(read_events(text))


def test_data_of_several_lines_is_one() -> None:
    """An event's lines of data are joined; the last event counts although no empty line ends it."""
    assert list(read_events("data: a\ndata:b\n\nevent: none\n\ndata: [DONE]")) == ["a\nb", "[DONE]"]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_is_put_together_is_what_was_said(tools: bool, size: int) -> None:
    """The pieces make up the text, or the function's arguments, with reason and usage."""
    completion = put(stream(TEXT, tools=tools, size=size))
    (choice,) = completion["choices"]
    message = choice["message"]
    function = {"name": "Pick", "arguments": TEXT}
    calls = [{"id": "c1", "type": "function", "function": function}] if tools else None
    assert (message["content"], message.get("tool_calls")) == (None if tools else TEXT, calls)
    assert (choice["finish_reason"], completion["usage"], completion["model"]) == ("stop", COUNTS, "m")
    seen = "".join(
        read_delta(parse_chunk(data)) for data in read_events(b"".join(stream(TEXT, tools=tools)).decode())
    )
    assert seen == TEXT


def test_the_last_usage_counts() -> None:
    """Usage that is told along the way is overwritten by the last one, and never by a chunk without."""
    early = {"prompt_tokens": 10, "completion_tokens": 1}
    pieces = [
        chunk({"content": "{}"}, usage=early),
        chunk({}, finish="stop", usage=COUNTS),
        chunk({}, usage=None),
    ]
    assert put(pieces)["usage"] == COUNTS
    text = b"".join(pieces).decode()
    assert read_usage(STREAM, [text]) == read_usage("application/json", [join_stream(text)])


def test_separators_of_lines_inside_texts_are_no_lines() -> None:
    """Usage is found behind characters that some take for the end of a line."""
    text = "".join(
        f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in ({"say": "\u2028\x85"}, {"usage": COUNTS})
    )
    one = Usage(calls=1, input_tokens=10, cached_tokens=4, output_tokens=3)
    assert read_usage(STREAM, [text]) == one
    single = {"say": "a\u2028b\u2029c\x85d", "usage": COUNTS}
    assert read_usage(STREAM, [f"data: {json.dumps(single, ensure_ascii=False)}\n\n"]) == one


def test_what_nobody_ended_was_cut_off() -> None:
    """Without a reason to finish an answer is told as one that reached its limit."""
    assert put(stream("{}", finish=None))["choices"][0]["finish_reason"] == "length"
    assert put(stream("{}", finish="length"))["choices"][0]["finish_reason"] == "length"


def test_where_nothing_was_answered_there_is_no_choice() -> None:
    """A stream without an answer is a completion without choices."""
    assert put([chunk(usage=COUNTS), b"data: [DONE]\n\n"])["choices"] == []


def test_halves_of_a_character_in_two_chunks_come_together() -> None:
    """A surrogate pair that was cut in two is one character again."""
    halves = [
        b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % half for half in (rb"\ud83d", rb"\ude00")
    ]
    assert put(halves)["choices"][0]["message"]["content"] == "\U0001f600"


def test_only_the_first_function_is_the_reply() -> None:
    """Arguments of further calls are kept apart, and no part of what is seen."""
    second = {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "b", "arguments": "{2}"}}]}
    first = {"tool_calls": [{"id": "c1", "function": {"name": "a", "arguments": "{1}"}}]}
    calls = put([chunk(first), chunk(second)])["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "a", "arguments": "{1}"},
        {"name": "b", "arguments": "{2}"},
    ]
    seen = [read_delta(parse_chunk(data)) for data in read_events((chunk(first) + chunk(second)).decode())]
    assert seen == ["{1}", ""]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "", "stop"]),
    lambda v: (
        st.lists(v, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "tool_calls", "function", "arguments", "index", "usage"]
            ),
            v,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3))
def test_nonsense_is_put_together_without_an_error(values: list[Any]) -> None:
    """Whatever a server says, there is a completion, whose texts are texts."""
    text = "".join(f"data: {json.dumps(value)}\n\n" for value in values)
    for choice in json.loads(join_stream(text))["choices"]:
        assert isinstance(choice["message"]["content"], str | None)
        assert all(
            isinstance(c["function"]["arguments"], str) for c in choice["message"].get("tool_calls", [])
        )
    assert all(isinstance(read_delta(value), str) for value in values)


def test_an_error_within_a_stream_breaks_it() -> None:
    """What a server says it could not finish is no answer, whatever end it marks."""
    pieces = [chunk({"content": "{"}), b'data: {"error": {"message": "overloaded"}}\n\n', b"data: [DONE]\n\n"]
    assert classify_body(STREAM, b"".join(pieces).decode()) == "broken stream"
    assert classify_body(STREAM, b"".join(stream("{}")).decode()) is None


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
