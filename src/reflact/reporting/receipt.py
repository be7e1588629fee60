"""A receipt of a run: what it claims, and what others need to check it.

A receipt holds digests in place of texts: it names the skill, the items and the settings. Whoever
guesses a short text or a setting can find out that the guess is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from reflact.errors import UsageError
from reflact.gate.corrected_claim import CorrectedClaim
from reflact.records import Claim, Improvement, SkillScore, Spend
from reflact.reporting.asking import AnswerFile, choose_claim, list_claims
from reflact.reporting.history import open_run, read_matrix, read_run
from reflact.reporting.items import ItemMatrix
from reflact.text import list_items, name_count
from reflact.types import FrozenModel, Split, digest_json

# What a part of a run's identity is called, if it is no key of the configuration.
PART_NAMES = {
    "data": "the items (data)",
    "skill": "the initial skill",
    "environment": "the environment or its grader",
    "target": "the target",
}

# A score from here on counts as solved when two models are compared.
SOLVED = 0.5

ModelVerdict = Literal["still true", "no longer true", "not enough cases"]


class ReceiptItem(FrozenModel):
    """A test item: its mean scores under both skills, and a digest of both answers."""

    item_id: str
    before: float | None
    after: float | None
    answers: str


class Receipt(FrozenModel):
    """What a run claims, and what it takes to check it.

    Args:
        format: The form of this file.
        reflact: The version that wrote it.
        run_id: The run.
        identity: A digest of each part that makes the run: settings, items, prompts, first skill.
        model: The target's model.
        initial_skill: The digest of the initial skill.
        skill: The digest of the best skill.
        claim: The claim on the sealed test items; None if the initial skill is the best one.
        scores: The scores on the test items: of both skills, the placebo and the null answers.
        items: The test items.
        test_openings: How often the test split was opened.
        spend: What the run paid; a replay pays nothing, so it cannot be checked.
        answers: What persons said of the answers to items, by the item's id; see ``reflact ask``.
        corrected: The claim that these answers make.
    """

    format: Literal[1] = 1
    reflact: str
    run_id: str
    identity: dict[str, str]
    model: str | None
    initial_skill: str
    skill: str
    claim: Claim | None
    scores: tuple[SkillScore, ...]
    items: tuple[ReceiptItem, ...]
    test_openings: int
    spend: tuple[Spend, ...] = ()
    answers: dict[str, float] = {}
    corrected: CorrectedClaim | None = None


class ModelCheck(FrozenModel):
    """Whether the claim of a receipt holds for another model, on the same items.

    ``better`` and ``worse`` are the items that the best skill solves under one of the models alone.
    """

    model: str
    verdict: ModelVerdict
    gain: Improvement
    better: tuple[str, ...]
    worse: tuple[str, ...]


def digest_identity(identity: Mapping[str, JsonValue]) -> dict[str, str]:
    """Return a digest of each part of a run's identity."""
    return {key: digest_json(value)[:16] for key, value in sorted(identity.items())}


async def build_receipt(path: Path, run_id: str, file: AnswerFile | None = None) -> Receipt:
    """Return the receipt of a completed run with a test split.

    Raises:
        UsageError: There is no such run, it is not complete, or no test item is measured.
        StoreError: The store cannot be read.
    """
    history = await read_run(path, run_id, events=False)
    summary = history.summary
    if summary is None or summary.status != "completed" or summary.best is None:
        raise UsageError(f"run {run_id} is not complete; run reflact train again, then export")
    async with open_run(path, run_id) as (store, row):
        identity = await store.identity(row.run_id)
    matrix = await read_matrix(path, run_id, split=Split.test, ends_only=True)
    said = {} if file is None else file.list_answers()
    answers = {item_id: each for item_id, each in sorted(said.items()) if each is not None}
    return Receipt(
        reflact=version("reflact"),
        run_id=run_id,
        identity=digest_identity(identity),
        model=_find_model(summary.config),
        initial_skill=history.versions[0].skill_hash,
        skill=summary.best.skill_hash,
        claim=summary.claim,
        scores=tuple(score for score in summary.scores if score.split is Split.test),
        items=tuple(_list_items(matrix)),
        test_openings=summary.test_openings,
        spend=summary.spend,
        answers=answers,
        corrected=choose_claim(list_claims(matrix, run_id, said)),
    )


