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

from reflact.calibration.rendering import show_transition
from reflact.calibration.state_diff import show_state
from reflact.concurrency import fan_out
from reflact.config.models import ConfigSection
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory.cards import create_card
from reflact.memory.models import Evaluation, MemoryCard, Provenance, Scope, ScoreEvent
from reflact.messages import CallId, ReplyModel
from reflact.prompts import PromptBook, fence, load_prompts
from reflact.protocols import LLM
from reflact.types import FrozenModel, digest_json

META_JUDGE_PROMPT = "meta_judge"

Points: TypeAlias = Annotated[int, Field(ge=0, le=10, strict=True)]
"""A whole number from 0 to 10; neither text nor a fraction is taken for one."""

EvaluationQuality = Literal["good", "poor", "middling", "unread"]
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


class MetaJudgeSettings(ConfigSection):
    """What a judge of evaluations makes of them."""

    good_threshold: float = Field(7.0, ge=0, le=10, description="Least overall score of a good evaluation.")
    poor_threshold: float = Field(4.0, ge=0, le=10, description="Evaluations with less are poor.")
    allow_same_model: bool = Field(False, description="Let the critic's own model judge its evaluations.")
    concurrency: int = Field(8, ge=1, description="Model calls in flight at most.")
    state_tokens: int = Field(
        2000,
        ge=32,
        description="Room for each of: purpose, state before, action, state after, change; in tokens.",
    )

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.poor_threshold > self.good_threshold:
            raise ValueError(f"poor ({self.poor_threshold:g}) must not exceed good ({self.good_threshold:g})")
        return self


DEFAULT_META_JUDGE_SETTINGS = MetaJudgeSettings()


class MetaJudgeResult(FrozenModel):
    """What became of one evaluation.

    Args:
        step: The event's step in its trace.
        standing: What it is worth.
        overall: The mean of the components; None where it is unread.
        words: The judge's feedback, or why there is none.
        card: The card that comes of it, a candidate; None for middling and unread ones.
    """

    step: int
    quality: EvaluationQuality
    overall: float | None = None
    feedback: str
    card: MemoryCard | None = None


async def judge_evaluations(
    events: Sequence[ScoreEvent],
    *,
    purpose: str,
    trace_id: str,
    judge: LLM,
    critic: LLM,
    settings: MetaJudgeSettings = DEFAULT_META_JUDGE_SETTINGS,
    prompts: PromptBook | None = None,
) -> tuple[MetaJudgeResult, ...]:
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
    if judge.identity == critic.identity and not settings.allow_same_model:
        raise ConfigError(
            "meta_judge: the judge is the critic's own model, which likes what it would say itself; choose "
            "another one, or set same_model"
        )
    book = prompts or load_prompts()

    async def one(said: tuple[ScoreEvent, Evaluation]) -> MetaJudgeResult:
        event, evaluation = said
        step = show_transition(purpose, event.transition, max_tokens=settings.state_tokens)
        prompt = book.render(
            META_JUDGE_PROMPT, {"step": step, "evaluation": _format_judged_evaluation(evaluation)}
        )
        about: JsonValue = [purpose, event.model_dump(mode="json", exclude={"step", "label"})]
        place = CallId(role="meta_judge", purpose="evaluation", part=digest_json(about)[:32])
        try:
            reply = (await judge.ask(prompt, MetaReply, call_id=place)).value
        except (ReplyError, ContextOverflow) as error:
            return MetaJudgeResult(step=event.step, quality="unread", feedback=str(error))
        source = Provenance(
            trace_id=trace_id,
            step=event.step,
            prompt=f"{META_JUDGE_PROMPT}@{prompt.version}",
            model=judge.identity,
        )
        return build_meta_judge_result(*said, reply, purpose=purpose, settings=settings, provenance=source)

    evaluated = [(event, event.evaluation) for event in events if event.evaluation is not None]
    return await fan_out(one, evaluated, limit=settings.concurrency)


def build_meta_judge_result(
    event: ScoreEvent,
    evaluation: Evaluation,
    reply: MetaReply,
    *,
    purpose: str,
    settings: MetaJudgeSettings,
    provenance: Provenance,
) -> MetaJudgeResult:
    """Return what an evaluation is worth by the judge's points, and the card that comes of it. Pure."""
    standing = rate_evaluation(reply, settings)
    seen = show_transition(purpose, event.transition, max_tokens=settings.state_tokens)
    card: MemoryCard | None = None
    if standing in {"good", "poor"}:
        card = create_card(
            "critic_calibration" if standing == "good" else "failure_pattern",
            f"{seen}\n\n{_format_judged_evaluation(evaluation)}",
            pattern=f"{standing} evaluation",
            strategy=reply.feedback,
            scope=Scope(roles=("critic",)),
            provenance=provenance,
            created_by=META_JUDGE_PROMPT,
        )
    return MetaJudgeResult(
        step=event.step, quality=standing, overall=reply.overall, feedback=reply.feedback, card=card
    )


def rate_evaluation(reply: MetaReply, settings: MetaJudgeSettings) -> EvaluationQuality:
    """Return what an evaluation is worth: good only where no single component is poor."""
    if reply.overall < settings.poor_threshold:
        return "poor"
    return (
        "good"
        if reply.overall >= settings.good_threshold and min(reply.points) >= settings.poor_threshold
        else "middling"
    )


def _format_judged_evaluation(evaluation: Evaluation) -> str:
    lines = (
        f"Before: {evaluation.progress_before:g}",
        f"After: {evaluation.progress_after:g}",
        f"Reasoning: {evaluation.reasoning}",
        *(f"Evidence: {quote}" for quote in evaluation.evidence),
        f"Confidence: {evaluation.confidence:g}",
    )
    return fence("evaluation", show_state("\n".join(lines)))
