"""A fixed use of each version of each prompt: what the recording script asks and the test replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import JsonValue

from reflact.calibration.contrast import ContrastSettings, GenerationTask, PairModels, generate_contrast_pairs
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import MistakeShare, RoundPlan
from reflact.config.models import ModelConfig
from reflact.config.training import AggregateConfig, PromptsConfig, ReflectConfig, UpdateConfig
from reflact.errors import ReplyError
from reflact.llm.budget import Account
from reflact.llm.cassettes import open_cassette
from reflact.llm.client import Client
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, ScoreEvent, Transition
from reflact.messages import CallId, NoReply, RenderedPrompt, Reply, ReplyModel
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import R, StepEvidence
from reflact.records import StepBufferEntry
from reflact.skills.document import replace_notes
from reflact.stages.aggregate import aggregate
from reflact.stages.context import StageContext
from reflact.stages.evaluate import GateMetric
from reflact.stages.execution_notes import LapseTriage, update_appendix
from reflact.stages.prompt_sections import show_buffer, show_figures, show_meta, show_task
from reflact.stages.reflect import Analyst, Minibatch
from reflact.stages.select import choose_step_size, select
from reflact.stages.slow_update import categorize_items, show_comparison, slow_update, update_meta_skill
from reflact.stages.update import update
from reflact.testing import InMemoryRunStore
from reflact.training.proposing import RewritingProposer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Case,
    Edit,
    EditKind,
    Item,
    Patch,
    Rollout,
    RolloutSource,
    Score,
    SelectResult,
    Skill,
    Turn,
)

CASSETTE = Path(__file__).parents[1] / "fixtures" / "prompts" / "cassette.jsonl"

MODEL = ModelConfig(
    model="qwen2.5-coder-0.5b",
    base_url="http://127.0.0.1:8123/v1",
    api_key_env=None,
    mode="json_schema",
    temperature=0.5,
    seed="per_call",
    max_tokens=300,
    timeout=600,
    reasks=2,
)

LARGER = MODEL.model_copy(
    update={
        "model": "qwen2.5-coder-1.5b",
        "temperature": 0.7,
        "max_tokens": 1000,
        "extra_body": {"frequency_penalty": 0.6},
        "timeout": 3600,
    }
)
"""The model for the prompts of the default profile, and for those that the smaller one never answers validly."""

UNANSWERED = {"merge/v1", "draft_failure/v1", "rewrite/v1"}
"""Prompts for small models to which the smaller one gives no valid reply."""

SKILL = Skill(text="Answer with one query and nothing else.\n")
LATER = Skill(text="Answer with one query and nothing else.\n\nWrite a state as two letters: Ohio is 'OH'.\n")
TABLE = "Table: airports(iata, name, city, state, latitude, longitude)\nQuestion: "
TASKS = (f"{TABLE}How many airports are in Ohio?", f"{TABLE}How many airports are in Iowa?")
RIGHT = (
    "SELECT COUNT(*) FROM airports WHERE state = 'OH'",
    "SELECT COUNT(*) FROM airports WHERE state = 'IA'",
)
WRONG = (
    "SELECT COUNT(*) FROM airports WHERE state = 'Ohio'",
    "SELECT COUNT(*) FROM airports WHERE city = 'Iowa'",
)
TASK = "Each task is a question about a table of airports; the answer is one SQLite query."
ITEMS = tuple(Item(id=str(n), input=task, reference=RIGHT[n]) for n, task in enumerate(TASKS))

QUERIES = (RIGHT[0], RIGHT[1], "SELECT MAX(temp_max) FROM weather WHERE date LIKE '2014-06%'")
RULES = (
    "Write a state as two capital letters, such as 'OH' for Ohio.",
    "The column state holds two letters: write 'IA', not 'Iowa'.",
    "Find the days of a month with LIKE, such as date LIKE '2014-06%'.",
    "Where a question asks how many, count rows with COUNT(*).",
)
LIST = Skill(text="- Answer with one query and nothing else.\n")
DRAFTS = (
    f"{LIST.text}- Write states as two letters.",
    f"{LIST.text}- Compare names without regard to case.\n- Write states as two letters.",
    f"{LIST.text}- Give temperatures in degrees Celsius.",
    f"{LIST.text}- Count rows with COUNT(*).",
)
SUGGESTIONS = (
    "Add a rule: Write states as two letters.",
    "Add a rule: Give temperatures in degrees Celsius.",
)
NOTES = (
    "Write states as two letters.",
    "Do not explain the query.",
    "A state is two letters: 'OH', not 'Ohio'.",
    "Give the query alone.",
)
MEMORY = "Rules with an example of a right value helped. Long explanations did not help."
ATTEMPTS = (
    StepBufferEntry(
        step=1,
        action="reject",
        n_failures=3,
        n_total=4,
        rejected_edits=(Edit(op="append", content="Compare states without regard to case."),),
        score_before=0.25,
        score_after=0.25,
    ),
)
PURPOSE = "Every item of the order is paid for and shipped, and the customer was told."
SHIPPED = Transition(
    before={"paid": True, "shipped": ["lamp"], "open": ["desk"], "mails": 0},
    action=Action(name="ship", arguments={"item": "desk"}),
    after={"paid": True, "shipped": ["lamp", "desk"], "open": [], "mails": 0},
)
CLAIMED = ContrastPair(
    purpose="The backup is written and was checked.",
    transition=Transition(
        before={"backup": None, "checked": False},
        action=Action(name="say", arguments={"text": "The backup is done and checked."}),
        after={"backup": None, "checked": False, "said": "The backup is done and checked."},
    ),
    right=Evaluation(
        progress_before=0,
        progress_after=0,
        reasoning="The agent says that the backup is done, but there is none.",
        evidence=('"backup": null',),
    ),
    wrong=Evaluation(
        progress_before=0,
        progress_after=9,
        reasoning="The agent reports success.",
        evidence=("done and checked",),
    ),
    reason="What the agent says is no backup.",
    mistake="credit_for_intention",
    construction="claim_for_effect",
    label_source="program",
)


@dataclass(frozen=True)
class Example:
    """A rendered prompt with the reply type and check that its stage uses."""

    prompt: RenderedPrompt
    reply_type: type[ReplyModel]
    check: Callable[[Any], None] | None
    model: ModelConfig = MODEL

    @property
    def name(self) -> str:
        """The prompt's name and version, as its file is called."""
        return f"{self.prompt.name}/v{self.prompt.version}"


