"""Record replies of the small model that tests replay: one to each version of each prompt, and one long stream.

Needs a server as ``scripts/local_server.py`` starts it. Run it whenever a prompt gets a new version; what is
recorded already is not asked again::

    python scripts/record_replies.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import draft_example
import prompt_examples


async def main() -> None:
    """Record and show the replies."""
    prompt_examples.CASSETTE.parent.mkdir(parents=True, exist_ok=True)
    for name, reply in (await prompt_examples.record()).items():
        print(f"{name}: {reply!r}")
    print(f"the stream has {await draft_example.record()} characters")


if __name__ == "__main__":
    anyio.run(main)
