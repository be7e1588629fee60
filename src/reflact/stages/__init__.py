"""The six stages of a step as coroutines of typed values, for a loop of your own; see
examples/own_loop.py.
"""

from reflact.stages.aggregate import aggregate
from reflact.stages.context import Journal, StageContext
from reflact.stages.select import select
from reflact.stages.standalone import evaluate, reflect, roll_out
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
