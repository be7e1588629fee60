"""Record one answer to each version of each prompt from the small model; a test replays them.

Needs a server as ``scripts/local_server.py`` starts it. Run it whenever a prompt gets a new version; what is
recorded already is not asked again::

    python scripts/record_prompts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from prompt_examples import CASSETTE, record


async def main() -> None:
    """Record and show the replies."""
    CASSETTE.parent.mkdir(parents=True, exist_ok=True)
    for name, reply in (await record()).items():
        print(f"{name}: {reply!r}")


if __name__ == "__main__":
    anyio.run(main)