class Listener:
    """An optimizer without answers that keeps all prompts, and a decision log that keeps nothing."""

    identity = "listener"

    def __init__(self) -> None:
        self.heard: dict[str, Example] = {}
        self.prompts: list[RenderedPrompt] = []

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Keep the question.

        Raises:
            ReplyError: Always; stages go on without an answer.
        """
        example = Example(prompt, reply_type, check)
        self.heard[example.name] = example
        self.prompts.append(prompt)
        raise ReplyError(f"{call_id.label} is not answered here")

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return that nothing was noted."""
        return {}

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Forget it."""


async def examples() -> dict[str, Example]:
    """Return an example of each version of each prompt that a model answers, by ``NAME/vN``.

    They are the versions of both profiles, as the stages ask, and that of the recorded calibration.
    """
    small = Listener()
    await _ask_stages(small, PromptsConfig(profile="small"))
    await _judge(small)
    for version in (1, 2):
        await _contrast(small, load_prompts(PromptsConfig(versions={"contrast": version})))
    default = Listener()
    await _ask_stages(default, PromptsConfig())
    heard = default.heard | small.heard
    larger = (set(default.heard) - set(small.heard)) | UNANSWERED
    return {name: replace(e, model=LARGER if name in larger else MODEL) for name, e in heard.items()}


async def _ask_stages(listener: Listener, config: PromptsConfig) -> None:
    context = _context_of(listener, config)
    await _reflect(context)
    await _merge(context, SKILL, "append", RULES)
    await _merge(context, LIST, "rewrite", DRAFTS)
    await _decide(context)
    await _close(context)
    await _rewrite(context)


def _context_of(listener: Listener, config: PromptsConfig) -> StageContext:
    return StageContext(
        llm=listener, prompts=load_prompts(config), decision_log=listener, step=1, task=show_task(TASK)
    )


async def _reflect(context: StageContext) -> None:
    batches = (_batch("failure", WRONG), _batch("success", RIGHT))
    for update_config in (
        UpdateConfig(operations=("append",)),
        UpdateConfig(mode="rewrite"),
        UpdateConfig(mode="full_rewrite"),
    ):
        analyst = Analyst(
            context=context,
            tokens=1000,
            skill=SKILL,
            config=update_config,
            max_edits=1,
            notes=lambda batch: "",
        )
        for batch in batches:
            await analyst.report(batch)
    triage = LapseTriage(context=context, skill=LATER, analyse=_unread, successes=True, tokens=1000)
    for batch in batches:
        await triage.report(batch)


async def _rewrite(context: StageContext) -> None:
    proposer = RewritingProposer(1, context.prompts, ReflectConfig(), GateMetric(metric="hard"))
    rollouts = (*_rollouts(SKILL, WRONG[:1], hard=0), *_rollouts(SKILL, RIGHT, hard=1)[1:])
    cases = (
        Case(item=item, rollout=rollout, failed=rollout.answer in WRONG)
        for item, rollout in zip(ITEMS, rollouts, strict=True)
    )
    evidence = StepEvidence(
        step=1, cases=tuple(cases), attempts=ATTEMPTS, meta_skill=MEMORY, task=context.task
    )
    await proposer.propose(SKILL, evidence, Asker(context))


@dataclass(frozen=True)
class Asker:
    """A proposer's budget for calls alone."""

    context: StageContext
    max_edits: int | None = None

    async def ask(
        self, prompt: RenderedPrompt, reply_type: type[R], *, purpose: str = "proposal", **options: Any
    ) -> R | NoReply:
        """Ask as a stage does."""
        return await self.context.ask_rendered(prompt, reply_type, purpose=purpose, **options)

    async def roll_out(self, documents: Sequence[str]) -> tuple[tuple[Rollout, ...], ...]:
        """Refuse to roll out."""
        raise NotImplementedError


