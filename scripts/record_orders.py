"""Record a round of calibration on orders: states and labels are computed, and steps rise, stay and fall.

An order has five goals: three things in the parcel, an amount that is paid, and an address. Progress is ten times the
share of the goals that the state meets. A step meets a goal, undoes one, or does neither: it packs another thing, pays
too little, or only says that all is done. No model chooses steps, so making traces takes no call.

Needs reflact and, from ``score`` on, a server as ``scripts/local_server.py`` starts it::

    python scripts/record_orders.py traces      # writes all traces and the anchors; no call
    python scripts/record_orders.py score       # scores the traces to learn from, about 32 calls, and prints its errors
    python scripts/record_orders.py calibrate   # tests the pairs on held-out traces, about 110 calls; writes the report

Choose rendering and settings by ``score`` alone, and commit that choice before ``calibrate``. What the cassette holds is
not asked again, so each command can be stopped and repeated.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import anyio
from pydantic import JsonValue

from reflact import Calibrator, Critic, MemoryStore, Trace
from reflact.calibration import build_anchors
from reflact.calibration.config import CalibrateConfig
from reflact.calibration.report import CalibrationReport
from reflact.config.loading import load_section
from reflact.errors import ReplyError
from reflact.llm.budget import Account
from reflact.llm.cassettes import open_cassette
from reflact.llm.client import Client
from reflact.llm.connection_pool import PooledTransport
from reflact.memory.models import Action, ContrastPair, Direction, Evaluation, Label, Transition
from reflact.prompts import load_prompts
from reflact.protocols import LLM
from reflact.testing import InMemoryRunStore

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"
REPORT = FOLDER / "report.json"
PAIRS = FOLDER / "pairs.jsonl"
"""The pairs that were made of the traces to learn from when the replies were recorded."""
PARTS = {"learn": (16, 2), "held_out": (42, 1), "anchors": (12, 1)}
"""The traces of each part, and the steps of a trace."""

THINGS = ("lamp", "rug", "vase", "clock", "kettle", "mirror", "stool", "basket", "radio", "globe")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
CLAIMS = (
    "The order is complete.",
    "Done, all of it is ready to go.",
    "Everything was packed, paid and addressed.",
)
OUTCOMES: tuple[Direction, ...] = ("rises", "stays", "falls")


class Order(NamedTuple):
    """What is to be packed, paid and written on the parcel."""

    things: tuple[str, ...]
    price: int
    name: str

    @property
    def purpose(self) -> str:
        """The order in words."""
        things = ", ".join(self.things)
        return (
            f"Fill the order: the parcel holds {things}; {self.price} is paid; the address is {self.name}. "
            "These are five goals of equal weight. Other things in the parcel do not matter."
        )


class Parcel(NamedTuple):
    """The state of an order."""

    packed: tuple[str, ...] = ()
    paid: int = 0
    address: str = ""
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> JsonValue:
        """The state as a critic sees it."""
        return {
            "parcel": list(self.packed),
            "paid": self.paid,
            "address": self.address,
            "notes": list(self.notes),
        }

    def progress(self, order: Order) -> float:
        """Return ten times the share of the goals that are met."""
        met = [thing in self.packed for thing in order.things]
        return 10 * fmean([*met, self.paid == order.price, self.address == order.name])


class Move(NamedTuple):
    """An action and the state after it."""

    action: Action
    after: Parcel


def list_moves(parcel: Parcel, order: Order, claim: str) -> Iterator[Move]:
    """Yield all moves from a state."""

    def move(name: str, value: JsonValue, **changes: object) -> Move:
        return Move(Action(name=name, arguments={"what": value}), parcel._replace(**changes))

    for thing in THINGS:
        if thing in parcel.packed:
            left = tuple(one for one in parcel.packed if one != thing)
            yield move("unpack", thing, packed=left)
        else:
            yield move("pack", thing, packed=(*parcel.packed, thing))
    if parcel.paid == order.price:
        yield move("refund", order.price, paid=0)
    else:
        yield move("pay", order.price - parcel.paid, paid=order.price)
        if parcel.paid == 0:
            yield move("pay", order.price // 3, paid=order.price // 3)
    if parcel.address:
        yield move("erase", "address", address="")
    else:
        yield move("address", order.name, address=order.name)
    yield move("note", claim, notes=(*parcel.notes, claim))


def play(parcel: Parcel, order: Order, outcome: Direction, chance: Random) -> Move:
    """Return a move with an outcome, by chance: first its kind, since there are more things than goals."""
    before = parcel.progress(order)
    fitting: dict[str, list[Move]] = defaultdict(list)
    for move in list_moves(parcel, order, chance.choice(CLAIMS)):
        change = move.after.progress(order) - before
        if ("stays" if change == 0 else "rises" if change > 0 else "falls") == outcome:
            fitting[move.action.name].append(move)
    return chance.choice(fitting[chance.choice(sorted(fitting))])


def make_trace(part: str, number: int, n_steps: int) -> Trace:
    """Return a trace whose outcomes go round; it begins when some goals are met and others are not."""
    chance = Random(f"{part} {number}")
    order = Order(tuple(chance.sample(THINGS, 3)), chance.randrange(20, 90), chance.choice(NAMES))
    trace, parcel = Trace(order.purpose, id=f"order-{part}-{number:02}"), Parcel()
    for _ in range(chance.randrange(2, 4)):
        parcel = play(parcel, order, "rises", chance).after
    for step in range(n_steps):
        move = play(parcel, order, OUTCOMES[(number + step) % 3], chance)
        trace.record(
            Transition(before=parcel.state, action=move.action, after=move.after.state),
            label=Label(
                progress_before=parcel.progress(order),
                progress_after=move.after.progress(order),
                source="program",
            ),
        )
        parcel = move.after
    trace.finish()
    return trace


def make_traces(part: str) -> list[Trace]:
    """Return the traces of a part."""
    n_traces, n_steps = PARTS[part]
    return [make_trace(part, number, n_steps) for number in range(n_traces)]


def write(part: str, trace: Trace, evaluations: list[Evaluation | None]) -> None:
    """Write a trace, with an evaluation of each step if there is one."""
    path = FOLDER / "traces" / part / f"{trace.id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    written = Trace(trace.purpose, id=trace.id, path=path)
    for event, evaluation in zip(trace.events, evaluations, strict=True):
        written.record(event.transition, evaluation, label=event.label)
    written.finish()


def write_all() -> None:
    """Write all traces, without evaluations, and the anchors."""
    for part in ("learn", "held_out"):
        for trace in make_traces(part):
            write(part, trace, [None] * len(trace.events))
    anchors = build_anchors(make_traces("anchors"))
    (FOLDER / "anchors.jsonl").write_text(
        "".join(f"{pair.model_dump_json()}\n" for pair in anchors)
    )


@asynccontextmanager
async def connect(
    settings: CalibrateConfig, mode: Literal["record", "replay"] = "record"
) -> AsyncIterator[LLM]:
    """Connect the model; its replies are recorded, or only replayed."""
    assert settings.replay.cassette is not None
    store = InMemoryRunStore()
    account = Account("r", store, store.decision_log("r"))
    async with (
        PooledTransport() as network,
        open_cassette(settings.replay.cassette, mode=mode, inner=network) as transport,
        Client(settings.models.critic, "critic", account, transport=transport) as llm,
    ):
        yield llm


async def score(settings: CalibrateConfig) -> None:
    """Score the traces to learn from, write the evaluations beside the labels, and print errors by outcome."""
    errors: dict[str, list[float]] = defaultdict(list)
    async with connect(settings) as llm:
        critic = Critic(llm, settings=settings.critic, prompts=load_prompts(settings.prompts))
        for trace in make_traces("learn"):
            found: list[Evaluation | None] = []
            for event in trace.events:
                assert event.label is not None
                try:
                    score = await critic.score(event.transition, purpose=trace.purpose)
                except ReplyError:
                    found.append(None)
                    errors["no valid score"].append(1)
                    continue
                found.append(score.evaluation)
                right, said = event.label, score.evaluation
                errors[str(right.delta)].append(said.progress_after - right.progress_after)
                print(
                    f"{trace.id}: {event.transition.action.name}: right {right.progress_before:g} -> "
                    f"{right.progress_after:g}, critic {said.progress_before:g} -> {said.progress_after:g}",
                    flush=True,
                )
            write("learn", trace, found)
    for name, values in sorted(errors.items()):
        print(
            f"{name}: {len(values)} steps, bias {fmean(values):+.2f}, error {fmean(map(abs, values)):.2f}"
        )


async def calibrate(
    settings: CalibrateConfig, mode: Literal["record", "replay"] = "record"
) -> CalibrationReport:
    """Test the recorded pairs, ask all that this takes, and return the report."""
    assert settings.heldout is not None
    held_out = Trace.load_all(settings.heldout)
    prompts = load_prompts(settings.prompts)
    async with connect(settings, mode) as llm:
        with TemporaryDirectory() as folder:
            async with MemoryStore(Path(folder) / "memory.db") as memory:
                await memory.add_anchors(build_anchors(make_traces("anchors")))
                for line in PAIRS.read_text(encoding="utf-8").splitlines():
                    await memory.submit(ContrastPair.model_validate_json(line))
                critic = Critic(llm, memory=memory, settings=settings.critic, prompts=prompts)
                calibrator = Calibrator(
                    llm, memory, critic=critic, settings=settings.calibrator, prompts=prompts
                )
                return await calibrator.calibrate((), heldout=held_out)


def main() -> None:
    """Make traces, score those to learn from, or calibrate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=("traces", "score", "calibrate"))
    parser.add_argument(
        "--port", type=int, default=None, help="port of the server, if it is not 8123"
    )
    options = parser.parse_args()
    overrides = (
        ()
        if options.port is None
        else (f"models.critic.base_url=http://127.0.0.1:{options.port}/v1",)
    )
    settings = load_section(CalibrateConfig, FOLDER / "calibrate.yaml", overrides=overrides)
    if options.work == "traces":
        write_all()
    elif options.work == "score":
        anyio.run(score, settings)
    else:
        report = anyio.run(calibrate, settings)
        REPORT.write_text(report.model_dump_json(indent=1) + "\n")
        print(report)


if __name__ == "__main__":
    main()
