"""The configuration of a run: typed sections with strict keys.

Keys marked *changeable* may differ between two starts of a run. All others are its identity.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from reflact.config.critic import CriticConfig
from reflact.config.fields import FieldsConfig
from reflact.config.models import (
    OBJECT_NAME,
    ConfigSection,
    ExecutorConfig,
    ModelsConfig,
    TelemetryConfig,
    changeable_field,
    option,
    refuse_secrets,
)
from reflact.types import GatePolicy, Operation

# The sources of candidates that reflact has.
ALL_SOURCES = ("examples", "rewrite", "edits")

# Arguments of a class or function; they are stored with the run.
Options = Annotated[dict[str, JsonValue], AfterValidator(refuse_secrets)]


def read_address(value: object) -> object:
    """Return the file of the connection string of a SQLite file; another value as it is."""
    if isinstance(value, str) and "://" in value:
        scheme, _, path = value.partition(":///")
        if scheme != "sqlite" or not path:
            raise ValueError(
                "only SQLite files can be read, such as sqlite:///tables.db; save other tables as "
                ".csv files"
            )
        return path
    return value


class EnvironmentConfig(ConfigSection):
    """The environment that runs and grades items."""

    name: str = option("dataset", pattern=OBJECT_NAME)
    """`dataset`: one question for each item; `module:name`: an environment to import, or what makes
    one; any other name: an entry point of the group `reflact.environments`."""

    options: Options = Field(default_factory=dict)
    """Arguments of that class or function."""

    grader: Literal[
        "exact",
        "normalized",
        "token_f1",
        "numeric",
        "regex",
        "contains",
        "similarity",
        "json_fields",
        "json_subset",
        "json_schema",
        "sql",
        "python",
        "checks",
        "rubric",
        "critic",
    ] = "normalized"
    """How an answer is compared with the item's reference. `rubric` asks the model of
    `models.critic` whether sentences are true of the answer. `critic` asks it for a score, as the
    section `critic` describes."""

    tolerance: float = option(0.0, ge=0)
    """Absolute tolerance of the `numeric` grader."""

    relative_tolerance: float | None = option(None, ge=0)
    """Relative tolerance of the `numeric` grader; null: 0 for whole numbers, 1e-06 for others."""

    threshold: float = option(1.0, gt=0, le=1)
    """Minimum score of a solved item with `token_f1` and `similarity`."""

    tables: Annotated[Path | None, BeforeValidator(read_address)] = changeable_field(None)
    """Tables for the `sql` grader: a folder of .csv files, or a SQLite file, also written as
    `sqlite:///tables.db`."""

    rubric_votes: int = option(1, ge=1, le=25)
    """How often the judge of the `rubric` grader reads each sentence; the majority counts."""

    rubric_marks: Path | None = changeable_field(None)
    """Answers that a person marked, as a .csv, .json or .jsonl file with the columns `input` or
    `id`, `answer`, `sentence` and `met`: they measure the judge of the `rubric` grader. null: its
    error is unknown."""

    description: str = ""
    """A description of the tasks and of a good answer, in plain text; the optimizer reads it."""

    time_limit: int = option(5, ge=1)
    """Seconds of processor time for an answer with the `python` grader; ten times on the clock."""

    allow_unconfined: bool = changeable_field(False)
    """Let the `python` grader run answers even if this system cannot confine them."""

    template: str = option("{input}", pattern=r"\{input\}")
    """The message to the target; `{input}` is the item's input, `{NAME}` another column."""


