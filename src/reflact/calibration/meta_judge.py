"""Judging the judge: evaluations are scored on five criteria, and what stands out becomes a card.

An option for evaluations without gold. Good ones become candidates for calibration, poor ones failure
patterns, middling ones nothing; all take the same review as any other card. The overall score is computed
from the components, so that a model cannot claim one that they do not bear out, and an evaluation is good
only if no component is poor.

Source of the idea: T. Wu et al., Meta-Rewarding Language Models (arXiv 2407.19594), where judges that train
in their own loop also drift: so the judge is another model than the critic, unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, field_validator, model_validator

from reflact.calibration.changes import show_state
from reflact.calibration.showing import show_transition
from reflact.calls import CallId, ReplyModel
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory import Evaluation, MemoryCard, Provenance, Scope, ScoreEvent
from reflact.memory_cards import new_card
from reflact.ports import LLM
from reflact.prompts import PromptBook, fence, load_prompts
from reflact.roles import ConfigSection
from reflact.tasks import fan_out
from reflact.types import FrozenModel, digest_json

PROMPT = "meta_judge"

Points: TypeAlias = Annotated[int, Field(ge=0, le=10, strict=True)]
"""A whole number from 0 to 10; neither text nor a fraction is taken for one."""

Standing = Literal["good", "poor", "middling", "unread"]
"""What an evaluation is worth; ``unread`` where the judge gave no valid reply."""


class MetaReply(ReplyModel):
    """How good an evaluation is, by five criteria from 0 to 10."""

    version: ClassVar[int] = 1
    accuracy: Points = Field(description="The numbers fit what the two states show.")
    evidence: Points = Field(description="The reasons rest on what the state after shows.")
    consistency: Points = Field(description="The reasons and the numbers say the same.")
    calibration: Points = Field(description="The confidence fits how sure one can be.")
    usefulness: Points = Field(description="Somebody else would learn from the reasons.")
    feedback: str = Field(min_length=1, max_length=600, description="What is good or wrong about it.")

    @field_validator("feedback")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the feedback is empty")
        return value

    @property
    def points(self) -> tuple[int, ...]:
        """The five components, in the order above."""
        return self.accuracy, self.evidence, self.consistency, self.calibration, self.usefulness

    @property
    def overall(self) -> float:
        """The mean of the components, in 0..10."""
        return mean(self.points)


class MetaSettings(ConfigSection):
    """What a judge of evaluations makes of them."""

    good: float = Field(7.0, ge=0, le=10, description="Least overall score of a good evaluation.")
    poor: float = Field(4.0, ge=0, le=10, description="Evaluations with less are poor.")
    same_model: bool = Field(False, description="Let the critic's own model judge its evaluations.")
    concurrency: int = Field(8, ge=1, description="Model calls in flight at most.")
    state_tokens: int = Field(
        2000,
        ge=32,
        description="Room for each of: purpose, state before, action, state after, change; in tokens.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.poor > self.good:
            raise ValueError(f"poor ({self.poor:g}) must not exceed good ({self.good:g})")
        return self


DEFAULTS = MetaSettings()


class MetaJudged(FrozenModel):
    """What became of one evaluation.

    Args:
        step: The event's step in its trace.
        standing: What it is worth.
        overall: The mean of the components; None where it is unread.
        words: The judge's feedback, or why there is none.
        card: The card that comes of it, a candidate; None for middling and unread ones.
    """

    step: int
    standing: Standing
    overall: float | None = None
    words: str
    card: MemoryCard | None = None


async def meta_judge(
    events: Sequence[ScoreEvent],
    *,
    purpose: str,
    trace_id: str,
    judge: LLM,
    critic: LLM,
    settings: MetaSettings = DEFAULTS,
    prompts: PromptBook | None = None,
) -> tuple[MetaJudged, ...]:
    """Judge the evaluations of a trace; one call for each, the results in the order of the events.

    Args:
        events: The steps; those that nobody evaluated are left out.
        purpose: What the agent was to achieve.
        trace_id: The trace, for where cards come from.
        judge: Judges the evaluations.
        critic: The model that made them; only its identity is used.
        settings: What counts as good and as poor.
        prompts: Where the prompt is; None: the newest version that is packaged.

    Raises:
        ConfigError: The judge is the critic's own model.
        ProviderError: The endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """
    if judge.identity == critic.identity and not settings.same_model:
        raise ConfigError(
            "meta_judge: the judge is the critic's own model, which likes what it would say itself; choose "
            "another one, or set same_model"
        )
    book = prompts or load_prompts()

    async def one(said: tuple[ScoreEvent, Evaluation]) -> MetaJudged:
        event, evaluation = said
        step = show_transition(purpose, event.transition, room=settings.state_tokens)
        prompt = book.render(PROMPT, {"step": step, "evaluation": _shown(evaluation)})
        about: JsonValue = [purpose, event.model_dump(mode="json", exclude={"step", "gold"})]
        place = CallId(role="meta_judge", purpose="evaluation", part=digest_json(about)[:32])
        try:
            reply = (await judge.ask(prompt, MetaReply, call_id=place)).value
        except (ReplyError, ContextOverflow) as error:
            return MetaJudged(step=event.step, standing="unread", words=str(error))
        source = Provenance(
            trace_id=trace_id, step=event.step, prompt=f"{PROMPT}@{prompt.version}", model=judge.identity
        )
        return judged(*said, reply, purpose=purpose, settings=settings, provenance=source)

    evaluated = [(event, event.evaluation) for event in events if event.evaluation is not None]
    return await fan_out(one, evaluated, limit=settings.concurrency)


def judged(
    event: ScoreEvent,
    evaluation: Evaluation,
    reply: MetaReply,
    *,
    purpose: str,
    settings: MetaSettings,
    provenance: Provenance,
) -> MetaJudged:
    """Return what an evaluation is worth by the judge's points, and the card that comes of it. Pure."""
    standing = standing_of(reply, settings)
    seen = show_transition(purpose, event.transition, room=settings.state_tokens)
    card: MemoryCard | None = None
    if standing in {"good", "poor"}:
        card = new_card(
            "critic_calibration" if standing == "good" else "failure_pattern",
            f"{seen}\n\n{_shown(evaluation)}",
            pattern=f"{standing} evaluation",
            strategy=reply.feedback,
            scope=Scope(roles=("critic",)),
            provenance=provenance,
            created_by=PROMPT,
        )
    return MetaJudged(
        step=event.step, standing=standing, overall=reply.overall, words=reply.feedback, card=card
    )


def standing_of(reply: MetaReply, settings: MetaSettings) -> Standing:
    """Return what an evaluation is worth: good only where no single component is poor."""
    if reply.overall < settings.poor:
        return "poor"
    return "good" if reply.overall >= settings.good and min(reply.points) >= settings.poor else "middling"


def _shown(evaluation: Evaluation) -> str:
    lines = (
        f"Before: {evaluation.phi_before:g}",
        f"After: {evaluation.phi_after:g}",
        f"Reasoning: {evaluation.reasoning}",
        *(f"Evidence: {quote}" for quote in evaluation.evidence),
        f"Confidence: {evaluation.confidence:g}",
    )
    return fence("evaluation", show_state("\n".join(lines)))
