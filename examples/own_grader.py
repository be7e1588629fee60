"""A grader of your own: titles become slugs, and a near miss counts in part. Runs without a model."""

import asyncio
from difflib import SequenceMatcher

import anyio
from pydantic import JsonValue

from reflact import Grade, Item, Score, Trainer
from reflact.environments import DataSet, DatasetEnvironment
from reflact.llm import CallId, RenderedPrompt, ReplyModel
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM, append_reply

LOWER, HYPHENS = "Use lower case.", "Put a hyphen for each space."


async def grade(item: Item, answer: str) -> Grade:
    """Grade right or wrong by equality, and a wrong answer by its similarity."""
    expected = str(item.reference)
    # A slow check goes to a worker thread, so that other rollouts continue.
    near = await anyio.to_thread.run_sync(lambda: SequenceMatcher(None, answer, expected).ratio())
    feedback = None if answer == expected else f"expected {expected}, got {answer}"
    return Grade(
        score=Score(hard=float(answer == expected), soft=near), answer=answer, feedback=feedback
    )


def items(*titles: str) -> tuple[Item, ...]:
    """Return an item for each title."""
    return tuple(Item(id=t, input=t, reference=t.lower().replace(" ", "-")) for t in titles)


def writer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> str:
    """Stand in for the target's model: change the title as the instructions say."""
    instructions, title = prompt.messages[0].content, prompt.messages[-1].content
    title = title.lower() if LOWER in instructions else title
    return title.replace(" ", "-") if HYPHENS in instructions else title


def editor(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    """Stand in for the optimizer's model: propose the first rule that the document lacks."""
    missing = [rule for rule in (LOWER, HYPHENS) if rule not in prompt.messages[-1].content]
    return append_reply(reply_type, *missing[:1])


async def main() -> None:
    """Train, and print the scores."""
    data = DataSet(
        train=items("The Night Train", "A Tower of Stone", "Two Wells", "North by Hand"),
        val=items("Salt and Wire", "The Long Way Up", "Green Lamps"),
        test=items("Over the Weir", "Half a Map", "Low Tide"),
    )
    trainer = Trainer(
        {
            "out_dir": "runs/slugs",
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 2},
            "gate": {"metric": "soft"},
        },
        environment=DatasetEnvironment(data, grade=grade, name="slugs", version=1),
        target=ChatTarget(ScriptedLLM(writer)),
        optimizer=ScriptedLLM(editor),
    )
    summary = await trainer.train()
    for score in summary.scores:
        print(
            f"{score.split} {score.name}: {score.successes:.0f} of {score.n} right, soft {score.soft:.2f}"
        )


if __name__ == "__main__":
    asyncio.run(main())
