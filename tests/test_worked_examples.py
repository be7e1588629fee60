"""Worked examples in the critic's prompt: within the budget, whole, promoted, in scope, always the same."""

from __future__ import annotations

from collections import Counter
from random import Random

import critic_world
from critic_world import EQUAL, World, pair, store_of, transition
from reflact.calibration.asked import KNOWN_MISTAKES
from reflact.calibration.critic import CRITIC_SCOPE, Critic
from reflact.calibration.transition_view import TransitionView, estimate_tokens
from reflact.calibration.worked_examples import EXAMPLES_HEADER, rank_pairs, show_examples
from reflact.memory.cards import is_visible_to
from reflact.memory.models import ContrastPair, Evaluation
from reflact.testing import ScriptedLLM


async def test_random_stores_and_budgets(thorough: bool) -> None:
    shown = passed_over = 0
    n_worlds = 1000 if thorough else 80
    for seed in range(n_worlds):
        world = World(seed)
        prompt, score = await world.ask()
        assert (prompt, score) == await world.ask(world.stored[::-1])
        by_id = {one.pair.id: one for one in world.stored}
        pairs = [by_id[pair_id].pair for pair_id in score.pair_ids]
        settings = world.settings
        limit = settings.example_state_tokens
        whole = show_examples(pairs, max_tokens=10**9, max_pairs=10**9, max_state_tokens=limit)
        assert estimate_tokens(whole.text) <= settings.example_tokens
        assert len(pairs) == len(set(score.pair_ids)) <= settings.max_examples
        assert all(by_id[pair_id].status == "promoted" for pair_id in score.pair_ids)
        assert all(is_visible_to(one.scope, CRITIC_SCOPE) for one in pairs)
        assert not any((one.purpose, one.transition) == (world.purpose, world.transition) for one in pairs)
        user = prompt.messages[1].content
        assert user.startswith(f"{whole.text}\n\n<purpose" if pairs else "<purpose")
        assert EXAMPLES_HEADER not in user.removeprefix(EXAMPLES_HEADER)
        shown += len(pairs)
        passed_over += len(by_id) - len(pairs)
    assert shown > n_worlds / 3
    assert passed_over > n_worlds


def test_credit_and_no_credit_balance_each_other() -> None:
    random = Random(6)

    def one(number: int, *, credit: bool) -> ContrastPair:
        right = Evaluation(
            progress_before=2, progress_after=5 if credit else 2, reasoning=f"Example {number}."
        )
        return pair(random).model_copy(update={"mistake": KNOWN_MISTAKES[number % 4].name, "right": right})

    pairs = [one(n, credit=n % 5 == 0) for n in range(40)]
    order = [*rank_pairs(pairs, TransitionView(transition(random)), purpose="p")]
    gives = [pair.right.delta > 0 for pair in order]
    assert [sum(gives[:n]) for n in (2, 4, 6, 8)] == [1, 2, 3, 4]
    assert sorted(order, key=lambda pair: pair.id) == sorted(pairs, key=lambda pair: pair.id)
    for n in range(4, 40, 4):
        kinds = Counter(pair.mistake for pair in order[:n])
        assert max(kinds.values()) - min(kinds.values()) <= 1


async def test_what_was_tested_is_what_scores() -> None:
    promoted, batch = (
        [pair(Random(n)).model_copy(update={"scope": CRITIC_SCOPE}) for n in numbers]
        for numbers in (range(180), range(1000, 1020))
    )
    steps = [(f"Purpose {n}: {critic_world.text(Random(n))}", transition(Random(n))) for n in range(6)]

    async def prompts(critic: Critic, llm: ScriptedLLM, pairs: list[ContrastPair] | None) -> list[str]:
        for purpose, asked in steps:
            await critic.score(asked, purpose=purpose, pairs=pairs)
        return [call.prompt.model_dump_json() for call in llm.calls]

    before, after = store_of(*promoted), store_of(*batch, *promoted)
    tested, live, pinned = (ScriptedLLM(lambda *_: EQUAL) for _ in range(3))
    replayed = await prompts(Critic(tested, memory=before), tested, [*promoted, *batch])
    assert await prompts(Critic(live, memory=after), live, None) == replayed
    assert await prompts(await Critic(pinned, memory=after).pin(), pinned, None) == replayed
    assert len(set(replayed)) == len(steps)
    assert all("<example_1" in prompt for prompt in replayed)
