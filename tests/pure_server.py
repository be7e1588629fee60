"""A chat endpoint in its own process, whose every answer is a function of the request's body and sample.

Items look like ``alpha 3``; the right answer is ``alpha:3``, and the target gives it where the skill holds
the line ``- rule alpha.``. A skill with the line ``- hush.`` answers nothing rightly. An item of the rule
``coin`` is answered as its sample says, which is never right, one of the rule ``flip`` rightly in every other
sample, and one of the rule ``slip`` never, whatever the skill holds.

The optimizer proposes rules and, for coins, the harmful line, as edits, suggestions or whole drafts; guidance
holds a rule that is still missing, and a rule that was not followed gives a reminder. Some first replies are
malformed, and the merges of one step are malformed for good.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from typing import Any, NamedTuple

SPOILED_STEP = 4
"""The step whose merges are never valid."""

SLOWEST_SECONDS = 0.012

CASE = re.compile(r"<(case_\d+_*)>\n(.*?)\n</\1>", re.DOTALL)
TASK = re.compile(r"\b(alpha|beta|gamma|delta|coin|flip|slip) (\d+)")
PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)
WITHIN = r"<({}_*)>\n(.*?)\n</\1>"
RULES = ("alpha", "beta", "gamma", "delta")


class Logged(NamedTuple):
    """A request as it arrived: the hash of its body, and its sample."""

    body: str
    call_id: str


def answer(body: dict[str, Any], call_id: str, *, spoiled: int | None = SPOILED_STEP) -> str:
    """Return what the model says; the merges of the step ``spoiled`` are never valid."""
    messages = body["messages"]
    asked = next(m["content"] for m in messages if m["role"] == "user")
    system = "\n".join(m["content"] for m in messages if m["role"] == "system")
    if call_id.startswith("target/"):
        return _target(system, asked, call_id)
    first_attempt = call_id.endswith("attempt=0")
    if first_attempt and "part=0" in call_id and int(_digits(call_id), 16) % 2:
        return "Let me think about that first."
    if f"merge/step={spoiled}/" in call_id:
        return '{"edits": ['
    if "response_format" not in body:
        return _write_document(asked, call_id)
    schema = body["response_format"]["json_schema"]
    kind, fields = schema["name"].removeprefix("Reasoned"), schema["schema"]["properties"]
    said = _reply(kind, fields, asked)
    return json.dumps({name: said.get(name, "As seen.") for name in schema["schema"]["properties"]})


def _target(skill: str, asked: str, call_id: str) -> str:
    name, _, number = asked.partition(" ")
    if name == "coin":
        return f"coin:{_digits(call_id)}"
    lines = skill.splitlines()
    known = f"- rule {name}." in lines and name != "slip"
    if name == "flip":
        known = int(_digits(call_id), 16) % 2 == 0
    return f"{name}:{number}" if known and "- hush." not in lines else "unknown"


def _reply(kind: str, fields: dict[str, Any], asked: str) -> dict[str, Any]:
    said: dict[str, Any]
    match kind:
        case "RankReply":
            said = {"reasoning": "The last ones first.", "selected": _ranked(asked)}
            said["selected"] = said["selected"][: fields["selected"]["minItems"]]
        case "StepSizeReply":
            count = min(2, fields["count"]["maximum"])
            said = {"reasoning": "Two at most.", "count": count, "confidence": 0.5, "risks": ""}
        case "LapseReply":
            said = {"lapses": _lapses(asked)}
        case "ReminderReply":
            said = {"reminders": []}
        case "CompactReply":
            said = {"notes": [f"Mind all that slips, as seen in {_digits(asked)}."]}
        case "GuidanceReply":
            said = {"reasoning": "As compared.", "helped": "unclear", "guidance": _guidance(asked)}
        case "MemoryReply":
            said = {"reasoning": "As compared.", "memory": f"Rules help, as seen in {_digits(asked)}."}
        case "RewriteReply":
            said = {"summary": "As proposed.", "document": _document(asked)}
        case _:
            said = _edits(kind, fields, asked)
    return said


def _write_document(asked: str, call_id: str) -> str:
    """Add the lines that failed cases call for; each call of a step leaves others out, by its number."""
    failed = asked.partition("Cases in which the agent succeeded:")[0]
    number = int(call_id.partition("part=")[2].partition("/")[0])
    wanted = [line for n, line in enumerate(_wanted(failed)) if (n + number) % 3 != 1]
    lines = dict.fromkeys([*_within("document", asked).splitlines(), *wanted])
    document = "\n".join(line for line in lines if line.strip())
    return f"```markdown\n{document or '- keep on.'}\n```"


def _edits(kind: str, reply: dict[str, Any], asked: str) -> dict[str, Any]:
    fields, most = reply["edits"]["items"]["properties"], reply["edits"]["maxItems"]
    if kind == "MergeReply":
        proposals = {number: _content(text) for _, number, text in PROPOSAL.findall(asked)}
        return {"edits": [_edit(fields, text, [int(n)]) for n, text in proposals.items()]}
    if kind == "SuccessReply":
        keep = [f"- keep {n}." for n in dict.fromkeys(_names(asked))]
        return {"strengths": "As told.", "edits": [_edit(fields, line) for line in keep[:1][:most]]}
    edits = [_edit(fields, line) for line in _wanted(asked)[:most]]
    return {"patterns": _patterns(reply, asked), "edits": edits}


def _names(asked: str) -> list[str]:
    return [TASK.findall(text)[0][0] for _, text in CASE.findall(asked)]


def _wanted(asked: str) -> list[str]:
    return ["- hush." if n == "coin" else f"- rule {n}." for n in dict.fromkeys(_names(asked))]


def _patterns(fields: dict[str, Any], asked: str) -> list[dict[str, Any]]:
    names = _names(asked)
    distinct = list(dict.fromkeys(names))[: max(1, min(3, len(names) // 2))]
    wanted = fields["patterns"]["items"]["properties"]
    whole = [
        {
            "type": name,
            "count": names.count(name),
            "description": f"No {name}.",
            "cases": [number for number, named in enumerate(names, 1) if named == name],
        }
        for name in distinct
    ]
    return [{name: pattern[name] for name in wanted} for pattern in whole]


def _edit(fields: dict[str, Any], line: str, sources: list[int] | None = None) -> dict[str, Any]:
    whole = {"op": "append", "target": "", "content": line, "sources": sources, "evidence": "As seen."}
    return {name: whole[name] for name in fields}


def _content(proposal: str) -> str:
    return proposal.rpartition("content: ")[2]


def _ranked(asked: str) -> list[int]:
    """The last proposals first, but harmful ones at the end."""
    proposals = {int(number): text for _, number, text in PROPOSAL.findall(asked)}
    return sorted(proposals, key=lambda n: ("- hush." in proposals[n], -n))


def _within(tag: str, asked: str) -> str:
    found = re.search(WITHIN.format(tag), asked, re.DOTALL)
    return found[2] if found else ""


def _document(asked: str) -> str:
    """The document's lines, then those of proposals and drafts, or else those that its cases call for."""
    proposed = [line for _, _, text in PROPOSAL.findall(asked) for line in _content(text).splitlines()]
    lines = [*_within("document", asked).splitlines(), *(proposed or _wanted(asked))]
    return "\n".join(dict.fromkeys(line for line in lines if line.strip()))