async def _merge(context: StageContext, skill: Skill, kind: EditKind, texts: Sequence[str]) -> None:
    sources: tuple[RolloutSource, ...] = ("failure", "failure", "failure", "success")
    reports = [
        AnalystReport(
            source_type=source,
            index=n,
            item_ids=("0",),
            patch=Patch(edits=(_edit(kind, text, source, 4 - n),)),
        )
        for n, (source, text) in enumerate(zip(sources, texts, strict=True))
    ]
    await aggregate(
        reports,
        skill,
        context=context,
        config=AggregateConfig(),
        operations=("append",),
        notes=show_meta(MEMORY),
    )


async def _decide(context: StageContext) -> None:
    edits = tuple(_edit("append", rule, "failure", 3 - n) for n, rule in enumerate(RULES[:3]))
    merged = AggregateResult(patch=Patch(edits=edits))
    figures = show_figures(_rollouts(SKILL, WRONG, hard=0), ITEMS, [item.id for item in ITEMS])
    await choose_step_size(
        merged, SKILL, context=context, notes=show_buffer(ATTEMPTS), figures=figures, default=1
    )
    await select(
        merged, SKILL, context=context, budget=2, attempts=show_buffer(ATTEMPTS), notes=show_meta(MEMORY)
    )
    suggestions = tuple(_edit("suggest", text, "failure", 2) for text in SUGGESTIONS)
    await update(
        LIST,
        SelectResult(patch=Patch(edits=suggestions), pool_size=2),
        context=context,
        attempts=show_buffer(ATTEMPTS),
    )
    reports = [AnalystReport(source_type="failure", index=0, item_ids=("0",), reminders=NOTES[3:])]
    await update_appendix(replace_notes(SKILL, NOTES[:3]), reports, context=context, threshold=2)


