"""Write the items of the demo's second task: sums of the family ``chain_sum`` of reasoning-gym.

All splits come from one seed, and no question is in two of them. Written as data, the items need no package. Two runs
write the same bytes::

    pip install reasoning-gym==0.1.25
    python scripts/prepare_arithmetic_data.py [--out fixtures/demo/arithmetic/data]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from reasoning_gym import create_dataset

DATA = Path(__file__).parents[1] / "fixtures" / "demo" / "arithmetic" / "data"
FAMILY = "chain_sum"
SIZES = {"train": 12, "val": 20, "test": 48}


def write_items(out: Path) -> None:
    """Write a file for each split."""
    size = 3 * sum(SIZES.values()) + 10
    dataset = create_dataset(FAMILY, seed=5000, size=size, max_terms=2, max_digits=2)
    questions: dict[str, str] = {}
    for index in range(size):
        entry = dataset[index]
        row = {"id": f"{FAMILY}-{index}", "input": entry["question"]}
        row |= {"task_type": FAMILY, "reference": str(entry["answer"])}
        questions.setdefault(" ".join(entry["question"].split()), json.dumps(row))
    lines = iter(questions.values())
    for split, count in SIZES.items():
        (out / split).mkdir(parents=True, exist_ok=True)
        text = "".join(f"{next(lines)}\n" for _ in range(count))
        (out / split / "items.jsonl").write_text(text, encoding="utf-8")
        print(f"{split}: {count} items")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="write the items of the demo's second task")
    parser.add_argument("--out", type=Path, default=DATA)
    write_items(parser.parse_args().out)


if __name__ == "__main__":
    main()
