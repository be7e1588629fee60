"""Contrast pairs: what is selected, what is right, what becomes of candidates, and in which order."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from critic_world import PURPOSE, KnowingJudge, PlainCritic, Script, event, generate, mistaken, round_of
from doubles import Endpoint, completion, config, connected, opened
from memory_pairs import make_pair
from reflact.calibration.contrast import (
    ContrastSettings,
    DroppedCandidate,
    GenerationResult,
    GenerationTask,
    PairModels,
    generate_contrast_pairs,
)
from reflact.calibration.mistakes import Mistake
from reflact.calibration.planning import select_events
from reflact.concurrency import INLINE_LIMIT
from reflact.config.training import PromptsConfig
from reflact.errors import ConfigError, ProviderDown
from reflact.memory.cards import compute_subject_hash
from reflact.memory.models import ContrastPair, Label, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.testing import ScriptedLLM
from reflact.types import digest_json

EVENTS = (event(0), event(1, said=(2, 9)), event(2, after=2, said=(2, 5), changed=False), event(3, before=5))


def unscored(**fields: Any) -> ScoreEvent:
    """Return a step that no critic saw."""
    return event(**fields).model_copy(update={"evaluation": None})


async def made(*events: ScoreEvent, **more: Any) -> GenerationResult:
    """Make the pairs of a trace."""
    return await generate(*(events or EVENTS), **more)


@pytest.mark.parametrize(
    ("one", "chosen", "without_still"),
    [
        (event(after=2.5), True, True),
        (event(after=2.4), False, False),
        (event(after=1), True, True),
        (event(after=2), True, False),
        (event(after=2.3, changed=False), True, False),
        (event(said=(2, 2.3)), True, True),
        (unscored(after=2.5), True, True),
        (unscored(after=2.4), False, False),
        (unscored(after=2), True, False),
        (unscored(after=2.3, changed=False), True, False),
        (unscored(gold=False), True, True),
        (unscored(gold=False, changed=False), True, False),
    ],
)
def test_steps_that_moved_or_stood_still_are_selected(
    one: ScoreEvent, chosen: bool, without_still: bool
) -> None:
    """Critic or label say if a step moved by 0.5 or stood still; if neither spoke, whether the states differ."""
    assert bool(select_events([one], ContrastSettings())) is chosen
    assert bool(select_events([one], ContrastSettings(include_no_change=False))) is without_still


INFLATED = round_of("inflated_score")
OTHERS = ("Draw three figures.", PURPOSE.upper())


@pytest.mark.parametrize(
    ("one", "options", "reason"),
    [
        (event(gold=False), {}, "unverified"),
        (unscored(gold=False), {}, "unverified"),
        (event(gold=False), {"critic": PlainCritic((2, 4), (2, 6), (2, 5))}, "disagreement"),
        (event(gold=False), {"critic": PlainCritic((0, 5), (3, 5))}, "disagreement"),
        (event(gold=False), {"critic": PlainCritic((2, 6), guarded=[2])}, "disagreement"),
        (event(after=10), {"plan": INFLATED}, "not_applicable"),
        (
            event(after=10),
            {"plan": INFLATED, "critic": PlainCritic((2, 10)), "other_purposes": OTHERS},
            "not_confirmed",
        ),
    ],
    ids=["one opinion", "no opinion", "after", "before", "no evidence", "no room", "other purpose"],
)
async def test_what_nobody_knows_or_nothing_shows_makes_no_pair(
    one: ScoreEvent, options: dict[str, Any], reason: str
) -> None:
    """Each candidate is a drop with its reason."""
    result = await made(one, **options)
    assert (result.pairs, result.n_candidates, result.dropped[0].reason) == ((), 4, reason)
    assert {drop.reason for drop in result.dropped} <= {reason, "not_applicable"}


async def test_a_label_alone_makes_pairs_without_a_critic() -> None:
    """Every candidate of a step that no critic scored becomes a pair, labelled by who gave the label."""
    result = await made(unscored())
    assert result.dropped == ()
    assert {pair.label_source for pair in result.pairs} == {"program"}
    assert "observed" not in {pair.construction for pair in result.pairs}


async def test_samples_that_agree_say_what_is_right() -> None:
    """The middle of three independent samples is the right side, and the label says so."""
    critic = PlainCritic((2, 5.5), (2, 6.5), (2, 6))
    result = await made(event(gold=False), plan=round_of("ignored_evidence"), critic=critic)
    assert sorted(critic.trials) == [1, 2, 3]
    assert {pair.label_source for pair in result.pairs} == {"agreement"}
    (asked, *_) = [pair for pair in result.pairs if pair.construction == "asked"]
    assert (asked.right.progress_before, asked.right.progress_after) == (2, 6)


async def test_no_sample_is_asked_in_vain() -> None:
    """Two samples far apart end the asking of nine; if a label says what is right, none is asked."""
    critic = PlainCritic((2, 2), (2, 9))
    await made(event(gold=False), critic=critic, settings=ContrastSettings(n_samples=9, concurrency=1))
    assert len(critic.trials) <= 3
    critic = PlainCritic((2, 2.5))
    await made(event(), plan=round_of("ignored_evidence"), critic=critic)
    assert critic.trials == []


async def test_each_way_of_making_a_mistake_is_used_once_the_best_first() -> None:
    """The critic's own mistake, then what needs no model, come before what a model is asked for."""
    ignored = await made(event(), plan=round_of("ignored_evidence"))
    ways = ["no_effect", "evidence_withdrawn", "asked", "asked"]
    assert [pair.construction for pair in ignored.pairs] == ways
    assert len({pair.id for pair in ignored.pairs}) == 4
    inflated = await made(event(said=(2, 9)), plan=INFLATED)
    first = inflated.pairs[0]
    assert (first.construction, first.right.progress_after, first.wrong.progress_after) == ("observed", 6, 9)


