"""Data sets: reading, splitting and checking them, and the plan of an epoch.

A data set is a folder with ``train``, ``val`` and mostly ``test``, each a ``.json``, ``.jsonl`` or
``.csv`` file or a folder with one, or a single file, which is split by a ratio or by its size.
All randomness derives from a seed and a label, and is the same in every Python version.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import Field, JsonValue, ValidationError

from reflact.config.fields import (
    DEFAULT_COLUMNS,
    FIELD_NAMES,
    FieldsConfig,
    read_result,
    unfold_articles,
    unfold_columns,
    unfold_row,
)
from reflact.config.loading import LARGE_RATIO
from reflact.errors import DataError
from reflact.jsonutil import build_object
from reflact.skill_evals import unfold_case
from reflact.text import suggest_path
from reflact.types import FrozenModel, Item, Split, canonical_json, digest_json

T = TypeVar("T")

# The ids of the items of a batch.
Batch = tuple[str, ...]

# The seed of the split of a single file: another one would make other runs of the same data.
SPLIT_SEED = 42

# The names of each split; the first one is its own, the others are aliases.
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    Split.train: ("train",),
    Split.val: ("val", "validation", "valid", "dev", "valid_seen", "selection"),
    Split.test: ("test", "valid_unseen"),
}

_SPLITS_BY_NAME = {name: split for split, names in SPLIT_NAMES.items() for name in names}

# The endings of data files.
SUFFIXES = (".json", ".jsonl", ".csv")

# The number of columns, and of rows, that an error names.
MAX_SHOWN_COLUMNS = 12
MAX_SHOWN_ROWS = 4

# The items of train and validation split, before the test split of a file gets most.
USEFUL_SIZE = 40


class FileItem(NamedTuple):
    """An item, and the file and row that it was read from."""

    item: Item
    where: str


class FileRow(NamedTuple):
    """A row of a data file, and the file and row in words."""

    value: Any
    where: str


class DataSet(FrozenModel):
    """Items in three splits, each in a fixed order."""

    train: tuple[Item, ...]
    val: tuple[Item, ...]
    test: tuple[Item, ...]
    rows: Mapping[str, str] = Field(default={}, repr=False)
    """The file and row of each item, by id; empty if the items were not read from files."""
    notes: tuple[str, ...] = Field(default=(), repr=False)
    """What a person should know of the files, a sentence each."""

    def items(self, split: Split) -> tuple[Item, ...]:
        """Return a split's items."""
        return {Split.train: self.train, Split.val: self.val, Split.test: self.test}[split]

    @property
    def fingerprint(self) -> str:
        """Hash of all items with their splits and order, 64 hexadecimal digits."""
        return digest_json(
            {split.value: [item.fingerprint for item in self.items(split)] for split in Split}
        )


class _FileItems(NamedTuple):
    """The items of a data file, and what was left out of it, a sentence each."""

    items: list[FileItem]
    notes: tuple[str, ...]


def load_dataset(
    path: Path,
    ratio: str | None,
    *,
    fields: FieldsConfig | None = None,
    needs_test: bool = True,
    skip_unanswered: bool = False,
) -> DataSet:
    """Read a data set; ``check_dataset`` checks that it is fit for a run.

    A single file is split by ``ratio``, rounded by largest remainders, or else by its column
    ``split``, such as ``validation``, or by ``choose_shares``. Each ``task_type`` is spread over
    the splits in the same proportion, within one or two items, but items with the same input stay
    in one split, also if white space and case differ. The assignment depends on the items alone,
    not on the order of the rows. Within a split, items keep the file's order. Rows of a file that
    are equal are one item.

    Args:
        path: The folder or file.
        ratio: train:val:test for a single file, such as ``2:1:7``; None: by its size.
        fields: The columns of the fields of items.
        needs_test: Whether a folder must have a test split.
        skip_unanswered: Whether rows without a right answer are left out.

    Raises:
        DataError: Something is missing, ambiguous, repeated or malformed; names the file and row.
    """
    fields = fields or FieldsConfig()
    try:
        if path.is_dir():
            files = {split: _find_split(path, split, needs_test=needs_test) for split in Split}
            read = {
                split: _read_file(file, fields, skip_unanswered=skip_unanswered)
                for split, file in files.items()
                if file
            }
            parts = {split: part.items for split, part in read.items()}
            rows = [row for part in parts.values() for row in part]
            notes = [note for part in read.values() for note in part.notes]
        elif path.is_file():
            rows, found = _read_file(path, fields, skip_unanswered=skip_unanswered)
            parts = _split_rows(rows, ratio)
            notes = [*found]
        else:
            raise DataError(
                f"there is no data at {path}: give a folder with train, val and test, or one file"
                f"{suggest_path(path)}"
            )
    except OSError as error:
        raise DataError(
            f"cannot read the data {error.filename or path}: {error.strerror or error}"
        ) from None
    _check_ids(rows)
    items = {split.value: tuple(row.item for row in parts.get(split, ())) for split in Split}
    notes += _describe_contradictions(rows)
    return DataSet(**items, rows={row.item.id: row.where for row in rows}, notes=tuple(notes))