def read_receipt(path: Path) -> Receipt:
    """Return the receipt of a file.

    Raises:
        UsageError: The file cannot be read, or is no receipt.
    """
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is no receipt; reflact export RUN --receipt writes one") from None


def list_changed_parts(receipt: Receipt, identity: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield what makes another run than that of a receipt: keys, items, prompts, first skill."""
    now = digest_identity(identity)
    for key in sorted({*now, *receipt.identity}):
        if now.get(key) != receipt.identity.get(key):
            yield PART_NAMES.get(key, key)


def list_differences(receipt: Receipt, replayed: Receipt) -> Iterator[str]:
    """Yield how a replay differs from a receipt, a sentence each."""
    for what, now, said in (
        ("the run", replayed.run_id, receipt.run_id),
        ("the model", replayed.model, receipt.model),
        ("the initial skill", replayed.initial_skill, receipt.initial_skill),
        ("the best skill", replayed.skill, receipt.skill),
    ):
        if now != said:
            yield f"{what} is {now}, and the receipt says {said}"
    items = {item.item_id: item for item in replayed.items}
    others = [item.item_id for item in receipt.items if items.get(item.item_id) != item]
    if others:
        yield f"answers or scores differ for {list_items(others)}"
    if len(items) != len(receipt.items):
        yield f"the replay has {name_count(len(items), 'test item')}"
    if replayed.claim != receipt.claim:
        yield "the claim differs"
    if replayed.scores != receipt.scores:
        yield "the scores differ"
    if replayed.test_openings != receipt.test_openings:
        yield "the test split was opened another number of times"


def find_corrected_difference(receipt: Receipt, replayed: ItemMatrix) -> str | None:
    """Return whether the answers of persons give another claim than that of the receipt."""
    claims = list_claims(replayed, receipt.run_id, receipt.answers)
    if choose_claim(claims) != receipt.corrected:
        return "the claim that persons' answers correct differs"
    return None


def check_model(receipt: Receipt, matrix: ItemMatrix, gain: Improvement, model: str) -> ModelCheck:
    """Return whether a claim holds for another model, from the answers of both skills under it.

    It is still true if the interval of the gain lies above 0, and no longer true if it lies below
    the gain that was claimed and holds 0 or less.
    """
    before = {item.item_id: item.after for item in receipt.items}
    better = []
    worse = []
    for row in matrix.rows:
        old = before.get(row.item_id)
        new = row.results[-1].hard
        if old is None or new is None:
            continue
        if old < SOLVED <= new:
            better.append(row.item_id)
        elif new < SOLVED <= old:
            worse.append(row.item_id)
    claimed = 0.0 if receipt.claim is None else receipt.claim.improvement.mean
    verdict: ModelVerdict = "not enough cases"
    if gain.low > 0:
        verdict = "still true"
    elif gain.high < claimed:
        verdict = "no longer true"
    return ModelCheck(
        model=model, verdict=verdict, gain=gain, better=tuple(better), worse=tuple(worse)
    )


def describe_receipt(receipt: Receipt) -> str:
    """Return what a receipt claims, in a sentence."""
    n_items = name_count(len(receipt.items), "sealed item")
    if receipt.claim is None:
        return f"The initial skill is the best one, on {n_items}."
    gain = receipt.claim.improvement
    state = "confirmed" if receipt.claim.confirmed else "not confirmed"
    return (
        f"The skill gains {100 * gain.mean:+.0f} points [{100 * gain.low:+.0f}, "
        f"{100 * gain.high:+.0f}] on {n_items} under {receipt.model or 'the target'}: {state}."
    )


def _list_items(matrix: ItemMatrix) -> Iterator[ReceiptItem]:
    for row in matrix.rows:
        ends = (row.results[0], row.results[-1])
        answers: list[JsonValue] = [
            [rollout.answer for rollout in result.rollouts] for result in ends
        ]
        yield ReceiptItem(
            item_id=row.item_id,
            before=row.results[0].hard,
            after=row.results[-1].hard,
            answers=digest_json(answers)[:16],
        )


def _find_model(config: JsonValue) -> str | None:
    """Return the name of the target's model in a run's configuration."""
    value = config
    for key in ("models", "target", "model"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None
