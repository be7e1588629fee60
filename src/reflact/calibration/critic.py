"""The critic: says how far a transition brought an agent, with worked examples from the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import Field

from reflact.memory import ContrastPair, Scope, StateScore, Transition
from reflact.memory_ports import CardStore
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.types import Frozen

CRITIC = Scope(roles=("critic",))
"""Who the critic is to the memory, where nothing else is said."""


class CriticSettings(Frozen):
    """What a critic shows and how it takes what comes back.

    Args:
        samples: Evaluations asked for each transition; the median one counts.
        example_tokens: Room for all worked examples and the line above them; 0 shows none.
        examples: Worked examples at most.
        state_tokens: Room for each of: purpose, state before, action, state after, change. What is longer
            is cut, and the cut marked.
        example_state_tokens: The same for each of these in a worked example.
        jump: The largest change of phi, up or down, whose confidence is taken as it comes.
        jump_confidence: The most that a larger one gets.
        unsupported_confidence: The most that an evaluation without evidence gets.
        show_same: Show pairs of the very transition that is scored, under the same purpose.
        cache: Scores kept in memory.
    """

    samples: int = Field(default=1, ge=1, le=25)
    example_tokens: int = Field(default=3000, ge=0)
    examples: int = Field(default=8, ge=0, le=100)
    state_tokens: int = Field(default=2000, ge=32)
    example_state_tokens: int = Field(default=300, ge=32)
    jump: float = Field(default=4.0, ge=0, le=10)
    jump_confidence: float = Field(default=0.5, ge=0, le=1)
    unsupported_confidence: float = Field(default=0.2, ge=0, le=1)
    show_same: bool = False
    cache: int = Field(default=1024, ge=0)


DEFAULTS = CriticSettings()


class Critic:
    """Scores transitions.

    Args:
        llm: The model that judges.
        memory: Where promoted pairs are; None: no worked examples.
        settings: What is shown and how replies are taken.
        prompts: Where its prompt is; None: the newest versions that are packaged.
        count: Estimates the tokens of a text; see ``tokens.estimate``.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        memory: CardStore | None = None,
        settings: CriticSettings = DEFAULTS,
        prompts: PromptBook | None = None,
        count: Callable[[str], int] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """Model, prompt with version and checksum, settings, and the snapshot's hash if pinned, as JSON."""
        raise NotImplementedError

    @property
    def prompt(self) -> str:
        """The prompt's name and version, such as ``critic@1``."""
        raise NotImplementedError

    @property
    def snapshot(self) -> str | None:
        """Hash of the pairs and the prompt that it is pinned to; None where it reads the memory."""
        raise NotImplementedError

    def pinned(self, pairs: Sequence[ContrastPair]) -> Critic:
        """Return a critic that chooses its worked examples from these pairs only, whatever is promoted."""
        raise NotImplementedError

    async def pin(self, *, scope: Scope = CRITIC) -> Critic:
        """Return a critic that is pinned to the pairs which are promoted now, for a scope."""
        raise NotImplementedError

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        scope: Scope = CRITIC,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Score a transition.

        Args:
            transition: What is judged.
            purpose: What the agent is to achieve.
            scope: Whose cards count.
            pairs: None: the promoted ones of the memory in scope, ranked. Else these alone, whatever their
                status and scope; ``()`` is none. What is shown stays within the budget either way.
            trial: Equal questions of another trial are asked anew.

        Raises:
            ModelError: The model gave no score.
            StoreError: The memory cannot be read.
        """
        raise NotImplementedError
