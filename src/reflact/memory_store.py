"""The memory that calibration keeps, as users open it: cards, pairs, tests and traces in one file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from reflact.calibration.scan import CachingScanner
from reflact.memory_cards import Scanner
from reflact.store.calibrations import SQLiteCalibrationStore
from reflact.store.cards import MAX_ACTIVE_CARDS, TimeSource, utc_now
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database
from reflact.store.exchange import SQLiteExportStore
from reflact.store.schema import SCHEMA
from reflact.store.traces import SQLiteTraceStore


class MemoryStore(SQLiteExportStore, SQLiteTraceStore, SQLiteCalibrationStore):
    """Memory cards and traces in a SQLite file, opened and closed by ``async with``, once.

    The file may be a run's own and may be shared by several processes: what one promotes, the next read of
    another finds.

    Args:
        path: The file; it and its folder are made where missing.
        active_cards: At most so many candidate, quarantined and promoted cards of each kind; beyond it the
            weakest are archived.
        scan: Looks at every text before it is stored; None: the rules that stand on the page on memory.
        clock: Gives the time of changes, with its time zone.
        patience: Seconds to wait for another process's lock.
        read_only: Write nothing to the file, which has to be there. If its folder cannot be written to, a
            copy is read. Methods that write raise.

    Raises:
        StoreError: On opening and from every method; says what is wrong with which file.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_active_cards: int = MAX_ACTIVE_CARDS,
        scan: Scanner | None = None,
        clock: TimeSource = utc_now,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        read_only: bool = False,
    ) -> None:
        database = Database(Path(path), SCHEMA, lock_timeout=lock_timeout, read_only=read_only)
        looks = CachingScanner() if scan is None else scan
        super().__init__(database, scan=looks, max_active_cards=max_active_cards, clock=clock)

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._database.__aexit__(kind, error, trace)
