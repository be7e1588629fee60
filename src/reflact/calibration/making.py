"""Makes the candidates of one round into pairs or drops; see ``contrast``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
from pydantic import JsonValue

from reflact.aside import run_in_thread
from reflact.calibration.comparing import compare, sides
from reflact.calibration.constructions import Band, Built, Label, built, label_of, under
from reflact.calibration.critic import Scorer, agreed
from reflact.calibration.curriculum import Round
from reflact.calibration.limited import LimitedCritic, LimitedLLM
from reflact.calibration.mistakes import (
    KNOWN_MISTAKES,
    Asked,
    Choice,
    ContrastSettings,
    Drop,
    DropReason,
    Elsewhere,
    Impossible,
    Mistake,
    PurposeReply,
    Report,
    ask_mistake,
    ask_purpose,
    choose,
    mistaken,
    mistaken_check,
    other_than,
    purpose_check,
)
from reflact.calibration.showing import show_transition
from reflact.calls import CallId, RenderedPrompt
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory import Construction, ContrastPair, Evaluation, Provenance, ScoreEvent, Transition
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.tasks import fan_out
from reflact.types import digest_json

Way: TypeAlias = Choice[ContrastPair]
"""How a candidate comes about; pairs that need no model are there already."""


class Job(NamedTuple):
    """An event with the kinds of mistakes that it was dealt.

    Args:
        event: The scored step.
        hand: The kinds, one for each candidate.
        place: The number of its first candidate in the round.
        repeated: Whether an earlier event equals it.
    """

    event: ScoreEvent
    hand: tuple[str, ...]
    place: int
    repeated: bool


class _Failed(Exception):
    """A candidate that becomes no pair; never leaves this module."""

    def __init__(self, reason: DropReason, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class Maker:
    """Makes pairs of a trace's events, for one round; the arguments are those of ``contrast``.

    Raises:
        ConfigError: The round asks for a kind of mistake that nobody described.
    """

    def __init__(
        self,
        purpose: str,
        trace_id: str,
        plan: Round,
        *,
        llm: LLM,
        judge: LLM | None,
        critic: Scorer | None,
        settings: ContrastSettings,
        prompts: PromptBook,
        known: Container[str],
        others: Sequence[str],
        report: Report | None,
    ) -> None:
        gate = anyio.Semaphore(settings.concurrency)
        self._purpose = purpose
        self._trace_id = trace_id
        self._plan = plan
        self._band = Band(plan.nearest, plan.farthest)
        self._mistakes = described(plan, settings)
        self._llm = LimitedLLM(llm, gate)
        self._judge = None if judge is None else LimitedLLM(judge, gate)
        self._critic = None if critic is None else LimitedCritic(critic, gate)
        self._settings = settings
        self._prompts = prompts
        self._known = known
        self._others = others
        self._report = report
        self._told: set[str] = set()

    async def make(self, job: Job) -> tuple[ContrastPair | Drop, ...]:
        """Return what became of an event's candidates, in their order."""
        choices = await self._choices(job)
        return await fan_out(lambda n: self._candidate(job, n, choices), range(len(job.hand)))

    async def _choices(self, job: Job) -> tuple[Way, ...]:
        if job.repeated:
            return (Impossible("duplicate", "an earlier step of this trace is equal"),) * len(job.hand)
        try:
            agreed_on = None if job.event.gold is not None else await self._agreed(job.event, self._purpose)
            return await run_in_thread(partial(self._chosen, job, agreed_on), *job.event.transition.states)
        except _Failed as failed:
            return (Impossible(failed.reason, str(failed)),) * len(job.hand)

    def _chosen(self, job: Job, agreed_on: Evaluation | None) -> tuple[Way, ...]:
        label = _label(job.event, agreed_on)
        possible = built(job.event, label, purpose=self._purpose, band=self._band)
        pairs = [self._pair(job.event, one) for one in possible]
        return choose(
            job.hand,
            label,
            ready=[pair for pair in pairs if pair.id not in self._known],
            elsewhere=self._elsewhere(label),
            band=self._band,
            mistakes=self._mistakes,
        )

    async def _candidate(self, job: Job, number: int, choices: Sequence[Way]) -> ContrastPair | Drop:
        choice = choices[number]

        def lost(reason: DropReason, error: Exception) -> Drop:
            return Drop(
                reason=reason,
                words=str(error),
                step=job.event.step,
                mistake=job.hand[number],
                construction=_construction(choice),
            )

        result: ContrastPair | Drop
        try:
            pair = await self._made(job.event, choice)
            result = await self._judged(pair, job.place + number)
        except _Failed as failed:
            result = lost(failed.reason, failed)
        except ReplyError as error:
            result = lost("bad_reply", error)
        except ContextOverflow as error:
            result = lost("too_long", error)
        await self._tell(result)
        return result

    # ------------------------------------------------------------------------------------ what is right

    async def _agreed(self, event: ScoreEvent, purpose: str) -> Evaluation:
        if self._critic is None:
            raise _Failed("unverified", "there is neither gold nor a critic whose samples could agree")
        found = await agreed(
            self._critic,
            event.transition,
            purpose=purpose,
            samples=self._settings.samples,
            max_spread=self._settings.max_spread,
        )
        if isinstance(found, str):
            raise _Failed("disagreement", found)
        return found

    # ------------------------------------------------------------------------------------ what is wrong

    def _elsewhere(self, label: Label) -> Elsewhere | None:
        """Return the round's look at a step under another purpose, each purpose in one round only."""
        if self._critic is None:
            return None
        purpose = other_than(self._purpose, self._others, place=self._plan.number - 1)
        return Elsewhere(label, purpose) if purpose is not None or self._settings.near_misses else None

    async def _made(self, event: ScoreEvent, choice: Way) -> ContrastPair:
        if isinstance(choice, Impossible):
            raise _Failed(choice.reason, choice.words)
        if isinstance(choice, ContrastPair):
            return choice
        if isinstance(choice, Elsewhere):
            made = await self._looked_at(event, choice)
        else:
            made = await self._asked(event, choice)
        return await run_in_thread(partial(self._hashed, event, made), *event.transition.states)

    def _hashed(self, event: ScoreEvent, made: Built) -> ContrastPair:
        pair = self._pair(event, made)
        _ = pair.id
        return pair

    async def _looked_at(self, event: ScoreEvent, choice: Elsewhere) -> Built:
        purpose = choice.purpose
        if purpose is None:
            prompt = ask_purpose(self._prompts, purpose=self._purpose)
            place = CallId(
                role="contrast",
                purpose="other_purpose",
                part=digest_json(self._purpose)[:32],
                trial=self._plan.number,
            )
            check = purpose_check(self._purpose)
            purpose = (await self._llm.ask(prompt, PurposeReply, call_id=place, check=check)).value.purpose
        right = await self._agreed(event, purpose)
        found = under(event, choice.label, purpose=purpose, right=right, band=self._band)
        if found is None:
            raise _Failed(
                "not_confirmed",
                f"samples agree on {right.phi_after:g} for another purpose, which does not make the "
                "evaluation wrong for it by a distance of this round",
            )
        return found

    async def _asked(self, event: ScoreEvent, choice: Asked) -> Built:
        right, kind = choice.label.right, choice.mistake.name
        prompt, place = await run_in_thread(partial(self._question, event, choice), *event.transition.states)
        check = mistaken_check(right, choice.reach)
        said = (await self._llm.ask(prompt, mistaken(kind), call_id=place, check=check)).value
        wrong = right.model_copy(
            update={"phi_after": said.phi_after, "reasoning": said.reasoning, "evidence": ()}
        )
        return Built(
            construction="asked",
            mistake=kind,
            purpose=self._purpose,
            transition=event.transition,
            right=right,
            wrong=wrong,
            source=choice.label.source,
            why=said.why,
        )

    def _question(self, event: ScoreEvent, choice: Asked) -> tuple[RenderedPrompt, CallId]:
        right = choice.label.right
        prompt = ask_mistake(
            self._prompts,
            step=self._shown(self._purpose, event.transition),
            right=right,
            mistake=choice.mistake,
            reach=choice.reach,
            subtle=self._plan.number > 1,
        )
        about: JsonValue = {
            "purpose": self._purpose,
            "transition": event.transition.plain,
            "right": right.model_dump(mode="json"),
            "mistake": choice.mistake.model_dump(mode="json"),
            "reach": choice.reach.model_dump(mode="json"),
            "round": self._plan.number,
        }
        part = digest_json(about)[:32]
        return prompt, CallId(role="contrast", purpose="mistake", part=part, trial=choice.variation)

    # ----------------------------------------------------------------------------------- what is kept

    async def _judged(self, pair: ContrastPair, place: int) -> ContrastPair:
        if pair.id in self._known:
            raise _Failed("known", "the pair was there before")
        judges = self._settings.judges
        if self._judge is None or judges == 0 or (self._settings.judged == "unproven" and proven(pair)):
            return pair
        outcome, found = await compare(
            pair,
            sides(place, judges, seed=self._settings.seed),
            step=await run_in_thread(
                partial(self._shown, pair.purpose, pair.transition), *pair.transition.states
            ),
            judge=self._judge,
            prompts=self._prompts,
            agreement=self._settings.agreement,
        )
        if outcome != "kept":
            raise _Failed(outcome, f"{sum(found)} of the first {len(found)} comparisons found the right side")
        return pair.model_copy(update={"judges": judges, "agreement": sum(found) / judges})

    def _pair(self, event: ScoreEvent, made: Built) -> ContrastPair:
        asked = made.construction == "asked"
        version = self._prompts.prompts["contrast"].header.version
        return ContrastPair(
            purpose=made.purpose,
            transition=made.transition,
            right=made.right,
            wrong=made.wrong,
            why=made.why,
            mistake=made.mistake,
            construction=made.construction,
            label=made.source,
            provenance=Provenance(
                trace_id=self._trace_id,
                step=event.step,
                prompt=f"contrast@{version}" if asked else None,
                model=self._llm.identity if asked else None,
            ),
        )

    async def _tell(self, result: ContrastPair | Drop) -> None:
        """Report a result; of equal pairs the one that finished first, the others as drops."""
        if self._report is None:
            return
        if isinstance(result, ContrastPair):
            if result.id in self._told:
                result = duplicate(result)
            else:
                self._told.add(result.id)
        await self._report(result)

    def _shown(self, purpose: str, transition: Transition) -> str:
        return show_transition(purpose, transition, room=self._settings.state_tokens)


