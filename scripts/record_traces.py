"""Record runs of a small model in generated kitchens of TextWorld, scored by a critic, with gold beside it.

Needs, in an environment of its own, reflact and TextWorld (MIT; its dependency jericho is GPL), which
reflact does not depend on, and a server as ``scripts/local_server.py`` starts it::

    pip install --no-deps textworld==1.7.0 jericho
    pip install numpy tqdm networkx more_itertools tatsu==5.8.3 hashids mementos termcolor prompt_toolkit \
        pyyaml requests
    python scripts/record_traces.py GAMES [--ports 8123 8124]

``GAMES`` is a folder; games that it lacks are made there. What the cassette holds is not asked again.

There are 24 games with two runs each: 12 games are held out, 8 are learned from, 4 are anchors. A run begins
after some steps of the game's own walkthrough, so that states lie all over the scale, and is ``--steps``
long. A step is the model's choice among ten admissible commands or, in half the steps by chance, the
walkthrough's: the model alone hardly ever gets anywhere. Gold is ten times the share of the game's score that
was reached, and 0 once the game is lost. The score itself is kept out of the states.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import anyio
import httpx
import textworld
from pydantic import Field, create_model

from reflact import Calibrator, Critic, MemoryStore, Trace
from reflact.calibration.config import CalibrateConfig
from reflact.calibration.pairs import (
    StepToContrast,
    find_reference,
    pairs_of,
)
from reflact.concurrency import fan_out
from reflact.config.loading import load_section
from reflact.errors import ReplyError
from reflact.llm.budget import Account
from reflact.llm.cassettes import open_cassette
from reflact.llm.client import Client
from reflact.llm.connection_pool import PooledTransport
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Transition
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.protocols import LLM
from reflact.testing import InMemoryRunStore

FOLDER = Path(__file__).parents[1] / "fixtures" / "calibration"
PARTS = {"held_out": (*range(10), 20, 21), "learn": range(10, 18), "anchors": (18, 19, 22, 23)}
RUNS = "ab"
OFFERED = 10
WANTED = textworld.EnvInfos(
    admissible_commands=True,
    description=True,
    facts=True,
    inventory=True,
    lost=True,
    max_score=True,
    policy_commands=True,
    score=True,
    won=True,
)
IDLE = re.compile(r"cookbook|^(inventory|look)$")
SAY = (
    "You are an agent in a kitchen. Choose the next command. "
    "Your thought, in one short sentence, says what the command achieves. The command is one of the list."
)


class Choice(ReplyModel):
    """What the agent is asked to fill in; the command among those that are offered."""

    thought: str = Field(
        max_length=120, description="What the command achieves, in one short sentence."
    )
    command: str


class Run(NamedTuple):
    """A run to record."""

    part: str
    game: int
    letter: str

    @property
    def id(self) -> str:
        return f"kitchen-{self.game:02}-{self.letter}"


def make(path: Path, number: int) -> None:
    """Make a game of one kitchen: one or two ingredients to take, cut, and cook in two games of three."""
    kind = [
        "--take",
        "1",
        "--cut",
        *(["--cook"] if number % 3 else []),
        *([] if number % 2 else ["--open"]),
    ]
    seeds = ["--recipe-seed", str(100 + number), "--seed", str(100 + number)]
    command = [
        str(Path(sys.executable).parent / "tw-make"),
        "tw-cooking",
        "--recipe",
        str(1 + number % 2),
    ]
    subprocess.run([*command, *kind, *seeds, "--output", str(path), "-f", "--silent"], check=True)


def said(text: str) -> str:
    """Return what the game says without status line, prompt sign and anything about the score."""
    text = re.split(r"\n\s*>|\*\*\* ", text)[0]
    kept = (" ".join(line.split()) for line in text.splitlines())
    return " ".join(line for line in kept if line and "score" not in line)


def seen(state: Any) -> str:
    """Return the sentences of a room's description that name something that lies in or on something."""
    names = {f.arguments[0].name for f in state.facts if f.name in {"in", "on"}}
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(state.description.split()))
    return " ".join(s for s in sentences if any(name and name in s for name in names))


def shown(state: Any, words: str) -> dict[str, str]:
    """Return what an agent knows after a step: the room, what it carries, what the game said last."""
    return {"room": seen(state), "inventory": " ".join(state.inventory.split()), "said": words}


def phi(state: Any) -> float:
    """Return how much of the game is done, from 0 to 10; nothing once it is lost."""
    return 0.0 if state.lost else round(10 * state.score / state.max_score, 2)


