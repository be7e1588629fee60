"""The paired gate: whether a candidate is better than the current skill on one validation split.

Both sides are run on the same items and trials. ``look`` says what to run next or what is decided, from the
scores alone; ``reflact.early_stop`` says when the rest of a round cannot change the decision. Nothing here
runs anything, and the order in which scores arrived has no influence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from reflact.betting import Tally, stakes_for
from reflact.planning import DISCORDANT, resolvable
from reflact.types import Evidence, Frozen

ROUNDING = 1e-9
"""Scores that differ by no more are equal: their arithmetic is not more exact than that."""

REPEATS = 4
"""How often the items that differ are run again before a deterministic target's improvement is believed."""

VETO_TRIALS = 4
"""Trials on each side before an item of a noisy target counts as lost."""

IMBALANCE = 5
"""Points by which the two sides' shares of unmeasured rollouts may differ."""

MOST_RECORDED = 700.0
"""The greatest logarithm of evidence that is recorded; more has no floating-point number."""


class Pair(Frozen):
    """One item in one trial on both sides, in the gate's metric; None is unmeasured.

    ``candidate_solved`` and ``current_solved`` are read by ``no_regression`` alone.
    """

    item_id: str
    candidate: float | None = Field(ge=0, le=1)
    current: float | None = Field(ge=0, le=1)
    candidate_solved: bool | None = None
    current_solved: bool | None = None

    @property
    def difference(self) -> float | None:
        """The candidate's score less the current skill's; None where a side is unmeasured."""
        return None if self.candidate is None or self.current is None else self.candidate - self.current


Decision = Literal["accept", "reject", "inconclusive", "unmeasured"]

Trials = Mapping[int, Mapping[str, Pair]]
"""The pairs at hand, by trial number and item id."""


class Setting(Frozen):
    """All that a decision depends on beside the scores.

    Args:
        item_ids: The validation items, in the order in which they are run.
        policy: ``strict`` compares the means of one pass, ``paired`` asks for proof.
        trials: Rounds at most, for a noisy target.
        level: This decision's share of the run's error probability.
        planned: The ``trials`` that the first comparison of the same two skills was planned with, where this
            one adds to it: stakes must not be chosen by one who has seen how the bets went. None: no other.
        planned_level: Likewise its ``level``.
        effect: The improvement that is looked for; a comparison is given up when it has become unlikely.
        min_improvement: A candidate must be better by more than this.
        coverage: Share of the pairs that must be measured on both sides.
        no_regression: How many items may go from always solved to always failed; None: any number.
        early_stop: Whether a round ends as soon as its open pairs cannot change the decision.
        deterministic: Whether no repeat of a rollout ever disagreed.
        declared: Whether the configuration says that the target is deterministic; a disagreement refutes it.
    """

    item_ids: tuple[str, ...] = Field(min_length=1)
    policy: Literal["strict", "paired"] = "paired"
    trials: int = Field(ge=1)
    level: float = Field(gt=0, lt=1)
    planned: int | None = Field(default=None, ge=1)
    planned_level: float | None = Field(default=None, gt=0, lt=1)
    effect: float = Field(default=0.15, gt=0, le=1)
    min_improvement: float = Field(default=0.0, ge=0, lt=1)
    coverage: float = Field(default=0.9, gt=0, le=1)
    no_regression: int | None = Field(default=None, ge=0)
    early_stop: bool = True
    deterministic: bool = True
    declared: bool = False

    @property
    def threshold(self) -> float:
        """The logarithm of the evidence that acceptance needs."""
        return -math.log(self.level)

    @property
    def aim(self) -> float:
        """The improvement that a comparison goes on for."""
        return max(self.effect, self.min_improvement)

    def tally(self) -> Tally:
        """Return the tally of no pairs, with the stakes of the plan."""
        rounds = self.trials if self.planned is None else self.planned
        level = self.level if self.planned_level is None else self.planned_level
        margin = self.min_improvement
        stakes = stakes_for(len(self.item_ids) * rounds, level=level, margin=margin)
        return Tally(stakes=stakes, margin=margin)


class Ask(Frozen):
    """What to run next on both sides: one trial of these items, in this order."""

    trial: int
    item_ids: tuple[str, ...]


class Ruling(Frozen):
    """The decision.

    Args:
        action: What was decided.
        reason: Why, in a sentence.
        evidence: What it rested on. Where ``bound`` is set, ``value`` is the least evidence (accepted) or the
            greatest (otherwise) that the open pairs could have left.
        deterministic: Whether still no repeat of a rollout has disagreed.
        candidate_score: The candidate's mean over the pairs measured on both sides, in all trials below
            ``evidence.rounds``; where ``bound`` is set the last of them is known in part. None: no such pair.
        current_score: The current skill's mean over the same pairs.
    """

    action: Decision
    reason: str
    evidence: Evidence
    deterministic: bool
    candidate_score: float | None = None
    current_score: float | None = None


