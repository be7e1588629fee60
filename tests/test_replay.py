"""While steps are measured no worked example shows the state that is scored."""

from __future__ import annotations

import re

import pytest

from memory_pairs import make_pair
from reflact.calibration.critic import Critic, CriticReply
from reflact.calibration.replay import LeakFilter, list_labeled_steps, score_steps
from reflact.calibration.trace import Trace
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

pytestmark = pytest.mark.anyio

PURPOSE = "Fill the shelf."
EXAMPLE = re.compile(r"<(example_\d+_*)>\n(.*?)\n</\1>", re.DOTALL)


def step(before: str, after: str) -> Transition:
    """Return a step from one state to another."""
    return Transition(before=before, action=Action(name="put"), after=after)


def example(before: str, after: str, *, purpose: str = PURPOSE) -> ContrastPair:
    """Return a pair that says of the state after that it is worth 4."""
    return make_pair().model_copy(
        update={
            "purpose": purpose,
            "transition": step(before, after),
            "right": Evaluation(progress_before=1, progress_after=4, reasoning="Four books."),
        }
    )


def trace(number: int) -> Trace:
    """Return a run from nothing to a state of its own."""
    made = Trace(PURPOSE, id=f"run {number}")
    made.record(
        step("empty", f"shelf {number}"), label=Label(progress_before=0, progress_after=4, source="program")
    )
    return made


async def test_pairs_that_show_the_state_after_a_step_tell_its_score() -> None:
    """On either side of a pair, under the same purpose; a state before that many runs share tells nothing."""
    (scored,) = list_labeled_steps([trace(1)])
    telling = [example("a", "shelf 1"), example("shelf 1", "b")]
    silent = [example("empty", "c"), example("d", "shelf 2"), example("e", "shelf 1", purpose="Clear it.")]
    index = LeakFilter([*telling, *silent])
    await index.hash_states()
    assert await index.exclude_leaking([*silent, *telling], scored) == silent
    assert await index.exclude_leaking(silent, scored) == silent


async def test_a_critic_that_remembers_states_gains_nothing() -> None:
    """What copies the score of a state that it has seen is right where states come again, and is not let."""

    def parrot(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        assert issubclass(reply_type, CriticReply)
        content = prompt.messages[-1].content
        asked = re.findall(r"shelf \d+", EXAMPLE.sub("", content))[-1]
        remembered = any(asked in shown for _, shown in EXAMPLE.findall(content))
        phi = 4.0 if remembered else 9.0
        said = {"phi_before": 0, "phi_after": phi, "confidence": 1}
        return {"reasoning": "r", "evidence": [asked], **said}

    critic, steps = Critic(ScriptedLLM(parrot)), list_labeled_steps([trace(n) for n in range(4)])
    pairs = [example("empty", f"shelf {n}") for n in range(4)]
    found = await critic.score(steps[0].transition, purpose="Another.", pairs=pairs)
    assert found.evaluation.progress_after == 4
    scored = await score_steps(critic, steps, pairs, max_concurrent=2)
    assert [one and one.evaluation.progress_after for one in scored] == [9.0] * 4
