"""The paired gate: decides whether a candidate is better than the current skill on the validation split.

Both sides are rolled out on the same items and trials. ``decide`` returns the next request or the decision,
from the scores alone. ``reflact.gate.early_stop`` finds when the rest of a round cannot change the decision.
All functions are pure; the order in which scores arrived has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from pydantic import Field

from reflact.gate.paired_test import DISCORDANT_SHARE, PairStatistics, choose_stakes, detectable_effect
from reflact.types import Evidence, FrozenModel, GatePolicy

SCORE_TOLERANCE = 1e-9
"""Scores that differ by no more count as equal, because of rounding."""

CONFIRMATION_REPEATS = {"paired": 4, "ranked": 1}
"""Repeats of the items that differ before a deterministic target's improvement is accepted."""

REPRODUCED_AFTER = 1 + CONFIRMATION_REPEATS["paired"]
"""Complete rounds of a noisy target after which a gain on items that never disagreed is accepted."""

VETO_TRIALS = 4
"""Trials on each side before an item of a noisy target counts as lost."""

MAX_UNMEASURED_GAP = 5
"""Maximum difference of the two sides' shares of unmeasured rollouts, in percentage points."""

MAX_LOG_EVIDENCE = 700.0
"""Maximum of the logarithm of recorded evidence; larger values overflow."""


class ScorePair(FrozenModel):
    """The scores of one item in one trial on both sides, in the gate's metric; None is unmeasured.

    Only ``no_regression`` uses ``candidate_solved`` and ``current_solved``.
    """

    item_id: str
    candidate: float | None = Field(ge=0, le=1)
    current: float | None = Field(ge=0, le=1)
    candidate_solved: bool | None = None
    current_solved: bool | None = None

    @property
    def difference(self) -> float | None:
        """The candidate's score minus the current skill's; None if a side is unmeasured."""
        return None if self.candidate is None or self.current is None else self.candidate - self.current


RulingAction = Literal["accept", "reject", "inconclusive", "unmeasured"]

Trials = Mapping[int, Mapping[str, ScorePair]]
"""The finished pairs, by trial number and item id."""


class GateSettings(FrozenModel):
    """The inputs of a decision beside the scores; see ``GateConfig`` for the settings.

    ``item_ids`` are in the order in which they are run. ``trials`` is the maximum of rounds for a noisy
    target, ``level`` this decision's share of the run's error probability. If this comparison adds to an
    earlier one of the same two skills, ``planned_trials`` and ``planned_level`` are the first one's: stakes
    must not depend on earlier results. ``deterministic``: no repeat of a rollout ever disagreed. A
    disagreement overrides a declaration. ``trust_repeats``: items that never disagreed count as reproducible,
    unless the target was declared as noisy.
    """

    item_ids: tuple[str, ...] = Field(min_length=1)
    policy: GatePolicy = "paired"
    trials: int = Field(ge=1)
    level: float = Field(gt=0, lt=1)
    planned_trials: int | None = Field(default=None, ge=1)
    planned_level: float | None = Field(default=None, gt=0, lt=1)
    effect: float = Field(default=0.15, gt=0, le=1)
    min_improvement: float = Field(default=0.0, ge=0, lt=1)
    coverage: float = Field(default=0.9, gt=0, le=1)
    no_regression: int | None = Field(default=None, ge=0)
    early_stop: bool = True
    deterministic: bool = True
    declared_deterministic: bool = False
    trust_repeats: bool = True

    @property
    def threshold(self) -> float:
        """The logarithm of the evidence that an acceptance requires."""
        return -math.log(self.level)

    @property
    def target_improvement(self) -> float:
        """The improvement that must be unlikely before a comparison ends as futile."""
        return max(self.effect, self.min_improvement)

    def new_statistics(self) -> PairStatistics:
        """Return the statistics of no pairs, with the stakes of the plan."""
        rounds = self.trials if self.planned_trials is None else self.planned_trials
        level = self.level if self.planned_level is None else self.planned_level
        margin = self.min_improvement
        stakes = choose_stakes(len(self.item_ids) * rounds, level=level, margin=margin)
        return PairStatistics(stakes=stakes, margin=margin)


class TrialRequest(FrozenModel):
    """A request to roll out both sides: one trial of these items, in this order."""

    trial: int
    item_ids: tuple[str, ...]


class Ruling(FrozenModel):
    """The decision and its reason, as one sentence; ``deterministic``: no repeat of a rollout has disagreed.

    If ``evidence.bound`` is set, ``evidence.value`` is the least evidence (if accepted) or the greatest
    (otherwise) over all outcomes of the open pairs.
    """

    action: RulingAction
    reason: str
    evidence: Evidence
    deterministic: bool


