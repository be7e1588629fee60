"""Data sets: reading, splitting, checking, and the plan of an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.config.fields import FieldsConfig
from reflact.data import (
    DataSet,
    check_dataset,
    count_steps_per_epoch,
    describe_near_copies,
    load_dataset,
    make_rng,
    plan_epoch,
    read_rows,
    shuffle,
)
from reflact.errors import DataError
from reflact.types import Item, Split

ids = st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=40).map(sorted)
sizes = st.integers(1, 12)
Row = dict[str, object]

TRAIN_OF_SEED_42 = ["q1", "q3", "q7", "q9"]
FINGERPRINT_OF_SEED_42 = "4fb6ec2fa2ecba6052669c6b38382bc15a46d8b00090324cea655447d6d28897"
FIRST_OF_EPOCH = 0.10841202207341205
SHUFFLE_OF_TEN = (8, 7, 6, 4, 3, 0, 2, 5, 9, 1)
PLAN_OF_SEVEN = ["dg", "fe", "ac", "b", "af", "fg"]


def _rows(n: int, prefix: str = "q") -> list[Row]:
    return [{"id": f"{prefix}{k}", "input": f"{prefix} question {k}"} for k in range(n)]


def _write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(row) for row in rows) + "\n"
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")
    return path


def _set(train: list[Row], val: list[Row], test: list[Row]) -> DataSet:
    return DataSet.model_validate({"train": train, "val": val, "test": test})


def _counts(dataset: DataSet) -> tuple[int, ...]:
    return tuple(len(dataset.items(split)) for split in Split)


def test_a_folder_holds_its_splits_as_files_or_folders(tmp_path: Path) -> None:
    _write(tmp_path / "train" / "part.jsonl", _rows(3, "a"))
    _write(tmp_path / "selection.json", _rows(2, "b"))
    _write(tmp_path / "valid_unseen" / "x.json", _rows(1, "c"))
    (tmp_path / "train" / "README.md").write_text("about", encoding="utf-8")
    dataset = load_dataset(tmp_path, "2:1:7")
    assert _counts(dataset) == (3, 2, 1)
    assert [item.id for item in dataset.train] == ["a0", "a1", "a2"]


def test_items_keep_all_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    row = '{"id": "ä", "input": {"q": [1, null]}, "task_type": "sum", "reference": [3.5]}'
    path.write_text(f'\ufeff\n{row}\r\n\n{{"id": "b", "input": "x\u2028y"}}', encoding="utf-8")
    first = Item(id="ä", input={"q": [1, None]}, task_type="sum", reference=[3.5])
    assert load_dataset(path, "1:0:0").train == (first, Item(id="b", input="x\u2028y"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"id": "a", "input": 1}\n\nnope', r"a.jsonl row 3 is not valid JSON"),
        ("a.json", '[{"input": 1, "refrence": 2}]', "no column 'reference'; .*reference: refrence"),
        ("a.json", '[{"id": "a", "input": null}]', "row 1: the column 'input', which is the input, is empty"),
        ("a.json", '[{"id": "a", "input": NaN}]', "NaN is not a JSON number"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"input": 1}\n{"input": 2, "m": {"b": 1, "b": 2}}', "a.jsonl row 2 .* name 'b' twice"),
        ("a.csv", "sep=;\nid;input\na\n", "a.csv row 3: it has 1 cells, but the header has 2"),
        ("a.csv", "id,input,id\na,b,c\n", r"a.csv row 1: the header has 'id' more than once"),
    ],
)
def test_malformed_files_are_one_sentence(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=words) as error:
        load_dataset(tmp_path / name, "2:1:7")
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_ambiguous_splits_are_errors(tmp_path: Path) -> None:
    _write(tmp_path / "train.json", _rows(1))
    with pytest.raises(DataError, match=r"has no val split: looked for val or validation or "):
        load_dataset(tmp_path, "2:1:7")
    _write(tmp_path / "val.json", _rows(1))
    _write(tmp_path / "selection.json", _rows(1))
    with pytest.raises(DataError, match=r"more than one val split: val.json, selection.json"):
        load_dataset(tmp_path, "2:1:7")
    (tmp_path / "selection.json").unlink()
    for name in ("a.json", "b.json"):
        _write(tmp_path / "test" / name, _rows(1))
    with pytest.raises(
        DataError, match=r"exactly one .json, .jsonl or .csv file; it contains a.json, b.json"
    ):
        load_dataset(tmp_path, "2:1:7")


@pytest.mark.parametrize(
    ("n", "ratio", "counts"),
    [
        *[
            (10, "2:1:7", (2, 1, 7)),
            (4, "2:1:7", (1, 0, 3)),
            (7, "1:1:1", (3, 2, 2)),
            (5, "0:1:0", (0, 5, 0)),
        ],
        *[(3, None, (1, 1, 1)), (10, None, (3, 3, 4)), (120, None, (40, 40, 40)), (200, None, (40, 40, 120))],
        *[(399, None, (79, 40, 280)), (400, None, (80, 40, 280)), (1000, None, (200, 100, 700))],
    ],
)
def test_one_file_is_split_by_its_ratio_or_its_size(
    tmp_path: Path, n: int, ratio: str | None, counts: tuple[int, ...]
) -> None:
    path = _write(tmp_path / "all.jsonl", _rows(n))
    dataset = load_dataset(path, ratio)
    assert _counts(dataset) == counts
    assert {item.id for split in Split for item in dataset.items(split)} == {f"q{k}" for k in range(n)}
    with pytest.raises(DataError, match="is not train:val:test in whole numbers"):
        load_dataset(path, "0:0:0")


def test_the_split_depends_on_the_items_alone(tmp_path: Path) -> None:
    rows = _rows(10)
    dataset = load_dataset(_write(tmp_path / "a.jsonl", rows), "4:3:3")
    turned = load_dataset(_write(tmp_path / "b.jsonl", rows[::-1]), "4:3:3")
    assert [set(turned.items(s)) for s in Split] == [set(dataset.items(s)) for s in Split]
    assert [item.id for item in dataset.train] == TRAIN_OF_SEED_42
    assert dataset.fingerprint == FINGERPRINT_OF_SEED_42


@pytest.mark.parametrize(
    "row", [{"id": "a", "input": "x", "reference": "y"}, {"input": "x", "reference": "y"}]
)
def test_repeated_items_name_their_rows(tmp_path: Path, row: Row) -> None:
    """An id is used for one item, and an item is in one split."""
    first = _rows(1)
    other = [{**row, "task_type": "other"}] if "id" in row else []
    path = _write(tmp_path / "train.jsonl", [row, *first, *other])
    if not other:
        _write(tmp_path / "val.jsonl", [row, *first])
    words = "the item id 'a' is used 2 times" if other else "the same item is in the data 2 times"
    with pytest.raises(DataError, match=rf"{words}: .*row 1, .*row [13]; (ids must|keep one)"):
        load_dataset(path if other else tmp_path, None, needs_test=False)


def test_a_person_is_told_of_copies_and_contradictions(tmp_path: Path) -> None:
    """Equal rows are one item; two answers to one input are told; rows without one may be left out."""
    rows: list[Row] = [{"input": f"{n}?", "reference": str(n)} for n in range(3)]
    rows += [rows[0], {"input": "1 ?", "reference": "2"}, {"input": "1?", "reference": "3"}, {"input": "9?"}]
    path = _write(tmp_path / "all.jsonl", rows)
    dataset = load_dataset(path, "1:1:0", skip_unanswered=True)
    assert sum(_counts(dataset)) == 5
    copies, unanswered, contradiction = dataset.notes
    assert copies == f"{path} row 4 repeats an earlier row and counts once"
    assert unanswered.startswith(f"{path} row 7 has no right answer and is left out")
    assert contradiction.startswith(
        f"{path} row 2 and {path} row 6 have the same input and two right answers"
    )
    assert sum(_counts(load_dataset(path, "1:1:0"))) == 6


def test_a_chat_is_an_item(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Count."}
    ask = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    more = [{"role": "user", "content": "And 1?"}, {"role": "assistant", "content": "3"}]
    path = _write(tmp_path / "chats.jsonl", [{"messages": [system, *ask]}, {"messages": [*ask, *more]}])
    one, two = load_dataset(path, "1:1:0").train + load_dataset(path, "1:1:0").val
    assert {(str(item.input), str(item.reference)) for item in (one, two)} == {
        ("1 + 1", "2"),
        ("user: 1 + 1\n\nassistant: 2\n\nuser: And 1?", "3"),
    }
    assert {str(item.metadata.get("system")) for item in (one, two)} == {"Count.", "None"}


def test_fields_name_the_columns_and_others_are_metadata(tmp_path: Path) -> None:
    fields = FieldsConfig(id="nr", input="ask", reference="gold", task_type="level")
    row: Row = {"nr": 7, "ask": "x", "gold": [1], "level": 3, "source": {"page": 2}}
    path = _write(tmp_path / "all.jsonl", [row])
    (item,) = load_dataset(path, "1:0:0", fields=fields).train
    expected = Item(id="7", input="x", reference=[1], task_type="3", metadata={"source": {"page": 2}})
    assert item == expected
    with pytest.raises(DataError, match=r"row 1: there is no column 'q', which data.fields.input names; its"):
        load_dataset(path, "1:0:0", fields=FieldsConfig(input="q"))


def test_csv_rows_are_items(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text(';question;answer;level\r\n0;"a;\r\nb";1;\r\n\r\n1;c;2;hard\r\n', encoding="utf-8-sig")
    first, second = load_dataset(path, "1:0:0").train
    assert (first.input, first.reference, first.metadata) == ("a;\r\nb", "1", {"level": None})
    assert (second.input, second.reference, second.metadata) == ("c", "2", {"level": "hard"})
    assert len({first.id, second.id}) == 2


def test_near_copies_stay_together_and_are_counted_if_they_do_not(tmp_path: Path) -> None:
    forms = ("Which Q{}?", " which  q{}?", "WHICH Q{}?\n")
    rows: list[Row] = [{"question": forms[n // 20].format(n % 20), "answer": n} for n in range(60)]
    dataset = load_dataset(_write(tmp_path / "all.jsonl", rows), None)
    assert describe_near_copies(dataset) is None
    check_dataset(dataset)
    turned = load_dataset(_write(tmp_path / "b.jsonl", rows[::-1]), None)
    assert [set(turned.items(s)) for s in Split] == [set(dataset.items(s)) for s in Split]
    assert sum(_counts(dataset)) == 60
    near = [{"id": "t", "input": "Q  Question 0 "}, {"id": "u", "input": "another"}]
    warning = describe_near_copies(_set(_rows(1), _rows(1, "v"), near))
    assert warning is not None
    assert warning.startswith("1 of 2 test items")


def test_a_test_split_may_be_absent(tmp_path: Path) -> None:
    _write(tmp_path / "train.json", _rows(2))
    _write(tmp_path / "val.json", _rows(2, "v"))
    with pytest.raises(DataError, match=r"has no test split: .*set test.enabled: false"):
        load_dataset(tmp_path, None)
    dataset = load_dataset(tmp_path, None, needs_test=False)
    check_dataset(dataset)
    assert _counts(dataset) == (2, 2, 0)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ((_rows(1), [], _rows(3, "t")), r"the val split is empty \(train 1, val 0, test 3\)"),
        ((_rows(2), _rows(1), _rows(1, "t")), r"the item id 'q0' is used twice \(in train and val\)"),
        (([*_rows(1), {"id": "q0", "input": 0}], _rows(1, "v"), []), r"twice \(in train\)"),
        (
            (_rows(1), _rows(1, "v"), [{"id": "t", "input": "q question 0"}]),
            "items 'q0' in train and 't' in test have the same input",
        ),
    ],
)
def test_unfit_data_is_refused(splits: tuple[list[Row], list[Row], list[Row]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_dataset(_set(*splits))


def test_random_numbers_are_pinned() -> None:
    assert [make_rng(42, "epoch").random() for _ in range(2)] == [FIRST_OF_EPOCH] * 2
    assert make_rng(42, "other").random() != FIRST_OF_EPOCH
    assert shuffle(range(10), 42, "epoch") == SHUFFLE_OF_TEN


def test_plans_are_pinned() -> None:
    plan = plan_epoch("abcdefg", epoch=1, seed=42, batch_size=2, accumulation=3)
    assert ["".join(batch) for step in plan for batch in step] == PLAN_OF_SEVEN
    assert plan_epoch("abcdefg", epoch=2, seed=42, batch_size=2, accumulation=3) != plan


@given(ids, st.integers(0, 9), st.integers(), sizes, st.integers(1, 4))
def test_every_item_is_dealt_once_an_epoch(
    ids: list[str], epoch: int, seed: int, batch_size: int, accumulation: int
) -> None:
    plan = plan_epoch(ids, epoch=epoch, seed=seed, batch_size=batch_size, accumulation=accumulation)
    turned = plan_epoch(ids[::-1], epoch=epoch, seed=seed, batch_size=batch_size, accumulation=accumulation)
    assert turned == plan
    assert len(plan) == count_steps_per_epoch(len(ids), batch_size, accumulation)
    assert all(len(step) == accumulation for step in plan)
    batches = [batch for step in plan for batch in step]
    dealt = -(-len(ids) // batch_size)
    assert sorted(item for batch in batches[:dealt] for item in batch) == ids
    assert all(len(batch) == batch_size for batch in batches[: dealt - 1])
    assert all(len(set(batch)) == len(batch) == min(batch_size, len(ids)) for batch in batches[dealt:])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('"a, b, or c";reference\nq;1\n', "row 2"),
        ('\n\n"input, the task"\treference\nq\t1\n', "row 4"),
        ('"sep=|"\ninput, a;b|reference\nq|1\n', "row 3"),
    ],
)
def test_the_separator_of_a_file_is_found(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "items.csv"
    path.write_text(text, encoding="utf-8")
    (row,) = read_rows(path)
    assert (list(row.value.values()), row.where) == (["q", "1"], f"{path} {place}")


@pytest.mark.parametrize("form", ["folder", "column", "lists"])
@pytest.mark.parametrize("name", ["val", "validation", "dev"])
def test_splits_have_the_names_of_others(tmp_path: Path, form: str, name: str) -> None:
    parts = {split: _rows(n, split) for n, split in ((3, "train"), (2, name), (1, "test"))}
    path = tmp_path / "data.json"
    if form == "folder":
        path = tmp_path
        for split, rows in parts.items():
            _write(tmp_path / f"{split}.json", rows)
    elif form == "lists":
        path.write_text(json.dumps(parts), encoding="utf-8")
    else:
        _write(path, [{**row, "split": split.title()} for split, rows in parts.items() for row in rows])
    assert _counts(load_dataset(path, None)) == (3, 2, 1)
