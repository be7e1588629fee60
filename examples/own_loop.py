"""A loop of your own, of the six stages. Runs without a model."""

import asyncio
from collections.abc import Sequence
from functools import partial

from reflact import LLM, Environment, Item, Skill, Split, Target
from reflact.stages import (
    Journal,
    StageContext,
    aggregate,
    evaluate,
    reflect,
    roll_out,
    select,
    update,
)
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer


async def train(
    target: Target, environment: Environment, optimizer: LLM, *, steps: int
) -> tuple[Skill, list[str]]:
    """Return the last accepted document, and what was decided in each step."""
    skill, decisions = Skill(text=""), list[str]()
    batch: Sequence[Item] = environment.items(Split.train)
    play = partial(roll_out, target=target, environment=environment, journal=Journal())
    for step in range(1, steps + 1):
        context = StageContext(llm=optimizer, step=step)
        rollouts = await play(batch, skill)
        reports = await reflect(rollouts, batch, skill, context=context)
        merged = await aggregate(reports, skill, context=context)
        chosen = await select(merged, skill, context=context, budget=2)
        candidate = await update(skill, chosen, context=context)
        verdict = await evaluate(
            candidate.skill, skill, environment.items(Split.val), roll_out=play
        )
        decisions.append(f"{verdict.action}: {verdict.reason}")
        if verdict.accepted:
            skill = candidate.skill
    return skill, decisions


async def main() -> None:
    """Train in the toy world, and print what was decided and the document."""
    optimizer = ScriptedLLM(toy_optimizer())
    skill, decisions = await train(ToyTarget(), ToyEnvironment(), optimizer, steps=4)
    print(*decisions, skill.text, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