async def test_samples_say_what_is_right_for_another_purpose() -> None:
    """The purpose comes from another trace; if there is none a model writes it, unless that is switched off."""
    critic = PlainCritic((0, 0.5))
    low = await made(event(), plan=INFLATED, critic=critic, other_purposes=OTHERS)
    (found,) = [pair for pair in low.pairs if pair.construction == "other_purpose"]
    assert (found.purpose, found.label_source, found.right.progress_after) == (OTHERS[0], "agreement", 0.5)
    result = await made(event(), plan=INFLATED, critic=critic)
    assert "Draw the three figures of the report." in {pair.purpose for pair in result.pairs}
    without = ContrastSettings(write_other_purposes=False)
    off = await made(event(), plan=INFLATED, critic=critic, settings=without)
    assert {pair.purpose for pair in off.pairs} == {PURPOSE}


async def test_own_kinds_of_mistakes_are_asked_for() -> None:
    """A described kind of one's own is made; one that nobody described is refused before any call."""
    plan = round_of("halo")
    own = ContrastSettings(mistakes=(Mistake(name="halo", description="Likes the agent."),))
    result = await made(event(), plan=plan, settings=own)
    assert {pair.mistake for pair in result.pairs} == {"halo"}
    with pytest.raises(ConfigError, match="halo"):
        await made(event(), plan=plan)


async def test_a_second_round_makes_nothing_again() -> None:
    """Known pairs are passed over before they are paid for; other constructions take their places."""
    first = await made()
    known = {pair.id for pair in first.pairs}
    second = await made(known_pair_ids=known, plan=round_of(number=2))
    assert not known & {pair.id for pair in second.pairs}
    assert {pair.construction for pair in second.pairs} >= {"asked", "evidence_withdrawn"}


async def test_a_reply_that_gives_a_known_pair_is_a_drop() -> None:
    """What a model writes again is dropped as known."""
    plan = round_of("credit_for_intention")
    still = event(after=2, changed=False)
    first = await made(still, plan=plan)
    again = await made(still, plan=plan, known_pair_ids={pair.id for pair in first.pairs})
    assert again.pairs == ()
    assert {drop.reason for drop in again.dropped} == {"known"}