def decide(settings: GateSettings, trials: Trials) -> TrialRequest | Ruling:
    """Return the next request, or the decision if the pairs of complete requests determine it.

    The first round that determines a decision decides, even if later ones are complete.

    1. ``strict``: a greater mean of one pass is accepted.
    2. A deterministic target, with no disagreeing repeat: a mean that is not greater is rejected. Otherwise
       the items that differ are repeated, and the candidate is accepted if all repeats agree.
    3. A noisy target under ``ranked``: inconclusive, because beliefs decide; see ``reflact.gate.ranked_decision``.
    4. A noisy target under ``paired``: rounds of all items on both sides, until the evidence reaches ``1 / level``
       or the gain is reproduced (accept), the improvement has become unlikely (reject), or no round is left
       (inconclusive). A gain is unlikely only while the differences are within two standard errors of zero.

    Rule 4 is valid for this reason. If the candidate is not better on average over the items, the expected
    factor of a complete round is at most 1, by the inequality of the means, whichever items it helps or harms.
    By Ville's inequality the evidence then ever reaches ``1 / level`` with probability at most ``level``. A
    part of a round has no such guarantee and is never tested.
    """
    open_items = find_missing_items(settings, trials, 0)
    if open_items:
        return TrialRequest(trial=0, item_ids=open_items)
    if settings.policy == "strict":
        return _decide_by_one_pass(settings, {0: trials[0]}, noisy=is_noisy(settings, trials))
    if is_noisy(settings, trials):
        return (
            _end_by_noise(settings, trials)
            if settings.policy == "ranked"
            else _decide_by_test(settings, trials)
        )
    return _decide_by_one_pass(settings, trials, noisy=False)


def find_missing_items(settings: GateSettings, trials: Trials, trial: int) -> tuple[str, ...]:
    """Return the items without a finished pair in a trial, in the order in which they are run."""
    pairs = trials.get(trial, {})
    return tuple(item_id for item_id in settings.item_ids if item_id not in pairs)


def is_noisy(settings: GateSettings, trials: Trials) -> bool:
    """Return whether a repeat has disagreed in the metric, earlier or among the finished pairs."""
    if not settings.deterministic:
        return True
    first: dict[tuple[str, str], float] = {}
    for trial in sorted(trials):
        for item_id, pair in trials[trial].items():
            for side, score in (("candidate", pair.candidate), ("current", pair.current)):
                if (
                    score is not None
                    and abs(first.setdefault((item_id, side), score) - score) > SCORE_TOLERANCE
                ):
                    return True
    return False


def find_lost_items(settings: GateSettings, trials: Trials) -> tuple[str, ...]:
    """Return the items that the current skill always solved and the candidate never, as far as measured."""
    lost = []
    for item_id in settings.item_ids:
        pairs = [pairs[item_id] for pairs in trials.values() if item_id in pairs]
        known = [pair for pair in pairs if None not in (pair.candidate_solved, pair.current_solved)]
        if known and all(pair.current_solved and not pair.candidate_solved for pair in known):
            lost.append(item_id)
    return tuple(lost)


def count_required(coverage: float, total: int) -> int:
    """Return how many of ``total`` items must be measured: at least one, and the share ``coverage``, 0..1.

    The share counts as the decimal number that is written: 0.07 of 100 is 7, although the float is a little larger.
    """
    return max(1, math.ceil(Fraction(repr(coverage)) * total))


def has_coverage(settings: GateSettings, sums: PairStatistics) -> bool:
    """Return whether enough pairs are measured, and the two sides' unmeasured shares are similar."""
    gap = abs(sums.n_unmeasured[0] - sums.n_unmeasured[1])
    enough = count_required(settings.coverage, sums.n_pairs)
    return sums.n_measured >= enough and 100 * gap <= MAX_UNMEASURED_GAP * sums.n_pairs


@dataclass
class RepeatTracker:
    """Which items have never disagreed on either side, over the pairs that were added round by round.

    An item with an unmeasured pair counts as disagreeing.
    """

    settings: GateSettings
    first: dict[str, ScorePair] = field(default_factory=dict)
    unstable: set[str] = field(default_factory=set)

    def add(self, pair: ScorePair) -> None:
        """Add one pair."""
        first = self.first.setdefault(pair.item_id, pair)
        if not _agree(first.candidate, pair.candidate) or not _agree(first.current, pair.current):
            self.unstable.add(pair.item_id)

    @property
    def certain_gain(self) -> float:
        """The mean difference if stable items repeat, and the candidate loses each item that disagreed."""
        stable = (pair.difference or 0.0 for item, pair in self.first.items() if item not in self.unstable)
        return (math.fsum(stable) - len(self.unstable)) / len(self.settings.item_ids)

    @property
    def is_reproduced(self) -> bool:
        """Whether the certain gain is large enough; further rounds can refute it but not raise it."""
        settings = self.settings
        return settings.trust_repeats and self.certain_gain - settings.min_improvement > SCORE_TOLERANCE


