"""Fake models, worlds, stores and networks for the tests of reflact and its users.

    from reflact import Trainer
    from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer

    summary = await Trainer(
        {"out_dir": tmp_path},
        environment=ToyEnvironment(),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    ).train()

Nothing here calls a model, opens a connection, or depends on time or a global random generator.
"""

from __future__ import annotations

from reflact.prompts import find_data_folder
from reflact.testing.doubles import Fault, FaultyTransport, InMemoryRunStore
from reflact.testing.llm import ScriptedCall, ScriptedLLM, append_reply
from reflact.testing.toy import TOY_RULES, ToyEnvironment, ToyRule, ToyTarget, toy_optimizer

__all__ = [
    "TOY_RULES",
    "Fault",
    "FaultyTransport",
    "InMemoryRunStore",
    "ScriptedCall",
    "ScriptedLLM",
    "ToyEnvironment",
    "ToyRule",
    "ToyTarget",
    "append_reply",
    "find_data_folder",
    "toy_optimizer",
]
