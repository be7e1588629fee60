"""Pairs and evidence that tests of the memory share."""

from __future__ import annotations

from collections.abc import Sequence

from reflact import MemoryStore
from reflact.memory.cards import TraceIdentity, compute_alpha, hash_purpose
from reflact.memory.models import (
    Action,
    BatchTest,
    ContrastPair,
    Evaluation,
    PromotionEvidence,
    Provenance,
    Scope,
    Transition,
)
from reflact.messages import CallId, CallReservation, StoredResponse
from reflact.protocols import ResponseStore
from reflact.types import digest_json

CRITIC = Scope(roles=("critic",))


def recorded(name: str) -> TraceIdentity:
    return TraceIdentity(name, (hash_purpose(name),))


HELD_OUT = tuple(recorded(f"held out {number}") for number in range(60))
"""Traces that batches are tested on."""


def make_pair(
    number: int = 0,
    *,
    note: str = "a report was written",
    trace: str | None = "trace",
    scope: Scope = CRITIC,
) -> ContrastPair:
    return ContrastPair(
        purpose="Write the report.",
        transition=Transition(
            before={"files": []}, action=Action(name="write"), after={"files": [number], "note": note}
        ),
        right=Evaluation(
            progress_before=2, progress_after=3, reasoning="One file more.", evidence=("files",)
        ),
        wrong=Evaluation(progress_before=2, progress_after=9, reasoning="It says that it is done."),
        reason="It credits what the agent announced.",
        mistake="credit_for_intention",
        construction="asked",
        label_source="program",
        scope=scope,
        provenance=Provenance(trace_id=trace, step=number, prompt="contrast@1", model="m"),
    )


async def keep_reply(effects: ResponseStore, asked: str, said: str) -> str:
    role, purpose = asked.split("/")
    key = digest_json([asked, said])
    call_id = CallId(role=role, purpose=purpose, part="p").label
    intent = CallReservation(
        key=key, run_id="r", call_id=call_id, role="critic", purpose=purpose, endpoint="e", model="m"
    )
    await effects.reserve(intent)
    reply = StoredResponse(key=key, text=said)
    await effects.store_response(reply, intent)
    return key


def evidence_for(test: BatchTest, *, promoted: bool = True) -> PromotionEvidence:
    shown = promoted is (test.kind == "promote")
    outcomes = ("better", "not_shown") if test.kind == "promote" else ("no_harm_shown", "worse")
    return PromotionEvidence(
        pair_ids=test.pair_ids,
        passed_test=promoted,
        n_traces=60,
        n_transitions=135,
        n_earlier_tests=test.n_earlier_tests,
        effect=1.5 if promoted else -0.5,
        low=0.75 if promoted else -0.75,
        high=2.25 if promoted else -0.25,
        p_value=0.5**60 if shown else 0.875,
        alpha=compute_alpha(test.n_earlier_tests),
        critic="m",
        prompt="critic@1",
        outcome=outcomes[not promoted],
    )


async def promote(memory: MemoryStore, pairs: Sequence[ContrastPair]) -> None:
    for pair in pairs:
        await memory.submit(pair)
    test = await memory.open_test([pair.id for pair in pairs], traces=HELD_OUT)
    await memory.close_test(test.number, evidence_for(test))


async def set_utility(memory: MemoryStore, pair_id: str, utility: float) -> None:
    sql = "UPDATE memory_pairs SET utility = ? WHERE id = ?"
    assert await memory._database.execute(sql, (utility, pair_id)) == 1
