"""Play a newcomer's first session: a CSV file of 60 questions, a live endpoint, and eight commands.

    python benchmarks/newcomer.py            # play it, and write docs/first-session.md
    python benchmarks/newcomer.py --check    # play it, and say how the page differs
    python benchmarks/newcomer.py --serve 1  # only the endpoint, a second a call; prints its address

The endpoint is a process of its own and knows nothing of reflact. Its small model answers questions of an office
in everyday words, and in the house style as far as its instructions ask for it. Now and then it forgets.
Its large model reads the cases that failed and writes instructions. Times, dates and ports of the page are fixed.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "first-session.md"
INTRODUCTION = """# A first session, word for word

<!-- Written by benchmarks/newcomer.py; do not edit. -->

This is what a newcomer sees who trains on a CSV file of 60 questions: each command, and all that it prints. No file is
edited. The endpoint is a small program that plays both models, `benchmarks/newcomer.py`, so the scores say nothing
about real models. [The tutorial](getting-started.md) explains the steps. Times and the address are fixed here, and
long lists are cut where `[...]` stands.

`questions.csv` begins with these rows:

"""
COMMANDS = (
    ("Write a configuration", "init questions.csv --model small --optimizer large --base-url URL"),
    ("Check it", "check run.yaml"),
    ("Train", "train run.yaml --show lines"),
    ("See what changed", "show runs/questions --items --changed"),
    (
        "Take the skill away",
        'export runs/questions --name house-style --description "Answers in the house style."',
    ),
)
WRITTEN = {"init": "run.yaml", "export": "house-style/SKILL.md"}
"""The files that the page shows, by the command that writes them."""

LONGEST = 24
"""The lines of an output that the page shows at most."""

RULES = {
    "date": "Write each date as YYYY-MM-DD, with nothing around it.",
    "sum": "Write each amount with two decimals and EUR after it, as in 7.50 EUR.",
    "shelf": "Write each shelf as the letter of the room, a hyphen and three digits, as in B-023.",
}
QUESTION = re.compile(
    r"Order \d+ leaves on March (?P<day>\d+), 2026 and takes (?P<takes>\d+) days\. When is it due\?"
    r"|What do (?P<cups>\d+) cups at (?P<price>[\d.]+) euros each cost\?"
    r"|Room (?P<room>[A-D]), place (?P<place>\d+): which shelf is it\?"
)
CASE = re.compile(r"<(case_\d+_*)>\n(.*?)\n</\1>", re.DOTALL)
PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)


def list_questions(n: int = 60) -> list[tuple[str, str, str]]:
    """Return questions with the answer that the house wants, and their subject."""
    made = []
    for k in range(n):
        if k % 3 == 0:
            day, takes = k // 3 + 1, 2 + k % 7
            question = f"Order {100 + k} leaves on March {day}, 2026 and takes {takes} days. When is it due?"
            subject = "orders"
        elif k % 3 == 1:
            question, subject = (
                f"What do {2 + k % 9} cups at {1 + k % 5}.{k % 4 * 25 % 100:02d} euros each cost?",
                "prices",
            )
        else:
            question, subject = (
                f"Room {'ABCD'[k % 4]}, place {7 * k % 90 + 1}: which shelf is it?",
                "shelves",
            )
        made.append((question, answer(question, "\n".join(RULES.values())), subject))
    return made


def answer(question: str, instructions: str, forgets: float = 0.0) -> str:
    """Return the small model's answer: in the house style if its instructions say so."""
    found = QUESTION.search(question)
    if found is None:
        return "ready"
    share = int(hashlib.sha256(question.encode()).hexdigest()[:4], 16) / 0xFFFF
    known = {name for name, rule in RULES.items() if rule in instructions and share >= forgets}
    if found["day"]:
        day = int(found["day"]) + int(found["takes"])
        return f"2026-03-{day:02d}" if "date" in known else f"It is due on March {day}."
    if found["cups"]:
        total = int(found["cups"]) * float(found["price"])
        return f"{total:.2f} EUR" if "sum" in known else f"{total:g} euros"
    if "shelf" in known:
        return f"{found['room']}-{int(found['place']):03d}"
    return f"Place {found['place']} in room {found['room']}"


def reply(schema: dict[str, Any], asked: str) -> Any:
    """Return the large model's reply: an instruction for each kind of question of the failed cases."""
    return fill(schema, schema.get("$defs", {}), write_edits(asked))


def write_edits(asked: str) -> list[tuple[str, list[int]]]:
    """Return the instructions that the cases or the proposals of a prompt ask for, with their sources."""
    proposals = {
        int(number): text.rpartition("content: ")[2] for _, number, text in PROPOSAL.findall(asked)
    }
    if proposals:
        texts = dict.fromkeys(proposals.values())
        return [
            (text, [number for number, other in proposals.items() if other == text])
            for text in texts
        ]
    kinds = ("date", "sum", "shelf")
    asked_for = dict.fromkeys(
        kinds[0 if found["day"] else 1 if found["cups"] else 2]
        for _, case in CASE.findall(asked)
        for found in QUESTION.finditer(case)
    )
    return [(RULES[kind], [1]) for kind in asked_for if RULES[kind] not in asked]


