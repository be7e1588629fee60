"""A fixed use of each version of each prompt: what the recording script asks and the test replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import JsonValue

from reflact.calibration.asked import KNOWN_MISTAKES, AskedMistake, ask_for_pair, compute_reach, prefers_right
from reflact.calibration.critic import Critic
from reflact.calibration.pairs import StepToContrast, find_reference, pairs_of
from reflact.calibration.transition_view import TransitionView, show_transition
from reflact.config.models import ModelConfig
from reflact.config.training import AggregateConfig, PromptsConfig, UpdateConfig
from reflact.environments.rubric import RubricGrader
from reflact.errors import ReplyError
from reflact.llm.budget import Account
from reflact.llm.cassettes import open_cassette
from reflact.llm.client import Client
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt, Reply, ReplyModel
from reflact.prompts import load_prompts
from reflact.protocols import R
from reflact.records import StepBufferEntry
from reflact.search.rewrite import RewriteInput, write_documents
from reflact.skills.document import replace_notes
from reflact.stages.aggregate import aggregate
from reflact.stages.context import StageContext
from reflact.stages.execution_notes import LapseTriage, update_appendix
from reflact.stages.prompt_sections import join_sections, show_buffer, show_figures, show_meta, show_task
from reflact.stages.reflect import Analyst, Minibatch
from reflact.stages.select import choose_step_size, select
from reflact.stages.slow_update import categorize_items, show_comparison, slow_update, update_meta_skill
from reflact.stages.update import update
from reflact.testing import InMemoryRunStore
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
"""The model for the prompts that ask for reasoning, which the smaller one never answers validly."""

SMALL = {"consolidate/v1", "lapse_failure/v1", "lapse_success/v1"}
"""Prompts of the stages that the smaller model answers, beside the earlier versions."""

EARLIER = {"analyst_failure": 1, "merge": 2, "meta_skill": 1, "slow_update": 1}
"""Versions that later ones have replaced, with which a demo was recorded."""

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

RULES = (
    "Write a state as two capital letters, such as 'OH' for Ohio.",
    "The column state holds two letters: write 'IA', not 'Iowa'.",
    "Find the days of a month with LIKE, such as date LIKE '2014-06%'.",
    "Where a question asks how many, count rows with COUNT(*).",
)
LIST = Skill(text="- Answer with one query and nothing else.\n")
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
SENTENCE = "The query writes the state as two letters."
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
        """Keep the question, and raise ReplyError, so that stages go on without an answer."""
        example = Example(prompt, reply_type, check)
        self.heard[example.name] = example
        self.prompts.append(prompt)
        raise ReplyError(f"{call_id.label} is not answered here")

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return that nothing was noted."""
        return {}

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Forget it."""


@dataclass(frozen=True)
class Material:
    """What the stages show to models in one use of each prompt, beside what the prompts say.

    ``listed`` is a document whose rules suggestions change; ``changed`` are the rollouts under the later document.
    ``notes`` is for analysts, ``attempts`` for the other stages. All ``lapses`` but the last stand in the document.
    """

    task: str
    skill: Skill
    later: Skill
    listed: Skill
    items: Sequence[Item]
    failures: tuple[Rollout, ...]
    successes: tuple[Rollout, ...]
    changed: tuple[Rollout, ...]
    rewrite: RewriteInput
    rules: Sequence[Edit]
    choices: Sequence[Edit]
    suggestions: Sequence[Edit]
    notes: str
    attempts: str
    advice: str
    figures: str
    guidance: str
    lapses: Sequence[str]
    tokens: int


async def examples() -> dict[str, Example]:
    """Return an example of each version of each prompt that a model answers, by ``NAME/vN``.

    They are the versions that the stages ask with, and those of the recordings.
    """
    default, earlier, others = Listener(), Listener(), Listener()
    await ask_stages(default, _material(), PromptsConfig())
    await ask_stages(earlier, _material(), PromptsConfig(versions=EARLIER))
    await _judge(others)
    await _contrast(others)
    with suppress(ReplyError):
        judge = RubricGrader(judge="").connect(others, load_prompts())
        await judge.explain_failure(TASKS[0], WRONG[0], SENTENCE)
    larger = set(default.heard) - SMALL
    heard = {**default.heard, **others.heard}
    heard |= {name: earlier.heard[name] for name in (f"{n}/v{v}" for n, v in EARLIER.items())}
    return {name: replace(e, model=LARGER if name in larger else MODEL) for name, e in heard.items()}


def _material() -> Material:
    right, wrong = _rollouts(SKILL, RIGHT, hard=1), _rollouts(SKILL, WRONG, hard=0)
    sources: tuple[RolloutSource, ...] = ("failure", "failure", "failure", "success")
    cases = (
        Case(item=item, rollout=rollout, failed=rollout.answer in WRONG)
        for item, rollout in zip(ITEMS, (wrong[0], right[1]), strict=True)
    )
    return Material(
        task=show_task(TASK),
        skill=SKILL,
        later=LATER,
        listed=LIST,
        items=ITEMS,
        failures=wrong,
        successes=right,
        changed=(*_rollouts(LATER, RIGHT[:1], hard=1), *_rollouts(LATER, WRONG, hard=0)[1:]),
        rewrite=RewriteInput(
            cases=tuple(cases), notes=join_sections(show_buffer(ATTEMPTS), show_meta(MEMORY))
        ),
        rules=[edit("append", rule, sources[n], support=4 - n) for n, rule in enumerate(RULES)],
        choices=[edit("append", rule, "failure", support=3 - n) for n, rule in enumerate(RULES[:3])],
        suggestions=[edit("suggest", text, "failure") for text in SUGGESTIONS],
        notes="",
        attempts=show_buffer(ATTEMPTS),
        advice=MEMORY,
        figures=show_figures(wrong, ITEMS, [item.id for item in ITEMS]),
        guidance="Read the question twice.",
        lapses=NOTES,
        tokens=1000,
    )


async def ask_stages(listener: Listener, shown: Material, prompts: PromptsConfig) -> None:
    """Have each stage ask what it asks about the material."""
    context = StageContext(
        llm=listener, prompts=load_prompts(prompts), decision_log=listener, step=1, task=shown.task
    )
    await _reflect(context, shown)
    await _merge(context, shown, shown.skill, shown.rules)
    await _decide(context, shown)
    await _close(context, shown)
    await write_documents(shown.skill, shown.rewrite, context=context, n=1, seed=1)


async def _reflect(context: StageContext, shown: Material) -> None:
    batches = [
        Minibatch(source=source, index=0, items=shown.items, rollouts=rollouts)
        for source, rollouts in (("failure", shown.failures), ("success", shown.successes))
    ]
    for update_config in (UpdateConfig(operations=("append",)), UpdateConfig(mode="rewrite")):
        analyst = Analyst(
            context=context,
            tokens=shown.tokens,
            skill=shown.skill,
            config=update_config,
            max_edits=1,
            notes=lambda batch: shown.notes,
        )
        for batch in batches:
            await analyst.report(batch)
    triage = LapseTriage(
        context=context, skill=shown.later, analyse=_unread, successes=True, tokens=shown.tokens
    )
    for batch in batches:
        await triage.report(batch)


async def _merge(context: StageContext, shown: Material, skill: Skill, edits: Sequence[Edit]) -> None:
    reports = [
        AnalystReport(source_type=e.source_type, index=n, item_ids=("0",), patch=Patch(edits=(e,)))
        for n, e in enumerate(edits)
    ]
    config, notes = AggregateConfig(), show_meta(shown.advice)
    await aggregate(reports, skill, context=context, config=config, operations=("append",), notes=notes)


async def _decide(context: StageContext, shown: Material) -> None:
    merged, attempts = AggregateResult(patch=Patch(edits=tuple(shown.choices))), shown.attempts
    await choose_step_size(
        merged, shown.skill, context=context, notes=attempts, figures=shown.figures, default=1
    )
    notes = show_meta(shown.advice)
    await select(merged, shown.skill, context=context, budget=2, attempts=attempts, notes=notes)
    suggested = SelectResult(patch=Patch(edits=tuple(shown.suggestions)), pool_size=2)
    await update(shown.listed, suggested, context=context, attempts=attempts)
    *noted, last = shown.lapses
    reports = [AnalystReport(source_type="failure", index=0, item_ids=("0",), reminders=(last,))]
    await update_appendix(replace_notes(shown.skill, noted), reports, context=context, threshold=2)


async def _close(context: StageContext, shown: Material) -> None:
    categories = categorize_items(shown.items, shown.failures, shown.changed, None)
    comparison = show_comparison(categories, tokens=shown.tokens)
    place: dict[str, Any] = {"context": replace(context, step=2), "comparison": comparison, "epoch": 2}
    await slow_update(shown.skill, shown.later, guidance=shown.guidance, **place)
    await update_meta_skill(shown.skill, shown.later, attempts=shown.attempts, memory=shown.advice, **place)


async def _judge(listener: Listener) -> None:
    with suppress(ReplyError):
        await Critic(listener).score(SHIPPED, purpose=PURPOSE, pairs=[CLAIMED])


async def _contrast(listener: Listener) -> None:
    said = Evaluation(
        progress_before=4,
        progress_after=7,
        reasoning="The desk was shipped, and nothing is open. The customer has no mail yet.",
        evidence=('"desk"', '"mails": 0'),
        confidence=0.8,
    )
    gold = Label(progress_before=4, progress_after=7, source="program")
    event = ScoreEvent(step=0, transition=SHIPPED, evaluation=said, label=gold)
    await ask_for_pairs(listener, [event], PURPOSE)


async def ask_for_pairs(
    listener: Listener, events: Sequence[ScoreEvent], purpose: str, *, state_tokens: int = 2000
) -> None:
    """Ask for a mistake of each step, and compare the sides of a pair of it."""
    prompts = load_prompts()
    mistake = KNOWN_MISTAKES[1]
    for event in events:
        right = find_reference(event)
        assert right is not None
        step = StepToContrast(event, right, purpose, "t")
        reach = compute_reach(mistake, step)
        assert reach is not None
        asked = AskedMistake(step, mistake, reach)
        await ask_for_pair(asked, llm=listener, prompts=prompts, state_tokens=state_tokens)
        pair = next(pair for pair in pairs_of(step) if pair.construction == "no_effect")
        shown = show_transition(purpose, TransitionView(pair.transition), max_tokens=state_tokens)
        await prefers_right(pair, shown, listener, prompts, is_right_first=False, trial=0)


async def _unread(batch: Minibatch) -> AnalystReport:
    return batch.empty_report


def edit(kind: EditKind, text: str, source: RolloutSource, *, target: str = "", support: int = 2) -> Edit:
    """Return an edit that so many cases support."""
    return Edit(op=kind, content=text, target=target, source_type=source, support_count=support)


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