def proven(pair: ContrastPair) -> bool:
    """Whether a pair's sides are right and wrong by gold and construction, whatever a model thinks."""
    return pair.label != "agreement" and pair.construction not in {"asked", "other_purpose"}


def duplicate(pair: ContrastPair) -> Drop:
    """Return what becomes of a pair that equals an earlier one of its round."""
    return Drop(
        reason="duplicate",
        words="an earlier candidate of this round gave the same pair",
        step=pair.provenance.step or 0,
        mistake=pair.mistake,
        construction=pair.construction,
    )


def described(plan: Round, settings: ContrastSettings) -> Mapping[str, Mistake]:
    """Return all kinds of mistakes by name.

    Raises:
        ConfigError: The round asks for one that nobody described.
    """
    known = {mistake.name: mistake for mistake in (*KNOWN_MISTAKES, *settings.mistakes)}
    missing = sorted(kind.mistake for kind in plan.shares if kind.mistake not in known)
    if missing:
        raise ConfigError(
            f"contrast.mistakes: the round asks for {', '.join(missing)}, which nobody has described; add "
            "name and description"
        )
    return known


def _label(event: ScoreEvent, agreed_on: Evaluation | None) -> Label:
    if agreed_on is not None:
        return Label(right=agreed_on, source="agreement")
    label = None if event.gold is None else label_of(event, event.gold)
    if label is None:
        raise _Failed("unverified", "gold says what the state after is worth, and not the state before")
    return label


def _construction(choice: Way) -> Construction | None:
    if isinstance(choice, ContrastPair):
        return choice.construction
    if isinstance(choice, Elsewhere):
        return "other_purpose"
    return "asked" if isinstance(choice, Asked) else None
