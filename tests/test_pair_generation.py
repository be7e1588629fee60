"""Steps that no critic scored, as logs have them: recorded, kept, learned from by gold or by agreement."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pydantic import JsonValue

from contrast_world import PURPOSE, PlainCritic, event, generate
from memory_pairs import make_pair
from reflact import Calibrator, MemoryStore, Trace
from reflact.calibration.contrast import ContrastSettings, select_events
from reflact.calibration.critic import CriticReply
from reflact.calibration.mistakes import GenerationResult
from reflact.calibration.perturbations import DistanceBand, StepToContrast, build_pairs, find_reference
from reflact.concurrency import INLINE_LIMIT
from reflact.errors import DataError
from reflact.memory.cards import ScanFinding, compute_subject_hash
from reflact.memory.models import Action, ContrastPair, Label, ScoreEvent, StoredTrace, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.types import digest_json

pytestmark = pytest.mark.anyio

TRACES = sorted((Path(__file__).parent.parent / "fixtures" / "calibration" / "traces").rglob("*.jsonl"))


def unscored(
    step: int = 0, *, before: float = 2, after: float = 6, gold: bool = True, changed: bool = True
) -> ScoreEvent:
    """Return a step that no critic saw."""
    one = event(step, before=before, after=after, gold=gold, changed=changed)
    return one.model_copy(update={"evaluation": None})


def test_a_step_is_recorded_with_gold_alone_or_with_nothing(tmp_path: Path) -> None:
    """What a program knows needs no critic beside it, and a step that nobody judged is one as well."""
    trace = Trace(PURPOSE, path=tmp_path / "t.jsonl")
    step, gold = event().transition, Label(progress_before=2, progress_after=6, source="human")
    trace.record(step, None, label=gold)
    trace.record(step, label=gold)
    trace.record(step)
    found = [(e.evaluation, e.label) for e in Trace.load(tmp_path / "t.jsonl").events]
    assert found == [(None, gold), (None, gold), (None, None)]


def test_the_real_traces_are_written_as_they_stand(tmp_path: Path) -> None:
    """A file with scored steps that is read and recorded again is the same file, byte for byte."""
    assert TRACES
    for number, path in enumerate(TRACES):
        trace, again = Trace.load(path), tmp_path / f"{number}.jsonl"
        copy = Trace(trace.purpose, id=trace.id, path=again)
        for one in trace.events:
            assert one.evaluation is not None
            copy.record(one.transition, one.evaluation, label=one.label)
        copy.finish()
        assert again.read_bytes() == path.read_bytes(), path.name


async def test_a_memory_keeps_exports_and_imports_them(tmp_path: Path) -> None:
    """Steps with gold alone come back whole from a memory, and from an export of it."""
    trace = Trace(PURPOSE, id="t")
    for one in (unscored(0), unscored(1, gold=False)):
        trace.record(one.transition, label=one.label)
    async with MemoryStore(tmp_path / "a.db") as memory, MemoryStore(tmp_path / "b.db") as other:
        await trace.save_to(memory)
        gold = Label(progress_before=2, progress_after=5, source="human")
        await memory.label("t", 1, gold)
        await other.import_lines([line async for line in memory.export_lines()])
        stored = await other.trace("t")
    assert stored is not None
    assert [one.evaluation for one in stored.events] == [None, None]
    assert [one.label for one in stored.events] == [trace.events[0].label, gold]


# ------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("one", "chosen", "without_still"),
    [
        (unscored(after=2.5), True, True),
        (unscored(after=2.4), False, False),
        (unscored(after=2), True, False),
        (unscored(after=2.3, changed=False), True, False),
        (unscored(gold=False), True, True),
        (unscored(gold=False, changed=False), True, False),
    ],
)
def test_steps_are_selected_by_gold_or_because_they_changed(
    one: ScoreEvent, chosen: bool, without_still: bool
) -> None:
    """Gold says whether a step moved or stood still; without it, whether the states differ."""
    assert bool(select_events([one], ContrastSettings())) is chosen
    assert bool(select_events([one], ContrastSettings(include_no_change=False))) is without_still


# ------------------------------------------------------------------------------------------- pairs


def test_gold_alone_gives_all_perturbations() -> None:
    """What is right for the true step is wrong for each perturbed one; nothing was observed."""
    one = unscored()
    right = find_reference(one)
    assert right is not None
    pairs = build_pairs(StepToContrast(one, right, PURPOSE, "t", DistanceBand(1, 10)))
    found = {pair.construction: pair for pair in pairs}
    assert set(found) == {"no_effect", "claim_for_effect", "progress_reversed", "evidence_withdrawn"}
    assert all(b.wrong == right for b in found.values())
    assert right.reasoning == "It was at 2 before the action and is at 6 after it."
    assert right.evidence == ("chapters",)


async def test_gold_alone_makes_pairs_without_a_critic() -> None:
    """Every candidate of a step with gold becomes a pair, labelled by who gave the gold."""
    result = await generate(unscored())
    assert result.dropped == ()
    assert {pair.label_source for pair in result.pairs} == {"program"}
    assert "observed" not in {pair.construction for pair in result.pairs}


async def test_without_gold_samples_that_agree_make_pairs() -> None:
    """A step that nobody judged is labelled by agreement, and dropped where there is no critic to sample."""
    result = await generate(unscored(gold=False), critic=PlainCritic((2, 6)))
    assert {pair.label_source for pair in result.pairs} == {"agreement"}
    assert [drop.reason for drop in (await generate(unscored(gold=False))).dropped] == ["unverified"] * 4


# ------------------------------------------------------------------------------------------- purpose


@pytest.mark.parametrize("purpose", ["", "  \n\t"])
def test_a_trace_without_a_purpose_is_refused(tmp_path: Path, purpose: str) -> None:
    """Nothing can be scored that has no purpose; no file is left of the attempt."""
    with pytest.raises(DataError, match="say in words what the agent was to achieve"):
        Trace(purpose, path=tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize("read", [Trace.load, Trace.resume])
def test_a_file_without_a_purpose_says_so(tmp_path: Path, read: Callable[[Path], Trace]) -> None:
    """The error names the file and what to write where, and that is enough to read it."""
    path = tmp_path / "t.jsonl"
    Trace("Ship the order.", id="t", path=path).record(event().transition)
    lines = path.read_text(encoding="ascii").splitlines()
    header = json.dumps({**json.loads(lines[0]), "purpose": " "})
    path.write_text("\n".join([header, *lines[1:], ""]), encoding="ascii")
    with pytest.raises(DataError, match=r"t\.jsonl: the trace has no purpose; write into `purpose`"):
        read(path)
    path.write_text("\n".join([header.replace('" "', '"Ship it."'), *lines[1:], ""]), encoding="ascii")
    assert read(path).purpose == "Ship it."


def test_a_stored_trace_without_a_purpose_says_so() -> None:
    """What an older version stored is named by its id."""
    with pytest.raises(DataError, match="trace t is stored without a purpose"):
        Trace.from_stored(StoredTrace(id="t", purpose="", events=()))


# ---------------------------------------------------------------------------------------- whole rounds


def letters(run: str, *, gold: bool) -> Trace:
    """Return a run in which a letter is sorted at each of two steps, of which nobody scored any."""
    trace = Trace("Sort all ten letters.", id=run)
    for done in range(2):
        states = (f"Desk of {run}: {n} of 10 are sorted." for n in (done, done + 1))
        before, after = states
        step = Transition(before=before, action=Action(name="sort"), after=after)
        right = Label(progress_before=done, progress_after=done + 1, source="human")
        trace.record(step, label=right if gold else None)
    return trace


def counted(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    """Score states by the number in them; write no mistakes."""
    if reply_type is not CriticReply:
        return None
    question = prompt.messages[-1].content.rpartition("<purpose>")[2]
    before, after = (int(n) for n in re.findall(r"(\d+) of 10", question)[:2])
    return {
        "reasoning": f"{after} are sorted.",
        "evidence": ["are sorted"],
        "phi_before": before,
        "phi_after": after,
        "confidence": 0.9,
    }


async def test_labels_on_held_out_traces_are_enough_for_a_test(tmp_path: Path) -> None:
    """What is learned from needs no gold where samples agree, as long as the held-out traces have it."""
    learn = [letters(f"learn {n}", gold=False) for n in range(3)]
    labelled = [letters(f"held out {n}", gold=True) for n in range(20)]
    async with MemoryStore(tmp_path / "memory.db") as memory:
        calibrator = Calibrator(ScriptedLLM(counted), memory, n_judges=0)
        report = await calibrator.calibrate(learn, heldout=labelled)
        assert {one.pair.label_source for one in await memory.pairs()} == {"agreement"}
    assert (len(report.tests), report.tests[0].n_traces) == (1, 20)


async def test_without_any_gold_nothing_is_promoted(tmp_path: Path) -> None:
    """Pairs are made of what samples agree on, and wait: no trace is there that could test them."""
    async with MemoryStore(tmp_path / "memory.db") as memory:
        calibrator = Calibrator(ScriptedLLM(counted), memory, n_judges=0)
        report = await calibrator.calibrate(
            [letters(f"run {n}", gold=False) for n in range(8)], allow_untested=True
        )
        stored = await memory.pairs()
    assert stored
    assert {one.status for one in stored} == {"quarantined"}
    assert (report.tests, report.n_promoted, report.held_out.before) == ((), 0, None)
    assert report.not_tested_reason is not None
    assert "20" in report.not_tested_reason


async def test_gold_alone_calibrates_a_critic(tmp_path: Path) -> None:
    """Logs with a program's score and no critic's are learned from and tested on."""
    async with MemoryStore(tmp_path / "memory.db") as memory:
        calibrator = Calibrator(ScriptedLLM(counted), memory, n_judges=0)
        report = await calibrator.calibrate([letters(f"run {n}", gold=True) for n in range(110)])
        assert {one.pair.label_source for one in await memory.pairs()} == {"human"}
    assert len(report.tests) == 1
    assert report.held_out.before is not None
    assert report.held_out.before.error.value == 0


# ---------- long states


def longer(step: ScoreEvent, rows: int) -> ScoreEvent:
    """Return a step whose states have so many fields more, which do not change."""
    more: dict[str, JsonValue] = {f"row {n}": {"text": "some words"} for n in range(rows)}
    before, after = step.transition.before, step.transition.after
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    grown = Transition(before={**before, **more}, action=step.transition.action, after={**after, **more})
    return step.model_copy(update={"transition": grown})


class Where:
    """Known ids: none; remembers on which threads it was asked."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __contains__(self, pair_id: object) -> bool:
        self.threads.add(threading.get_ident())
        return False