def conclude_rounds(
    settings: GateSettings, sums: PairStatistics, repeats: RepeatTracker
) -> RulingAction | None:
    """Return the decision of complete rounds of a noisy target; None if another round is needed."""
    rounds = sums.n_pairs // len(settings.item_ids)
    if not has_coverage(settings, sums):
        return "unmeasured"
    reproduced = repeats.is_reproduced
    if sums.log_evidence() >= settings.threshold or (reproduced and rounds >= REPRODUCED_AFTER):
        return "accept"
    is_unlikely = (
        sums.upper_bound < settings.target_improvement and sums.lower_bound <= settings.min_improvement
    )
    if rounds > 1 and is_unlikely and not reproduced:
        return "reject"
    return "inconclusive" if rounds == settings.trials else None


def _agree(first: float | None, second: float | None) -> bool:
    return first is not None and second is not None and abs(first - second) <= SCORE_TOLERANCE


def build_ruling(
    settings: GateSettings,
    sums: PairStatistics,
    action: RulingAction,
    *,
    noisy: bool,
    reason: str | None = None,
    open_pairs: int = 0,
) -> Ruling:
    """Return a decision with its evidence; without a ``reason`` it explains the comparison of the two sides.

    ``noisy``: a repeat has disagreed. ``open_pairs`` of the last round are unknown and cannot change the decision.
    """
    tested = noisy and settings.policy == "paired"
    log_evidence = sums.log_evidence(open_pairs, -1.0 if action == "accept" else 1.0)
    discordant = sums.squares / sums.n_measured if sums.squares > 0 else DISCORDANT_SHARE
    effect = detectable_effect(
        len(settings.item_ids), settings.trials, level=settings.level, discordant=discordant
    )
    evidence = Evidence(
        policy=settings.policy,
        deterministic=not noisy,
        rounds=math.ceil(sums.n_pairs / len(settings.item_ids)),
        pairs=sums.n_measured,
        value=float(f"{math.exp(min(log_evidence, MAX_LOG_EVIDENCE)):.6g}") if tested else None,
        level=settings.level if tested else None,
        detectable_effect=effect if action == "inconclusive" else None,
        bound=open_pairs > 0,
        futile=tested and action == "reject" and reason is None,
    )
    sentence = _explain(settings, sums, action, evidence) if reason is None else reason
    if open_pairs:
        rest = "The comparison that is" if open_pairs == 1 else f"The {open_pairs} comparisons that are"
        sentence = f"{sentence} {rest} left cannot change that."
    return Ruling(action=action, reason=sentence, evidence=evidence, deterministic=not noisy)


def explain_veto(losses: int, allowed: int) -> str:
    """Return the reason of a rejection by ``no_regression``."""
    items = "1 item that was" if losses == 1 else f"{losses} items that were"
    return f"The candidate fails {items} solved before; `no_regression` allows {allowed}."


def _decide_by_one_pass(settings: GateSettings, trials: Trials, *, noisy: bool) -> TrialRequest | Ruling:
    sums = settings.new_statistics()
    for item_id in settings.item_ids:
        sums.add(trials[0][item_id].candidate, trials[0][item_id].current)
    if not has_coverage(settings, sums):
        return build_ruling(settings, sums, "unmeasured", noisy=noisy)
    if sums.mean - settings.min_improvement <= SCORE_TOLERANCE:
        return build_ruling(settings, sums, "reject", noisy=noisy)
    if settings.policy == "strict" or settings.declared_deterministic:
        return _accept_unless_lost(settings, trials, sums, noisy=noisy)
    differing = [i for i in settings.item_ids if abs(trials[0][i].difference or 0.0) > SCORE_TOLERANCE]
    for trial in range(1, CONFIRMATION_REPEATS[settings.policy] + 1):
        open_items = tuple(i for i in differing if i not in trials.get(trial, {}))
        if open_items:
            return TrialRequest(trial=trial, item_ids=open_items)
    return _decide_by_repeats(settings, trials, sums, differing)