async def test_equal_steps_are_learned_from_once() -> None:
    """A step that equals an earlier one is dropped before anything is asked about it."""
    twin = event().model_copy(update={"step": 7})
    result = await made(event(), twin)
    assert result.n_candidates == 8
    assert [(drop.step, drop.reason) for drop in result.dropped] == [(7, "duplicate")] * 4


async def test_equal_replies_are_one_pair() -> None:
    """A model that writes the same twice gives one pair and one drop."""
    same = {"mistake": "inflated_score", "reasoning": "Great.", "phi_after": 9, "why": "Not so."}
    result = await made(event(), plan=INFLATED, write=lambda *_: same)
    assert (len(result.pairs), [d.reason for d in result.dropped]) == (1, ["duplicate"] * 3)


@given(
    moves=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10)), max_size=4),
    each=st.integers(1, 5),
    mute=st.booleans(),
)
def test_candidates_add_up_and_pairs_are_contrasts(
    moves: list[tuple[int, int, int]], each: int, mute: bool
) -> None:
    """Each selected step has so many candidates; each is a pair or a drop, each pair apart by the margin."""
    events = [event(n, before=a, after=b, said=(a, c), changed=a != b) for n, (a, b, c) in enumerate(moves)]

    async def run() -> GenerationResult:
        settings = ContrastSettings(candidates_per_event=each)
        return await made(*events, write=(lambda *_: {}) if mute else mistaken, settings=settings)

    result = anyio.run(run) if events else GenerationResult()
    assert result.n_candidates == each * (len(events) - result.n_skipped)
    for pair in result.pairs:
        assert abs(pair.right.progress_after - pair.wrong.progress_after) >= 1 - 1e-9
        assert pair.wrong.reasoning.strip() != pair.right.reasoning.strip()
        assert pair.provenance.trace_id == "t"


async def test_the_order_of_replies_changes_nothing() -> None:
    """Whatever finishes first, pairs and drops come in the order of the steps; the callback gets the same."""
    plain = await made(judge=KnowingJudge(), settings=ContrastSettings(n_judges=2))
    chance = random.Random(3)

    def late(script: Script) -> Script:
        async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> Any:
            for _ in range(chance.randrange(9)):
                await anyio.lowlevel.checkpoint()
            return script(prompt, reply_type, call_id)

        return answer

    for _ in range(5):
        told: list[ContrastPair | DroppedCandidate] = []

        async def report(one: ContrastPair | DroppedCandidate) -> None:
            told.append(one)  # noqa: B023

        result = await made(
            write=late(mistaken),
            judge=late(KnowingJudge()),
            settings=ContrastSettings(n_judges=2),
            on_result=report,
        )
        assert result == plain
        assert Counter(one.model_dump_json() for one in told) == Counter(
            one.model_dump_json() for one in (*plain.pairs, *plain.dropped)
        )


async def test_calls_in_flight_stay_within_the_limit() -> None:
    """All kinds of calls together never exceed ``concurrency``, and reach it."""
    flying = [0, 0]

    def counted(script: Script) -> Script:
        async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> Any:
            flying[0] += 1
            flying[1] = max(flying)
            try:
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
            finally:
                flying[0] -= 1
            return script(prompt, reply_type, call_id)

        return answer

    events = [event(n) for n in range(12)]
    limits = ContrastSettings(n_judges=4, concurrency=3)
    await made(*events, write=counted(mistaken), judge=counted(KnowingJudge()), settings=limits)
    assert flying == [0, 3]


async def test_a_dead_provider_is_an_error_and_not_a_drop() -> None:
    """What could not be asked is not counted as made: the error comes out as it is."""
    with pytest.raises(ProviderDown):
        await made(event(), plan=INFLATED, write=lambda *_: ProviderDown("the endpoint is gone"))


