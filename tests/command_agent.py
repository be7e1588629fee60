"""An agent in a process of its own: asks its model once over HTTP, as other people's agents do, and prints the answer.

command_agent.py TASK [misbehaviour]
command_agent.py TASK with FIELDS (further fields of the request, in JSON)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return the model's answer."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "any", "user": str(time.time()), "messages": messages, **fields}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    if not fields.get("stream"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def main() -> None:
    """Answer a task, or misbehave."""
    task, how = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    skill = Path("SKILL.md")
    instructions = skill.read_text(encoding="utf-8") if skill.exists() else "Be helpful."
    if how == "hang":
        time.sleep(600)
    if how == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    if how == "fork":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if how == "fail":
        sys.exit("no such tool")
    if how == "environment":
        sys.stdout.write(json.dumps(dict(os.environ)))
        return
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": task}]
    fields = json.loads(sys.argv[3]) if how == "with" else {}
    answer = ask(messages, stream=how == "stream", **fields)
    Path("answer.txt").write_text(answer, encoding="utf-8")
    sys.stdout.write(answer)


main()
