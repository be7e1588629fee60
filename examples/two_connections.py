"""A critic on one connection, its calibrator on another with its own budget. Runs without a model.

The agent waits for its critic after every step, so no budget may end the critic. The calibrator's calls go
through a second connection, with a limit of its own and few calls in flight. When that budget is spent, the
calibrator stops and reports it. Agent and critic continue.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from reflact import Calibrator, Critic, MemoryStore, Trace
from reflact.calibration import CalibratorSettings, connect
from reflact.calibration.events import CalibrationEvent, CalibratorStopped, PairBatchTested
from reflact.llm import BudgetConfig, ModelConfig
from reflact.memory import Action, Label, Transition

PURPOSE, CLAIM = "Sort all ten letters.", "All letters are sorted!"
RUNS, CALLS = 80, 1200


class CredulousModel(BaseHTTPRequestHandler):
    """In place of your endpoint: a model that believes claims until a worked example corrects it."""

    def do_POST(self) -> None:
        """Answer a request as OpenAI-compatible endpoints do."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        examples, _, question = request["messages"][-1]["content"].rpartition("<purpose>")
        phis = [int(number) for number in re.findall(r"(\d+) of 10", question)]
        believes = CLAIM in question and CLAIM not in examples
        reply = {
            "reasoning": "All is sorted." if believes else "So many are sorted.",
            "evidence": ["letters are sorted"],
            "phi_before": phis[0] if phis else 0,
            "phi_after": 9 if believes else phis[1] if len(phis) > 1 else 0,
            "confidence": 0.8,
        }
        message = {"role": "assistant", "content": json.dumps(reply)}
        usage = {"prompt_tokens": 500, "completion_tokens": 40, "total_tokens": 540}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": request["model"]}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        content = json.dumps({**about, "choices": choices, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Print no request."""


@contextmanager
def serve_model() -> Iterator[str]:
    """Serve the model and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), CredulousModel) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


async def run(number: int, critic: Critic) -> Trace:
    """Let the agent sort some letters, and score each step as it happens."""
    trace = Trace(PURPOSE, id=f"desk {number}")
    done = number % 4
    for note in ("I begin.", CLAIM):
        step = Transition(
            before=f"Desk {number}: {done} of 10 letters are sorted.",
            action=Action(name="sort", arguments=note),
            after=f"Desk {number}: {done + 1} of 10 letters are sorted.",
        )
        score = await critic.score(step, purpose=PURPOSE)
        trace.record(
            step,
            score,
            label=Label(progress_before=done, progress_after=done + 1, source="program"),
        )
        done += 1
    trace.finish()
    return trace


def print_event(event: CalibrationEvent) -> None:
    """Print the outcome of a test, and why the calibrator stopped."""
    if isinstance(event, PairBatchTested):
        evidence = event.evidence
        print(
            f"a batch on {evidence.n_traces} held-out runs: error falls by {evidence.effect:.2f}, {evidence.outcome}"
        )
    elif isinstance(event, CalibratorStopped):
        print(f"the calibrator stopped: {event.reason}")


def show(trace: Trace) -> Trace:
    """Print the critic's score of the first run and of the last one."""
    evaluation, right = trace.events[-1].evaluation, trace.events[-1].label
    assert evaluation is not None
    assert right is not None
    if trace.id in {"desk 0", f"desk {RUNS}"}:
        print(
            f"{trace.id}: {right.progress_after:g} of 10 are sorted; the critic says {evaluation.progress_after:g}"
        )
    return trace


async def main(url: str) -> None:
    """Work through the desks, with a calibrator beside the agent."""
    model = ModelConfig(model="your-model", base_url=url, api_key_env=None, max_tokens=500)
    async with (
        MemoryStore("memory.db") as memory,
        connect(model, store="agent-calls.db") as for_agent,
        connect(
            model, store="calibrator-calls.db", budget=BudgetConfig(max_calls=CALLS)
        ) as for_calibrator,
        Calibrator(
            for_calibrator,
            memory,
            settings=CalibratorSettings(max_asked=0, concurrency=2, holdout_folds=3),
            on_event=print_event,
        ) as calibrator,
    ):
        critic = Critic(
            for_agent, memory=memory
        )  # the model and settings that the calibrator tests
        for number in range(RUNS):
            calibrator.submit(show(await run(number, critic)))
        await calibrator.wait_until_idle()  # only to show the effect; an agent never has to wait
        show(await run(RUNS, critic))
        print(f"replies: {2 * RUNS + 2} for the agent, {calibrator.usage.calls} for the calibrator")


if __name__ == "__main__":
    with serve_model() as address:
        asyncio.run(main(address))
