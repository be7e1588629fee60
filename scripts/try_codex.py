"""Train the unmodified Codex CLI, as docs/own-target.md prints it: killed and resumed, in one go, and replayed offline.

The script installs Codex with npm, and plays the models.

Usage: python scripts/try_codex.py [FOLDER]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from filled_schema import fill_schema  # noqa: E402
from served import asked_of, completion, reflact_process, send, serving  # noqa: E402

CODEX = "@openai/codex@0.169.0"
RULE = "Look into stock.txt."
STOCK = {"apples": 3, "pears": 0, "plums": 7, "figs": 12, "limes": 5, "dates": 9}
CONFIG = """out_dir: {out}
data: {{path: items.jsonl}}
environment: {{grader: exact}}
train: {{num_epochs: 2, rollout_concurrency: 1}}
models:
  target: {{model: small, base_url: "{url}", api_key_env: null}}
  optimizer: {{model: large, mode: json_schema}}
replay: {{cassette: {cassette}, mode: {mode}}}
"""


class Clerk:
    """Plays both models: the agent looks into the file only if its instructions tell it to."""

    def __init__(self) -> None:
        self.calls = 0
        self.kill_at = 0
        self.process: subprocess.Popen[str] | None = None

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a chat completion, or kill the training that asks for it."""
        body = asked_of(handler)
        self.calls += 1
        if self.calls == self.kill_at and self.process is not None:
            self.process.kill()
            return None
        if "response_format" in body:
            schema = body["response_format"]["json_schema"]["schema"]
            return send(handler, completion(json.dumps(fill_schema(schema, RULE))))
        messages = body["messages"]
        asked = re.findall(r"How many (\w+) are left\?", json.dumps(messages))
        if not asked:
            self.calls -= 1  # the test of the connection, which a run without a recording begins with
            return send(handler, completion("ready"))
        fruit = asked[-1]
        if messages[-1]["role"] == "tool":
            return send(handler, completion(messages[-1]["content"].partition(f"{fruit} ")[2].split()[0]))
        if RULE in json.dumps(messages):
            return send(handler, call_command("cat stock.txt"))
        return send(handler, completion("about 5 perhaps"))


def call_command(command: str) -> dict[str, Any]:
    """Return a completion that calls Codex's shell."""
    answer = completion("")
    call = {"name": "exec_command", "arguments": json.dumps({"cmd": command})}
    message = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
    answer["choices"] = [{"index": 0, "finish_reason": "tool_calls", "message": message}]
    return answer


def train(folder: Path, url: str, clerk: Clerk, out: str, *, cassette: str | None, mode: str) -> str:
    """Train in a process, and return what it prints; a killed one prints nothing.

    Raises:
        RuntimeError: The training fails.
    """
    page = (ROOT / "docs" / "own-target.md").read_text(encoding="utf-8")
    found = re.search(r"^### Codex\n.*?```yaml\n(.*?)```", page, re.M | re.S)
    assert found is not None
    config = CONFIG.format(out=out, url=url, cassette=cassette or "null", mode=mode) + found[1]
    (folder / f"{out}.yaml").write_text(config, encoding="utf-8")
    path = f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"

    clerk.process = reflact_process("train", f"{out}.yaml", cwd=folder, env={**os.environ, "PATH": path})
    shown, errors = clerk.process.communicate(timeout=600)
    if clerk.process.returncode and not clerk.kill_at:
        raise RuntimeError(f"{shown}{errors}")
    return shown.replace(out, "OUT")


def main(arguments: list[str]) -> int:
    """Install Codex, train, and print what was seen."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(arguments[0] if arguments else made).resolve()
        (folder / "my_project").mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, CODEX], check=True)
        stock = "".join(f"{name} {count}\n" for name, count in STOCK.items())
        (folder / "my_project" / "stock.txt").write_text(stock, encoding="utf-8")
        items = [{"input": f"How many {n} are left?", "reference": str(c)} for n, c in STOCK.items()]
        (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
        clerk = Clerk()
        with serving(clerk.answer) as url:
            whole = train(folder, url, clerk, "whole", cassette="codex.jsonl", mode="record")
            once, clerk.calls, clerk.kill_at = clerk.calls, 0, clerk.calls // 2
            train(folder, url, clerk, "killed", cassette=None, mode="replay")
            clerk.kill_at = 0
            train(folder, url, clerk, "killed", cassette=None, mode="replay")
        print(whole)
        print(f"calls in one go: {once}; killed at call {once // 2} and resumed: {clerk.calls}")
        asked = clerk.calls
        replayed = train(folder, url, clerk, "replayed", cassette="codex.jsonl", mode="replay")
        print(f"replayed offline with {clerk.calls - asked} calls")
        print(replayed)
    return 0 if clerk.calls == once + 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