def look(setting: Setting, trials: Trials) -> Ask | Ruling:
    """Return what to run next, or the decision if the pairs at hand determine it.

    To be called with the pairs of complete asks; with none at first. A round counts when it is complete and
    all before it are, and the first round that decides is the one that decides, however many are at hand.

    1. ``strict``: a greater mean of one pass is accepted.
    2. A target that never disagreed with itself: a mean that is not greater is rejected; otherwise the items
       that differ are repeated, and if all of it happens again the candidate is accepted.
    3. A noisy target: rounds of all items on both sides, until the evidence reaches ``1 / level`` (accept),
       the improvement looked for has become unlikely (reject), or no round is left (inconclusive).

    Why 3 is valid: while the candidate is not better on the average over the items, the expected factor of a
    complete round is at most 1 by the inequality of the means, whichever items it helps or harms; by Ville's
    inequality the evidence then ever reaches ``1 / level`` with at most the probability ``level``. A part of
    a round has no such guarantee and is never tested.
    """
    open_items = missing(setting, trials, 0)
    if open_items:
        return Ask(trial=0, item_ids=open_items)
    if setting.policy == "strict":
        return _by_one_pass(setting, {0: trials[0]}, noisy=is_noisy(setting, trials))
    if is_noisy(setting, trials):
        return _by_test(setting, trials)
    return _by_one_pass(setting, trials, noisy=False)


def missing(setting: Setting, trials: Trials, trial: int) -> tuple[str, ...]:
    """Return the items whose pair of a trial is not at hand, in the order in which they are run."""
    pairs = trials.get(trial, {})
    return tuple(item_id for item_id in setting.item_ids if item_id not in pairs)


def is_noisy(setting: Setting, trials: Trials) -> bool:
    """Return whether a repeat has disagreed in the metric, before or among the pairs at hand."""
    if not setting.deterministic:
        return True
    first: dict[tuple[str, str], float] = {}
    for trial in sorted(trials):
        for item_id, pair in trials[trial].items():
            for side, score in (("candidate", pair.candidate), ("current", pair.current)):
                if score is not None and abs(first.setdefault((item_id, side), score) - score) > ROUNDING:
                    return True
    return False


def lost(setting: Setting, trials: Trials) -> tuple[str, ...]:
    """Return the items that the current skill always solved and the candidate never, as far as measured."""
    found = []
    for item_id in setting.item_ids:
        pairs = [pairs[item_id] for pairs in trials.values() if item_id in pairs]
        known = [pair for pair in pairs if None not in (pair.candidate_solved, pair.current_solved)]
        if known and all(pair.current_solved and not pair.candidate_solved for pair in known):
            found.append(item_id)
    return tuple(found)


def covered(setting: Setting, sums: Tally) -> bool:
    """Return whether enough pairs are measured, and the two sides' unmeasured shares are alike."""
    apart = abs(sums.missed[0] - sums.missed[1])
    enough = max(1.0, setting.coverage * sums.asked - ROUNDING)
    return sums.measured >= enough and 100 * apart <= IMBALANCE * sums.asked


def concluded(setting: Setting, sums: Tally) -> Decision | None:
    """Return what complete rounds of a noisy target decide; None: the next round is needed."""
    rounds = sums.asked // len(setting.item_ids)
    if not covered(setting, sums):
        return "unmeasured"
    if sums.log_evidence() >= setting.threshold:
        return "accept"
    if rounds > 1 and sums.upper < setting.aim:
        return "reject"
    return "inconclusive" if rounds == setting.trials else None


def rule(
    setting: Setting,
    sums: Tally,
    action: Decision,
    *,
    noisy: bool,
    reason: str | None = None,
    open_pairs: int = 0,
) -> Ruling:
    """Return a decision with its evidence, and with the reason that follows from it where none is given.

    Args:
        setting: What it depends on beside the scores.
        sums: The pairs that it rests on.
        action: The decision.
        noisy: Whether a repeat has disagreed.
        reason: Why, where it is not the comparison of the two sides.
        open_pairs: Pairs of the last round that are not known and cannot change the decision.
    """
    tested = noisy and setting.policy == "paired"
    log_evidence = sums.log_evidence(open_pairs, -1.0 if action == "accept" else 1.0)
    evidence = Evidence(
        policy=setting.policy,
        deterministic=not noisy,
        rounds=math.ceil(sums.asked / len(setting.item_ids)),
        pairs=sums.measured,
        value=float(f"{math.exp(min(log_evidence, MOST_RECORDED)):.6g}") if tested else None,
        level=setting.level if tested else None,
        resolvable=_resolvable(setting, sums) if action == "inconclusive" else None,
        bound=open_pairs > 0,
        futile=tested and action == "reject" and reason is None,
    )
    sentence = _reason(setting, sums, action, evidence) if reason is None else reason
    if open_pairs:
        told = "the open pair" if open_pairs == 1 else f"the {open_pairs} open pairs"
        sentence = f"{sentence} Nothing that {told} may give can change that."
    return Ruling(
        action=action,
        reason=sentence,
        evidence=evidence,
        deterministic=not noisy,
        candidate_score=sums.totals[0] / sums.measured if sums.measured else None,
        current_score=sums.totals[1] / sums.measured if sums.measured else None,
    )


