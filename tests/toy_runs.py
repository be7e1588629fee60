"""Whole runs in the toy world, for tests of what the algorithm does, and what such a run left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from anyio import sleep_forever
from anyio.lowlevel import checkpoint

from reflact import Trainer, events
from reflact.config.training import TrainerConfig
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Approver, Environment, Session, Target
from reflact.records import EpochRecord, PromotionRecord, RunState, RunSummary, StepRecord
from reflact.stages.reply_models import AnalystReply
from reflact.store.runs import open_store, read_state
from reflact.testing import TOY_RULES, ScriptedLLM, ToyEnvironment, ToyTarget, append_reply, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer, ScriptedCall
from reflact.types import Skill, Split, Turn

Plays = Callable[[type[ReplyModel], str], ScriptedAnswer]
"""Answers one kind of question, from the reply type and from what is shown."""

Part = tuple[type[ReplyModel], Plays | ScriptedAnswer]
"""A kind of reply, and who or what answers it."""

Acts = Callable[[Skill, str, int], str | Awaitable[None] | None]
"""Answers a message under a skill that was asked it so often before; None: as the toy target would."""

WORLD = ToyEnvironment(train=8, val=4, test=4)
"""The world of most runs: four rules."""

LINES = {name: rule.line for name, rule in TOY_RULES.items()}


class Actor:
    """A toy target that notes what it was asked under which skill, and may answer otherwise.

    Attributes:
        asked: The skill's text and the message of each question, in order.
    """

    def __init__(self, acts: Acts | None = None, *, noise: float = 0.0) -> None:
        self._toy = ToyTarget(noise=noise)
        self._acts = acts
        self._times: Counter[tuple[str, str]] = Counter()
        self.asked: list[tuple[str, str]] = []

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _Acting(self._toy.session(skill, rollout=rollout), skill, self)

    async def answer(self, skill: Skill, message: str) -> str | None:
        before = self._times[skill.text, message]
        self._times[skill.text, message] += 1
        self.asked.append((skill.text, message))
        instead = None if self._acts is None else self._acts(skill, message, before)
        return instead if instead is None or isinstance(instead, str) else await instead


def hang_at_document(number: int) -> Acts:
    """Return how to act so that a run never ends: it hangs at its so many-th document, the initial one included."""
    texts: list[str] = []

    def act(skill: Skill, message: str, before: int) -> Awaitable[None] | None:
        if skill.text not in texts:
            texts.append(skill.text)
        return sleep_forever() if texts.index(skill.text) >= number - 1 else None

    return act


class _Acting:
    def __init__(self, inner: Session, skill: Skill, actor: Actor) -> None:
        self._inner = inner
        self._skill = skill
        self._actor = actor
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        instead = await self._actor.answer(self._skill, message)
        await checkpoint()
        answer = await self._inner.reply(message) if instead is None else instead
        self.turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))
        return answer


class Ran(NamedTuple):
    """A run's outcome, its history, and all that its collaborators were asked."""

    summary: RunSummary
    records: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    promotions: tuple[PromotionRecord, ...]
    events: tuple[events.Event, ...]
    state: RunState
    texts: Mapping[str, str]
    calls: Sequence[ScriptedCall]
    actor: Actor

    @property
    def actions(self) -> list[str]:
        return [record.verdict.action for record in self.records]

    def asked(self, purpose: str) -> list[ScriptedCall]:
        return [call for call in self.calls if call.call_id.purpose == purpose]

    def shown(self, purpose: str) -> list[str]:
        return [shown_to(call) for call in self.asked(purpose)]

    @property
    def current(self) -> str:
        return self.texts[self.state.current.skill_hash]

    @property
    def best(self) -> str:
        return self.texts[self.state.best.skill_hash]


