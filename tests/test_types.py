"""JSON values, digests and call labels, from which stored keys are made, and chunks of long values."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from reflact.jsonutil import CHUNK_SIZE, is_same_json, is_short, iter_json_chunks, measure_size
from reflact.messages import CallId
from reflact.records import SkillScore
from reflact.types import (
    Edit,
    Grade,
    Rollout,
    Score,
    Skill,
    Split,
    canonical_json,
    digest_json,
)

texts = st.text(max_size=20) | st.sampled_from(["", "a\ud800", "\u65e5"])
values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
DIGEST = "90d8761401c99dab25f70cc4f5cb032bcebca7f9de6d9eec2b084ffb4f4d10be"
samples = st.builds(
    CallId,
    role=st.text("az_", min_size=1, max_size=4),
    purpose=st.text("az_", min_size=1, max_size=4),
    step=st.none() | st.integers(0, 99),
    part=st.text(max_size=6) | st.sampled_from(("1/2", "trial=1", "a/part=b", "%2F")),
    trial=st.integers(0, 3),
    attempt=st.integers(0, 3),
)


def test_canonical_json_is_pinned() -> None:
    value: JsonValue = {"b": [1, 1.0, 1e-7, True, None], "a": "é\n👩", "é": {}}
    assert canonical_json(value) == r'{"a":"\u00e9\n\ud83d\udc69","b":[1,1.0,1e-07,true,null],"\u00e9":{}}'
    assert digest_json(value) == DIGEST


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf]])
def test_what_is_not_json_has_no_digest(value: JsonValue) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json(value)


def test_sample_labels_are_pinned() -> None:
    analyst = CallId(role="optimizer", purpose="analyse_failures", step=3, part="é/0", attempt=1)
    turn = CallId(role="target", purpose="rollout", rollout="r/1", number=2, step=3)
    assert analyst.label == "optimizer/analyse_failures/step=3/part=%C3%A9%2F0/trial=0/attempt=1"
    assert turn.label == "target/rollout/rollout=r%2F1/2/part=/trial=0/attempt=0"


@given(samples, samples)
def test_labels_tell_samples_apart(one: CallId, other: CallId) -> None:
    assert (one.label == other.label) == (one == other)
    assert one.label.isascii()
    assert "\n" not in one.label


def test_a_skills_hash_is_that_of_its_exact_bytes() -> None:
    assert Skill(text="é").hash == hashlib.sha256("é".encode()).hexdigest()
    assert len({Skill(text=text).hash for text in ("", "\n", "\r\n", "a", "a\n")}) == 5


def test_values_are_frozen_and_closed() -> None:
    skill = Skill(text="a")
    with pytest.raises(ValidationError):
        skill.text = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Edit.model_validate({"op": "append", "contents": "x"})
    with pytest.raises(ValidationError):
        Score.of(math.nan)
    with pytest.raises(ValidationError):
        Score.of(1.5)


def test_scores_are_members_of_sets() -> None:
    scores = [Score.of(1), Score.of(1), Score.of(1, {"seconds": 2})]
    assert len({Grade(score=score, answer="a") for score in scores}) == len(set(scores)) == 2
    assert len({Rollout(key="k", item_id="i", skill_hash="s", score=score) for score in scores}) == 2
    assert (
        len(
            {SkillScore(name="best", skill_hash="s", split=Split.val, n=1, metrics=s.metrics) for s in scores}
        )
        == 2
    )


def size(value: JsonValue) -> int:
    """Return how many values and characters a JSON value holds."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, list):
        return 1 + sum(map(size, value))
    if isinstance(value, dict):
        return 1 + sum(len(name) + size(item) for name, item in value.items())
    return 1


def grown(value: JsonValue, wide: bool) -> JsonValue:
    """Return a long value that holds another several times, side by side or far within."""
    if wide:
        return {
            "a": [value] * 9,
            "b": ["x" * 70] * CHUNK_SIZE,
            "c": {f"{n}": value for n in range(CHUNK_SIZE // 3)},
        }
    return {
        "deep": [{"text": "y" * (CHUNK_SIZE + 1), "here": [value, {"longer": ["z" * CHUNK_SIZE, value]}]}]
    }


@given(values, st.integers(0, 200))
def test_short_is_what_holds_few_values_and_characters(value: JsonValue, most: int) -> None:
    assert is_short([value], most) is (size(value) <= most)
    assert is_short([value, value], most) is (2 * size(value) <= most)
    assert measure_size(value, 10**6) == size(value)


@pytest.mark.slow
@given(values, st.sampled_from([None, True, False]))
def test_pieces_make_the_text_that_is_written_at_once(value: JsonValue, wide: bool | None) -> None:
    value = value if wide is None else grown(value, wide)
    pieces = list(iter_json_chunks(value))
    assert "".join(pieces) == canonical_json(value)
    assert max(map(len, pieces)) <= 6 * (2 * CHUNK_SIZE + 100)


@given(values, values)
def test_alike_is_what_has_one_canonical_text(one: JsonValue, other: JsonValue) -> None:
    assert is_same_json(one, other) is (canonical_json(one) == canonical_json(other))
    assert is_same_json(one, json.loads(canonical_json(one)))


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ([1], [1.0]), ({"a": 0}, {"a": False})]
)
def test_values_of_other_kinds_are_not_alike(one: JsonValue, other: JsonValue) -> None:
    assert not is_same_json(one, other)
    long = ["x"] * CHUNK_SIZE
    assert not is_same_json([*long, one], [*long, other])
    assert is_same_json([*long, one], [*long, one])