def normalize_ratio(value: object) -> object:
    """Return a ratio as text; a value in no known form is returned as it is.

    Known are ``2:1:7`` and a list of three numbers. YAML reads an unquoted ``2:1:7`` as the number
    7267, in base 60.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 3600:
        return f"{value // 3600}:{value // 60 % 60}:{value % 60}"
    return ":".join(map(str, value)) if isinstance(value, list | tuple) else value


class DataConfig(ConfigSection):
    """The items and their splits."""

    path: Path | None = changeable_field(None)
    """A folder with train/, val/ and test/, or one .csv, .json or .jsonl file to split."""

    ratio: Annotated[str | None, BeforeValidator(normalize_ratio)] = option(
        None, pattern=r"^[0-9]+:[0-9]+:[0-9]+$"
    )
    """train:val:test for a single file: `2:1:7` or `[2, 1, 7]`; the last number may be 0. null:
    `2:1:7` from 400 items on, with more validation items for a smaller file."""

    fields: FieldsConfig = FieldsConfig()

    skip_unanswered: bool = changeable_field(False)
    """Leave out rows without a right answer."""


class TargetConfig(ConfigSection):
    """The target and its calls."""

    kind: str = option("chat", pattern=OBJECT_NAME)
    """`chat`: a chat model with the skill as its system message; `module:name`: a target or
    pydantic-ai agent to import, or what makes one; any other name: an entry point of the group
    `reflact.targets`."""

    options: Options = Field(default_factory=dict)
    """Arguments of that class or function, or of `PydanticAITarget`."""

    preamble: str = ""
    """Text before the skill in the system message."""

    deterministic: bool | None = None
    """Whether the gate assumes that repeats of a rollout get the same score; null: it tests this.
    """


class TrainConfig(ConfigSection):
    """The length of a run and its batches."""

    num_epochs: int = changeable_field(4, ge=1)
    """Passes over the train split; with `max_rollouts`, as many as these pay for."""

    max_rollouts: int | None = changeable_field(None, ge=1)
    """Rollouts of train and validation items after which the training ends, and with which the
    search plans; null: it ends after `num_epochs`."""

    batch_size: int = option(40, ge=1)
    """Items in a batch."""

    accumulation: int = option(1, ge=1)
    """Batches in a step; the edits of all are merged."""

    success_threshold: float | None = option(None, gt=0, le=1)
    """Rollouts with a lower hard score count as failures; null: only those with 0."""

    rollout_concurrency: int = changeable_field(32, ge=1)
    """Maximum of rollouts in flight."""

    patience: int | None = changeable_field(None, ge=1)
    """Steps in a row without an accepted edit after which the training ends; null: no limit."""

    raise_on_exception: bool = changeable_field(False)
    """Let an exception of your own code end the run; false: the item stays unmeasured."""

    grace_seconds: float = changeable_field(5.0, ge=0)
    """Seconds that calls in flight get to finish after a stop, such as Ctrl-C."""

    @property
    def planned_epochs(self) -> int | None:
        """The epochs of the run; None if it ends with its rollouts."""
        return self.num_epochs if self.max_rollouts is None else None


class ReflectConfig(ConfigSection):
    """Analysis of trajectories."""

    minibatch_size: int = option(8, ge=1)
    """Trajectories in an analyst call."""

    failure_only: bool = False
    """Analyse only failures, not successes."""

    concurrency: int = changeable_field(16, ge=1)
    """Maximum of analyst calls in flight."""

    memory: Literal["off", "run", "environment"] = "run"
    """Show analysts relevant rejected edits of earlier epochs (`run`), and of earlier runs of the
    same environment in the same store (`environment`)."""

    trajectory_tokens: int = option(12000, ge=500)
    """Maximum of estimated tokens for all trajectories of an analyst call; cuts are marked."""

    overlap: bool = changeable_field(True)
    """Start an analyst as soon as its cases are ready; the result is the same."""


class AggregateConfig(ConfigSection):
    """Merging of patches."""

    merge_batch_size: int = option(8, ge=2)
    """Proposals (lists of edits) in a merge call."""


class SelectConfig(ConfigSection):
    """The edit budget of a step, the counterpart of a learning rate."""

    lr_control: Literal["fixed", "autonomous", "none"] = "fixed"
    """Who sets the number of edits of a step: the scheduler (`fixed`), the optimizer (`autonomous`)
    or nobody (`none`), so that all are applied."""

    scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """How the maximum number of edits falls from the first step to the last."""

    max_edits: int = option(4, ge=1)
    """Maximum number of edits of the first step."""

    min_edits: int | None = option(None, ge=0)
    """The same of the last step; null: min(2, max_edits)."""

    @model_validator(mode="after")
    def _check_order(self) -> SelectConfig:
        if self.min_edits is not None and self.min_edits > self.max_edits:
            raise ValueError(
                f"min_edits ({self.min_edits}) must not exceed max_edits ({self.max_edits})"
            )
        return self

    @property
    def floor(self) -> int:
        """The budget of the last step."""
        return min(2, self.max_edits) if self.min_edits is None else self.min_edits


class UpdateConfig(ConfigSection):
    """Updating of the document by the selected edits."""

    mode: Literal["patch", "rewrite", "full_rewrite"] = "patch"
    """`patch`: the chosen edits are applied in order; `rewrite`: one call rewrites the document by
    the chosen suggestions; `full_rewrite`: one call writes it anew from the cases of a step."""

    operations: tuple[Operation, ...] = option(
        ("append", "insert_after", "replace", "delete"), min_length=1
    )
    """Allowed kinds of edit; small optimizers do better with `append` alone."""


class SearchConfig(ConfigSection):
    """Where the candidates of a step come from."""

    sources: tuple[str, ...] = option(ALL_SOURCES, min_length=1)
    """The allowed sources of candidates: `examples` puts worked examples from train items into the
    document; `rewrite` writes it anew; `edits`, alone the published algorithm, runs the stages
    reflect, aggregate, select and update. `module:name` imports a proposer of your own; any other
    name is an entry point of the group `reflact.proposers`."""

    max_document_tokens: int = option(3000, ge=100)
    """Worked examples are added as long as the document has at most this many estimated tokens."""

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        for name in sources:
            if not re.fullmatch(OBJECT_NAME, name):
                raise ValueError(
                    f"{name!r} is no name of a source; choose from {', '.join(ALL_SOURCES)}, or "
                    "module:name"
                )
        if len(set(sources)) < len(sources):
            raise ValueError("a source is named twice")
        if len(set(sources) - set(ALL_SOURCES)) > 1:
            raise ValueError("there is room for one proposer of your own; join them into one")
        return sources

    @property
    def own(self) -> str | None:
        """The name of a proposer outside of reflact; None without one."""
        return next((name for name in self.sources if name not in ALL_SOURCES), None)

    @property
    def is_published(self) -> bool:
        """Whether the published algorithm runs alone: no race, and one candidate for each step."""
        return self.sources == ("edits",)


class GateConfig(ConfigSection):
    """The decision about a candidate on the validation split."""

    enabled: bool = True
    """false: scores are recorded, and every candidate is accepted."""

    policy: GatePolicy = "ranked"
    """`ranked`: the next step begins with the version that has the best estimated score; `strict`:
    a candidate is accepted if its mean of one pass is greater, which may be chance."""

    worth: float = option(0.00005, ge=0)
    """A candidate gets a further pass if the expected gain for each rollout exceeds this number
    (`ranked`); 1: a single pass."""

    metric: Literal["hard", "soft", "mixed"] = "hard"
    """The score that is compared; `mixed` is the mean of hard and soft."""

    coverage: float = option(0.9, gt=0, le=1)
    """Share of items that must be measured under both skills."""

    no_regression: int | None = option(None, ge=0)
    """Maximum of items that may go from solved to failed; null: any number."""


class SlowUpdateConfig(ConfigSection):
    """The guidance that is written at the end of each epoch, from the second one on."""

    enabled: bool = True
    """Write slow guidance into its region of the document."""

    samples: int = option(20, ge=1)
    """Number of train items for the comparison of two epochs' skills."""

    pair_policy: Literal["mixed", "changed", "unchanged"] = "mixed"
    """Items that the optimizer sees: all, or those with a changed or the same outcome, for which
    further train items are used if needed."""

    gated: bool = True
    """Let the gate decide about guidance; false: it is written into the current skill unmeasured,
    and into the best skill only after a measurement."""