def purpose(recipe: str) -> str:
    """Return a purpose from the text of a cookbook."""
    _, ingredients, directions = re.split(r"Ingredients:|Directions:", recipe)
    things, steps = (
        ", ".join(p.split("\n")) for p in (_lines(ingredients), _lines(directions.split(">")[0]))
    )
    return (
        f"Make this meal and eat it. Ingredients, to be carried: {things}. Then: {steps}, eat meal."
    )


def _lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


class Player:
    """Plays and scores runs."""

    def __init__(self, agent: LLM, critic: Critic, games: Path, traces: Path, steps: int) -> None:
        self._agent = agent
        self._critic = critic
        self._games = games
        self._traces = traces
        self._steps = steps

    async def play(self, run: Run) -> Trace:
        """Play a run and write its trace."""
        chance = Random(run.id)
        env = textworld.start(str(self._games / f"{run.game}.z8"), request_infos=WANTED)
        env.reset()
        recipe = env.step("examine cookbook")[0].feedback
        path = self._traces / run.part / f"{run.id}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        trace = Trace(purpose(recipe), id=run.id, path=path)
        state, words = env.step("inventory")[0], ""
        for _ in range(chance.randrange(len(state.policy_commands) - 1)):
            state = env.step(state.policy_commands[0])[0]
            words = said(state.feedback)
        for number in range(self._steps):
            if state.won or state.lost or not state.policy_commands:
                break
            before, had = shown(state, words), phi(state)
            action = await self._choose(run, number, trace.purpose, state, words, chance)
            state = env.step(action.name)[0]
            words = said(state.feedback)
            transition = Transition(before=before, action=action, after=shown(state, words))
            gold = Label(progress_before=had, progress_after=phi(state), source="program")
            trace.record(transition, await self._scored(transition, trace.purpose), label=gold)
        trace.finish()
        return trace

    async def _choose(  # noqa: PLR0917 - where a run stands
        self, run: Run, number: int, aim: str, state: Any, words: str, chance: Random
    ) -> Action:
        """Return the model's choice with its thought, or the walkthrough's command."""
        right = state.policy_commands[0]
        others = [c for c in state.admissible_commands if c != right and not IDLE.search(c)]
        offered = sorted([right, *chance.sample(others, min(len(others), OFFERED - 1))])
        led = chance.random() < 0.5
        if led:
            return Action(name=right)
        asked = "\n".join(["Purpose: " + aim, *_told(shown(state, words)), "Commands:", *offered])
        prompt = RenderedPrompt(
            name="act",
            version=1,
            messages=(Message(role="system", content=SAY), Message(role="user", content=asked)),
        )

        offer: Any = Literal[tuple(offered)]
        kind = create_model("Choice", __base__=Choice, command=(offer, ...))
        place = CallId(role="agent", purpose="act", part=f"{run.id}-{number}")
        try:
            chosen = (await self._agent.ask(prompt, kind, call_id=place)).value
        except ReplyError:
            return Action(name="wait")
        return Action(name=chosen.command, arguments={"thought": chosen.thought})

    async def _scored(self, transition: Transition, aim: str) -> Evaluation:
        """Return the critic's evaluation; where it gives no valid reply, that everything stays at 0."""
        try:
            return (await self._critic.score(transition, purpose=aim)).evaluation
        except ReplyError as error:
            reason = (
                f"The critic gave no valid reply: {error.reasons[-1] if error.reasons else ''}"[
                    :300
                ]
            )
            return Evaluation(progress_before=0, progress_after=0, reasoning=reason, confidence=0)


def _told(state: dict[str, str]) -> list[str]:
    return [f"{name.capitalize()}: {text}" for name, text in state.items()]