def choose_shares(n: int) -> tuple[int, ...]:
    """Return the sizes of train, validation and test for a single file without a ratio.

    Train and validation get ``USEFUL_SIZE`` items each, or a third of the file if that is less.
    From 400 items on, the ratio is 2:1:7, which gives validation at least as many. Two items are
    one for each of the first two.
    """
    if n == len(TRAINING_SPLITS):
        return 1, 1, 0
    least = min(USEFUL_SIZE, n // 3)
    if n >= 10 * USEFUL_SIZE:
        return _parse_ratio(LARGE_RATIO)
    train = max(least, n // 5)
    return train, least, n - train - least


def _check_ids(rows: Sequence[FileItem]) -> None:
    """Check that no id is repeated; the error names the rows of the first one that is."""
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(row.item.id, []).append(row.where)
    for row in rows:
        same = places[row.item.id]
        if len(same) > 1:
            problem = f"the item id {row.item.id!r} is used {len(same)} times"
            advice = "ids must be unique"
            if has_made_id(row.item):
                problem = f"the same item is in the data {len(same)} times"
                advice = "keep one of them"
            raise DataError(f"{problem}: {list_first(same, MAX_SHOWN_ROWS)}; {advice}")


def list_first(texts: Sequence[str], most: int) -> str:
    """Return the first texts of a list in one, with the number of those that are left out."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


# The splits that a training needs; a measurement needs only its own.
TRAINING_SPLITS = (Split.train, Split.val)


def check_dataset(dataset: DataSet, needed: Sequence[Split] = TRAINING_SPLITS) -> None:
    """Check that a data set is fit for a run.

    Raises:
        DataError: A needed split is empty, an id is repeated, or two splits have the same input.
    """
    for split in needed:
        if not dataset.items(split):
            sizes = ", ".join(f"{s.value} {len(dataset.items(s))}" for s in Split)
            raise DataError(
                f"the {split.value} split is empty ({sizes}): add items or change data.ratio"
            )
    splits_by_id: dict[str, Split] = {}
    items_by_input: dict[str, tuple[Split, Item]] = {}
    for split in Split:
        for item in dataset.items(split):
            if item.id in splits_by_id:
                where = " and ".join(dict.fromkeys((splits_by_id[item.id].value, split.value)))
                raise DataError(
                    f"the item id {item.id!r} is used twice (in {where}); give each its own id"
                )
            splits_by_id[item.id] = split
            where = digest_json(item.input)
            other_split, other = items_by_input.setdefault(where, (split, item))
            if other_split is not split:
                raise DataError(
                    f"items {other.id!r} in {other_split.value} and {item.id!r} in {split.value} "
                    "have the same input: keep it in one split only"
                )


def _fold_input(item: Item) -> str:
    """Return an item's input as text, without differences of white space and case."""
    text = item.input if isinstance(item.input, str) else canonical_json(item.input)
    return " ".join(text.split()).casefold()


def describe_near_copies(dataset: DataSet) -> str | None:
    """Return a warning about test items whose inputs are in another split too, if any."""
    others = {_fold_input(item) for split in TRAINING_SPLITS for item in dataset.items(split)}
    n = sum(_fold_input(item) in others for item in dataset.test)
    if not n:
        return None
    return (
        f"{n} of {len(dataset.test)} test items have an input that is in train or val too, but for "
        "white space and case; remove them, because they flatter the result of the test"
    )


def _read_file(path: Path, fields: FieldsConfig, *, skip_unanswered: bool) -> _FileItems:
    """Return the items of a data file in its order, equal ones once."""
    items: dict[str, FileItem] = {}
    repeated: list[FileItem] = []
    copies: list[str] = []
    unanswered: list[str] = []
    faults = []
    for row in read_rows(path, fields):
        try:
            item = build_item(row.value, fields, row.where)
        except DataError as error:
            faults.append(str(error))
            continue
        if skip_unanswered and item.reference in (None, ""):
            unanswered.append(row.where)
            continue
        first = items.setdefault(item.id, FileItem(item, row.where))
        if first.where != row.where and (has_made_id(item) or first.item == item):
            copies.append(row.where)
        elif first.where != row.where:
            repeated.append(FileItem(item, row.where))
    if len(faults) > 1 and items:  # a fault of every row is one of the whole file
        faults[0] += f"; {len(faults) - 1} more rows have errors"
    if faults:
        raise DataError(faults[0])
    if not items:
        raise DataError(f"{path} has no items; add a row for each task")
    notes = (
        ("repeats an earlier row and counts once", copies),
        ("has no right answer and is left out (data.skip_unanswered)", unanswered),
    )
    words = tuple(_describe_rows(rows, what) for what, rows in notes if rows)
    return _FileItems([*items.values(), *repeated], words)


def _describe_rows(rows: Sequence[str], what: str) -> str:
    """Return what holds for rows, in a sentence about the first one."""
    more = "" if len(rows) == 1 else f"; {len(rows) - 1} more rows are alike"
    return f"{rows[0]} {what}{more}"


def _describe_contradictions(rows: Sequence[FileItem]) -> list[str]:
    """Return a sentence about rows with the same input and two right answers, if there are any."""
    answers: dict[str, dict[str, str]] = {}
    for row in rows:
        known = answers.setdefault(_fold_input(row.item), {})
        known.setdefault(canonical_json(row.item.reference), row.where)
    wheres = [[*known.values()] for known in answers.values() if len(known) > 1]
    if not wheres:
        return []
    same = " and ".join(wheres[0][:2])
    more = "" if len(wheres) == 1 else f"; {len(wheres) - 1} more inputs are alike"
    return [f"{same} have the same input and two right answers, so one of them is wrong{more}"]


def read_rows(path: Path, fields: FieldsConfig | None = None) -> tuple[FileRow, ...]:
    """Return the rows of a data file; unless ``fields`` names columns, cases are read as items.

    Rows count from 1. In a ``.csv`` file, the header is row 1, and empty cells are null. For cases
    see ``skill_evals``.

    Raises:
        DataError: The file is malformed.
        OSError: The file cannot be read.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path}: the name of a data file must end in .csv, .json or .jsonl; rename or convert "
            "the file"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the data file {path} is not UTF-8 text: {error.reason}; save it as UTF-8"
        ) from None
    if path.suffix == ".csv":
        return tuple(_read_csv_rows(text, path))
    if path.suffix == ".jsonl":
        lines = {f"{path} row {n}": line for n, line in enumerate(text.split("\n"), start=1)}
        rows = [
            FileRow(_parse(line, where), where) for where, line in lines.items() if line.strip()
        ]
        return _unfold_cases(rows, path, fields)
    value = _parse(text or "[]", str(path))
    is_eval = isinstance(value, dict) and "evals" in value
    listed = enumerate(unfold_articles(_find_list(value, path)), start=1)
    rows = [FileRow(row, f"{path} row {n}") for n, row in listed]
    return _unfold_cases(rows, path, fields, is_eval=is_eval)


def _unfold_cases(
    rows: Sequence[FileRow], path: Path, fields: FieldsConfig | None, *, is_eval: bool = False
) -> tuple[FileRow, ...]:
    if fields is not None and (fields.input, fields.reference) != (None, None):
        return tuple(rows)
    return tuple(
        FileRow(unfold_case(row, path, where, is_eval=is_eval), where) for row, where in rows
    )


def _find_list(value: Any, path: Path) -> list[Any]:
    """Return the rows of a JSON file: a list, or the list or the lists of splits of an object."""
    if isinstance(value, list):
        return value
    entries = value if isinstance(value, dict) else {}
    lists = {name: part for name, part in entries.items() if isinstance(part, list) and part}
    if len(lists) == 1:
        return next(iter(lists.values()))
    if lists and entries.keys() <= _SPLITS_BY_NAME.keys():
        rows = []
        for name, part in lists.items():
            rows += [{"split": name, **row} if isinstance(row, dict) else row for row in part]
        return rows

    advice = ""
    if lists:
        advice = f"; save one of its lists ({', '.join(map(repr, lists))}) as a file of its own"
    raise DataError(f"{path}: expected a list of items, found {_type_name(value)}{advice}")


def build_item(row: Any, fields: FieldsConfig, where: str) -> Item:
    """Return the item of a row.

    A field of the item is the column that ``fields`` names, or one of ``DEFAULT_COLUMNS``; a
    question has its ``context`` before it. Of an answer that ends in a line ``#### 42`` the result
    counts. A row without an id gets a digest of its input and reference. All other columns are
    metadata.

    Raises:
        DataError: A field is missing or wrong.
    """
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected an object with an input, found {_type_name(row)}; write each item "
            'as {"input": ..., "reference": ...}'
        )
    if fields.input is None:
        row = unfold_row(row)
    row = unfold_columns(row, [name for name in fields.model_dump().values() if name is not None])
    if _has_lone_surrogate(row):
        raise DataError(
            f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not text; remove it"
        )
    columns = _find_columns(row, fields, where)
    values: dict[str, Any] = {name: row[column] for name, column in columns.items()}
    metadata = {name: value for name, value in row.items() if name not in columns.values()}
    if columns["input"] == "question" and fields.input is None and row.get("context") is not None:
        values["input"] = _join_context(metadata.pop("context"), row["question"])
    if values["input"] is None:
        raise DataError(
            f"{where}: the column {columns['input']!r}, which is the input, is empty; fill it in "
            "or remove the row"
        )
    values["reference"] = read_result(values.get("reference"))
    for name in ("id", "task_type"):
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            values[name] = str(values[name])
    if isinstance(own := metadata.get("metadata"), dict):
        del metadata["metadata"]
        metadata |= own
    values["metadata"] = metadata
    values["task_type"] = values.get("task_type") or None
    made_id = values.get("id") is None
    if made_id:
        values["id"] = "-"
    try:
        item = Item.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        raise DataError(
            f"{where}: the field {field!r} (column {columns.get(field, field)!r}) is wrong: "
            f"{problem['msg']}"
        ) from None
    if made_id:
        item = item.model_copy(update={"id": make_id(item.input, item.reference)})
    return item


def make_id(task: JsonValue, reference: JsonValue) -> str:
    """Return the id of an item that has none, from its content."""
    return digest_json([task, reference])[:12]


def has_made_id(item: Item) -> bool:
    """Whether the id of an item was made from its content, so that it tells a reader nothing."""
    return item.id == make_id(item.input, item.reference)


def make_rng(seed: int, label: str) -> random.Random:
    """Return the generator of a seed and a label; different labels are independent.

    Use only its ``random()``, which gives the same numbers in every Python version.
    """
    text = f"{seed}/{label}".encode("utf-8", "surrogatepass")
    return random.Random(int.from_bytes(hashlib.sha256(text).digest()))  # noqa: S311 - plans, not secrets


def shuffle(values: Iterable[T], seed: int, label: str) -> tuple[T, ...]:
    """Return the values in the random order of a seed and a label (Durstenfeld's shuffle)."""
    order = list(values)
    generator = make_rng(seed, label)
    for last in range(len(order) - 1, 0, -1):
        other = int(generator.random() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def count_steps_per_epoch(n_train: int, batch_size: int, accumulation: int = 1) -> int:
    """Return the number of steps of an epoch: ``ceil(n_train / (batch_size * accumulation))``."""
    if n_train < 1 or batch_size < 1 or accumulation < 1:
        raise ValueError("an epoch needs items, a batch size and an accumulation of at least 1")
    return -(-n_train // (batch_size * accumulation))


def plan_epoch(
    ids: Iterable[str], *, epoch: int, seed: int, batch_size: int, accumulation: int = 1
) -> tuple[tuple[Batch, ...], ...]:
    """Return the steps of an epoch, each a tuple of ``accumulation`` batches of ids.

    The ids are shuffled with seed ``seed + 1000 * epoch`` and dealt in order. Each is dealt once,
    and all batches except the last are full. Further batches of the last step are each dealt from a
    new shuffle. The plan does not depend on the order of ``ids``.

    Raises:
        ValueError: There are no ids, ids are repeated, or a size is not positive.
    """
    sorted_ids = sorted(ids)
    if len(set(sorted_ids)) != len(sorted_ids):
        raise ValueError("a plan needs distinct ids")
    steps = count_steps_per_epoch(len(sorted_ids), batch_size, accumulation)
    epoch_seed = seed + 1000 * epoch
    order = shuffle(sorted_ids, epoch_seed, "epoch")
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    while len(batches) < steps * accumulation:
        refill = shuffle(sorted_ids, epoch_seed, f"refill/{len(batches)}")
        batches.append(refill[:batch_size])
    return tuple(
        tuple(batches[step * accumulation : (step + 1) * accumulation]) for step in range(steps)
    )


def _find_split(folder: Path, split: Split, *, needs_test: bool) -> Path | None:
    """Return the file of a split, which may be the only data file in a folder of that name."""
    names = SPLIT_NAMES[split]
    paths = [folder / name for name in names if (folder / name).is_dir()]
    files = [folder / f"{name}{end}" for name in names for end in SUFFIXES]
    paths += [file for file in files if file.is_file()]
    if not paths and split is Split.test and not needs_test:
        return None
    if not paths:
        spare = ""
        if split is Split.test:
            spare = "; to train without one, set test.enabled: false"
        elif len(others := _list_data_files(folder)) == 1:
            spare = f"; to split a single file, name the file: {others[0]}"
        raise DataError(
            f"{folder} has no {split.value} split: looked for {' or '.join(names)}, each a folder "
            f"or with .json, .jsonl or .csv{spare}"
        )
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths)
        raise DataError(f"{folder} has more than one {split.value} split: {listed}; keep one")
    if paths[0].is_file():
        return paths[0]
    inside = _list_data_files(paths[0])
    if len(inside) != 1:
        listed = ", ".join(path.name for path in inside) or "none"
        raise DataError(
            f"{paths[0]} must contain exactly one .json, .jsonl or .csv file; it contains {listed}"
        )
    return inside[0]


def _list_data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)


def _parse_ratio(ratio: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]+:[0-9]+:[0-9]+", ratio) or not re.search("[1-9]", ratio):
        raise DataError(
            f"the ratio {ratio!r} is not train:val:test in whole numbers, such as 2:1:7"
        )
    return tuple(map(int, ratio.split(":")))


def _split_rows(rows: Sequence[FileItem], ratio: str | None) -> dict[Split, list[FileItem]]:
    """Deal the rows of a single file to the splits; within a split they keep their order."""
    splits = _read_splits(rows) if ratio is None else None
    if splits is None:
        shares = choose_shares(len(rows)) if ratio is None else _parse_ratio(ratio)
        splits = _draw_splits([row.item for row in rows], shares)
    parts: dict[Split, list[FileItem]] = {split: [] for split in Split}
    for row, split in zip(rows, splits, strict=True):
        parts[split].append(row)
    return parts


def _read_splits(rows: Sequence[FileItem]) -> list[Split] | None:
    """Return the splits that a column ``split`` names; None unless it names that of each row."""
    splits = []
    for row in rows:
        split = _SPLITS_BY_NAME.get(str(row.item.metadata.get("split")).lower())
        if split is None:
            return None
        splits.append(split)
    return splits if set(TRAINING_SPLITS) <= set(splits) else None


def _draw_splits(items: Sequence[Item], shares: Sequence[int]) -> list[Split]:
    """Return the split of each item, drawn by its content within its task type."""
    groups: dict[str, list[int]] = {}
    for n in sorted(range(len(items)), key=lambda n: items[n].fingerprint):
        groups.setdefault(items[n].task_type or "", []).append(n)
    order = [
        n for name in sorted(groups) for n in shuffle(groups[name], SPLIT_SEED, f"split/{name}")
    ]
    splits = dict(zip(order, _deal_splits(len(items), shares), strict=True))
    split_by_input: dict[str, Split] = {}
    for n in order:
        splits[n] = split_by_input.setdefault(_fold_input(items[n]), splits[n])
    return [splits[n] for n in range(len(items))]


def _deal_splits(n: int, shares: Sequence[int]) -> Iterator[Split]:
    """Return n splits in the proportion of the shares, each spread evenly over the sequence."""
    exact = [Fraction(n * share, sum(shares)) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda k: (sizes[k] - exact[k], k))
    for k in by_remainder[: n - sum(sizes)]:
        sizes[k] += 1
    positions = [
        (Fraction(2 * j + 1, 2 * size), k) for k, size in enumerate(sizes) for j in range(size)
    ]
    return (list(Split)[k] for _, k in sorted(positions))


def _find_columns(row: Mapping[str, Any], fields: FieldsConfig, where: str) -> dict[str, str]:
    """Return the columns of the fields of an item; those of optional fields may be missing."""
    listed = f"its columns are {list_first([*row], MAX_SHOWN_COLUMNS) or 'none'}"
    columns: dict[str, str] = {}
    for name in FIELD_NAMES:
        column = getattr(fields, name)
        if column is not None and column not in row:
            alike = difflib.get_close_matches(column.lower(), [name.lower() for name in row], n=1)
            meant = "".join(f"did you mean {name!r}? " for name in row if name.lower() in alike)
            raise DataError(
                f"{where}: there is no column {column!r}, which data.fields.{name} names; "
                f"{meant}{listed}"
            )
        for usual in DEFAULT_COLUMNS[name] if column is None else (column,):
            if usual in row:
                columns.setdefault(name, usual)
    free = [name for name in row if name not in columns.values() and name != "metadata"]
    for name in FIELD_NAMES[1:]:
        near = next(iter(difflib.get_close_matches(name, free, n=1, cutoff=0.8)), None)
        if name not in columns and (near is not None or name == "input"):
            raise DataError(
                f"{where}: there is no column {name!r}; name yours: data.fields.{name}: "
                f"{near or 'COLUMN'} ({listed})"
            )
    return columns


def _join_context(context: Any, question: Any) -> JsonValue:
    if isinstance(context, list) and all(isinstance(part, str) for part in context):
        context = "\n\n".join(context)
    if isinstance(context, str) and isinstance(question, str):
        return f"{context}\n\nQuestion: {question}" if context.strip() else question
    return {"context": context, "question": question}


def _read_csv_rows(text: str, path: Path) -> Iterator[FileRow]:
    named = re.match(r'"?sep=(.)"?\r?\n', text)  # a line that spreadsheets write and read
    first_row = 1
    if named is None:
        head = re.sub('"[^"]*"', "", text.lstrip("\r\n")).partition("\n")[0]
        delimiter = max(",;\t|", key=head.count)
    else:
        delimiter = named[1]
        text = text[named.end() :]
        first_row = 2
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    row = 0
    try:
        for row, cells in enumerate(reader, start=first_row):
            where = f"{path} row {row}"
            if not any(cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                if repeated := sorted({name for name in header if name and header.count(name) > 1}):
                    raise DataError(
                        f"{where}: the header has {repeated[0]!r} more than once; rename one of "
                        "these columns"
                    )
            elif len(cells) != len(header):
                raise DataError(
                    f"{where}: it has {len(cells)} cells, but the header has {len(header)}; "
                    "correct the row"
                )
            else:
                yield FileRow(
                    {n: c or None for n, c in zip(header, cells, strict=True) if n}, where
                )
    except csv.Error as error:
        raise DataError(
            f"{path} row {row + 1} is not valid CSV: {error}; close its quotation marks, or save "
            "the data as .jsonl"
        ) from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=build_object)
    except RecursionError:
        raise DataError(f"{where} is not readable JSON: it is nested too deeply") from None
    except ValueError as error:
        advice = ""
        if "Extra data" in str(error) and "\n" in text.strip():
            advice = "; if each line is an item, rename the file to end in .jsonl"
        elif text.startswith("[") and "\n" not in text:
            advice = "; if the file is a list, rename it to end in .json"
        raise DataError(f"{where} is not valid JSON: {error}{advice}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _has_lone_surrogate(value: Any) -> bool:
    return any(
        "\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False)
    )


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names[type(None)] = "null"
    return names.get(type(value), "a number")