def too_many_lost(setting: Setting, losses: int) -> str:
    """Return the reason of a veto."""
    items = "1 item that was" if losses == 1 else f"{losses} items that were"
    return f"The candidate fails {items} solved before; `no_regression` allows {setting.no_regression}."


def _by_one_pass(setting: Setting, trials: Trials, *, noisy: bool) -> Ask | Ruling:
    sums = setting.tally()
    for item_id in setting.item_ids:
        sums.add(trials[0][item_id].candidate, trials[0][item_id].current)
    if not covered(setting, sums):
        return rule(setting, sums, "unmeasured", noisy=noisy)
    if sums.mean - setting.min_improvement <= ROUNDING:
        return rule(setting, sums, "reject", noisy=noisy)
    if setting.policy == "strict" or setting.declared:
        return _unless_lost(setting, trials, sums, noisy=noisy)
    differing = [i for i in setting.item_ids if abs(trials[0][i].difference or 0.0) > ROUNDING]
    for trial in range(1, REPEATS + 1):
        open_items = tuple(i for i in differing if i not in trials.get(trial, {}))
        if open_items:
            return Ask(trial=trial, item_ids=open_items)
    return _if_repeated(setting, trials, sums, differing)


def _if_repeated(setting: Setting, trials: Trials, sums: Tally, differing: Sequence[str]) -> Ask | Ruling:
    """Accept on repeats that agree; an item whose repeats are not all measured counts only as a loss."""
    repeats = [trials[trial] for trial in range(1, REPEATS + 1)]
    doubtful = [i for i in differing if any(pairs[i].difference is None for pairs in repeats)]
    unproven = math.fsum(max(0.0, trials[0][i].difference or 0.0) for i in doubtful)
    if (sums.total - unproven) / sums.measured - setting.min_improvement <= ROUNDING:
        reason = f"Of {len(differing)} items that differ, {len(doubtful)} could not be measured again."
        return rule(setting, sums, "unmeasured", noisy=False, reason=reason)
    return _unless_lost(setting, trials, sums, noisy=False)


def _by_test(setting: Setting, trials: Trials) -> Ask | Ruling:
    sums = setting.tally()
    for trial in range(setting.trials):
        open_items = missing(setting, trials, trial)
        if open_items:
            return Ask(trial=trial, item_ids=open_items)
        for item_id in setting.item_ids:
            sums.add(trials[trial][item_id].candidate, trials[trial][item_id].current)
        action = concluded(setting, sums)
        if action == "accept":
            return _unless_lost(setting, trials, sums, noisy=True)
        if action is not None:
            return rule(setting, sums, action, noisy=True)
    raise AssertionError("the last round concludes")


def _unless_lost(setting: Setting, trials: Trials, sums: Tally, *, noisy: bool) -> Ask | Ruling:
    """Accept, unless too many items were lost; what a noisy target seems to have lost is run again first."""
    losses = lost(setting, trials)
    if setting.no_regression is None or len(losses) <= setting.no_regression:
        return rule(setting, sums, "accept", noisy=noisy)
    for trial in range(VETO_TRIALS if noisy and setting.policy == "paired" else 0):
        open_items = tuple(item_id for item_id in losses if item_id not in trials.get(trial, {}))
        if open_items:
            return Ask(trial=trial, item_ids=open_items)
    return rule(setting, sums, "reject", noisy=noisy, reason=too_many_lost(setting, len(losses)))


def _resolvable(setting: Setting, sums: Tally) -> float:
    discordant = sums.squares / sums.measured if sums.squares > 0 else DISCORDANT
    return resolvable(len(setting.item_ids), setting.trials, level=setting.level, discordant=discordant)


def _reason(setting: Setting, sums: Tally, action: Decision, evidence: Evidence) -> str:
    pairs = f"{sums.measured} of {sums.asked} pairs"
    if action == "unmeasured":
        return (
            f"Only {pairs} are measured on both sides, with {sums.missed[0]} rollouts of the candidate and "
            f"{sums.missed[1]} of the current skill missing; the gate needs a share of {setting.coverage:g}, "
            f"and the sides' shares at most {IMBALANCE} points apart."
        )
    new, old = (f"{total / sums.measured:.4f}" for total in sums.totals)
    if evidence.value is None or evidence.level is None:
        more = f"more than {setting.min_improvement:g} " if setting.min_improvement else ""
        relation = "is" if action == "accept" else "is not"
        return f"The candidate's {new} {relation} {more}above the current {old} over {pairs}."
    scores = f"The candidate has {new} and the current skill {old} over {pairs} in {evidence.rounds} trials"
    weight = f"{scores}: evidence of {evidence.value:.4g} for an improvement"
    if action == "accept":
        return f"{weight}, where {1 / evidence.level:.4g} is enough."
    if evidence.resolvable is not None:
        return (
            f"{weight}, where {1 / evidence.level:.4g} is needed; {setting.trials} trials of "
            f"{len(setting.item_ids)} items resolve improvements of about {evidence.resolvable:.2f}."
        )
    return f"{scores}; an improvement of {setting.aim:g} has become unlikely."
