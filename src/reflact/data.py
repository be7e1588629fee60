"""Data sets: reading, splitting and checking them, and the plan of an epoch.

A data set is a folder or a file. A folder contains ``train``, ``val`` and ``test``, each as a ``.json`` or
``.jsonl`` file, or as a folder with exactly one such file. A single file is split by a ratio. A ``.json`` file
is a list of items, a ``.jsonl`` file has one item a line. Items have the fields of ``Item``.

All randomness derives from a seed and a label, and is the same in every Python version.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from reflact.errors import DataError
from reflact.types import FrozenModel, Item, Split, digest_json

T = TypeVar("T")

Batch = tuple[str, ...]
"""The ids of the items of a batch."""

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    Split.train: ("train",),
    Split.val: ("val", "valid_seen", "selection"),
    Split.test: ("test", "valid_unseen"),
}
"""The names of each split; the first one is its own, the others are aliases."""

MAX_SHOWN_ROWS = 4
"""The number of rows with the same id that an error names."""

_SUFFIXES = (".json", ".jsonl")


class DataSet(FrozenModel):
    """Items in three splits, each in a fixed order."""

    train: tuple[Item, ...]
    val: tuple[Item, ...]
    test: tuple[Item, ...]

    def items(self, split: Split) -> tuple[Item, ...]:
        """Return a split's items."""
        return {Split.train: self.train, Split.val: self.val, Split.test: self.test}[split]

    @property
    def fingerprint(self) -> str:
        """Hash of all items with their splits and order, 64 hexadecimal digits."""
        return digest_json({split.value: [item.fingerprint for item in self.items(split)] for split in Split})


def load_dataset(path: Path, ratio: str, split_seed: int) -> DataSet:
    """Read a data set; ``check_dataset`` checks that it is fit for a run.

    A single file is split by ``ratio``, rounded by largest remainders. Each ``task_type`` is spread over the
    splits in the same proportion, within one or two items. The assignment depends on the items and the seed,
    not on the order of the rows. Within a split, items keep the file's order.

    Args:
        path: The folder or file.
        ratio: train:val:test for a single file, such as ``2:1:7``; ignored for a folder.
        split_seed: Seed of the split of a single file.

    Raises:
        DataError: Something is missing, ambiguous or malformed; names the file and the row.
    """
    try:
        if path.is_dir():
            read = {split: _read_rows(_find_split(path, split)) for split in Split}
            _check_ids([row for rows in read.values() for row in rows])
            parts = {split: tuple(item for _, item in rows) for split, rows in read.items()}
        elif path.is_file():
            rows = _read_rows(path)
            _check_ids(rows)
            parts = _split_items([item for _, item in rows], _parse_ratio(ratio), split_seed)
        else:
            raise DataError(
                f"there is no data at {path}: give a folder with train, val and test, or one file"
            )
    except OSError as error:
        raise DataError(f"cannot read the data {error.filename or path}: {error.strerror or error}") from None
    return DataSet(train=parts[Split.train], val=parts[Split.val], test=parts[Split.test])


def check_dataset(dataset: DataSet, train_size: int | None = None) -> None:
    """Check that a data set is fit for a run.

    Args:
        dataset: The data set.
        train_size: Expected number of train items; None: any number.

    Raises:
        DataError: A split is empty, an id is repeated, two splits have the same input, or the train size differs.
    """
    for split in Split:
        if not dataset.items(split):
            sizes = ", ".join(f"{s.value} {len(dataset.items(s))}" for s in Split)
            raise DataError(f"the {split.value} split is empty ({sizes}): add items or change data.ratio")
    split_items = [(split, item) for split in Split for item in dataset.items(split)]
    item_id, times = Counter(item.id for _, item in split_items).most_common(1)[0]
    if times > 1:
        where = ", ".join(dict.fromkeys(split.value for split, item in split_items if item.id == item_id))
        raise DataError(f"the item id {item_id!r} is used {times} times (in {where}): ids must be unique")
    first: dict[str, tuple[Split, Item]] = {}
    for split, item in split_items:
        other_split, other = first.setdefault(digest_json(item.input), (split, item))
        if other_split is not split:
            raise DataError(
                f"items {other.id!r} in {other_split.value} and {item.id!r} in {split.value} have the same "
                "input: keep it in one split only"
            )
    if train_size is not None and train_size != len(dataset.train):
        raise DataError(
            f"data.train_size is {train_size}, but the train split has {len(dataset.train)} items: "
            "correct the number or leave it out"
        )


def make_rng(seed: int, label: str) -> random.Random:
    """Return the generator of a seed and a label; different labels are independent.

    Use only its ``random()``, which gives the same numbers in every Python version.
    """
    text = f"{seed}/{label}".encode("utf-8", "surrogatepass")
    return random.Random(int.from_bytes(hashlib.sha256(text).digest()))  # noqa: S311 - plans, not secrets


