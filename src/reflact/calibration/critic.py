"""The critic: says how far a transition brought an agent, with worked examples from the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from copy import copy
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from reflact.calibration.guards import GuardCase, QuotableTexts, apply_guards, find_objection
from reflact.calibration.transition_view import (
    TokenCounter,
    TransitionView,
    estimate_tokens,
    show_transition,
)
from reflact.calibration.worked_examples import rank_pairs, show_examples
from reflact.concurrency import fan_out
from reflact.config.critic import CriticSettings
from reflact.errors import ConfigError, ReplyError
from reflact.memory.cards import is_visible_to
from reflact.memory.models import (
    ContrastPair,
    Evaluation,
    Progress,
    Scope,
    Share,
    StateScore,
    Transition,
)
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM
from reflact.types import canonical_json, digest_json, digest_text

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

# Which pairs a critic sees.
CRITIC_SCOPE = Scope(roles=("critic",))

CRITIC_PROMPT = "critic"

DEFAULT_CRITIC_SETTINGS = CriticSettings()

# Scores that a critic keeps, more than one round measures; then all are computed again.
MAX_KEPT_SCORES = 1024


def require_model(llm: object, *, caller: str) -> None:
    """Raise ``ConfigError`` unless a value is a connected model."""
    if callable(getattr(llm, "ask", None)):
        return
    got = f"got a value of type {type(llm).__name__}"
    if isinstance(llm, AbstractAsyncContextManager):
        got = "got one that is not connected yet"
    raise ConfigError(
        f"{caller} needs a connected model and {got}: use `async with "
        "connect(ModelConfig(model=...), store=...) as llm` and pass llm"
    )


class CriticReply(ReplyModel):
    """What the critic is asked to fill in."""

    reasoning: str = Field(
        max_length=2000,
        description="What the purpose asks for, and what of it the state after shows.",
    )
    evidence: tuple[str, ...] = Field(
        max_length=20, description="Texts copied from the state after or from the change."
    )
    phi_before: Progress = Field(
        description="How much of the purpose the state before fulfils, from 0 to 10."
    )
    phi_after: Progress = Field(
        description="How much of the purpose the state after fulfils, from 0 to 10."
    )
    confidence: Share = Field(description="How likely the numbers are right, from 0 to 1.")

    @field_validator("reasoning")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the reasoning is empty")
        return value

    @property
    def evaluation(self) -> Evaluation:
        """The reply as a value of its own."""
        return Evaluation(
            progress_before=self.phi_before,
            progress_after=self.phi_after,
            reasoning=self.reasoning,
            evidence=tuple(self.evidence),
            confidence=self.confidence,
        )


class Critic:
    """Scores transitions.

    Scores are kept by purpose, transition and worked examples: equal questions are asked once.

    Args:
        llm: The model that judges.
        memory: Where promoted pairs are; None: no worked examples.
        settings: What is shown and how replies are taken.
        prompts: Where its prompt is; None: the newest versions that are packaged.
        count_tokens: Counts the tokens of a text; see ``estimate_tokens``.

    Raises:
        ConfigError: The model is not connected.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        memory: MemoryStore | None = None,
        settings: CriticSettings = DEFAULT_CRITIC_SETTINGS,
        prompts: PromptBook | None = None,
        count_tokens: TokenCounter = estimate_tokens,
    ) -> None:
        require_model(llm, caller="a critic")
        self._llm = llm
        self._memory = memory
        self._settings = settings
        self._prompts = prompts or load_prompts()
        self._count_tokens = count_tokens
        self._pinned_pairs: tuple[ContrastPair, ...] | None = None
        self._words_by_pair: dict[str, frozenset[str]] = {}
        self._scores: dict[str, StateScore] = {}

    @property
    def identity(self) -> str:
        """Model, prompt, settings, counter and, if pinned, snapshot, as canonical JSON."""
        return canonical_json(
            {
                "critic": self.prompt,
                "checksum": self._prompts.prompts[CRITIC_PROMPT].checksum[:16],
                "llm": self._llm.identity,
                "settings": self._settings.model_dump(mode="json"),
                "count": _name_counter(self._count_tokens),
                "snapshot": self.snapshot,
            }
        )

    @property
    def settings(self) -> CriticSettings:
        """The sizes of its prompt, and its number of samples."""
        return self._settings

    @property
    def prompt(self) -> str:
        """The prompt's name and version, such as ``critic@1``."""
        return f"{CRITIC_PROMPT}@{self._prompts.prompts[CRITIC_PROMPT].header.version}"

    @property
    def snapshot(self) -> str | None:
        """Hash of the pairs and the prompt that it is pinned to; None if it reads the memory."""
        if self._pinned_pairs is None:
            return None
        return digest_json([self.prompt, *(pair.id for pair in self._pinned_pairs)])

    @property
    def pairs(self) -> tuple[ContrastPair, ...] | None:
        """The pairs that it is pinned to, by id; None if it reads the memory."""
        return self._pinned_pairs

    def pin_to(self, pairs: Sequence[ContrastPair]) -> Critic:
        """Return a critic that chooses its worked examples from these pairs alone."""
        critic = copy(self)
        critic._memory = None
        critic._scores = {}
        by_id = {pair.id: pair for pair in pairs}
        critic._pinned_pairs = tuple(by_id[pair_id] for pair_id in sorted(by_id))
        return critic

    def wrap_llm(self, wrap: Callable[[LLM], LLM]) -> Critic:
        """Return an equal critic that asks a wrapped model and keeps scores of its own."""
        critic = copy(self)
        critic._llm = wrap(self._llm)
        critic._scores = {}
        return critic

    async def pin(self) -> Critic:
        """Return a critic pinned to what is promoted now, or to what this one is pinned to.

        Raises:
            StoreError: The memory cannot be read.
        """
        if self._pinned_pairs is not None:
            return self.pin_to(self._pinned_pairs)
        return self.pin_to(await self._load_pairs())

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        progress_before: Progress | None = None,
    ) -> StateScore:
        """Score a transition.

        Args:
            transition: What is judged.
            purpose: What the agent is to achieve.
            pairs: None: the promoted ones of the memory. Else these alone, whatever their status
                and scope; ``()`` is none.
            progress_before: What the state before is worth by definition, whatever the model says.
                None: the model says.

        Raises:
            ModelError: The model gave no score.
            StoreError: The memory cannot be read.
        """
        if pairs is None:
            pairs = await self._load_pairs()
        settings = self._settings
        view = TransitionView(transition)
        examples = show_examples(
            rank_pairs(pairs, view, purpose=purpose, words_by_pair=self._words_by_pair),
            max_tokens=settings.example_tokens,
            max_pairs=settings.max_examples,
            max_state_tokens=settings.example_state_tokens,
            count_tokens=self._count_tokens,
        )
        pair_ids = tuple(pair.id for pair in examples.pairs)
        step_hash = digest_text(f"[{canonical_json(purpose)},{transition.canonical_json}]")
        key = digest_json([step_hash, progress_before, *pair_ids])
        score = self._scores.get(key)
        if score is not None:
            return score
        shown = show_transition(
            purpose, view, max_tokens=settings.state_tokens, count_tokens=self._count_tokens
        )
        variables = {"examples": examples.text, "transition": shown}
        prompt = self._prompts.render(CRITIC_PROMPT, variables)
        case = GuardCase(transition.changes_state, QuotableTexts(view), progress_before)

        async def sample(trial: int) -> Evaluation:
            call_id = CallId(role="critic", purpose="score", part=step_hash[:16], trial=trial)
            return await self._sample_evaluation(prompt, case, call_id)

        evaluations = await fan_out(sample, range(settings.n_samples))
        score = _combine_samples(evaluations, case, pair_ids)
        if len(self._scores) >= MAX_KEPT_SCORES:
            self._scores.clear()
        self._scores[key] = score
        return score

    async def _load_pairs(self) -> tuple[ContrastPair, ...]:
        """Return all pairs that may be shown."""
        if self._pinned_pairs is not None:
            return tuple(
                pair for pair in self._pinned_pairs if is_visible_to(pair.scope, CRITIC_SCOPE)
            )
        return () if self._memory is None else await self._memory.promoted_pairs(CRITIC_SCOPE)

    async def _sample_evaluation(
        self, prompt: RenderedPrompt, case: GuardCase, call_id: CallId
    ) -> Evaluation:
        """Return an evaluation; the last one if its evidence stays invented."""
        last: list[Evaluation] = []

        def check(reply: CriticReply) -> None:
            last.append(reply.evaluation)
            reason = find_objection(last[-1], case)
            if reason is not None:
                raise ValueError(reason)

        try:
            reply = await self._llm.ask(prompt, CriticReply, call_id=call_id, check=check)
        except ReplyError:
            if not last:
                raise
            return last[-1]
        return reply.value.evaluation


def _name_counter(count_tokens: TokenCounter) -> str:
    if count_tokens is estimate_tokens:
        return "estimate"
    return f"{count_tokens.__module__}.{getattr(count_tokens, '__qualname__', '')}"


def _combine_samples(
    evaluations: Sequence[Evaluation], case: GuardCase, pair_ids: tuple[str, ...]
) -> StateScore:
    """Return the median of the guarded samples; a spread limits confidence."""
    guarded = [(*apply_guards(raw, case), raw) for raw in evaluations]
    judged = sorted(guarded, key=lambda each: (each[0].progress_after, each[0].delta))
    evaluation, names, raw = judged[(len(judged) - 1) // 2]
    spread = judged[-1][0].progress_after - judged[0][0].progress_after
    agreed = 1 - spread / 10
    if evaluation.confidence > agreed:
        evaluation = evaluation.model_copy(update={"confidence": agreed})
        names = (*names, "spread")
    return StateScore(
        evaluation=evaluation,
        raw=raw,
        applied_guards=names,
        n_samples=len(judged),
        spread=spread,
        pair_ids=pair_ids,
    )