def _decide_by_repeats(
    settings: GateSettings, trials: Trials, sums: PairStatistics, differing: Sequence[str]
) -> TrialRequest | Ruling:
    """Accept if all repeats agree; an item with an unmeasured repeat cannot count as an improvement."""
    repeats = [trials[trial] for trial in range(1, CONFIRMATION_REPEATS[settings.policy] + 1)]
    doubtful = [i for i in differing if any(pairs[i].difference is None for pairs in repeats)]
    unproven = math.fsum(max(0.0, trials[0][i].difference or 0.0) for i in doubtful)
    if (sums.total - unproven) / sums.n_measured - settings.min_improvement <= SCORE_TOLERANCE:
        reason = f"Of {len(differing)} items that differ, {len(doubtful)} could not be measured again."
        return build_ruling(settings, sums, "unmeasured", noisy=False, reason=reason)
    return _accept_unless_lost(settings, trials, sums, noisy=False)


def _end_by_noise(settings: GateSettings, trials: Trials) -> Ruling:
    sums = settings.new_statistics()
    for pair in trials[0].values():
        sums.add(pair.candidate, pair.current)
    return build_ruling(settings, sums, "inconclusive", noisy=True, reason="A repeat of a rollout disagreed.")


def _decide_by_test(settings: GateSettings, trials: Trials) -> TrialRequest | Ruling:
    sums, repeats = settings.new_statistics(), RepeatTracker(settings)
    for trial in range(settings.trials):
        open_items = find_missing_items(settings, trials, trial)
        if open_items:
            return TrialRequest(trial=trial, item_ids=open_items)
        for item_id in settings.item_ids:
            pair = trials[trial][item_id]
            sums.add(pair.candidate, pair.current)
            repeats.add(pair)
        action = conclude_rounds(settings, sums, repeats)
        if action == "accept":
            reason = (
                None if sums.log_evidence() >= settings.threshold else _explain_repeats(repeats, trial + 1)
            )
            return _accept_unless_lost(settings, trials, sums, noisy=True, reason=reason)
        if action is not None:
            return build_ruling(settings, sums, action, noisy=True)
    raise AssertionError("the last round concludes")


def _explain_repeats(repeats: RepeatTracker, rounds: int) -> str:
    unstable = len(repeats.unstable)
    items = "1 item" if unstable == 1 else f"{unstable} items"
    return (
        f"The candidate gains at least {repeats.certain_gain:.4f} on {len(repeats.settings.item_ids)} items if all "
        f"scores that agreed in {rounds} trials repeat; {items} that disagreed count as lost."
    )


def _accept_unless_lost(
    settings: GateSettings, trials: Trials, sums: PairStatistics, *, noisy: bool, reason: str | None = None
) -> TrialRequest | Ruling:
    """Accept unless too many items were lost; a noisy target's lost items are repeated first."""
    losses = find_lost_items(settings, trials)
    if settings.no_regression is None or len(losses) <= settings.no_regression:
        return build_ruling(settings, sums, "accept", noisy=noisy, reason=reason)
    for trial in range(VETO_TRIALS if noisy and settings.policy == "paired" else 0):
        open_items = tuple(item_id for item_id in losses if item_id not in trials.get(trial, {}))
        if open_items:
            return TrialRequest(trial=trial, item_ids=open_items)
    return build_ruling(
        settings, sums, "reject", noisy=noisy, reason=explain_veto(len(losses), settings.no_regression)
    )


def _explain(settings: GateSettings, sums: PairStatistics, action: RulingAction, evidence: Evidence) -> str:
    n, rounds = len(settings.item_ids), evidence.rounds
    part = f"{n}" if sums.n_measured == n else f"{sums.n_measured} of {n}"
    where = f"on {part} items" if rounds <= 1 else f"on {n} items in {rounds} trials"
    if action == "unmeasured":
        return (
            f"Only {sums.n_measured} of {sums.n_pairs} comparisons are measured with both skills: {sums.n_unmeasured[0]} "
            f"rollouts of the candidate and {sums.n_unmeasured[1]} of the current skill are missing. The gate needs "
            f"a share of {settings.coverage:g}, and the skills' shares at most {MAX_UNMEASURED_GAP} points apart."
        )
    new, old = (f"{total / sums.n_measured:.4g}" for total in sums.totals)
    if evidence.value is None or evidence.level is None:
        more = f"more than {settings.min_improvement:g} " if settings.min_improvement else ""
        relation = "is" if action == "accept" else "is not"
        return f"The candidate's {new} {relation} {more}above the current skill's {old}, {where}."
    scores = f"The candidate has {new} and the current skill {old}, {where}"
    weight = f"{scores}: evidence of {evidence.value:.4g} for an improvement"
    if action == "accept":
        return f"{weight}; {1 / evidence.level:.4g} is required."
    if evidence.detectable_effect is not None:
        return (
            f"{weight}; {1 / evidence.level:.4g} is required; {settings.trials} trials of "
            f"{len(settings.item_ids)} items detect improvements of about {evidence.detectable_effect:.2f}."
        )
    return f"{scores}; an improvement of {settings.target_improvement:g} has become unlikely."
