"""An agent of pydantic-ai that loads an exported skill when a task needs it. Runs without a model.

The agent's model sees the name and the description of the skill. It asks for the whole text before it answers.
"""

import asyncio
from pathlib import Path
from tempfile import mkdtemp

import yaml
from pydantic_ai import Agent
from pydantic_ai.capabilities import Capability
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from reflact import Trainer, export_skill
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer

DESCRIPTION = "Rules for words: which of them to double, to turn round or to shout. Use them for tasks on words."


def load_skill(folder: Path) -> Capability[None]:
    """Return the skill of a folder as a capability, which the model loads on demand."""
    _, front_matter, body = (folder / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)
    known = yaml.safe_load(front_matter)
    return Capability(
        id=known["name"],
        description=known["description"],
        instructions=body.strip(),
        defer_loading=True,
    )


def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Stand in for the agent's model: load the skill, then say how many rules it has."""
    if len(messages) == 1:
        print(info.instructions)
        return ModelResponse(parts=[ToolCallPart("load_capability", {"id": "word-rules"})])
    (loaded,) = messages[-1].parts
    rules = str(getattr(loaded, "content", "")).count("- ")
    return ModelResponse(parts=[TextPart(f"The skill has {rules} rules.")])


async def main() -> None:
    """Train a skill in the toy world, export it, and give it to an agent."""
    folder = Path(mkdtemp())
    trainer = Trainer(
        {"out_dir": folder / "run"},
        environment=ToyEnvironment(),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    )
    await trainer.train()
    skill = await export_skill(folder / "run", folder, name="word-rules", description=DESCRIPTION)
    agent = Agent(FunctionModel(answer), capabilities=[load_skill(skill)])
    print((await agent.run("How many rules are there for words?")).output)


asyncio.run(main())
