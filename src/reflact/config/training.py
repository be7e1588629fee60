"""The configuration of a run: typed sections with strict keys.

Keys marked *changeable* may differ between two starts of the same run; all others make up its identity,
together with the contents of the files that paths name.
``reflact.config.loading`` reads configurations from files and mappings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from reflact.config.critic import CriticConfig
from reflact.config.models import CHANGEABLE, ConfigSection, ModelsConfig
from reflact.types import Operation


class EnvironmentConfig(ConfigSection):
    """The environment that runs and grades items."""

    name: Literal["dataset"] = Field(
        "dataset", description="Which environment; `dataset` asks one question an item."
    )
    grader: Literal[
        "exact", "normalized", "token_f1", "numeric", "regex", "json_fields", "sql", "python", "critic"
    ] = Field(
        "normalized",
        description="How an answer is compared with the item's reference; `critic` looks at no reference and "
        "has a section of its own.",
    )
    tolerance: float = Field(0.0, ge=0, description="Absolute tolerance of the `numeric` grader.")
    relative_tolerance: float = Field(1e-6, ge=0, description="Relative tolerance of the `numeric` grader.")
    threshold: float = Field(1.0, gt=0, le=1, description="F1 from which `token_f1` counts as solved.")
    tables: Path | None = Field(
        None,
        description="Folder of .csv tables that the `sql` grader runs queries on.",
        json_schema_extra=CHANGEABLE,
    )
    time_limit: int = Field(
        5,
        ge=1,
        description="Seconds of processor time that an answer may take with the `python` grader; ten times "
        "as long on the clock.",
    )
    memory_limit: int = Field(
        1024, ge=64, description="MiB of memory that an answer may take with the `python` grader."
    )
    allow_unconfined: bool = Field(
        False,
        description="Let the `python` grader run answers even where this system cannot lock them in.",
        json_schema_extra=CHANGEABLE,
    )
    template: str = Field(
        "{input}", description="The message to the target; `{input}` is the only hole.", pattern=r"\{input\}"
    )


class TelemetryConfig(ConfigSection):
    """What spans hold, and whether MLflow is told of the run."""

    content: bool = Field(
        False,
        description="Let spans of model calls hold prompts and replies, and failed spans the words of the "
        "error; keys are taken out.",
        json_schema_extra=CHANGEABLE,
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="MLflow's tracking address; null: MLflow is told nothing. Needs the extra `mlflow`.",
        json_schema_extra=CHANGEABLE,
    )
    experiment: str = Field(
        "reflact", min_length=1, description="MLflow's experiment.", json_schema_extra=CHANGEABLE
    )

    @field_validator("mlflow")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "an address is stored with the run, so no name or password stands in it: MLflow reads them "
                "from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return value


class DataConfig(ConfigSection):
    """Where the items come from and how they are split."""

    path: Path | None = Field(
        None,
        description="A folder with train/, val/ and test/, or one .json or .jsonl file to be split.",
        json_schema_extra=CHANGEABLE,
    )
    ratio: str = Field(
        "2:1:7", pattern=r"^[0-9]+:[0-9]+:[0-9]+$", description="train:val:test for a single file."
    )
    split_seed: int = Field(42, description="Seed of the split of a single file.")
    train_size: int | None = Field(None, ge=1, description="If given, the train split must have this size.")


class TargetConfig(ConfigSection):
    """How the target is called."""

    kind: Literal["chat"] = Field(
        "chat", description="`chat`: the skill as system message, one chat call a turn."
    )
    preamble: str = Field("", description="Text put before the skill in the system message.")
    postamble: str = Field("", description="Text put after the skill in the system message.")
    deterministic: bool | None = Field(
        None,
        description="true: the gate takes repeats of a rollout to agree; null: it finds out by itself.",
    )
    max_calls_per_rollout: int | None = Field(
        None,
        ge=1,
        description="The most calls that a rollout of a target passed in Python makes; `budget.max_calls` "
        "needs it, since such calls are not seen.",
        json_schema_extra=CHANGEABLE,
    )
    max_tokens_per_rollout: int | None = Field(
        None,
        ge=1,
        description="The most tokens that such a rollout takes, input and output together; "
        "`budget.max_tokens` and `budget.max_usd` need it.",
        json_schema_extra=CHANGEABLE,
    )


class TrainConfig(ConfigSection):
    """The length of a run and its batches."""

    num_epochs: int = Field(4, ge=1, description="Passes over the train split.", json_schema_extra=CHANGEABLE)
    batch_size: int = Field(40, ge=1, description="Items a batch.")
    accumulation: int = Field(1, ge=1, description="Batches a step: rolled out apart, merged together.")
    success_threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="A rollout whose hard score is below it failed; null: only a score of 0 fails.",
    )
    reuse_rollouts: bool = Field(
        True, description="Use a skill's finished rollouts again in other steps and phases."
    )
    rollout_concurrency: int = Field(
        32, ge=1, description="Rollouts in flight at most.", json_schema_extra=CHANGEABLE
    )
    grace_seconds: float = Field(
        5.0,
        ge=0,
        description="How long a run that is told to stop (Ctrl-C, SIGTERM, `Trainer.stop`) lets what is "
        "under way finish.",
        json_schema_extra=CHANGEABLE,
    )


class ReflectConfig(ConfigSection):
    """How trajectories are analysed."""

    minibatch_size: int = Field(8, ge=1, description="Trajectories an analyst call.")
    failure_only: bool = Field(False, description="Skip the success analyst.")
    concurrency: int = Field(
        16, ge=1, description="Analyst calls in flight at most.", json_schema_extra=CHANGEABLE
    )
    step_buffer: bool = Field(
        True,
        description="Show analysts what earlier steps of the epoch tried; small optimizers may copy it.",
    )
    memory: Literal["off", "run", "environment"] = Field(
        "run",
        description="Show analysts rejected edits of earlier epochs (`run`), and of earlier runs of the same "
        "environment in the same store (`environment`), that bear on their cases.",
    )
    trajectory_tokens: int = Field(
        12000,
        ge=500,
        description="Estimated tokens of trajectories an analyst sees; cuts are marked with their size.",
    )
    overlap: bool = Field(
        True,
        description="Start an analyst as soon as its cases are ready; the result is the same either way.",
        json_schema_extra=CHANGEABLE,
    )


class AggregateConfig(ConfigSection):
    """How patches are merged."""

    merge_batch_size: int = Field(8, ge=2, description="Patches a merge call.")


class SelectConfig(ConfigSection):
    """The edit budget of a step, the counterpart of a learning rate."""

    lr_control: Literal["fixed", "autonomous", "none"] = Field(
        "fixed",
        description="`fixed` follows the scheduler; `autonomous`: the optimizer decides; `none`: all edits.",
    )
    scheduler: Literal["constant", "linear", "cosine"] = Field("cosine", description="How the budget falls.")
    max_edits: int = Field(4, ge=0, description="Budget of the first step.")
    min_edits: int | None = Field(None, ge=0, description="Budget of the last step; null: min(2, max_edits).")

    @model_validator(mode="after")
    def _check_order(self) -> SelectConfig:
        if self.min_edits is not None and self.min_edits > self.max_edits:
            raise ValueError(f"min_edits ({self.min_edits}) must not exceed max_edits ({self.max_edits})")
        return self

    @property
    def floor(self) -> int:
        """The budget of the last step."""
        return min(2, self.max_edits) if self.min_edits is None else self.min_edits


class UpdateConfig(ConfigSection):
    """How chosen edits become a document."""

    mode: Literal["patch", "rewrite", "full_rewrite"] = Field(
        "patch",
        description="`patch`: edits applied in order; `rewrite`: one call revises the document by the chosen "
        "suggestions; `full_rewrite`: each analyst writes a whole document, and merges combine them.",
    )
    operations: tuple[Operation, ...] = Field(
        ("append", "insert_after", "replace", "delete"),
        min_length=1,
        description="Kinds of edit that may be proposed; small optimizers do better with `append` alone.",
    )


class GateConfig(ConfigSection):
    """What a candidate must show on the validation split."""

    enabled: bool = Field(True, description="false records scores and accepts every candidate.")
    policy: Literal["strict", "paired"] = Field(
        "paired",
        description="`paired`: repeated trials until a paired test says that the gain is real; `strict`: "
        "accept a strictly greater mean of one pass, which noise passes easily.",
    )
    metric: Literal["hard", "soft", "mixed"] = Field("hard", description="What is compared.")
    mixed_weight: float = Field(0.5, ge=0, le=1, description="Weight of soft in `mixed`.")
    coverage: float = Field(
        0.9, gt=0, le=1, description="Share of items that must be measured on both sides."
    )
    alpha: float = Field(
        0.10,
        gt=0,
        lt=1,
        description="Probability of any false acceptance in the whole run (`paired`), divided among its "
        "planned decisions; an extension opens a further one.",
    )
    min_improvement: float = Field(
        0.0, ge=0, lt=1, description="Gain that must be exceeded, in the metric (`paired`)."
    )
    effect: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Gain that the trials are planned for; smaller ones are given up as futile (`paired`).",
    )
    max_trials: int | None = Field(
        None, ge=1, description="Trials an item and side at most (`paired`); null: planned from `effect`."
    )
    early_stop: bool = Field(
        True, description="Stop an evaluation once the items left cannot change its decision."
    )
    no_regression: int | None = Field(
        None, ge=0, description="Items that may go from solved to failed at most; null: any number."
    )
    interleave: bool = Field(
        False, description="Roll out both sides anew for each decision, for providers that drift (`paired`)."
    )
    report_trials: int = Field(
        4, ge=1, description="Fresh trials behind the reported validation scores (`paired`, noisy targets)."
    )


class SlowUpdateConfig(ConfigSection):
    """The guidance that is written at the end of each epoch from the second on."""

    enabled: bool = Field(True, description="Write slow guidance into its own region of the document.")
    samples: int = Field(20, ge=1, description="Train items that the two epochs' skills are compared on.")
    pair_policy: Literal["mixed", "changed", "unchanged"] = Field(
        "mixed",
        description="Comparisons that are shown: all, those whose outcome changed, or those whose outcome "
        "stayed (both topped up from further train items).",
    )
    gated: bool = Field(
        True,
        description="Through the gate; false puts it into the current skill unmeasured, never into best.",
    )


class MetaSkillConfig(ConfigSection):
    """The optimizer's memory about which edits help here."""

    enabled: bool = Field(True, description="Keep one from the end of the second epoch on.")