@pytest.mark.parametrize("rows", [0, INLINE_LIMIT])
async def test_pairs_of_long_states_are_made_off_the_loop(rows: int) -> None:
    """Perturbed inputs and their ids are computed on another thread where states are long, else in place."""
    known = Where()
    made = await generate(*(longer(event(n), rows) for n in range(3)), known_pair_ids=known)
    assert made.pairs
    assert (known.threads != {threading.get_ident()}) is (rows > 0)


async def test_long_states_make_the_pairs_that_short_ones_make() -> None:
    """What does not change makes no difference to what is made of steps, and in which order."""
    few = await generate(*(event(n) for n in range(3)))
    many = await generate(*(longer(event(n), INLINE_LIMIT) for n in range(3)))

    def told(made: GenerationResult) -> list[object]:
        pairs = [
            (p.construction, p.mistake, p.right, p.wrong.progress_after, p.provenance) for p in made.pairs
        ]
        return [pairs, made.dropped, made.n_candidates]

    assert told(few) == told(many)


@pytest.mark.parametrize("rows", [0, INLINE_LIMIT])
async def test_pairs_of_long_states_are_scanned_off_the_loop(rows: int, tmp_path: Path) -> None:
    """A store looks at the texts of a long pair on another thread, at those of a short one in place."""
    threads: set[int] = set()

    def scan(texts: Iterable[str]) -> ScanFinding | None:
        threads.add(threading.get_ident())
        return None

    step = longer(event(), rows)
    pair = make_pair().model_copy(update={"transition": step.transition})
    async with MemoryStore(tmp_path / "memory.db", scan=scan) as store:
        assert (await store.submit(pair)).is_new
        assert (await store.pairs())[0].pair == pair
    assert (threads == {threading.get_ident()}) is (rows == 0)


def test_a_copy_has_the_hashes_of_what_it_holds() -> None:
    """A pair's id follows from its content, also where it is the changed copy of one whose id is known."""

    def id_of(pair: ContrastPair) -> str:
        names = {"purpose", "transition", "right", "wrong", "mistake", "scope"}
        fields = pair.model_dump(mode="json", include=names)
        return digest_json(fields | {side: getattr(pair, side).hashed_fields for side in ("right", "wrong")})

    pair, other = make_pair(), longer(event(), 3).transition
    assert pair.id == id_of(pair)
    changes: dict[str, object] = {
        "purpose": "another",
        "transition": other,
        "right": pair.wrong,
        "wrong": pair.right,
        "mistake": "mine",
        "scope": pair.scope.model_copy(update={"user": "me"}),
    }
    for name, value in changes.items():
        copied = pair.model_copy(update={name: value})
        assert copied.id == id_of(copied) != pair.id
        assert copied.hashes.subject == compute_subject_hash(copied.purpose, copied.transition)
    judged = pair.model_copy(update={"n_judgements": 2, "agreement": 1.0, "reason": "so"}, deep=True)
    assert judged.id == id_of(judged) == pair.id
    assert pair == ContrastPair.model_validate(pair.model_dump())
