"""Work on long states: off the loop, nothing computed for another pair, the same as on short ones."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import JsonValue

from contrast_world import PURPOSE, event, mistaken, round_of
from memory_pairs import make_pair
from reflact import MemoryStore
from reflact.calibration.contrast import ContrastSettings, generate_contrast_pairs
from reflact.calibration.mistakes import GenerationResult
from reflact.concurrency import INLINE_LIMIT
from reflact.memory.cards import ScanFinding, compute_subject_hash, subject_hash
from reflact.memory.models import ContrastPair, ScoreEvent, Transition
from reflact.testing import ScriptedLLM
from reflact.types import digest_json

pytestmark = pytest.mark.anyio


def longer(step: ScoreEvent, rows: int) -> ScoreEvent:
    """Return a step whose states have so many fields more, which do not change."""
    more: dict[str, JsonValue] = {f"row {n}": {"text": "some words"} for n in range(rows)}
    before, after = step.transition.before, step.transition.after
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    grown = Transition(before={**before, **more}, action=step.transition.action, after={**after, **more})
    return step.model_copy(update={"transition": grown})


class Where:
    """Known ids: none; remembers on which threads it was asked."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __contains__(self, pair_id: object) -> bool:
        self.threads.add(threading.get_ident())
        return False


async def made_of(steps: Iterable[ScoreEvent], known: Where) -> GenerationResult:
    """Make the pairs of steps that need no model."""
    return await generate_contrast_pairs(
        tuple(steps),
        purpose=PURPOSE,
        trace_id="t",
        round_plan=round_of(),
        llm=ScriptedLLM(mistaken),
        settings=ContrastSettings(n_judges=0),
        known_pair_ids=known,
    )


@pytest.mark.parametrize("rows", [0, INLINE_LIMIT])
async def test_pairs_of_long_states_are_made_off_the_loop(rows: int) -> None:
    """Perturbed inputs and their ids are computed on another thread where states are long, else in place."""
    known = Where()
    made = await made_of([longer(event(n), rows) for n in range(3)], known)
    assert made.pairs
    assert (known.threads != {threading.get_ident()}) is (rows > 0)


async def test_long_states_make_the_pairs_that_short_ones_make() -> None:
    """What does not change makes no difference to what is made of steps, and in which order."""
    few = await made_of([event(n) for n in range(3)], Where())
    many = await made_of([longer(event(n), INLINE_LIMIT) for n in range(3)], Where())

    def told(made: GenerationResult) -> list[object]:
        pairs = [
            (p.construction, p.mistake, p.right, p.wrong.progress_after, p.provenance) for p in made.pairs
        ]
        return [pairs, made.dropped, made.n_candidates]

    assert told(few) == told(many)


@pytest.mark.parametrize("rows", [0, INLINE_LIMIT])
async def test_pairs_of_long_states_are_scanned_off_the_loop(rows: int, tmp_path: Path) -> None:
    """A store looks at the texts of a long pair on another thread, at those of a short one in place."""
    threads: set[int] = set()

    def scan(texts: Iterable[str]) -> ScanFinding | None:
        threads.add(threading.get_ident())
        return None

    step = longer(event(), rows)
    pair = make_pair().model_copy(update={"transition": step.transition})
    async with MemoryStore(tmp_path / "memory.db", scan=scan) as store:
        assert (await store.submit(pair)).is_new
        assert (await store.pairs())[0].pair == pair
    assert (threads == {threading.get_ident()}) is (rows == 0)


def test_a_copy_has_the_hashes_of_what_it_holds() -> None:
    """A pair's id follows from its content, also where it is the changed copy of one whose id is known."""

    def id_of(pair: ContrastPair) -> str:
        names = {"purpose", "transition", "right", "wrong", "mistake", "scope"}
        fields = pair.model_dump(mode="json", include=names)
        return digest_json(fields | {side: getattr(pair, side).hashed_fields for side in ("right", "wrong")})

    pair, other = make_pair(), longer(event(), 3).transition
    assert pair.id == id_of(pair)
    changes: dict[str, object] = {
        "purpose": "another",
        "transition": other,
        "right": pair.wrong,
        "wrong": pair.right,
        "mistake": "mine",
        "scope": pair.scope.model_copy(update={"user": "me"}),
    }
    for name, value in changes.items():
        copied = pair.model_copy(update={name: value})
        assert copied.id == id_of(copied) != pair.id
        assert subject_hash(copied) == compute_subject_hash(copied.purpose, copied.transition)
    judged = pair.model_copy(update={"n_judgements": 2, "agreement": 1.0, "reason": "so"}, deep=True)
    assert judged.id == id_of(judged) == pair.id
    assert pair == ContrastPair.model_validate(pair.model_dump())