class MetaSkillConfig(ConfigSection):
    """The optimizer's memory of which edits help."""

    enabled: bool = True
    """Keep a memory from the end of the second epoch on."""


class AppendixConfig(ConfigSection):
    """Skill-aware reflection: reminders of the document's rules that were not followed."""

    enabled: bool = False
    """Keep reminders of rules that the target did not follow in an appendix."""

    source: Literal["both", "failure_only"] = "both"
    """Whether successes may give reminders too."""

    consolidate_threshold: int | None = option(None, ge=1)
    """Number of reminders above which one call shortens their list; null: never."""


class BudgetConfig(ConfigSection):
    """Limits of a run, over all its starts; null: no limit.

    Calls that were interrupted in flight count at their worst case. A run that reaches a limit ends
    with the status `budget`; to resume it, raise the limit.
    """

    max_usd: float | None = changeable_field(None, ge=0)
    """Dollars. Needs `max_tokens` and a known price for each role; see `price` of its model."""

    max_tokens: int | None = changeable_field(None, ge=0)
    """Input and output tokens together. Needs `max_tokens` for each role."""

    max_calls: int | None = changeable_field(None, ge=0)
    """Requests that were answered or may have been charged."""

    max_seconds: float | None = changeable_field(None, ge=0)
    """Seconds of active time; after them, calls in flight are interrupted."""

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set, so that what is asked for first has to come first."""
        limits = (self.max_usd, self.max_tokens, self.max_calls, self.max_seconds)
        return any(limit is not None for limit in limits)


class TestConfig(ConfigSection):
    """The sealed test split, and the controls that are measured at the end of a run."""

    __test__ = False

    enabled: bool = changeable_field(True)
    """Open the test split when the run has completed."""

    placebo: bool = changeable_field(True)
    """Also measure a document about something else, of the best skill's length."""

    null_answers: bool = changeable_field(True)
    """Also grade constant answers, without model calls: an empty one, a refusal, the most frequent.
    """


