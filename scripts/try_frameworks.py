"""Train the agent of each recipe in docs/train-your-agent.md, as printed, in an environment of its own.

The script installs reflact and the newest allowed version of each framework from the package index, and plays the
models.

Usage: python scripts/try_frameworks.py [FOLDER]
"""

from __future__ import annotations

import json
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
from served import asked_of, completion, send, serving  # noqa: E402

PAGE = ROOT / "docs" / "train-your-agent.md"
PACKAGES = {
    "openai-agents": ("openai-agents>=0.24,<0.25",),
    "langchain": ("langchain>=1.4,<2", "langgraph>=1.2,<2", "langchain-openai>=1.7,<2"),
    "smolagents": ("smolagents[openai]>=1.26,<2",),
}
"""What each recipe needs."""

RULE = "Look up the stock."


class Clerk:
    """Plays both models: the agent looks up only what its instructions tell it to, and the optimizer knows it."""

    def __init__(self) -> None:
        self.calls = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a chat completion."""
        body = asked_of(handler)
        self.calls += 1
        if "response_format" in body:
            schema = body["response_format"]["json_schema"]["schema"]
            return send(handler, completion(json.dumps(fill_schema(schema, RULE))))
        found = re.search(
            r"(?:How many (\w+) are left\?|Observation:\s*(\d+)|^(\d+))", _read_last(body)
        )
        fruit, *seen = found.groups() if found else (None, None)
        count = next((number for number in seen if number), None)
        if count is None and fruit and RULE in json.dumps(body["messages"]):
            return send(handler, _call_tool("look_up_stock", {"fruit": fruit}))
        text = count or "about 5 perhaps"
        if any(tool["function"]["name"] == "final_answer" for tool in body.get("tools", ())):
            return send(handler, _call_tool("final_answer", {"answer": text}))
        return send(handler, completion(text))


def _read_last(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call_tool(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    answer = completion("")
    call = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
    }
    answer["choices"] = [{"index": 0, "finish_reason": "tool_calls", "message": message}]
    return answer


def try_recipe(name: str, python: Path, folder: Path) -> str:
    """Check, train and train again with an interpreter that has the framework, and return what the commands print.

    Raises:
        RuntimeError: A command fails, or the second training asks a model.
    """
    page = PAGE.read_text(encoding="utf-8")
    files = dict(re.findall(r"<!-- shop: (\S+) -->\n```\w+\n(.*?)^```$", page, re.M | re.S))
    recipes = dict(re.findall(r"<!-- recipe: (\S+) -->\n```python\n(.*?)^```$", page, re.M | re.S))
    clerk, shown = Clerk(), ""
    with serving(clerk.answer) as url:
        files["run.yaml"] = files["run.yaml"].replace("http://localhost:8080/v1", url)
        for file, text in {**files, "my_agent.py": recipes[name]}.items():
            (folder / file).write_text(text, encoding="utf-8")
        for command in ("check", "train", "train"):
            before = clerk.calls
            code = f"import sys; sys.argv[1:] = ['{command}', 'run.yaml']; from reflact.cli import main; main()"
            done = subprocess.run(
                [python, "-c", code],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            shown += f"$ reflact {command} run.yaml\n{done.stdout}"
            if done.returncode:
                raise RuntimeError(f"{shown}{done.stderr}")
        if clerk.calls != before:
            raise RuntimeError(f"the second training asked {clerk.calls - before} times")
    return shown


def main(arguments: list[str]) -> int:
    """Make the environments, train in each, and print the versions."""
    folder = Path(arguments[0] if arguments else ROOT / "build" / "frameworks").resolve()
    for name, packages in PACKAGES.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-e", ROOT, *packages], check=True)
        with tempfile.TemporaryDirectory() as work:
            shown = try_recipe(name, python, Path(work))
        listed = subprocess.run(
            [python, "-m", "pip", "list", "--format=freeze"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = {re.split(r"[\[>]", package)[0] for package in packages}
        print(name, *(line for line in listed.splitlines() if line.partition("==")[0] in names))
        print(*(f"  {line}" for line in shown.splitlines()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