def fill(
    schema: dict[str, Any], definitions: dict[str, Any], edits: list[tuple[str, list[int]]]
) -> Any:
    """Return a value of a JSON schema, with the edits where it has a place for them."""
    if "$ref" in schema:
        return fill(definitions[schema["$ref"].rpartition("/")[2]], definitions, edits)
    if "anyOf" in schema:
        return fill(schema["anyOf"][0], definitions, edits)
    if "properties" in schema:
        return {
            name: fill_field(name, part, definitions, edits)
            for name, part in schema["properties"].items()
        }
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("type") == "array":
        numbers = range(1, 1 + schema.get("minItems", 1))
        return [
            n
            if schema["items"].get("type") == "integer"
            else fill(schema["items"], definitions, edits)
            for n in numbers
        ]
    plain = {"integer": schema.get("minimum", 1), "number": 0.5, "boolean": False}
    return plain.get(
        schema.get("type", ""), "The answers have the right content in the wrong form."
    )


def fill_field(
    name: str,
    schema: dict[str, Any],
    definitions: dict[str, Any],
    edits: list[tuple[str, list[int]]],
) -> Any:
    """Return the value of a field: the edits, or what fits its schema."""
    if name != "edits":
        return fill(schema, definitions, edits)
    item = schema["items"]
    fields = definitions[item["$ref"].rpartition("/")[2]] if "$ref" in item else item
    made = [
        {
            "op": "append",
            "target": "",
            "content": f"- {text.removeprefix('- ')}",
            "sources": sources,
            "evidence": "The form.",
        }
        for text, sources in edits
    ]
    return [
        {key: edit[key] for key in fields["properties"]}
        for edit in made[: schema.get("maxItems", len(made))]
    ]


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions of both models."""

    protocol_version = "HTTP/1.1"
    seconds = 0.0

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.seconds)
        asked = body["messages"][-1]["content"]
        wanted = body.get("response_format", {}).get("json_schema")
        if body["model"] == "large" and wanted:
            text = json.dumps(reply(wanted["schema"], asked))
        else:
            text = answer(asked, body["messages"][0]["content"], forgets=0.15)
        usage = {
            "prompt_tokens": len(json.dumps(body["messages"])) // 4,
            "completion_tokens": len(text) // 4 + 1,
        }
        usage["total_tokens"] = sum(usage.values())
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
        }
        sent = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
        data = json.dumps(sent).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def serve(seconds: float) -> None:
    """Print the address and answer until the process is ended; a call takes so long."""
    Handler.seconds = seconds
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


@contextmanager
def running() -> Iterator[str]:
    """Run the endpoint in a process of its own; gives its address."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def play(folder: Path) -> str:
    """Play the session in a folder and return the page."""
    with (folder / "questions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "right answer", "subject"), *list_questions()])
    rows = (folder / "questions.csv").read_text(encoding="utf-8").splitlines()[:4]
    page = INTRODUCTION + fence("\n".join(rows))
    program = Path(sys.executable).with_name("reflact")
    with running() as url:
        for title, command in COMMANDS:
            words = [word.replace("URL", url) for word in shlex.split(command)]
            done = subprocess.run(
                [program, *words],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{command}\n{done.stdout}{done.stderr}")
            shown = "$ reflact " + command.replace("URL", ADDRESS)
            page += (
                f"\n## {title}\n\n{fence(shown + chr(10) + cut(settle(done.stdout, folder, url)))}"
            )
            if path := WRITTEN.get(words[0]):
                text = settle((folder / path).read_text(encoding="utf-8"), folder, url)
                page += f"\n`{path}` now has:\n\n{fence(text, Path(path).suffix[1:])}"
    return page


ADDRESS = "http://127.0.0.1:8000/v1"
UNSETTLED = (
    (r" +\d+(\.\d+)? s\b", " 1 s"),
    (r"they take about .* if 4 run", "they take about 2 min if 4 run"),
    (r"and up to .* if not", "and up to 7 min if not"),
    (r"\brun r[0-9a-f]{12}\b", "run r0123456789ab"),
    (r" +$", ""),
    (r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b", "2026-01-01 12:00"),
)


def settle(text: str, folder: Path, url: str) -> str:
    """Return an output without what differs from time to time."""
    text = text.replace(str(folder), ".").replace(url, ADDRESS)
    for pattern, fixed in UNSETTLED:
        text = re.sub(pattern, fixed, text, flags=re.MULTILINE)
    return text


def cut(text: str) -> str:
    """Return a text whose middle is cut if it is long."""
    lines = text.rstrip().splitlines()
    half = LONGEST // 2
    return "\n".join(lines if len(lines) <= LONGEST else [*lines[:half], "[...]", *lines[-half:]])


def fence(text: str, kind: str = "text") -> str:
    """Return a block of code."""
    return f"```{kind}\n{text.rstrip()}\n```\n"


def main(arguments: list[str]) -> int:
    """Serve, or play and write or compare the page."""
    if "--serve" in arguments:
        serve(float(arguments[1]))
    with tempfile.TemporaryDirectory() as folder:
        page = play(Path(folder).resolve())
    if "--check" not in arguments:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    kept = PAGE.read_text(encoding="utf-8")
    print("\n".join(difflib.unified_diff(kept.splitlines(), page.splitlines(), lineterm="")))
    return int(kept != page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