async def test_comparisons_without_a_judge_are_refused() -> None:
    """Settings that ask for judges need one; a single comparison shows one order only."""
    with pytest.raises(ConfigError, match="judge"):
        await made(event(), settings=ContrastSettings(n_judges=2))
    with pytest.raises(ValidationError, match="at least 2"):
        ContrastSettings(n_judges=1)


async def test_the_writer_is_told_what_is_right() -> None:
    """The question names the right progress before and after; version 1, which recordings use, names the latter."""
    cases: tuple[tuple[dict[str, int], str | None], ...] = (
        ({}, "Right before the action: 2."),
        ({"contrast": 1}, None),
    )
    for versions, words in cases:
        writer = ScriptedLLM(mistaken)
        prompts = load_prompts(PromptsConfig(versions=versions))
        await made(event(before=2, after=6), write=writer, prompts=prompts, plan=INFLATED)
        (call,) = writer.calls[:1]
        text = call.prompt.messages[1].content
        assert "<right>\n6: " in text
        assert (words is None) is ("Right before" not in text)
        assert words is None or words in text


async def test_what_is_proven_can_be_kept_without_judges() -> None:
    """With `unproven`, pairs by label and construction stay unjudged; what samples agreed on is never proven."""
    settings = ContrastSettings(n_judges=2, judged_pairs="unproven")
    result = await made(judge=KnowingJudge(always="first"), settings=settings)
    assert result.pairs
    assert all(pair.construction not in {"asked", "other_purpose"} for pair in result.pairs)
    assert {pair.n_judgements for pair in result.pairs} == {0}
    lost = [drop for drop in result.dropped if drop.reason in {"judged_wrong", "decided_by_position"}]
    assert lost
    assert {drop.construction for drop in lost} <= {"asked", "other_purpose"}
    critic, always = PlainCritic((2, 6)), KnowingJudge(always="second")
    agreed = await made(event(gold=False), critic=critic, judge=always, settings=settings)
    assert agreed.pairs == ()
    assert {"judged_wrong", "decided_by_position"} & {drop.reason for drop in agreed.dropped}


RIGHT = "Two of the three chapters are there."
DONE = "The report is as good as done."
GOOD = {"mistake": "inflated_score", "reasoning": DONE, "phi_after": 9, "why": "A chapter is missing."}
"""A valid mistake beside the right score of 6; the room is 7 to 10."""


def text(**changed: Any) -> str:
    """Return the good reply's JSON with some fields changed."""
    return json.dumps(GOOD | changed)


BAD: dict[str, tuple[str | None, str]] = {
    "missing field": (json.dumps({k: v for k, v in GOOD.items() if k != "why"}), "why: Field required"),
    "not a number": (text(phi_after=float("nan")), "phi_after"),
    "above the scale": (text(phi_after=42), "less than or equal to 10"),
    "equal to what is right": (text(phi_after=6), "phi_after must be from 7 to 10"),
    "nearer than the margin": (text(phi_after=6.9), "phi_after must be from 7 to 10"),
    "the other direction": (text(phi_after=1), "phi_after must be from 7 to 10"),
    "a score in words": (text(phi_after="9/10"), "phi_after"),
    "blank reasoning": (text(reasoning=" .\n"), "must hold words"),
    "the right reasoning": (text(reasoning=f"  {RIGHT.upper()} "), "that of the right evaluation"),
    "an unknown mistake": (text(mistake="sycophancy"), "mistake"),
    "another known mistake": (text(mistake="ignored_evidence"), "mistake"),
    "no JSON": ("I give it a nine, since it is nearly done.", "Invalid JSON"),
    "cut off": (text()[:40], "cut off"),
    "a refusal": (None, "it was a refusal"),
}


def bad(kind: str) -> httpx.Response:
    """Return the answer of one kind."""
    content = BAD[kind][0]
    if content is None:
        return completion(None, refusal="I would rather not.")
    return completion(content, finish="length" if kind == "cut off" else "stop")


STEP = event().model_copy(
    update={"label": Label(progress_before=2, progress_after=6, source="human", reasoning=RIGHT)}
)
"""A step of which only a model can make an inflated score."""


