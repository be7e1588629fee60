"""An agent in a process of its own: asks its model once over HTTP, as other people's agents do, and prints the answer.

command_agent.py TASK [misbehaviour]
command_agent.py TASK with FIELDS (further fields of the request, in JSON)
command_agent.py TASK at PATH (of the request, below the gateway's address)
command_agent.py TASK write FILE (of 2 MiB)
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


def read_file(path: str) -> str:
    """Return the text of a file, or the reason why it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError as error:
        return str(error)


def misbehave(how: str) -> None:
    if how == "hang":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if how == "hoard":
        hoard = bytearray(2**28)
        hoard[:: 2**12] = b"x" * 2**16
        time.sleep(600)
    if how == "breed":
        for _ in range(30):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
        time.sleep(600)
    if how == "crowd":
        import threading

        for _ in range(40):
            threading.Thread(target=time.sleep, args=(600,)).start()
    if how == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    if how == "fork":
        import subprocess

        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        near, far = (subprocess.Popen(command, start_new_session=far) for far in (False, True))
        with open("children.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{near.pid} {far.pid}")


def main() -> None:
    task, how = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    instructions = "Be helpful."
    if os.path.exists("SKILL.md"):  # noqa: PTH110 - pathlib takes long to import
        with open("SKILL.md", encoding="utf-8") as skill:  # noqa: PTH123
            instructions = skill.read()
    misbehave(how)
    if how == "write":
        with open(sys.argv[3], "wb") as file:  # noqa: PTH123
            file.write(b"x" * 2**21)
    if how == "fail":
        sys.exit("no such tool")
    if how == "title":
        titled = [{"role": "user", "content": f"{number}: {task}"} for number in range(3)]
        ask([{"role": "system", "content": "You write titles."}, *titled])
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": task}]
    fields = json.loads(sys.argv[3]) if how == "with" else {}
    path = sys.argv[3] if how == "at" else "/chat/completions"
    answer = ask(messages, path, stream=how == "stream", **fields)
    if how == "spy":
        files = [os.path.join(folder, name) for folder, _, names in os.walk("..") for name in names]  # noqa: PTH118
        paths = [*files, "/proc/self/cmdline", "/proc/self/environ", f"/proc/{os.getppid()}/environ"]
        seen = {path: read_file(path) for path in paths}
        sys.stdout.write(json.dumps({"environment": dict(os.environ), "files": seen}))
        sys.stderr.write(json.dumps(seen))
        return
    with open("answer.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(answer)
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
