"""Write the items of the demo's second task: sums of the family ``chain_sum`` of reasoning-gym.

The items are those of ``ReasoningGymEnvironment`` with the settings below, with the environment's ids, questions,
answers and splits. Written as data, they need no package. Two runs write the same bytes::

    pip install 'reflact[reasoning-gym]' reasoning-gym==0.1.25
    python scripts/prepare_arithmetic_data.py [--out fixtures/demo/arithmetic/data]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from reflact.integrations.reasoning_gym import ReasoningGymEnvironment
from reflact.types import Split

DATA = Path(__file__).parents[1] / "fixtures" / "demo" / "arithmetic" / "data"
FAMILIES = {"chain_sum": {"max_terms": 2, "max_digits": 2}}
SIZES = {"train": 12, "val": 20, "test": 48}
SEED = 5000


def build_environment() -> ReasoningGymEnvironment:
    """Return the environment whose items the demo uses."""
    return ReasoningGymEnvironment(FAMILIES, **SIZES, seed=SEED)


def write_items(out: Path) -> None:
    """Write a file for each split."""
    environment = build_environment()
    for split in Split:
        lines = [
            json.dumps({name: getattr(item, name) for name in ("id", "input", "task_type", "reference")})
            for item in environment.items(split)
        ]
        (out / split).mkdir(parents=True, exist_ok=True)
        (out / split / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{split}: {len(lines)} items")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="write the items of the demo's second task")
    parser.add_argument("--out", type=Path, default=DATA)
    write_items(parser.parse_args().out)


if __name__ == "__main__":
    main()
