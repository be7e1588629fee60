"""The configuration of a run as typed sections, ``TrainerConfig(data=DataConfig(...), ...)``."""

from reflact.config.critic import CriticConfig
from reflact.config.fields import FieldsConfig
from reflact.config.models import ExecutorConfig, ModelConfig, ModelsConfig, Price, TelemetryConfig
from reflact.config.training import (
    AggregateConfig,
    AppendixConfig,
    BudgetConfig,
    DataConfig,
    EnvironmentConfig,
    GateConfig,
    MetaSkillConfig,
    PromptsConfig,
    ReflectConfig,
    ReplayConfig,
    SearchConfig,
    SelectConfig,
    SlowUpdateConfig,
    TargetConfig,
    TestConfig,
    TrainConfig,
    TrainerConfig,
    UpdateConfig,
)

__all__ = [
    "AggregateConfig",
    "AppendixConfig",
    "BudgetConfig",
    "CriticConfig",
    "DataConfig",
    "EnvironmentConfig",
    "ExecutorConfig",
    "FieldsConfig",
    "GateConfig",
    "MetaSkillConfig",
    "ModelConfig",
    "ModelsConfig",
    "Price",
    "PromptsConfig",
    "ReflectConfig",
    "ReplayConfig",
    "SearchConfig",
    "SelectConfig",
    "SlowUpdateConfig",
    "TargetConfig",
    "TelemetryConfig",
    "TestConfig",
    "TrainConfig",
    "TrainerConfig",
    "UpdateConfig",
]
