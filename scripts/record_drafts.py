"""Record one long streamed reply from the small model; tests and the benchmark of drafts replay it.

Needs a server as ``scripts/local_server.py`` starts it. What is recorded already is not asked again::

    python scripts/record_drafts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from draft_example import record


async def main() -> None:
    """Record and show how long the reply is."""
    print(f"{await record()} characters")


if __name__ == "__main__":
    anyio.run(main)
