"""``reflact demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from reflact.cli.running import configured, train_and_show


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the run is kept.")] = Path("demo-run"),
) -> None:
    """Replay a complete, recorded training run: no key, no network."""
    from reflact.prompts import data_folder

    out_dir = f"out_dir={json.dumps(str(out))}"
    train_and_show(configured(data_folder("demo") / "demo.yaml", [out_dir]))
