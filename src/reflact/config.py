"""The configuration of a run: typed sections with strict keys.

Keys marked *changeable* may differ between two starts of the same run; all others make up its identity,
together with the contents of the files that paths name.
``reflact.loading`` reads configurations from files and mappings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from reflact.types import Operation

KeySource = Callable[[], Awaitable[str]]
CHANGEABLE: dict[str, JsonValue] = {"changeable": True}


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ModelConfig(Section):
    """One role's model and how to reach it."""

    model: str = Field(
        "", description="Model name, as the endpoint knows it; needed unless the role is passed in Python."
    )
    base_url: str = Field(
        "https://api.openai.com/v1",
        pattern=r"^https?://\S+$",
        description="Root of an OpenAI-compatible API.",
    )
    api: Literal["openai", "azure"] = Field("openai", description="API flavour.")
    api_version: str | None = Field(None, description="Azure's API version; used by `api: azure` only.")
    api_key_env: str | None = Field(
        "OPENAI_API_KEY",
        description="Name of the environment variable that holds the key; null for endpoints without keys.",
        json_schema_extra=CHANGEABLE,
    )
    key: KeySource | None = Field(
        None,
        exclude=True,
        description="In Python only: an async function that returns the key; wins over `api_key_env`.",
        json_schema_extra=CHANGEABLE,
    )
    mode: Literal["auto", "json_schema", "tools", "json_object_with_schema", "json"] = Field(
        "auto",
        description="How typed replies are asked for; `auto` settles on the first the endpoint accepts.",
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="Sampling temperature; null leaves it out."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; null leaves it out.")
    seed: int | Literal["per_sample"] | None = Field(
        None,
        description="Sampling seed to send; `per_sample` derives one from each call's place in the plan.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Cap on a reply's tokens; null leaves it out.")
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="The request field that carries the cap."
    )
    reasoning_effort: str | None = Field(None, description="Sent as `reasoning_effort`; null leaves it out.")
    extra_body: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further fields of the request body, sent as they are."
    )
    sample_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header in which to send the call's logical sample id, for tracing at a proxy.",
        json_schema_extra=CHANGEABLE,
    )
    timeout: float = Field(120.0, gt=0, description="Seconds for one request.", json_schema_extra=CHANGEABLE)
    concurrency: int = Field(8, ge=1, description="Requests in flight at most.", json_schema_extra=CHANGEABLE)
    max_retries: int = Field(
        5,
        ge=0,
        description="Repeats after connection errors, time-outs, 408, 409, 429 and 5xx.",
        json_schema_extra=CHANGEABLE,
    )
    reasks: int = Field(2, ge=0, description="Times an invalid reply is sent back with the reason.")


CONNECTION = ("model", "base_url", "api", "api_version", "api_key_env", "key", "mode")


class ModelsConfig(Section):
    """The models by role; the optimizer takes the target's connection where it names none of its own."""

    target: ModelConfig = Field(default_factory=ModelConfig, description="The frozen agent's model.")
    optimizer: ModelConfig = Field(
        default_factory=ModelConfig, description="The model that analyses and edits."
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("target"), Mapping):
            return value
        own = value.get("optimizer")
        if own is not None and not isinstance(own, Mapping):
            return value
        shared = {k: v for k, v in value["target"].items() if k in CONNECTION}
        return {**value, "optimizer": {**shared, **(own or {})}}


class DataConfig(Section):
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


class EnvironmentConfig(Section):
    """The environment that runs and grades items."""

    name: Literal["dataset"] = Field(
        "dataset", description="Which environment; `dataset` asks one question an item."
    )
    grader: Literal["exact", "normalized", "token_f1", "numeric", "regex", "json_fields", "sql"] = Field(
        "normalized", description="How an answer is compared with the item's reference."
    )
    tolerance: float = Field(0.0, ge=0, description="Absolute tolerance of the `numeric` grader.")
    relative_tolerance: float = Field(1e-6, ge=0, description="Relative tolerance of the `numeric` grader.")
    threshold: float = Field(1.0, gt=0, le=1, description="F1 from which `token_f1` counts as solved.")
    tables: Path | None = Field(
        None,
        description="Folder of .csv tables that the `sql` grader runs queries on.",
        json_schema_extra=CHANGEABLE,
    )
    template: str = Field(
        "{input}", description="The message to the target; `{input}` is the only hole.", pattern=r"\{input\}"
    )