def shuffle(values: Iterable[T], seed: int, label: str) -> tuple[T, ...]:
    """Return the values in the random order of a seed and a label (Fisher and Yates, Durstenfeld's form)."""
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

    The ids are shuffled with seed ``seed + 1000 * epoch`` and dealt in order. Each is dealt once, and all
    batches except the last are full. Further batches of the last step are each dealt from a new shuffle. The
    plan does not depend on the order of ``ids``.

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
    return tuple(tuple(batches[step * accumulation : (step + 1) * accumulation]) for step in range(steps))


def _find_split(folder: Path, split: Split) -> Path:
    names = SPLIT_NAMES[split]
    paths = [folder / name for name in names if (folder / name).is_dir()]
    paths += [p for name in names for end in _SUFFIXES if (p := folder / f"{name}{end}").is_file()]
    if not paths:
        wanted = " or ".join(f"{name}, {name}.json, {name}.jsonl" for name in names)
        raise DataError(f"{folder} has no {split.value} split: looked for {wanted}")
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths)
        raise DataError(f"{folder} has more than one {split.value} split: {listed}; keep one")
    if paths[0].is_file():
        return paths[0]
    files = sorted(path for path in paths[0].iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if len(files) != 1:
        listed = ", ".join(path.name for path in files) or "none"
        raise DataError(f"{paths[0]} must contain exactly one .json or .jsonl file; it contains {listed}")
    return files[0]


def _check_ids(rows: Sequence[tuple[str, Item]]) -> None:
    """Check that no id is repeated; the error names the rows, each given with its file."""
    places: dict[str, list[str]] = {}
    for where, item in rows:
        places.setdefault(item.id, []).append(where)
    for item_id, found in places.items():
        if len(found) > 1:
            shown = ", ".join(found[:MAX_SHOWN_ROWS])
            more = f" and {len(found) - MAX_SHOWN_ROWS} more" if len(found) > MAX_SHOWN_ROWS else ""
            raise DataError(
                f"the item id {item_id!r} is used {len(found)} times: {shown}{more}; ids must be unique"
            )


def _read_rows(path: Path) -> tuple[tuple[str, Item], ...]:
    """Return the items of a file, each with its file and row."""
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path}: a data file ends in .json or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the data file {path} is not UTF-8 text: {error.reason}") from None
    if path.suffix == ".jsonl":
        lines = {f"{path} row {n}": line for n, line in enumerate(text.split("\n"), start=1)}
        return tuple(
            (where, _parse_item(_parse(line, where), where)) for where, line in lines.items() if line.strip()
        )
    rows = _parse(text, str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of items, found {_type_name(rows)}")
    places = {f"{path} row {n}": row for n, row in enumerate(rows, start=1)}
    return tuple((where, _parse_item(row, where)) for where, row in places.items())


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise DataError(f"{where} is not readable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_item(row: Any, where: str) -> Item:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with id and input, found {_type_name(row)}")
    fields = list(Item.model_fields)
    for name in row:
        if name not in fields:
            hint = _nearest(name, fields)
            raise DataError(f"{where}: unknown field {name!r}{hint}; the fields are {', '.join(fields)}")
    if _has_lone_surrogate(row):
        raise DataError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not text")
    try:
        return Item.model_validate(row)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"][:1])
        message = "is missing" if problem["type"] == "missing" else f"is wrong: {problem['msg']}"
        raise DataError(f"{where}: the field {field!r} {message}") from None


def _has_lone_surrogate(value: Any) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False))


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _parse_ratio(ratio: str) -> tuple[int, ...]:
    shares = tuple(map(int, ratio.split(":"))) if re.fullmatch("[0-9]+:[0-9]+:[0-9]+", ratio) else ()
    if not any(shares):
        raise DataError(f"the ratio {ratio!r} is not train:val:test in whole numbers, such as 2:1:7")
    return shares


def _split_items(items: Sequence[Item], shares: Sequence[int], seed: int) -> dict[Split, tuple[Item, ...]]:
    groups: dict[str, list[int]] = {}
    for n in sorted(range(len(items)), key=lambda n: items[n].fingerprint):
        groups.setdefault(items[n].task_type or "", []).append(n)
    order = [n for name in sorted(groups) for n in shuffle(groups[name], seed, f"split/{name}")]
    split_of = dict(zip(order, _deal_splits(len(items), shares), strict=True))
    return {split: tuple(item for n, item in enumerate(items) if split_of[n] is split) for split in Split}


def _deal_splits(n: int, shares: Sequence[int]) -> Iterator[Split]:
    """Return n splits in the proportion of the shares, each spread evenly over the sequence."""
    exact = [Fraction(n * share, sum(shares)) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda k: (sizes[k] - exact[k], k))
    for k in by_remainder[: n - sum(sizes)]:
        sizes[k] += 1
    positions = [(Fraction(2 * j + 1, 2 * size), k) for k, size in enumerate(sizes) for j in range(size)]
    return (list(Split)[k] for _, k in sorted(positions))
