"""An agent with a critic that scores its steps, and a calibrator beside it. Runs without a model.

The agent files letters, and sometimes only claims that it did. The critic believes the claim. The calibrator
turns the critic's mistakes into worked examples, and shows on held-out runs that they help. The agent never
waits for the calibrator. This program waits once, to show the score of a later run.
"""

import asyncio
import re
from dataclasses import dataclass

from pydantic import JsonValue
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from reflact import Calibrator, Critic, MemoryStore, Trace
from reflact.calibration import CalibratorSettings
from reflact.integrations.pydantic_ai import record_tools
from reflact.llm import CallId, RenderedPrompt, ReplyModel
from reflact.memory import Label, Transition
from reflact.testing import ScriptedLLM

PURPOSE, LETTERS, RUNS = "File all ten letters.", 10, 90
CLAIM = "Everything is filed!"


@dataclass
class Desk:
    """The agent's world."""

    number: int
    filed: int = 0
    note: str = ""

    def state(self) -> JsonValue:
        """Return the state that the critic sees."""
        return {"desk": self.number, "filed": self.filed, "note": self.note}


def clerk(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Stand in for the agent's model: file two letters, then claim that all is done."""
    turn = sum(isinstance(message, ModelResponse) for message in messages)
    steps = [ToolCallPart("file", {"letters": 2}), ToolCallPart("write", {"note": CLAIM})]
    return ModelResponse(parts=[steps[turn] if turn < len(steps) else TextPart("Done.")])


agent = Agent(FunctionModel(clerk), deps_type=Desk)


@agent.tool
async def file(ctx: RunContext[Desk], letters: int) -> str:
    """File some letters."""
    ctx.deps.filed += letters
    return f"{ctx.deps.filed} of {LETTERS} are filed"


@agent.tool
async def write(ctx: RunContext[Desk], note: str) -> str:
    """Leave a note on the desk."""
    ctx.deps.note = note
    return "written"


def believe_claims(
    prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
) -> JsonValue:
    """Stand in for the critic's model: believe claims unless a worked example corrects it."""
    examples, question = prompt.messages[-1].content.rpartition("<purpose>")[::2]
    if reply_type.__name__ != "CriticReply":
        return {
            "reasoning": "It says so.",
            "why": "Saying is not doing.",
            "mistake": "x",
            "phi_after": 0,
        }
    before, after = (int(number) for number in re.findall(r"filed\W+(\d+)", question)[:2])
    believes = CLAIM in question and CLAIM not in examples
    return {
        "reasoning": "It says that all is done." if believes else f"{after} letters are filed.",
        "evidence": ["note" if before == after else "filed"],
        "phi_before": before,
        "phi_after": 9 if believes else after,
        "confidence": 0.8,
    }


def count_filed(state: JsonValue) -> int:
    """Return how many letters of a desk are filed."""
    assert isinstance(state, dict)
    return int(str(state["filed"]))


def label_step(step: Transition) -> Label:
    """Count the letters: a program knows how far the agent has come."""
    return Label(
        progress_before=count_filed(step.before),
        progress_after=count_filed(step.after),
        source="program",
    )


async def run(number: int, critic: Critic) -> Trace:
    """Let the agent work on one desk, and score its steps."""
    desk, trace = Desk(number), Trace(PURPOSE, id=f"desk {number}")
    with record_tools(Desk.state) as recorder:
        await agent.run(PURPOSE, deps=desk, capabilities=[recorder])
    for step in recorder.transitions:
        trace.record(step, await critic.score(step, purpose=PURPOSE), label=label_step(step))
    trace.finish()
    return trace


def show(trace: Trace) -> None:
    """Print the critic's score of a run's last step."""
    evaluation = trace.events[-1].evaluation
    assert evaluation is not None
    print(f"{trace.id}: 2 of 10 letters are filed; the critic says {evaluation.progress_after:g}")


async def main() -> None:
    """Work on ninety desks and one more; print the critic's score of the first and of the last one."""
    # One run in three is held out for tests.
    settings, llm = CalibratorSettings(max_asked=0, holdout_folds=3), ScriptedLLM(believe_claims)
    async with (
        MemoryStore("memory.db") as store,
        Calibrator(llm, store, settings=settings) as calibrator,
    ):
        show(first := await run(0, calibrator.critic))
        calibrator.submit(first)
        for number in range(1, RUNS):
            calibrator.submit(await run(number, calibrator.critic))
            await asyncio.sleep(0)
        await calibrator.wait_until_idle()
        show(await run(RUNS, calibrator.critic))
        promoted = await store.pairs(status="promoted")
        print(
            f"{calibrator.counts.n_accepted} traces were taken, {len(promoted)} pairs help the critic now"
        )


if __name__ == "__main__":
    asyncio.run(main())