class PromptsConfig(ConfigSection):
    """The prompt files."""

    folder: Path | None = changeable_field(None)
    """Folder of your own prompts; missing ones come from the package."""

    versions: dict[str, int] = Field(default_factory=dict)
    """Pinned version by prompt name; default: the newest one."""


class ReplayConfig(ConfigSection):
    """Recording and replay of responses."""

    cassette: Path | None = changeable_field(None)
    """A cassette file."""

    mode: Literal["replay", "record"] = changeable_field("replay")
    """`replay` sends no requests; `record` sends them and writes the file."""


class TrainerConfig(ConfigSection):
    """A complete configuration."""

    outputs = frozenset({"out_dir", "store"})

    preset: Literal["default", "skillopt"] = changeable_field("default")
    """Defaults to start from; `skillopt` follows SkillOpt."""

    seed: int = 42
    """Root of all randomness."""

    out_dir: Path = changeable_field(Path("runs/default"))
    """The run's folder."""

    store: Path | None = changeable_field(None)
    """The database, which several runs may share; null: run.db in `out_dir`, for this run."""

    fork: bool = changeable_field(False)
    """Start a changed run in the same `out_dir`, and reuse matching results."""

    report: bool = changeable_field(True)
    """Write a page on the run, report.html, into `out_dir` at its end."""

    skill: Path | None = changeable_field(None)
    """The initial skill document, or the folder of a skill; null: the agent's own instructions if
    they can be read, else an empty document."""

    skill_files: tuple[str, ...] = changeable_field(())
    """Further Markdown files of the skill's folder that are trained together with its `SKILL.md`,
    such as `[references/tables.md]`; the target reads all of them."""

    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    target: TargetConfig = TargetConfig()
    models: ModelsConfig = ModelsConfig()
    executor: ExecutorConfig = ExecutorConfig()
    train: TrainConfig = TrainConfig()
    search: SearchConfig = SearchConfig()
    reflect: ReflectConfig = ReflectConfig()
    aggregate: AggregateConfig = AggregateConfig()
    select: SelectConfig = SelectConfig()
    update: UpdateConfig = UpdateConfig()
    gate: GateConfig = GateConfig()
    slow_update: SlowUpdateConfig = SlowUpdateConfig()
    meta_skill: MetaSkillConfig = MetaSkillConfig()
    appendix: AppendixConfig = AppendixConfig()
    critic: CriticConfig = CriticConfig()
    test: TestConfig = TestConfig()
    budget: BudgetConfig = BudgetConfig()
    prompts: PromptsConfig = PromptsConfig()
    replay: ReplayConfig = ReplayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainerConfig:
        if self.appendix.enabled and "edits" not in self.search.sources:
            raise ValueError(
                "`appendix.enabled` needs the source `edits`, whose analysts find the lapses"
            )
        if self.appendix.enabled and self.update.mode == "full_rewrite":
            raise ValueError(
                "`appendix.enabled` needs another `update.mode`: `full_rewrite` has no analysts"
            )
        joins_files = self.update.mode != "patch" or self.search.sources == ("rewrite",)
        if self.skill_files and joins_files:
            raise ValueError(
                "`skill_files` needs `update.mode: patch` and another source than `rewrite`: a "
                "rewrite would join the files"
            )
        if self.skill_files and self.skill is None:
            raise ValueError("`skill_files` needs `skill`, the folder of the skill")
        return self

    @property
    def uses_critic(self) -> bool:
        """Whether the model of ``models.critic`` is asked."""
        return self.environment.grader in {"critic", "rubric"} or self.critic.annotate

    @property
    def uses_progress(self) -> bool:
        """Whether a critic's scores of progress grade or advise the failure analysts."""
        return self.environment.grader == "critic" or self.critic.annotate

    @property
    def baseline_passes(self) -> int:
        """How often the initial skill is measured: twice if beliefs decide from the start."""
        gate = self.gate
        is_noisy = self.target.deterministic is False
        if gate.enabled and gate.policy == "ranked" and is_noisy:
            return 2
        return 1

    @property
    def reports_fresh_trials(self) -> bool:
        """Whether fresh trials give the reported validation scores of a noisy target."""
        gate = self.gate
        return gate.enabled and gate.policy == "ranked" and not self.test.enabled