class AppendixConfig(ConfigSection):
    """Skill-aware reflection: reminders of rules that stand in the document and are not followed."""

    enabled: bool = Field(False, description="Tell lapses from defects, and keep reminders in an appendix.")
    source: Literal["both", "failure_only"] = Field(
        "both", description="Whether successes may give reminders too."
    )
    consolidate_threshold: int | None = Field(
        None, ge=1, description="Above so many notes one call compacts them; null: never."
    )


class BudgetConfig(ConfigSection):
    """What a run may take at most, over all its starts.

    Calls that were cut off in flight count at their worst case.
    """

    max_usd: float | None = Field(
        None,
        ge=0,
        description="Money, in dollars. Needs `max_tokens` and a known price for each role, see `price` "
        "of its model.",
        json_schema_extra=CHANGEABLE,
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Input and output tokens together. Needs `max_tokens` for each role.",
        json_schema_extra=CHANGEABLE,
    )
    max_calls: int | None = Field(
        None,
        ge=0,
        description="Requests that were answered or may have been charged.",
        json_schema_extra=CHANGEABLE,
    )
    max_seconds: float | None = Field(
        None,
        ge=0,
        description="Active time; what is in flight then is cut off.",
        json_schema_extra=CHANGEABLE,
    )


class TestConfig(ConfigSection):
    """The sealed test split."""

    __test__ = False

    enabled: bool = Field(
        True, description="Open the test split when the run has completed.", json_schema_extra=CHANGEABLE
    )
    placebo: bool = Field(
        False,
        description="Also measure a document of the best skill's length about something else.",
        json_schema_extra=CHANGEABLE,
    )


