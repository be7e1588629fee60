"""A model connected from Python: asked over HTTP, paid once, within its budget, replayed without network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import pytest

from reflact import Critic
from reflact.calibration import connect
from reflact.config.training import ReplayConfig
from reflact.errors import BudgetSpent, ConfigError
from reflact.llm import BudgetConfig, ModelConfig
from reflact.memory import Transition
from reflact.memory.models import Action
from served import serving

pytestmark = pytest.mark.anyio

PURPOSE = "Write a report."
SAID = {
    "reasoning": "A file is there.",
    "evidence": ["one file"],
    "phi_before": 0,
    "phi_after": 3,
    "confidence": 0.9,
}


def step(number: int = 0) -> Transition:
    return Transition(before="No file.", action=Action(name="write", arguments=number), after="One file.")


@contextmanager
def endpoint() -> Iterator[tuple[ModelConfig, list[bytes]]]:
    """Serve a model that says the same of every step; gives its settings and what was asked."""
    asked: list[bytes] = []

    def play(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.rfile.read(int(handler.headers["content-length"])))
        message = {"role": "assistant", "content": json.dumps(SAID)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": "small"}
        content = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with serving(play) as url:
        yield (
            ModelConfig(model="small", base_url=url, api_key_env=None, mode="json_schema", max_retries=0),
            asked,
        )


async def score(
    model: ModelConfig,
    store: Path,
    *,
    number: int = 0,
    budget: BudgetConfig | None = None,
    replay: ReplayConfig | None = None,
) -> float:
    """Connect, score one step, and return what the critic said of the state after."""
    async with connect(
        model, store=store, budget=budget or BudgetConfig(), replay=replay or ReplayConfig()
    ) as llm:
        return (await Critic(llm).score(step(number), purpose=PURPOSE)).evaluation.progress_after


async def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    """A second connection to the same file finds the reply there."""
    with endpoint() as (model, asked):
        said = [await score(model, tmp_path / "memory.db") for _ in range(2)]
    assert said == [3, 3]
    assert len(asked) == 1


async def test_a_budget_holds_over_all_connections_to_a_file(tmp_path: Path) -> None:
    """Calls of an earlier connection count."""
    one = BudgetConfig(max_calls=1)
    with endpoint() as (model, asked):
        await score(model, tmp_path / "memory.db", budget=one)
        with pytest.raises(BudgetSpent, match="max_calls"):
            await score(model, tmp_path / "memory.db", number=1, budget=one)
        await score(model, tmp_path / "other.db", number=1, budget=one)
    assert len(asked) == 2


async def test_the_time_of_a_budget_ends_what_is_under_way(tmp_path: Path) -> None:
    """What waits when the time is up is cut off, and the error says which limit it was."""
    with endpoint() as (model, _), pytest.raises(BudgetSpent, match="max_seconds"):
        async with connect(model, store=tmp_path / "memory.db", budget=BudgetConfig(max_seconds=0.05)):
            await anyio.sleep_forever()


async def test_a_recording_answers_without_a_network_and_without_a_key(tmp_path: Path) -> None:
    """What was recorded is replayed for a model whose server is gone and whose key is not set."""
    cassette = tmp_path / "cassette.jsonl"
    with endpoint() as (model, _):
        await score(model, tmp_path / "a.db", replay=ReplayConfig(cassette=cassette, mode="record"))
    keyed = model.model_copy(update={"api_key_env": "REFLACT_TEST_KEY_THAT_IS_NOT_SET"})
    assert await score(keyed, tmp_path / "b.db", replay=ReplayConfig(cassette=cassette)) == 3


@pytest.mark.parametrize(
    ("model", "budget", "words"),
    [
        (ModelConfig(), BudgetConfig(), "the critic's model has no name"),
        (ModelConfig(model="m"), BudgetConfig(max_tokens=9), r"models\.critic\.max_tokens"),
        (ModelConfig(model="m", api_key_env="REFLACT_NOT_SET"), BudgetConfig(), "REFLACT_NOT_SET"),
    ],
    ids=["no name", "no cap", "no key"],
)
async def test_what_is_missing_is_said_before_a_call(
    tmp_path: Path, model: ModelConfig, budget: BudgetConfig, words: str
) -> None:
    """A name, a cap for a limit, a key: the error names what to set."""
    with pytest.raises(ConfigError, match=words):
        await score(model, tmp_path / "memory.db", budget=budget)