class TargetConfig(Section):
    """How the target is called."""

    kind: Literal["chat"] = Field(
        "chat", description="`chat`: the skill as system message, one chat call a turn."
    )
    preamble: str = Field("", description="Text put before the skill in the system message.")
    postamble: str = Field("", description="Text put after the skill in the system message.")


class TrainConfig(Section):
    """The length of a run and its batches."""

    num_epochs: int = Field(4, ge=1, description="Passes over the train split.", json_schema_extra=CHANGEABLE)
    batch_size: int = Field(40, ge=1, description="Items a step.")
    rollout_concurrency: int = Field(
        32, ge=1, description="Rollouts in flight at most.", json_schema_extra=CHANGEABLE
    )


class ReflectConfig(Section):
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
    trajectory_chars: int = Field(
        4000,
        ge=200,
        description="Characters of one trajectory shown at most; cuts are marked with their size.",
    )


class AggregateConfig(Section):
    """How patches are merged."""

    merge_batch_size: int = Field(8, ge=2, description="Patches a merge call.")


class SelectConfig(Section):
    """The edit budget of a step, the counterpart of a learning rate."""

    lr_control: Literal["fixed", "none"] = Field(
        "fixed", description="`fixed` follows the scheduler; `none`: all edits."
    )
    scheduler: Literal["constant", "linear", "cosine"] = Field("cosine", description="How the budget falls.")
    max_edits: int = Field(4, ge=0, description="Budget of the first step.")
    min_edits: int | None = Field(None, ge=0, description="Budget of the last step; null: min(2, max_edits).")

    @model_validator(mode="after")
    def _ordered(self) -> SelectConfig:
        if self.min_edits is not None and self.min_edits > self.max_edits:
            raise ValueError(f"min_edits ({self.min_edits}) must not exceed max_edits ({self.max_edits})")
        return self

    @property
    def floor(self) -> int:
        """The budget of the last step."""
        return min(2, self.max_edits) if self.min_edits is None else self.min_edits


class UpdateConfig(Section):
    """How chosen edits become a document."""

    mode: Literal["patch"] = Field("patch", description="`patch`: edits applied in order.")
    operations: tuple[Operation, ...] = Field(
        ("append", "insert_after", "replace", "delete"),
        min_length=1,
        description="Kinds of edit that may be proposed; small optimizers do better with `append` alone.",
    )


class GateConfig(Section):
    """What a candidate must show on the validation split."""

    enabled: bool = Field(True, description="false records scores and accepts every candidate.")
    policy: Literal["strict"] = Field(
        "strict", description="`strict`: accept a strictly greater mean of one pass."
    )
    metric: Literal["hard", "soft", "mixed"] = Field("hard", description="What is compared.")
    mixed_weight: float = Field(0.5, ge=0, le=1, description="Weight of soft in `mixed`.")
    coverage: float = Field(
        0.9, gt=0, le=1, description="Share of items that must be measured on both sides."
    )


class TestConfig(Section):
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


class PromptsConfig(Section):
    """Which prompt files are used."""

    folder: Path | None = Field(
        None,
        description="Own folder of prompts; those it lacks come from the package.",
        json_schema_extra=CHANGEABLE,
    )
    versions: dict[str, int] = Field(
        default_factory=dict, description="Pinned version by prompt name; default: newest."
    )


class ReplayConfig(Section):
    """Recorded responses instead of, or beside, a live endpoint."""

    cassette: Path | None = Field(None, description="A cassette file.", json_schema_extra=CHANGEABLE)
    mode: Literal["replay", "record"] = Field(
        "replay",
        description="`replay` never asks the network; `record` asks it and writes the file.",
        json_schema_extra=CHANGEABLE,
    )


class TrainerConfig(Section):
    """A complete configuration."""

    preset: Literal["default", "skillopt"] = Field(
        "default", description="Defaults to start from.", json_schema_extra=CHANGEABLE
    )
    seed: int = Field(42, description="Root of all randomness.")
    out_dir: Path = Field(
        Path("runs/default"), description="Where the run is kept.", json_schema_extra=CHANGEABLE
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
    test: TestConfig = Field(default_factory=TestConfig, description="Sealed test.")
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Prompts.")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="Recordings.")