class PromptsConfig(ConfigSection):
    """Which prompt files are used."""

    folder: Path | None = Field(
        None,
        description="Own folder of prompts; those it lacks come from the package.",
        json_schema_extra=CHANGEABLE,
    )
    versions: dict[str, int] = Field(
        default_factory=dict, description="Pinned version by prompt name; default: newest."
    )


class ReplayConfig(ConfigSection):
    """Recorded responses instead of, or beside, a live endpoint."""

    cassette: Path | None = Field(None, description="A cassette file.", json_schema_extra=CHANGEABLE)
    mode: Literal["replay", "record"] = Field(
        "replay",
        description="`replay` never asks the network; `record` asks it and writes the file.",
        json_schema_extra=CHANGEABLE,
    )


class TrainerConfig(ConfigSection):
    """A complete configuration."""

    preset: Literal["default", "skillopt"] = Field(
        "default", description="Defaults to start from.", json_schema_extra=CHANGEABLE
    )
    seed: int = Field(42, description="Root of all randomness.")
    out_dir: Path = Field(
        Path("runs/default"), description="Where the run is kept.", json_schema_extra=CHANGEABLE
    )
    store: Path | None = Field(
        None,
        description="The database, which several runs may share; null: run.db in `out_dir`, for this run.",
        json_schema_extra=CHANGEABLE,
    )
    fork: bool = Field(
        False,
        description="Let a changed run start beside the one in `out_dir`; what still matches is reused.",
        json_schema_extra=CHANGEABLE,
    )
    skill: Path | None = Field(
        None, description="The initial skill document; null: an empty one.", json_schema_extra=CHANGEABLE
    )
    data: DataConfig = Field(default_factory=DataConfig, description="Items.")
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, description="Environment.")
    target: TargetConfig = Field(default_factory=TargetConfig, description="Target.")
    models: ModelsConfig = Field(default_factory=ModelsConfig, description="Models by role.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Epochs and batches.")
    reflect: ReflectConfig = Field(default_factory=ReflectConfig, description="Reflection.")
    aggregate: AggregateConfig = Field(default_factory=AggregateConfig, description="Merging.")
    select: SelectConfig = Field(default_factory=SelectConfig, description="Step size.")
    update: UpdateConfig = Field(default_factory=UpdateConfig, description="Update.")
    gate: GateConfig = Field(default_factory=GateConfig, description="Gate.")
    slow_update: SlowUpdateConfig = Field(default_factory=SlowUpdateConfig, description="Slow update.")
    meta_skill: MetaSkillConfig = Field(default_factory=MetaSkillConfig, description="Meta skill.")
    appendix: AppendixConfig = Field(default_factory=AppendixConfig, description="Skill-aware reflection.")
    critic: CriticConfig = Field(
        default_factory=CriticConfig,
        description="A critic, by `models.critic`: it grades where `environment.grader` is `critic`, and "
        "advises failure analysts where `notes` is on.",
    )
    test: TestConfig = Field(default_factory=TestConfig, description="Sealed test.")
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig,
        description="What a run may take at most, over all its starts; null: no limit. Reaching one ends the "
        "run as `budget`, and a larger one lets it go on.",
    )
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Prompts.")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="Recordings.")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="Spans and MLflow.")

    @property
    def uses_critic(self) -> bool:
        """Whether a critic grades, or says its opinion to the failure analyst."""
        return self.environment.grader == "critic" or self.critic.annotate