class Turns(httpx.AsyncBaseTransport):
    """Sends each request to the server that has waited longest: small models answer one at a time."""

    def __init__(self, inner: httpx.AsyncBaseTransport, ports: Sequence[int]) -> None:
        self._inner = inner
        self._give, self._take = anyio.create_memory_object_stream[int](len(ports))
        for port in ports:
            self._give.send_nowait(port)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer of a server that is free."""
        port = await self._take.receive()
        try:
            request.url = request.url.copy_with(port=port)
            response = await self._inner.handle_async_request(request)
            await response.aread()
            return response
        finally:
            self._give.send_nowait(port)


async def main(arguments: argparse.Namespace) -> None:
    """Make missing games, play all runs, keep gold pairs as anchors, calibrate, and tell how it went."""
    runs = [
        Run(part, game, letter)
        for part, games in PARTS.items()
        for game in games
        for letter in RUNS
    ]
    runs = runs[: arguments.first]
    arguments.games.mkdir(parents=True, exist_ok=True)
    for game in sorted({run.game for run in runs}):
        if not (arguments.games / f"{game}.z8").exists():
            make(arguments.games / f"{game}.z8", game)
    settings = load_section(CalibrateConfig, FOLDER / "calibrate.yaml")
    assert settings.replay.cassette is not None
    store = InMemoryRunStore()
    async with (
        PooledTransport() as network,
        open_cassette(
            settings.replay.cassette, mode="record", inner=Turns(network, arguments.ports)
        ) as transport,
        Client(
            settings.models.critic,
            "critic",
            Account("r", store, store.decision_log("r")),
            transport=transport,
        ) as llm,
    ):
        player = Player(
            llm,
            Critic(llm, settings=settings.critic),
            arguments.games,
            FOLDER / "traces",
            arguments.steps,
        )
        traces = await fan_out(player.play, runs, limit=len(arguments.ports))
        for trace in traces:
            tell(trace)
        pairs = [
            pair
            for trace, run in zip(traces, runs, strict=True)
            if run.part == "anchors"
            for pair in gold_pairs(trace)
        ]
        (FOLDER / "anchors.jsonl").write_text(
            "".join(f"{pair.model_dump_json()}\n" for pair in pairs)
        )
        if arguments.first is None:
            await calibrate(llm, settings, traces, runs, pairs)


async def calibrate(
    llm: LLM,
    settings: CalibrateConfig,
    traces: Sequence[Trace],
    runs: Sequence[Run],
    anchors: Sequence[ContrastPair],
) -> None:
    """Ask all that a round of calibration asks."""
    with TemporaryDirectory() as folder:
        async with MemoryStore(Path(folder) / "memory.db") as memory:
            await memory.add_anchors(anchors)
            critic = Critic(llm, memory=memory, settings=settings.critic)
            calibrator = Calibrator(llm, memory, critic=critic, settings=settings.calibrator)
            parts = {
                part: [trace for trace, run in zip(traces, runs, strict=True) if run.part == part]
                for part in PARTS
            }
            report = await calibrator.calibrate(parts["learn"], heldout=parts["held_out"])
    (FOLDER / "report.json").write_text(report.model_dump_json(indent=1) + "\n")


def gold_pairs(trace: Trace) -> list[ContrastPair]:
    """Return two gold pairs for each step: of the step itself, and of a perturbed one, by turns."""
    pairs = []
    for event in trace.events:
        right = find_reference(event)
        assert right is not None
        step = StepToContrast(event, right, trace.purpose, trace.id)
        perturbed = [one for one in pairs_of(step) if one.construction != "observed"]
        pairs.append(written(step))
        if perturbed:
            pairs.append(perturbed[event.step % len(perturbed)])
    return pairs


def written(step: StepToContrast) -> ContrastPair:
    """Return a pair of a step as it was: its gold, and no credit for progress, or credit for none."""
    right = step.right
    gained = right.delta > 0
    wrong = right.model_copy(
        update={
            "progress_after": right.progress_before
            if gained
            else min(10.0, right.progress_before + 3),
            "reasoning": "Nothing has changed."
            if gained
            else "The agent does what it wants to do.",
            "evidence": (),
        }
    )
    return step.build_pair(
        wrong,
        construction="written",
        mistake="ignored_evidence" if gained else "credit_for_intention",
        reason="It overlooks what was achieved." if gained else "It credits what was not achieved.",
    )


def tell(trace: Trace) -> None:
    """Print a trace: each action with gold before and after, and what the critic said."""
    steps = "  ".join(
        f"{e.transition.action.name} [{e.label.progress_before:g} {e.label.progress_after:g}; "
        f"{e.evaluation.progress_before:g} {e.evaluation.progress_after:g}]"
        for e in trace.events
        if e.label is not None
    )
    print(f"{trace.id}: {steps}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("games", type=Path)
    parser.add_argument(
        "--ports", type=int, nargs="+", default=[8123], help="Of servers on this machine."
    )
    parser.add_argument("--steps", type=int, default=3, help="Steps of a run.")
    parser.add_argument("--first", type=int, default=None, help="Play only so many runs.")
    anyio.run(main, parser.parse_args())
