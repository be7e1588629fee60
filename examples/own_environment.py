"""An environment of your own: guess a number, with a hint after each wrong guess. Runs without a model."""

import asyncio

from pydantic import JsonValue

from reflact import Grade, Item, Score, Session, Split, Trainer
from reflact.llm import CallId, RenderedPrompt, ReplyModel
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM, append_reply


class GuessTheNumber:
    """Six guesses for a number out of 63: enough for a player that halves the range."""

    identity = "guess the number, version 1"  # raise the version when scores change their meaning

    def items(self, split: Split) -> list[Item]:
        first = {Split.train: 0, Split.val: 100, Split.test: 200}[split]
        starts = range(first, first + 24, 2)
        return [
            Item(id=f"{split}-{low}", input=[low, low + 62], reference=low + low * 7 % 63)
            for low in starts
        ]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        secret, message = int(str(item.reference)), f"Guess my number: {item.input}"
        for guesses in range(1, 7):
            answer = await session.reply(message)
            if answer == str(secret):
                return Grade(score=Score(hard=1, soft=1 / guesses), answer=answer)
            message = "higher" if answer.isdecimal() and int(answer) < secret else "lower"
        return Grade(score=Score.of(0), answer=answer, feedback=f"not found in 6 guesses: {secret}")


def player(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> str:
    """Stand in for the target's model: halve the range if the instructions say so, else count up."""
    turns = [message.content for message in prompt.messages if message.role != "system"]
    low, high = (int(word.strip("[],")) for word in turns[0].split()[-2:])
    for guess, hint in zip(turns[1::2], turns[2::2], strict=True):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2 if "middle" in prompt.messages[0].content else low)


def coach(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    """Stand in for the optimizer's model: propose one rule for failures, and nothing otherwise."""
    if call_id.purpose == "analyst_failure":
        return append_reply(reply_type, "Guess the middle of the range that the hints leave.")
    return append_reply(reply_type)


async def main() -> None:
    """Train, and print the scores."""
    trainer = Trainer(
        {
            "out_dir": "runs/guess",
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 8},
            "gate": {"metric": "mixed"},
        },
        environment=GuessTheNumber(),
        target=ChatTarget(ScriptedLLM(player)),
        optimizer=ScriptedLLM(coach),
    )
    summary = await trainer.train()
    for score in summary.scores:
        print(f"{score.split} {score.name}: {score.successes:.0f} of {score.n} found")


if __name__ == "__main__":
    asyncio.run(main())