async def _close(context: StageContext) -> None:
    before = _rollouts(SKILL, WRONG, hard=0)
    after = (*_rollouts(LATER, RIGHT[:1], hard=1), *_rollouts(LATER, WRONG, hard=0)[1:])
    comparison = show_comparison(categorize_items(ITEMS, before, after, None), tokens=1000)
    place: dict[str, Any] = {"context": replace(context, step=2), "comparison": comparison, "epoch": 2}
    await slow_update(SKILL, LATER, guidance="Read the question twice.", **place)
    await update_meta_skill(SKILL, LATER, attempts=show_buffer(ATTEMPTS), memory=MEMORY, **place)


async def _judge(listener: Listener) -> None:
    with suppress(ReplyError):
        await Critic(listener).score(SHIPPED, purpose=PURPOSE, pairs=[CLAIMED])


async def _contrast(listener: Listener, prompts: PromptBook) -> None:
    """Ask for two mistakes, which a look under another purpose precedes, compare a pair and judge a judge."""
    said = Evaluation(
        progress_before=4,
        progress_after=7,
        reasoning="The desk was shipped, and nothing is open. The customer has no mail yet.",
        evidence=('"desk"', '"mails": 0'),
        confidence=0.8,
    )
    gold = Label(progress_before=4, progress_after=7, source="program")
    event = ScoreEvent(step=0, transition=SHIPPED, evaluation=said, label=gold)
    shares = (
        MistakeShare(mistake="inflated_score", share=0.75),
        MistakeShare(mistake="ignored_evidence", share=0.25),
    )
    await generate_contrast_pairs(
        [event],
        GenerationTask(PURPOSE, "t", RoundPlan(number=1, shares=shares, nearest=1, farthest=10)),
        PairModels(listener, listener, Critic(listener)),
        settings=ContrastSettings(n_judges=2),
        prompts=prompts,
    )


async def _unread(batch: Minibatch) -> AnalystReport:
    return batch.empty_report


def _edit(kind: EditKind, text: str, source: RolloutSource, support: int) -> Edit:
    return Edit(op=kind, content=text, source_type=source, support_count=support)


def _batch(source: RolloutSource, answers: Sequence[str]) -> Minibatch:
    rollouts = _rollouts(SKILL, answers, hard=0 if source == "failure" else 1)
    return Minibatch(source=source, index=0, items=ITEMS, rollouts=rollouts)


def _rollouts(skill: Skill, answers: Sequence[str], *, hard: float) -> tuple[Rollout, ...]:
    return tuple(
        Rollout(
            key=item.id,
            item_id=item.id,
            skill_hash=skill.hash,
            turns=(Turn(role="user", content=str(item.input)), Turn(role="assistant", content=answer)),
            answer=answer,
            score=Score.of(hard),
        )
        for item, answer in zip(ITEMS, answers, strict=False)
    )


async def ask(example: Example, transport: httpx.AsyncBaseTransport) -> ReplyModel:
    """Ask one example's question and return the validated reply."""
    store = InMemoryRunStore()
    account = Account("r", store, store.decision_log("r"))
    prompt = example.prompt
    async with Client(example.model, "optimizer", account, transport=transport) as client:
        call_id = CallId(role="optimizer", purpose=prompt.name, step=0, part=f"v{prompt.version}")
        reply = await client.ask(prompt, example.reply_type, call_id=call_id, check=example.check)
    return reply.value


async def outcome(example: Example, transport: httpx.AsyncBaseTransport) -> ReplyModel | ReplyError:
    """Return the validated reply, or the typed refusal where the model gave none in all its attempts."""
    try:
        return await ask(example, transport)
    except ReplyError as refusal:
        return refusal


async def record() -> dict[str, ReplyModel | ReplyError]:
    """Ask all examples of the live endpoint and write the cassette; what it holds is not asked again."""
    async with open_cassette(CASSETTE, mode="record") as transport:
        return {name: await outcome(example, transport) for name, example in (await examples()).items()}
