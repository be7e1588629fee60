"""JSON values, digests and call labels, from which stored keys are made, and chunks of long values."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.jsonutil import CHUNK_SIZE, is_same_json
from reflact.messages import CallId
from reflact.types import Skill, canonical_json, digest_json

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


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ([1], [1.0]), ({"a": 0}, {"a": False})]
)
def test_values_of_other_kinds_are_not_alike(one: JsonValue, other: JsonValue) -> None:
    assert not is_same_json(one, other)
    long = ["x"] * CHUNK_SIZE
    assert not is_same_json([*long, one], [*long, other])
    assert is_same_json([*long, one], [*long, one])