def _lapses(asked: str) -> list[dict[str, Any]]:
    rules = _within("document", asked).splitlines()
    tasks = [TASK.findall(text)[0] for _, text in CASE.findall(asked)]
    return [
        {"case": case, "rule": f"- rule {name}.", "reminder": f"Mind {name} {number}."}
        for case, (name, number) in enumerate(tasks, 1)
        if f"- rule {name}." in rules
    ]


def _guidance(asked: str) -> str:
    document = _within("document", asked).splitlines()
    missing = [f"- rule {n}." for n in RULES if n in _names(asked) and f"- rule {n}." not in document]
    return missing[0] if missing else f"Take care of {_digits(asked)}."


def _digits(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:8]


def completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the whole answer to a request, its token counts included."""
    content = {name: value for name, value in body.items() if name not in {"stream", "stream_options"}}
    given, written = len(json.dumps(content)) // 4, len(text) // 4
    message = {"role": "assistant", "content": text}
    return {
        "id": "pure",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written},
    }


class Server:
    """Counts what arrives and answers it.

    ``GET /wait/N`` waits for N requests and ``GET /forget`` begins anew; both answer with the requests so
    far. After ``GET /break/WORDS`` everything is refused from the first request on whose sample begins with
    the words, until ``GET /mend``.
    """

    def __init__(self) -> None:
        self._log: list[Logged] = []
        self._arrived = asyncio.Condition()
        self._until: str | None = None
        self._broken = False

    async def serve(self) -> None:
        """Listen on a free port, print it, and answer until the process is ended."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=200)
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - how the parent learns the port
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := (await reader.readline()).decode():
                method, path, _ = line.split(" ", 2)
                headers = await _headers(reader)
                sent = await reader.readexactly(int(headers.get("content-length", "0")))
                status, value = await self._answered(method, path, headers, sent)
                text = json.dumps(value).encode()
                head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
                writer.write(head.encode() + b"\r\n\r\n" + text)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(
        self, method: str, path: str, headers: dict[str, str], sent: bytes
    ) -> tuple[str, Any]:
        if method == "POST":
            return await self._chat(json.loads(sent), headers["x-sample"])
        match path.split("/", 2)[1:]:
            case ["forget"]:
                forgotten, self._log = self._log, []
                return "200 OK", forgotten
            case ["wait", number]:
                async with self._arrived:
                    await self._arrived.wait_for(lambda: len(self._log) >= int(number))
            case ["break", words]:
                self._until = words
            case ["mend"]:
                self._until, self._broken = None, False
        return "200 OK", self._log

    async def _chat(self, body: dict[str, Any], call_id: str) -> tuple[str, Any]:
        self._broken |= self._until is not None and call_id.startswith(self._until)
        if self._broken:
            return "503 Service Unavailable", {"error": {"message": "gone for good"}}
        fingerprint = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        async with self._arrived:
            self._log.append(Logged(fingerprint, call_id))
            self._arrived.notify_all()
        share = int(hashlib.sha256((fingerprint + call_id).encode()).hexdigest()[:4], 16) / 0xFFFF
        await asyncio.sleep(share * SLOWEST_SECONDS)
        return "200 OK", completion(body, answer(body, call_id))


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


if __name__ == "__main__":
    sys.exit(asyncio.run(Server().serve()))
