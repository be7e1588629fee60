"""Several runs as one: seeds and a small grid of settings, at once and within one budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from reflact.concurrency import fan_out
from reflact.config.loading import load_config
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, RunFailed, UsageError
from reflact.events import Event, RunFinished
from reflact.llm.budget import COUNTED_LIMITS
from reflact.records import RunSummary
from reflact.reporting.history import RunComparison, compare_runs
from reflact.trainer import Trainer
from reflact.types import FrozenModel, ShortReprModel, Split

# Gets the name of a run with each of its events.
SweepCallback = Callable[[str, Event], None]


class SweepRun(ShortReprModel):
    """A run of a sweep; ``setting`` is its name without the seed."""

    name: str
    setting: str
    out_dir: Path
    summary: RunSummary


class SettingScore(FrozenModel):
    """The scores of a setting on a split, 0..1, as means over ``n`` runs.

    ``spread`` is the standard deviation of ``best`` between runs; None for a single run.
    """

    setting: str
    split: Split
    n: int
    baseline: float
    best: float
    spread: float | None


class SweepSummary(ShortReprModel):
    """The outcome of a sweep.

    ``comparison`` pairs the best skill of each run with that of the first one, by item. It is None
    if a run has not measured its initial skill.
    """

    runs: tuple[SweepRun, ...]
    scores: tuple[SettingScore, ...]
    comparison: RunComparison | None


async def train_many(
    config: TrainerConfig | Mapping[str, Any] | Path | str,
    *,
    seeds: int = 1,
    vary: Mapping[str, Sequence[Any]] | None = None,
    on_event: SweepCallback | None = None,
    **collaborators: Any,
) -> SweepSummary:
    """Train with several seeds and settings at once, or resume that, and compare the runs.

    Each run is an ordinary one in a folder of its own below ``out_dir``, and has an equal share of
    the budget.

    Args:
        config: As for ``Trainer``.
        seeds: How many seeds, from ``seed`` on.
        vary: The values of keys of the configuration, such as ``{"train.batch_size": [4, 8]}``. All
            combinations are tried.
        on_event: Takes the name of a run and its event; must neither wait nor raise.
        collaborators: Objects for each ``Trainer``, such as ``target``. The runs share them.

    Raises:
        UsageError: There is a single run, a key or a value is wrong, or the data is.
        StoreError: A database cannot be read or written.
    """
    configs = plan_sweep(load_config(config), seeds=seeds, vary=vary or {})
    trainers = {name: Trainer(each, **collaborators) for name, each in configs.items()}
    return await run_sweep(trainers, on_event or (lambda name, event: None))


def plan_sweep(
    config: TrainerConfig, *, seeds: int, vary: Mapping[str, Sequence[Any]]
) -> dict[str, TrainerConfig]:
    """Return the configuration of each run of a sweep by its name.

    Raises:
        UsageError: There is a single run, a key or a value is wrong, or a share of the budget is
            zero.
    """
    grid = dict(vary)
    if seeds > 1:
        if "seed" in grid:
            raise UsageError("seeds and a varied `seed` exclude each other; leave one of them out")
        grid["seed"] = range(config.seed, config.seed + seeds)
    taken = [key for key in grid if key in {"out_dir", *(f"budget.{k}" for k in COUNTED_LIMITS)}]
    if taken:
        raise UsageError(
            f"{taken[0]} cannot be varied: each run has a folder of its own and an equal share of "
            "the limits"
        )
    combinations = list(product(*grid.values()))
    if len(combinations) < 2:
        raise UsageError("several runs need at least two seeds, or two values of a key")
    if config.replay.cassette is not None and config.replay.mode == "record":
        raise ConfigError("several runs cannot write one recording; leave replay.mode: record out")
    shares = []
    for key in COUNTED_LIMITS:
        limit = getattr(config.budget, key)
        if limit is not None:
            share = limit / len(combinations) if key == "max_usd" else limit // len(combinations)
            if not share:
                raise ConfigError(f"budget.{key} is too small for {len(combinations)} runs")
            shares.append(f"budget.{key}={share}")
    configs = {}
    for values in combinations:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        changes = [f"{key}={text}" for key, text in zip(grid, texts, strict=True)]
        name = re.sub(r"[^\w.,=-]+", "-", ",".join(changes))
        if name in configs:
            raise UsageError(f"two runs would be named {name}; leave out one of the equal values")
        out_dir = f"out_dir={json.dumps(str(config.out_dir / name))}"
        configs[name] = load_config(config, overrides=[*changes, *shares, out_dir])
    return configs


async def run_sweep(trainers: Mapping[str, Trainer], on_event: SweepCallback) -> SweepSummary:
    """Run trainers at once, and compare what they found."""

    async def run(job: tuple[str, Trainer]) -> SweepRun:
        name, trainer = job
        async with trainer.stream() as stream:
            async for event in stream:
                on_event(name, event)
                if isinstance(event, RunFinished):
                    return SweepRun(
                        name=name,
                        setting=re.sub(r",?seed=\d+$", "", name),
                        out_dir=trainer.config.out_dir,
                        summary=event.summary,
                    )
        raise RunFailed(f"run {name} stopped without a summary; start it again to resume")

    runs = tuple(await fan_out(run, [*trainers.items()]))
    comparison = None
    if all(run.summary.best is not None for run in runs):
        comparison = await compare_runs([run.out_dir for run in runs])
    return SweepSummary(runs=runs, scores=tuple(_score_settings(runs)), comparison=comparison)


def _score_settings(runs: Sequence[SweepRun]) -> list[SettingScore]:
    """Return the scores of each setting on the test split if all runs have it, or else on val."""
    split = Split.test
    if any(run.summary.score("baseline", split) is None for run in runs):
        split = Split.val
    scores = []
    for setting in dict.fromkeys(run.setting for run in runs):
        pairs = []
        for run in runs:
            baseline = run.summary.score("baseline", split)
            best = run.summary.score("best", split) or baseline  # equal texts have one score
            if run.setting == setting and baseline is not None and best is not None:
                pairs.append((baseline.value or 0.0, best.value or 0.0))
        if pairs:
            bests = [best for _, best in pairs]
            spread = None
            if len(bests) > 1:
                spread = stdev(bests)
            score = SettingScore(
                setting=setting,
                split=split,
                n=len(pairs),
                baseline=fmean(baseline for baseline, _ in pairs),
                best=fmean(bests),
                spread=spread,
            )
            scores.append(score)
    return scores
