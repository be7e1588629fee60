"""The steps that an older run recorded: each once, in order."""

from __future__ import annotations

import re
from collections.abc import Collection

from reflact.errors import UsageError
from reflact.importing.reading import Fields, Folder

_STEP = re.compile(r"step_(\d{1,6})")


def read_history(folder: Folder) -> tuple[Fields, ...]:
    """Return the records of a run's steps, by number; of duplicates the last one.

    Without ``history.json`` the steps' own copies are read.

    Raises:
        UsageError: There are no steps, or one has no number; names the file.
    """
    entries = _entries(folder)
    last: dict[int, Fields] = {}
    for entry in entries:
        step = entry.count("step")
        if not step:
            raise UsageError(f"{entry.where} has no step number from 1 on; correct the file")
        last[step] = entry.called(f"history.json step {step}")
    if not last:
        raise UsageError(f"history.json in {folder.root} holds no steps, so there is nothing to import")
    dropped = len(entries) - len(last)
    if dropped:
        folder.remarks.add(f"history.json holds {dropped} duplicate steps; the last of each was taken.")
    _name_gaps(folder, last.keys())
    return tuple(last[step] for step in sorted(last))


def _entries(folder: Folder) -> tuple[Fields, ...]:
    recorded = folder.value("history.json")
    if isinstance(recorded, list):
        return Fields({"entry": recorded}, "history.json", folder.remarks).objects("entry")
    names = [f"steps/{name}/step_record.json" for name in folder.names("steps", _STEP)]
    entries = tuple(entry for name in names if (entry := folder.object(name)) is not None)
    if entries:
        folder.remarks.add(
            f"history.json is missing or holds no list; {len(entries)} files step_record.json were read."
        )
    return entries


def _name_gaps(folder: Folder, known: Collection[int]) -> None:
    for step in range(1, max(known)):
        if step not in known:
            folder.remarks.add(f"history.json lacks step {step}.")
    for name in folder.names("steps", _STEP):
        if int(name.removeprefix("step_")) not in known:
            folder.remarks.add(f"steps/{name} belongs to no step of history.json (it did not end); left out.")
