"""What is known of a run before it is opened: configuration, data, prompts and identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from reflact.adapters import (
    REQUIRED_PARTS,
    EnvironmentAdapter,
    ObjectRole,
    TargetAdapter,
    adapt_environment,
    adapt_target,
    check_object,
    check_texts,
    explain_exceptions,
    load_named_environment,
    load_named_proposer,
    load_named_target,
    read_dataset,
)
from reflact.config.loading import config_identity, list_set_keys
from reflact.config.models import PRICING_KEYS
from reflact.config.training import TrainerConfig
from reflact.data import TRAINING_SPLITS, DataSet, check_dataset, count_steps_per_epoch, shuffle
from reflact.errors import ConfigError
from reflact.lazy import CLIENT_MODULES, import_all
from reflact.llm.budget import require_caps
from reflact.prompts import PromptBook, list_used_prompts, load_prompts
from reflact.protocols import LLM, Annotator, Environment, Proposer, Target
from reflact.records import CriticDescription, SkillEvaluation
from reflact.skill_evals import refuse_other_files
from reflact.skills.document import check_document
from reflact.skills.package import load_skill
from reflact.stages.evaluate import GateMetric
from reflact.types import Skill, Split, digest_json

if TYPE_CHECKING:
    import httpx

    from reflact.integrations.opentelemetry import Telemetry
    from reflact.protocols import RequestSender


# The roles of every run.
ROLES = ("target", "optimizer")

# The fewest rollouts that a step usually takes.
ROLLOUTS_PER_STEP = 6


@dataclass(frozen=True)
class Overrides:
    """Collaborators that the caller brings instead of having them built."""

    environment: Environment | None = None
    target: Target | None = None
    optimizer: LLM | None = None
    transport: httpx.AsyncBaseTransport | None = None
    telemetry: Telemetry | None = None
    annotator: Annotator | None = None
    proposer: Proposer | None = None
    label: str = ""

    @property
    def objects(self) -> tuple[tuple[ObjectRole, object], ...]:
        """The targets, environments and so on that the caller brings, with their roles."""
        return tuple(
            (role, value) for role in REQUIRED_PARTS if (value := getattr(self, role)) is not None
        )

    @property
    def brought_roles(self) -> frozenset[str]:
        """The roles that the caller brings."""
        return frozenset(role for role in ROLES if getattr(self, role) is not None)

    @property
    def unseen_roles(self) -> frozenset[str]:
        """The roles whose calls are not seen."""
        is_seen = self.target is not None and adapt_target(self.target).is_connectable
        return self.brought_roles - ({"target"} if is_seen else set())


@dataclass(frozen=True)
class RunPlan:
    """All of a run that is known before anything is opened or sent.

    With an ``evaluation``, only that is done: it has its own id and costs, beside the run's.
    """

    config: TrainerConfig
    environment: EnvironmentAdapter
    data: DataSet
    prompts: PromptBook
    initial_skill: Skill
    identity: Mapping[str, JsonValue]
    run_id: str
    critic: CriticDescription | None = None
    annotator: Annotator | None = None
    proposer: Proposer | None = None
    target: TargetAdapter | None = None
    overrides: Overrides = Overrides()
    evaluation: SkillEvaluation | None = None

    @property
    def work_id(self) -> str:
        """The id under which work is stored and paid: that of the evaluation, or of the run."""
        return self.run_id if self.evaluation is None else self.evaluation.id

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        train = self.config.train
        return count_steps_per_epoch(len(self.data.train), train.batch_size, train.accumulation)

    @property
    def total_steps(self) -> int:
        """The steps of the run; with a budget of rollouts it usually ends before."""
        train = self.config.train
        planned = self.steps_per_epoch * train.num_epochs
        if train.max_rollouts is None:
            return planned
        return max(planned, train.max_rollouts // ROLLOUTS_PER_STEP)

    @cached_property
    def gate_order(self) -> tuple[str, ...]:
        """The validation items in the order in which the gate measures them."""
        return tuple(shuffle((item.id for item in self.data.val), self.config.seed, "gate"))

    @cached_property
    def metric(self) -> GateMetric:
        """How the gate makes one number of a score."""
        gate = self.config.gate
        threshold = self.config.train.success_threshold
        return GateMetric(metric=gate.metric, threshold=threshold)


def check_config(config: TrainerConfig, overrides: Overrides, *, trains: bool = False) -> None:
    """Refuse a configuration that cannot work with what the caller passes; reads no data.

    A budget of a run that ``trains`` needs to know the longest reply of the optimizer.
    """
    for role, value in overrides.objects:
        check_object(role, value)
    is_named = config.target.kind != "chat"
    for name in ROLES:
        is_brought = name in overrides.brought_roles or (name == "target" and is_named)
        if not is_brought and not getattr(config.models, name).model:
            raise ConfigError(
                f"models.{name}.model is required: name the model that plays this role"
            )
    if config.uses_critic:
        _check_critic(config, overrides)
    if overrides.target is not None or not is_named:
        target = None if overrides.target is None else adapt_target(overrides.target)
        require_caps(_add_agent_model(config, target), passed=overrides.unseen_roles, trains=trains)
    if overrides.proposer is not None and config.search.own is not None:
        raise ConfigError(
            "search.sources names a proposer, and one is passed in Python: choose one of them"
        )
    if config.executor.name == "ray" and find_spec("ray") is None:
        raise ConfigError("executor.name: ray needs Ray: pip install 'reflact[ray]'")


def _check_critic(config: TrainerConfig, overrides: Overrides) -> None:
    grader = config.environment.grader
    grades = grader in {"critic", "rubric"}
    reason = f"environment.grader: {grader}" if grades else "critic.annotate"
    if not config.models.critic.model:
        raise ConfigError(
            f"models.critic.model is required for {reason}: name the model that judges"
        )
    if grades and overrides.environment is not None:
        advice = ": give that one a CriticGrader" if grader == "critic" else ""
        raise ConfigError(
            f"environment.grader: {grader} grades the environment of the configuration, and "
            f"another one is passed in Python{advice}"
        )
    if config.critic.annotate and overrides.annotator is not None:
        raise ConfigError(
            "critic.annotate is on, and an annotator is passed in Python: choose one of them"
        )


def refuse_idle_keys(config: TrainerConfig, overrides: Overrides) -> None:
    """Refuse keys of the configuration that have no effect, because an object takes their place."""
    idle = {
        "environment": ("environment.", "data."),
        "target": ("target.kind", "target.options", "target.preamble"),
    }
    target = None if overrides.target is None else adapt_target(overrides.target)
    has_model = target is not None and (target.is_connectable or target.preflight)
    # Another role that the configuration describes inherits settings from models.target.
    has_heirs = overrides.optimizer is None or config.uses_critic
    if not has_model and not has_heirs:
        idle["target"] += ("models.target.",)
    used = ("environment.description", *(f"models.target.{name}" for name in PRICING_KEYS))
    keys = [key for key in list_set_keys(config) if not key.startswith(used)]
    for role, value in overrides.objects:
        wrong = [key for key in keys if key.startswith(idle.get(role, ()))]
        if wrong:
            raise ConfigError(
                f"{', '.join(sorted(wrong))}: no effect, because the {role} is passed in Python, "
                f"of type {type(value).__name__}; remove the key, or set it in that object"
            )


def import_collaborators(config: TrainerConfig, overrides: Overrides) -> None:
    """Import the slow libraries that a run will use; call it on a worker thread."""
    names = ["reflact.integrations.opentelemetry", "reflact.store.lock", "reflact.store.runs"]
    if sends_requests(config, overrides):
        names += [*CLIENT_MODULES, "reflact.targets.chat"]
    import_all(names)


def list_roles(config: TrainerConfig) -> tuple[str, ...]:
    """Return the roles of a run."""
    return (*ROLES, "critic") if config.uses_critic else ROLES


def sends_requests(config: TrainerConfig, overrides: Overrides) -> bool:
    """Whether any model of the run is asked over HTTP."""
    return config.uses_critic or len(overrides.unseen_roles) < len(ROLES)


def prepare_run(
    config: TrainerConfig, overrides: Overrides, needed: Sequence[Split] = TRAINING_SPLITS
) -> RunPlan:
    """Read and check all that a run on the needed splits takes; nothing is opened or sent."""
    from reflact.environments.dataset import build_environment

    given = overrides
    overrides = replace(
        overrides,
        target=overrides.target or load_named_target(config),
        environment=overrides.environment or load_named_environment(config),
    )
    check_config(config, overrides, trains=bool(needed))
    overrides = replace(overrides, proposer=overrides.proposer or load_named_proposer(config))
    explain = partial(explain_exceptions, pass_on=config.train.raise_on_exception)
    for role, value in overrides.objects:
        with explain(f"the {role}, of type {type(value).__name__},"):
            check_texts(role, value)
    environment = adapt_environment(overrides.environment or build_environment(config, needed))
    target = None if overrides.target is None else adapt_target(overrides.target)
    with explain(f"`items` of {type(environment.own).__name__}"):
        data = read_dataset(environment)
    check_dataset(data, needed)
    if target is None or not target.has_files:
        for split in Split:
            refuse_other_files(data.items(split))
    if not data.test:
        test = config.test.model_copy(update={"enabled": False})
        config = config.model_copy(update={"test": test})
    prompts = load_prompts(config.prompts, folder=environment.prompt_folder)
    initial = _load_initial_skill(config, target)
    identity: dict[str, JsonValue] = {
        **config_identity(config),
        **prompts.identity(list_used_prompts(config)),
        "data": data.fingerprint,
        "environment": environment.identity,
        "skill": initial.hash,
    }
    if config.store is not None:  # two folders of one store are two runs
        identity["out_dir"] = str(config.out_dir)
    for name in ("target", "optimizer", "annotator", "proposer"):
        if (collaborator := getattr(overrides, name)) is not None:
            identity[name] = collaborator.identity
    config = _add_agent_model(config, target)
    if target is not None and target.is_connectable:
        identity["target"] = _identify_connected(target, config)
    if config.uses_progress:
        identity["critic.memory"] = config.critic.memory is not None
    return RunPlan(
        config=config,
        environment=environment,
        data=data,
        prompts=prompts,
        initial_skill=initial,
        identity=identity,
        run_id=f"r{digest_json(identity)[:12]}",
        critic=environment.scored_by,
        annotator=overrides.annotator,
        proposer=overrides.proposer,
        target=target,
        overrides=replace(given, target=overrides.target),
    )


def _load_initial_skill(config: TrainerConfig, target: TargetAdapter | None) -> Skill:
    """Return the document that ``skill`` names, or else the target's own instructions."""
    if config.skill is not None:
        return load_skill(config.skill, config.skill_files)
    instructions = "" if target is None else target.instructions
    check_document(instructions)
    return Skill(text=instructions)


def _identify_connected(target: TargetAdapter, config: TrainerConfig) -> str:
    """Return the identity that a target has in the run, and so in the keys of its rollouts."""
    from reflact.llm.client import identify_model

    sender = SimpleNamespace(identity=identify_model(config.models.target))
    return target.connect(cast("RequestSender", sender), config.models.target).identity


def _add_agent_model(config: TrainerConfig, target: TargetAdapter | None) -> TrainerConfig:
    """Return the configuration with the model of an agent that brings its own."""
    if target is None:
        return config
    described = target.describe_model(config.models.target)
    models = config.models.model_copy(update={"target": described})
    return config.model_copy(update={"models": models})
