"""The corridor: what a run promises, whatever happens on the way."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from reflact import Trainer, events
from reflact.config.training import TrainerConfig
from reflact.errors import (
    CassetteError,
    ConfigError,
    DataError,
    ProviderDown,
    RunConflict,
    SkillError,
    UsageError,
)
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Session, Target
from reflact.records import RunState, RunSummary, StepRecord
from reflact.stages.reply_models import AnalystReply, MergeReply
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.trainer import evaluate_skill
from reflact.training.setup import Overrides
from reflact.types import FrozenModel, Skill, Split, Turn

pytestmark = pytest.mark.anyio


class Left(FrozenModel):
    """What the database holds of a run."""

    records: tuple[StepRecord, ...]
    events: tuple[events.Event, ...]
    state: RunState
    openings: int


def settings(folder: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a short toy run, with sections replaced in part."""
    plain: dict[str, Any] = {
        "train": {"batch_size": 4, "num_epochs": 2},
        "reflect": {"minibatch_size": 2},
        "select": {"max_edits": 1, "min_edits": 1},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return {"out_dir": folder, **plain}


def trainer(
    config: Mapping[str, Any], *, target: Target | None = None, script: Script | None = None
) -> Trainer:
    """Return a trainer in the toy world."""
    return Trainer(
        config,
        environment=ToyEnvironment(train=8, val=4, test=4),
        target=target or ToyTarget(),
        optimizer=ScriptedLLM(script or toy_optimizer()),
    )


async def left(folder: Path, run_id: str) -> Left:
    """Read what a run left."""
    async with open_store(folder / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT state FROM commits ORDER BY number DESC LIMIT 1", ())
        happened = await store.events(run_id)
        return Left(
            records=await store.records(run_id),
            events=happened,
            state=RunState.model_validate_json(rows[0][0]),
            openings=sum(isinstance(e, events.TestSplitOpened) for e in happened),
        )


class CountingTarget:
    """A toy target that notes what it was asked under which skill, and can be told to fail or stop.

    Args:
        lost: Messages for which the provider fails.
        stop_after: Answers after which ``stop`` is called.
        stop: What to do then.
    """

    def __init__(
        self, *, lost: tuple[str, ...] = (), stop_after: int = 0, stop: Callable[[], None] | None = None
    ) -> None:
        self._toy = ToyTarget()
        self.asked: list[tuple[str, str]] = []
        self._lost = lost
        self._stop_after = stop_after
        self._stop = stop

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _CountingSession(self._toy.session(skill, rollout=rollout), skill, self)

    def heard(self, skill: Skill, message: str) -> None:
        """Note a message, fail or stop."""
        if message in self._lost:
            raise ProviderDown(f"models.target: no answer to {message}")
        self.asked.append((skill.text, message))
        if self._stop is not None and len(self.asked) == self._stop_after:
            self._stop()


class _CountingSession:
    def __init__(self, inner: Session, skill: Skill, target: CountingTarget) -> None:
        self._inner = inner
        self._skill = skill
        self._target = target

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._inner.turns

    async def reply(self, message: str) -> str:
        self._target.heard(self._skill, message)
        await checkpoint()
        return await self._inner.reply(message)


async def broken_off(config: Mapping[str, Any], *, after: int, script: Script | None = None) -> int:
    """Train until the target has answered ``after`` times, cancel, and return the steps committed."""
    with anyio.CancelScope() as scope:
        target = CountingTarget(stop_after=after, stop=scope.cancel)
        await trainer(config, target=target, script=script).train()
    assert scope.cancelled_caught
    summary = RunSummary.model_validate_json((Path(config["out_dir"]) / "summary.json").read_text("utf-8"))
    assert summary.status == "cancelled"
    return summary.steps


def proposing_line(line: str) -> Script:
    """Return a script that plays the toy optimizer, but proposes one line for everything."""
    usual = toy_optimizer()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if issubclass(reply_type, AnalystReply | MergeReply):
            fields = reply_type.model_json_schema()["$defs"]
            edit = {"op": "append", "target": "", "content": line, "sources": [1]}
            (known,) = (f["properties"] for name, f in fields.items() if "content" in f["properties"])
            edits = [{k: v for k, v in edit.items() if k in known}]
            pattern = {"type": "t", "count": 1, "description": "d"}
            whole: dict[str, Any] = {"patterns": [pattern], "edits": edits}
            return {k: v for k, v in whole.items() if k in reply_type.model_fields}
        return usual(prompt, reply_type, call_id)  # type: ignore[return-value]

    return answer


# ---------------------------------------------------------------------------------- state and resuming


async def test_a_baseline_of_zero_stays_zero(tmp_path: Path) -> None:
    """A stored score of 0.0 is a score: it is not measured again and not replaced after a restart."""
    config = settings(tmp_path, gate={"policy": "strict"})
    await broken_off(config, after=6)
    target = CountingTarget()
    summary = await trainer(config, target=target).train()
    baseline = summary.score("baseline", Split.val)
    assert baseline is not None
    assert baseline.hard == 0.0
    left_behind = await left(tmp_path, summary.run_id)
    assert events.BaselineMeasured(run_id=summary.run_id, score=0.0, n=4) in left_behind.events
    assert left_behind.records[0].verdict.current_score == 0.0
    val = [i.input for i in ToyEnvironment(train=8, val=4, test=4).items(Split.val)]
    assert not [m for text, m in target.asked if text == "" and m in val]


@pytest.mark.parametrize("after", [2, 9, 15, 23, 30])
async def test_a_cancelled_run_goes_on_to_the_same_end(tmp_path: Path, after: int) -> None:
    """Step buffer, schedule and records of a run that was cut off are those of one that was not."""
    (tmp_path / "a").mkdir()
    sizes = {"max_edits": 3, "min_edits": 1}
    config = settings(tmp_path / "broken", select=sizes, train={"batch_size": 2})
    await broken_off(config, after=after)
    summary = await trainer(config).train()
    whole = await trainer({**config, "out_dir": tmp_path / "whole"}).train()
    assert summary.run_id == whole.run_id
    assert await left(tmp_path / "broken", whole.run_id) == await left(tmp_path / "whole", whole.run_id)
    assert summary.scores == whole.scores


async def test_the_step_buffer_survives(tmp_path: Path) -> None:
    """An analyst that is asked after a restart within the epoch is told of the epoch's earlier steps."""
    config = settings(tmp_path, train={"batch_size": 2, "num_epochs": 1})
    steps = await broken_off(config, after=18, script=proposing_line("- nonsense"))
    assert 0 < steps < 4
    optimizer = ScriptedLLM(proposing_line("- nonsense"))
    environment = ToyEnvironment(train=8, val=4, test=4)
    await Trainer(config, environment=environment, target=ToyTarget(), optimizer=optimizer).train()
    first = optimizer.calls[0]
    assert first.call_id.step == steps + 1
    assert f"step {steps}: 2 of 2 cases failed" in first.prompt.messages[1].content


async def test_the_schedule_is_a_function_of_the_step(tmp_path: Path) -> None:
    """Neither steps without a candidate nor a restart shift the edit budget."""
    sizes = {"max_edits": 4, "min_edits": 1, "scheduler": "linear"}
    config = settings(tmp_path, select=sizes, train={"batch_size": 2, "num_epochs": 1})
    await broken_off(config, after=12, script=proposing_line("- nonsense"))
    summary = await trainer(config, script=proposing_line("- nonsense")).train()
    records = (await left(tmp_path, summary.run_id)).records
    assert [r.chosen.budget for r in records] == [4, 3, 2, 1]
    assert "no_change" in {r.verdict.action for r in records}


async def test_a_longer_run_keeps_its_steps(tmp_path: Path) -> None:
    """Raising num_epochs goes on after the last committed step and opens the test split once more."""
    short = await trainer(settings(tmp_path, train={"num_epochs": 1})).train()
    before = (await left(tmp_path, short.run_id)).records
    longer = await trainer(settings(tmp_path, train={"num_epochs": 3})).train()
    assert longer.run_id == short.run_id
    after = (await left(tmp_path, short.run_id)).records
    assert after[: len(before)] == before
    assert (len(before), len(after)) == (2, 6)
    assert longer.steps == 6
    assert (short.test_openings, longer.test_openings) == (1, 2)


async def test_a_finished_run_asks_nothing_again(tmp_path: Path) -> None:
    """Starting a completed run again returns the same summary without a call."""
    config = settings(tmp_path)
    first = await trainer(config).train()
    target, optimizer = CountingTarget(), ScriptedLLM(toy_optimizer())
    environment = ToyEnvironment(train=8, val=4, test=4)
    again = await Trainer(config, environment=environment, target=target, optimizer=optimizer).train()
    assert (target.asked, optimizer.calls) == ([], [])
    unlike = {"seconds", "stages", "reuse", "surplus"}
    assert again.model_dump(exclude=unlike) == first.model_dump(exclude=unlike)


# ------------------------------------------------------------------------------------------- decisions


async def test_an_equal_candidate_costs_nothing(tmp_path: Path) -> None:
    """Edits that change nothing, or lead to a document rejected before, are neither measured nor accepted."""
    config = settings(tmp_path, slow_update={"enabled": False})
    target = CountingTarget()
    summary = await trainer(config, target=target, script=proposing_line("- nonsense")).train()
    actions = [r.verdict.action for r in (await left(tmp_path, summary.run_id)).records]
    assert actions == ["reject", "no_change", "no_change", "no_change"]
    assert (summary.accepts, summary.rejects, summary.skips) == (0, 1, 3)
    val = {i.input for i in ToyEnvironment(train=8, val=4, test=4).items(Split.val)}
    assert sum(message in val for text, message in target.asked if "nonsense" in text) == 4
    assert summary.best is not None
    assert summary.best.number == 0


async def test_no_proposals_is_an_ordinary_step(tmp_path: Path) -> None:
    """A step whose analysts propose nothing is committed as such."""

    def silent(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return "nothing of use"

    summary = await trainer(settings(tmp_path), script=silent).train()
    records = (await left(tmp_path, summary.run_id)).records
    assert {r.verdict.action for r in records} == {"no_patches"}
    assert all(report.no_reply_reason for r in records for report in r.reports)
    assert summary.status == "completed"


async def test_without_a_gate_everything_is_accepted(tmp_path: Path) -> None:
    """Where the gate is off candidates are measured and accepted, and the best is still the best measured."""
    summary = await trainer(settings(tmp_path, gate={"enabled": False})).train()
    records = (await left(tmp_path, summary.run_id)).records
    assert {r.verdict.action for r in records} <= {"force_accept", "no_change", "no_patches"}
    assert summary.best is not None
    assert summary.final is not None
    assert summary.best.score == max(r.verdict.candidate_score or 0 for r in records)
    assert summary.best.number > 0


# ------------------------------------------------------------------------------------------- providers


async def test_a_dead_provider_fails_the_run(tmp_path: Path) -> None:
    """A provider that never answers ends the run as failed with the reason; it is no lack of improvement."""
    items = ToyEnvironment(train=8, val=4, test=4)
    lost = tuple(str(i.input) for split in Split for i in items.items(split))
    summary = await trainer(settings(tmp_path), target=CountingTarget(lost=lost)).train()
    assert summary.status == "failed"
    assert "no answer to" in str(summary.reason)
    assert summary.best is None
    assert summary.steps == 0
    assert (await trainer(settings(tmp_path)).train()).status == "completed"


async def test_an_optimizer_that_dies_fails_the_run(tmp_path: Path) -> None:
    """A provider error of the optimizer commits nothing of its step, and the run can go on."""

    def dead(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return ProviderDown("models.optimizer cannot be reached")

    summary = await trainer(settings(tmp_path), script=dead).train()
    assert (summary.status, summary.reason) == ("failed", "models.optimizer cannot be reached")
    assert summary.steps == 0
    assert (await trainer(settings(tmp_path)).train()).steps == 4


async def test_unmeasured_items_are_no_zeros(tmp_path: Path) -> None:
    """Items that the provider failed are left out of means, failures and minibatches, and are noted."""
    train = ToyEnvironment(train=8, val=4, test=4).items(Split.train)
    target = CountingTarget(lost=(str(train[0].input), str(train[1].input)))
    summary = await trainer(settings(tmp_path, train={"batch_size": 8}), target=target).train()
    assert summary.status == "completed"
    for record in (await left(tmp_path, summary.run_id)).records:
        assert record.rollout.unmeasured == (train[0].id, train[1].id)
        assert record.rollout.n == 6
        assert not {train[0].id, train[1].id} & {i for report in record.reports for i in report.item_ids}


async def test_too_few_measured_items_decide_nothing(tmp_path: Path) -> None:
    """A validation split below the coverage ends the run as failed, never as a decision."""
    val = ToyEnvironment(train=8, val=4, test=4).items(Split.val)
    target = CountingTarget(lost=(str(val[0].input),))
    summary = await trainer(settings(tmp_path), target=target).train()
    assert summary.status == "failed"
    assert "only 3 of 4 rollouts could be measured" in str(summary.reason)


async def test_a_wrong_key_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 401 ends the run at once as failed, and the reason says which variable to set, not its value."""
    monkeypatch.setenv("SOME_KEY", "swordfish")
    sent: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(401, json={"error": {"message": "wrong key"}})

    model = {"model": "m", "base_url": "http://nowhere.test/v1", "api_key_env": "SOME_KEY"}
    config = settings(tmp_path, models={"target": model}, train={"rollout_concurrency": 1})
    environment = ToyEnvironment(train=8, val=4, test=4)
    summary = await Trainer(config, environment=environment, transport=httpx.MockTransport(refuse)).train()
    assert summary.status == "failed"
    assert "SOME_KEY" in str(summary.reason)
    assert "swordfish" not in summary.model_dump_json()
    assert len(sent) == 1


# ---------------------------------------------------------------------------------- folders and exports


async def test_exports_match_the_database(tmp_path: Path) -> None:
    """best_skill.md, the versions and summary.json hold what the database holds, and come back if lost."""
    config = settings(tmp_path)
    summary = await trainer(config).train()
    async with open_store(tmp_path / "run.db") as store:
        versions = await store.versions(summary.run_id)
        texts = {v.number: (await store.skill(v.skill_hash)).text for v in versions}
        stored = await store.summary(summary.run_id)
    files = {f"v{n:04}.md": text for n, text in texts.items()}
    assert len(files) > 2
    assert {p.name: p.read_text("utf-8") for p in (tmp_path / "skills").iterdir()} == files
    assert summary.best is not None
    assert (tmp_path / "best_skill.md").read_text("utf-8") == texts[summary.best.number]
    assert RunSummary.model_validate_json((tmp_path / "summary.json").read_text("utf-8")) == stored == summary

    for path in [*(tmp_path / "skills").iterdir(), tmp_path / "best_skill.md"]:
        path.unlink()
    (tmp_path / "skills" / ".v0001.md.part").write_text("half", encoding="utf-8")
    await trainer(config).train()
    assert {p.name: p.read_text("utf-8") for p in (tmp_path / "skills").iterdir()} == files
    assert (tmp_path / "best_skill.md").is_file()


async def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    """Another configuration in a run's folder is refused before any call, naming the keys that differ."""
    first = await trainer(settings(tmp_path)).train()
    target = CountingTarget()
    with pytest.raises(RunConflict, match=r"train\.batch_size was 4 and is now 2"):
        await trainer(settings(tmp_path, train={"batch_size": 2}), target=target).train()
    assert target.asked == []
    again = await trainer(settings(tmp_path)).train()
    assert again.run_id == first.run_id


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """While another process works in the folder, a trainer says so and does nothing."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom reflact.store.lock import lock_run\n"
        "with lock_run(Path(sys.argv[1])):\n    sys.stdout.write('held')\n"
        "    sys.stdout.flush()\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    async with await anyio.open_process(command, stderr=None) as holder:
        assert holder.stdout is not None
        assert await holder.stdout.receive() == b"held"
        with pytest.raises(RunConflict, match=f"process {holder.pid}"):
            await trainer(settings(tmp_path)).train()
        holder.kill()
    assert (await trainer(settings(tmp_path)).train()).status == "completed"


# ------------------------------------------------------------------------------------ the sealed split


async def test_the_test_split_is_sealed(tmp_path: Path) -> None:
    """No test item is rolled out before the last step is committed, and the opening is counted once."""
    config = settings(tmp_path)
    test = {str(i.input) for i in ToyEnvironment(train=8, val=4, test=4).items(Split.test)}
    target = CountingTarget()
    summary = await trainer(config, target=target).train()
    opened = [message in test for _, message in target.asked]
    assert any(opened)
    first = opened.index(True)
    train_or_val = [n for n, is_test in enumerate(opened) if not is_test]
    assert max(train_or_val) < first
    assert summary.test_openings == 1
    assert (await trainer(config).train()).test_openings == 1
    assert (await left(tmp_path, summary.run_id)).openings == 1


async def test_the_test_split_may_stay_closed(tmp_path: Path) -> None:
    """With test.enabled false no test item is rolled out and no opening counted."""
    test = {str(i.input) for i in ToyEnvironment(train=8, val=4, test=4).items(Split.test)}
    target = CountingTarget()
    summary = await trainer(settings(tmp_path, test={"enabled": False}), target=target).train()
    assert not [message for _, message in target.asked if message in test]
    assert summary.test_openings == 0
    assert {s.split for s in summary.scores} == {Split.val}


# -------------------------------------------------------------------------------------------- streaming


async def test_a_stream_ends_with_the_summary(tmp_path: Path) -> None:
    """Plain iteration gives the durable events in the stored order, and Finished last."""
    toy = trainer(settings(tmp_path))
    happened = [event async for event in toy.stream()]
    last = happened[-1]
    assert isinstance(last, events.RunFinished)
    assert last.summary.status == "completed"
    durable = tuple(event for event in happened if event.durable)
    assert durable == (await left(tmp_path, toy.run_id)).events


async def test_leaving_a_stream_cancels_the_run(tmp_path: Path) -> None:
    """A break inside ``async with`` ends the run before the block is left; it can go on."""
    config = settings(tmp_path)
    async with trainer(config).stream() as stream:
        async for event in stream:
            if isinstance(event, events.StepCommitted):
                break
    assert json.loads((tmp_path / "summary.json").read_text("utf-8"))["status"] == "cancelled"
    summary = await trainer(config).train()
    assert (summary.status, summary.steps) == ("completed", 4)


async def test_a_bare_break_cancels_the_run(tmp_path: Path) -> None:
    """After a plain break the run is cancelled as soon as the loop finalises the iterator."""
    config = settings(tmp_path)
    async for event in trainer(config).stream():
        if isinstance(event, events.StepCommitted):
            break
    gc.collect()
    summary = None
    with anyio.fail_after(5):
        while summary is None:
            with suppress(RunConflict):
                summary = await trainer(config).train()
            await checkpoint()
    assert summary.status == "completed"
    async with open_store(tmp_path / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT count(*) FROM commits WHERE kind = 'step'", ())
    assert rows == [(4,)]


async def test_an_error_of_the_consumer_harms_nothing(tmp_path: Path) -> None:
    """An exception inside the loop comes out as it is, and the run goes on to the same end."""
    config = settings(tmp_path / "broken")

    async def consume() -> None:
        async with trainer(config).stream() as stream:
            async for event in stream:
                if isinstance(event, events.AnalystReported):
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()
    summary = await trainer(config).train()
    await trainer({**config, "out_dir": tmp_path / "whole"}).train()
    assert await left(tmp_path / "broken", summary.run_id) == await left(tmp_path / "whole", summary.run_id)


# -------------------------------------------------------------------------------------------- bad input


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


async def refused(config: Mapping[str, Any], error: type[UsageError | CassetteError]) -> str:
    """Return the one sentence with which a run is refused; nothing may be sent."""

    def unexpected(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"a request was sent: {request.url}")

    with pytest.raises(error) as refusal:
        await Trainer(config, transport=httpx.MockTransport(unexpected)).train()
    message = str(refusal.value)
    assert "\n" not in message
    return message


@pytest.fixture
def usable(tmp_path: Path) -> dict[str, Any]:
    """A configuration that would send requests."""
    for split in Split:
        row = json.dumps({"id": f"{split}-1", "input": f"{split} 1", "reference": "a"})
        _written(tmp_path / "data" / split / "items.jsonl", row + "\n")
    return {
        "out_dir": tmp_path / "run",
        "data": {"path": tmp_path / "data"},
        "models": {"target": {"model": "m", "base_url": "http://nowhere.test/v1", "api_key_env": None}},
    }


async def test_a_missing_skill_is_one_sentence(usable: dict[str, Any], tmp_path: Path) -> None:
    """A skill document that is not there is named."""
    assert "none.md" in await refused({**usable, "skill": tmp_path / "none.md"}, SkillError)


async def test_malformed_data_is_one_sentence(usable: dict[str, Any], tmp_path: Path) -> None:
    """A damaged line of a data file is named with its place."""
    _written(tmp_path / "data" / "val" / "items.jsonl", '{"id": "v"\n')
    assert "items.jsonl" in await refused(usable, DataError)


@pytest.mark.parametrize(("text", "words"), [(None, "c.jsonl"), ("no JSON\n", "c.jsonl")])
async def test_a_bad_cassette_is_one_sentence(
    usable: dict[str, Any], tmp_path: Path, text: str | None, words: str
) -> None:
    """A cassette that is missing or damaged is named."""
    if text is not None:
        _written(tmp_path / "c.jsonl", text)
    assert words in await refused({**usable, "replay": {"cassette": tmp_path / "c.jsonl"}}, CassetteError)


async def test_a_missing_model_is_one_sentence(usable: dict[str, Any]) -> None:
    """A role without a model is named."""
    assert "models.target.model" in await refused({**usable, "models": {}}, ConfigError)


async def test_a_missing_key_is_one_sentence(usable: dict[str, Any]) -> None:
    """An environment variable that holds no key is named."""
    usable["models"]["target"]["api_key_env"] = "REFLACT_NO_SUCH_KEY"
    assert "REFLACT_NO_SUCH_KEY" in await refused(usable, ConfigError)


async def test_measuring_a_document_leaves_the_run_as_it_ended(tmp_path: Path) -> None:
    """An evaluation in a completed run's folder changes neither its status nor its configuration."""
    config = settings(tmp_path)
    await trainer(config).train()
    passed = Overrides(ToyEnvironment(train=8, val=4, test=4), ToyTarget(), ScriptedLLM(toy_optimizer()))
    changed = {**config, "train": {**config["train"], "num_epochs": 3}}
    await evaluate_skill(changed, Skill(text="- another"), Split.val, overrides=passed)
    async with open_store(tmp_path / "run.db") as store:
        (row,) = await store.runs()
    assert row.status == "completed"
    assert TrainerConfig.model_validate(row.config).train.num_epochs == 2
