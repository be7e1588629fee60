"""A store of calibrations that were begun: what each began with, and what came of it."""

from __future__ import annotations

from reflact.calibration_ports import StoredCalibration
from reflact.store.database import Database, Tables


class SQLiteCalibrationStore:
    """Implements ``calibration_ports.CalibrationStore`` on a database that several processes may share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Book a calibration, on disk when this returns; ``identity`` is equal for equal ones."""

        def book(tables: Tables) -> StoredCalibration:
            sql = "INSERT INTO calibrations (identity, baseline) VALUES (?, ?)"
            number = tables.execute(sql, (identity, baseline)).lastrowid
            return StoredCalibration(number=int(number or 0), baseline=baseline)

        return await self._database.write(book)

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        sql = (
            "SELECT number, baseline, result FROM calibrations WHERE identity = ? "
            "ORDER BY number DESC LIMIT 1"
        )
        found = await self._database.fetch_rows(sql, (identity,))
        return next(
            (
                StoredCalibration(number=number, baseline=baseline, result=result)
                for number, baseline, result in found
            ),
            None,
        )

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store what came of a calibration; of one that is over the first result stays."""
        sql = "UPDATE calibrations SET result = ? WHERE number = ? AND result IS NULL"

        def end(tables: Tables) -> None:
            tables.execute(sql, (result, number))

        await self._database.write(end)
