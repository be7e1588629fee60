"""An agent in a process of its own: asks its model once over HTTP, as other people's agents do, and prints the answer.

command_agent.py TASK [misbehaviour]
command_agent.py TASK with FIELDS (further fields of the request, in JSON)
command_agent.py TASK at PATH (of the request, below the gateway's address)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

if False:
    from typing import Any


def ask(messages: list[dict[str, Any]], path: str = "/chat/completions", **fields: Any) -> str:
    """Return the model's answer; over a bare socket, since the libraries for HTTP take long to import."""
    place = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1")
    host, _, port = place.partition(":")
    body = json.dumps({"model": "any", "user": str(time.time()), "messages": messages, **fields})
    lines = [
        f"POST /v1{path} HTTP/1.1",
        f"Host: {place}",
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        with connection.makefile(encoding="utf-8", newline="") as answer:
            text = answer.read().partition("\r\n\r\n")[2]
    if not fields.get("stream"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def main() -> None:
    """Answer a task, or misbehave."""
    task, how = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    instructions = "Be helpful."
    if os.path.exists("SKILL.md"):  # noqa: PTH110 - pathlib takes long to import
        with open("SKILL.md", encoding="utf-8") as skill:  # noqa: PTH123
            instructions = skill.read()
    if how == "hang":
        time.sleep(600)
    if how == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    if how == "fork":
        import subprocess

        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if how == "fail":
        sys.exit("no such tool")
    if how == "environment":
        sys.stdout.write(json.dumps(dict(os.environ)))
        return
    if how == "title":
        titled = [{"role": "user", "content": f"{number}: {task}"} for number in range(3)]
        ask([{"role": "system", "content": "You write titles."}, *titled])
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": task}]
    fields = json.loads(sys.argv[3]) if how == "with" else {}
    path = sys.argv[3] if how == "at" else "/chat/completions"
    answer = ask(messages, path, stream=how == "stream", **fields)
    with open("answer.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(answer)
    sys.stdout.write(answer)


main()
