"""Command-line agents of others, trained as they are: Codex, opencode and, if it is installed, Claude Code.

The test plays their models. An agent that is not on the PATH is skipped: `npm install` of @openai/codex, opencode-ai or
@anthropic-ai/claude-code brings it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from filled_schema import fill_schema
from reflact.agents.profiles import PROFILES
from served import asked_of, completion, reflact_process, send, serving

pytestmark = pytest.mark.slow

RULE = "Look into stock.txt."
STOCK = {"apples": 3, "pears": 0, "plums": 7}
SHELLS = {
    "codex": ("exec_command", "cmd"),
    "opencode": ("bash", "command"),
    "claude-code": ("Bash", "command"),
}
"""The tool of each agent that runs a command, with the name of its argument."""

CONFIG = """out_dir: {out}
data: {{path: items.jsonl, ratio: "1:1:1"}}
environment: {{grader: exact}}
search: {{sources: [edits]}}
train: {{num_epochs: 2, rollout_concurrency: 1}}
gate: {{policy: strict}}
test: {{enabled: false}}
report: false
models:
  target: {{model: small, base_url: "{url}", api_key_env: null}}
  optimizer: {{model: large, mode: json_schema}}
replay: {{cassette: agent.jsonl, mode: {mode}}}
target:
  kind: command
  options: {options}
"""


class Clerk:
    """Plays both models: the agent looks into the file only if its instructions tell it to.

    Attributes:
        calls: The number of requests.
        bodies: The requests of agents, without those for a title.
        kill_at: The request whose training is killed.
    """

    def __init__(self, shell: tuple[str, str]) -> None:
        self.calls, self.kill_at = 0, 0
        self.bodies: list[dict[str, Any]] = []
        self.process: subprocess.Popen[str] | None = None
        self._shell = shell

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a chat completion, or kill the training that asks for it."""
        body = asked_of(handler)
        self.calls += 1
        if self.calls == self.kill_at and self.process is not None:
            self.process.kill()
            return
        send(handler, self._complete(body))

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "response_format" in body:
            return completion(json.dumps(fill_schema(body["response_format"]["json_schema"]["schema"], RULE)))
        messages = body["messages"]
        if "tools" not in body:
            return completion("A clerk's stock")
        self.bodies.append(dict(body))
        fruit = re.findall(r"How many (\w+) are left\?", json.dumps(messages))[-1]
        if messages[-1]["role"] == "tool":
            return completion(messages[-1]["content"].partition(f"{fruit} ")[2].split()[0])
        return self._call("cat stock.txt") if RULE in json.dumps(messages) else completion("about 5 perhaps")

    def _call(self, command: str) -> dict[str, Any]:
        name, argument = self._shell
        call = {"name": name, "arguments": json.dumps({argument: command, "description": "Look."})}
        message = {
            "role": "assistant",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
        return {
            **completion(""),
            "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
        }


def write_world(folder: Path) -> None:
    """Write items, and the project with the file that holds their answers."""
    (folder / "project").mkdir()
    stock = "".join(f"{name} {count}\n" for name, count in STOCK.items())
    (folder / "project" / "stock.txt").write_text(stock, encoding="utf-8")
    items = [{"input": f"How many {n} are left?", "reference": str(c)} for n, c in STOCK.items()]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")


def train(
    folder: Path, out: str, url: str, clerk: Clerk, *, mode: str, **options: Any
) -> dict[str, Any] | None:
    """Train in a process of its own and return the summary; None if the clerk killed it."""
    options = {"workspace": "project", **options}
    config = CONFIG.format(out=out, url=url, mode=mode, options=json.dumps(options))
    (folder / f"{out}.yaml").write_text(config, encoding="utf-8")
    clerk.process = reflact_process("train", f"{out}.yaml", cwd=folder)
    shown, errors = clerk.process.communicate(timeout=540)
    if clerk.process.returncode == -9:
        return None
    assert clerk.process.returncode == 0, shown + errors
    summary: dict[str, Any] = json.loads((folder / out / "summary.json").read_text(encoding="utf-8"))
    return summary


def count_calls(summary: Mapping[str, Any], purpose: str | None = None) -> int:
    """Return the calls that a run booked, all or those of a purpose."""
    return sum(part["usage"]["calls"] for part in summary["spend"] if purpose in {None, part["purpose"]})


def require(profile: str) -> None:
    program = PROFILES[profile].command[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_an_agent_is_trained_killed_resumed_and_replayed(profile: str, tmp_path: Path) -> None:
    require(profile)
    write_world(tmp_path)
    clerk = Clerk(SHELLS[profile])
    with serving(clerk.answer) as url:
        clerk.kill_at = 7
        assert train(tmp_path, "recorded", url, clerk, mode="record", profile=profile) is None
        recorded = train(tmp_path, "recorded", url, clerk, mode="record", profile=profile)
        asked = clerk.calls
        replayed = train(tmp_path, "replayed", url, clerk, mode="replay", profile=profile)
    assert recorded is not None
    assert replayed is not None
    before, best = recorded["scores"][0], recorded["best"]
    assert (recorded["status"], before["name"], before["hard"], best["score"]) == (
        "completed",
        "baseline",
        0,
        1,
    )
    assert asked == count_calls(recorded) + 1, "the call that was killed is the only one that is repeated"
    assert clerk.calls == asked, "the recording answers all requests"
    assert (replayed["scores"], replayed["best"]) == (recorded["scores"], best)
    assert count_calls(replayed) == count_calls(recorded)
    assert (count_calls(recorded, "side_call") > 0) == (PROFILES[profile].side_call is not None)
