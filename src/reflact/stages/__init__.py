"""The six stages of a step as coroutines, for a loop of your own; see examples/own_loop.py."""

from reflact.stages.aggregate import aggregate
from reflact.stages.context import Journal, StageContext
from reflact.stages.evaluate import evaluate_once as evaluate
from reflact.stages.reflect import reflect
from reflact.stages.rollout import roll_out
from reflact.stages.select import select
from reflact.stages.update import update

__all__ = [
    "Journal",
    "StageContext",
    "aggregate",
    "evaluate",
    "reflect",
    "roll_out",
    "select",
    "update",
]