def settings(folder: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a short run of the published algorithm, without the ends of epochs and of the run.

    Controls are off, because tests count what the target was asked, and the rollouts that are stored.
    """
    plain: dict[str, Any] = {
        "report": False,
        "search": {"sources": ["edits"]},
        "train": {"batch_size": 4, "num_epochs": 1},
        "reflect": {"minibatch_size": 4},
        "select": {"max_edits": 1, "min_edits": 1},
        "slow_update": {"enabled": False},
        "meta_skill": {"enabled": False},
        "test": {"enabled": False, "placebo": False, "null_answers": False},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return {"out_dir": folder, **plain}


def build_trainer(
    config: Mapping[str, Any] | TrainerConfig,
    *,
    environment: Environment | None = WORLD,
    target: Target | None = None,
    script: Script | None = None,
    **passed: Any,
) -> Trainer:
    """Return a trainer of a toy target with a scripted optimizer; without an environment, as configured.

    The environment has eight train, four validation and four test items of four rules, unless given. A mapping that
    names no sources gets the published algorithm.
    """
    optimizer = ScriptedLLM(script or toy_optimizer())
    if isinstance(config, Mapping) and "proposer" not in passed:
        config = {"search": {"sources": ["edits"]}, **config}
    return Trainer(
        config, environment=environment, target=target or ToyTarget(), optimizer=optimizer, **passed
    )


def build_learning_trainer(
    folder: Path, *, target: Target | None = None, script: Script | None = None, **settings: Any
) -> Trainer:
    """Return a run of two epochs in the toy world."""
    config = {
        "out_dir": folder,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 2, "batch_size": 4},
        "select": {"max_edits": 1, "min_edits": 1},
        **settings,
    }
    return build_trainer(config, target=target, script=script or toy_optimizer(edits=2))


async def run(
    folder: Path,
    *,
    initial: str | None = None,
    environment: Environment | None = None,
    actor: Actor | None = None,
    script: Script | None = None,
    approve: Approver | None = None,
    store: Path | None = None,
    seed: int | None = None,
    preset: str = "default",
    **sections: Mapping[str, Any],
) -> Ran:
    """Train in the toy world and return what became of it.

    The initial document is empty, unless given. A ``store`` is shared with other runs. Sections are what differs from
    ``settings``.
    """
    config = {**settings(folder, **sections), "preset": preset}
    if initial is not None:
        config["skill"] = written(folder / "initial.md", initial)
    if store is not None:
        config["store"] = store
    if seed is not None:
        config["seed"] = seed
    optimizer, actor = ScriptedLLM(script or toy_optimizer()), actor or Actor()
    trainer = Trainer(
        config, environment=environment or WORLD, target=actor, optimizer=optimizer, approve=approve
    )
    summary = await trainer.train()
    async with open_store(store or folder / "run.db") as opened:
        state = await opened._database.read(lambda tables: read_state(tables, summary.run_id))
        skills = await opened._database.fetch_rows("SELECT value FROM outcomes WHERE kind = 'skill'", ())
        return Ran(
            summary=summary,
            records=await opened.records(summary.run_id),
            epochs=await opened.epochs(summary.run_id),
            promotions=await opened.promotions(summary.run_id),
            events=await opened.events(summary.run_id),
            state=state,
            texts={Skill(text=text).hash: text for (text,) in skills},
            calls=optimizer.calls,
            actor=actor,
        )


def written(path: Path, text: str) -> Path:
    """Write a text as it is, its line breaks included, and return where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def playing(*parts: Part, edits: int = 1) -> Script:
    """Return a script that plays the toy optimizer, but for some kinds of reply."""
    usual = toy_optimizer(edits=edits)

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        for kind, part in parts:
            if issubclass(reply_type, kind):
                shown = "\n".join(m.content for m in prompt.messages if m.role == "user")
                return part(reply_type, shown) if callable(part) else part
        return usual(prompt, reply_type, call_id)

    return answer


def shown_to(call: ScriptedCall) -> str:
    return "\n".join(m.content for m in call.prompt.messages if m.role == "user")


def in_turn(kind: type[ReplyModel], *answers: ScriptedAnswer) -> Part:
    """Play these replies one after the other, and the last one from then on."""
    left = list(answers)
    return kind, lambda *_: left.pop(0) if len(left) > 1 else left[0]


def list_messages(split: Split, world: ToyEnvironment = WORLD) -> set[str]:
    return {str(item.input) for item in world.items(split)}


def right(message: str) -> str:
    name, _, number = message.partition(" ")
    return TOY_RULES[name].answer(int(number))


def document(*names: str) -> str:
    return "".join(f"{LINES[name]}\n" for name in names)


IDLE: Part = (AnalystReply, lambda kind, _: append_reply(kind, "- nonsense about the missing rule"))
"""An analyst whose proposals never help."""

LEARNING = playing((AnalystReply, lambda kind, _: append_reply(kind, LINES["double"])))
"""An optimizer that adds one rule, whatever the feedback."""