async def made_contrast_replies(endpoint: Endpoint, *, each: int = 1, store: Any = None) -> GenerationResult:
    """Make pairs of the step in front of an endpoint."""
    async with connected(endpoint, config(reasks=1), store=store) as llm:
        return await generate_contrast_pairs(
            [STEP],
            GenerationTask(PURPOSE, "t", INFLATED),
            PairModels(llm),
            settings=ContrastSettings(candidates_per_event=each),
        )


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_reply_costs_one_more_call_and_one_that_stays_bad_is_a_drop(kind: str) -> None:
    """A second reply makes the pair, as if the first had not been; each candidate is counted, with the reason."""
    endpoint = Endpoint(bad(kind), completion(text()))
    result = await made_contrast_replies(endpoint)
    assert len(endpoint.requests) == 2
    assert BAD[kind][1] in endpoint.bodies[1]["messages"][-1]["content"]
    assert (result.n_candidates, result.dropped) == (1, ())
    (pair,) = result.pairs
    assert (pair.right.progress_after, pair.wrong.progress_after) == (6, 9)
    assert pair.wrong.reasoning == GOOD["reasoning"]
    stubborn = Endpoint(bad(kind))
    (drop,) = (await made_contrast_replies(stubborn)).dropped
    assert (drop.reason, drop.construction, len(stubborn.requests)) == ("bad_reply", "asked", 2)
    assert BAD[kind][1] in drop.explanation


async def test_a_round_made_again_repeats_no_call() -> None:
    """Of three candidates one stays bad; over the same store a second round sends nothing and comes out the same."""
    store = await opened()
    answers = [completion(text(reasoning=f"Variation {n}.")) for n in range(2)]
    endpoint = Endpoint(*answers, bad("no JSON"))
    first = await made_contrast_replies(endpoint, each=3, store=store)
    assert (len(first.pairs), [drop.reason for drop in first.dropped]) == (2, ["bad_reply"])
    sent = len(endpoint.requests)
    assert await made_contrast_replies(endpoint, each=3, store=store) == first
    assert len(endpoint.requests) == sent


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


async def test_pairs_of_long_states_are_those_of_short_ones_made_off_the_loop() -> None:
    """Perturbed inputs and ids of long states are computed on another thread; what does not change is no matter."""
    results = []
    for rows in (0, INLINE_LIMIT):
        known = Where()
        result = await generate(*(longer(event(n), rows) for n in range(3)), known_pair_ids=known)
        assert (known.threads != {threading.get_ident()}) is (rows > 0)
        pairs = [(p.construction, p.mistake, p.right, p.wrong.progress_after) for p in result.pairs]
        results.append((pairs, result.dropped))
    assert results[0][0]
    assert results[0] == results[1]


def test_a_copy_has_the_hashes_of_what_it_holds() -> None:
    """A pair's id follows from its content, also where it is the changed copy of one whose id is known."""

    def id_of(pair: ContrastPair) -> str:
        names = {"purpose", "transition", "right", "wrong", "mistake", "scope"}
        fields = pair.model_dump(mode="json", include=names)
        return digest_json(fields | {side: getattr(pair, side).hashed_fields for side in ("right", "wrong")})

    pair, other = make_pair(), longer(event(), 3).transition
    assert pair.id == id_of(pair)
    scope = pair.scope.model_copy(update={"user": "me"})
    changes: dict[str, object] = {"right": pair.wrong, "wrong": pair.right, "scope": scope}
    changes |= {"purpose": "another", "transition": other, "mistake": "mine"}
    for name, value in changes.items():
        copied = pair.model_copy(update={name: value})
        assert copied.id == id_of(copied) != pair.id
        assert copied.hashes.subject == compute_subject_hash(copied.purpose, copied.transition)
    judged = pair.model_copy(update={"n_judgements": 2, "agreement": 1.0, "reason": "so"}, deep=True)
    assert judged.id == id_of(judged) == pair.id
    assert pair == ContrastPair.model_validate(pair.model_dump())
