"""Write the demo's data: text-to-SQL questions over two real tables.

The tables come from the PyPI package ``vega-datasets`` 0.9.0, unchanged but for the choice
of rows (United States airports) and columns and the spelling of dates (``YYYY-MM-DD``).
The questions are templates filled with values of those tables; each reference is a query. Nothing
is random but the order, which a fixed seed decides: two runs write the same bytes.

    pip install vega-datasets==0.9.0
    python scripts/prepare_demo_data.py [--out fixtures/demo/data]

What makes the task a test of a skill document: how an answer must look (one bare SQLite
query) and how the tables spell things (two-letter states, five words for the weather,
dates as text) is in no question; a skill has to say it.

Written: ``tables/airports.csv``, ``tables/weather.csv`` and ``{train,val,test}/items.json``,
arrays of ``{"id", "input", "task_type", "reference"}``; the reference is a query. No question is in
two splits, and each split has the same share of every kind of question.
"""

from __future__ import annotations

import argparse
import csv
import importlib.resources
import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

SEED = 20
SIZES = {"train": 56, "val": 40, "test": 80}
TABLES = {
    "airports": ("iata", "name", "city", "state", "latitude", "longitude"),
    "weather": ("date", "precipitation", "temp_max", "temp_min", "wind", "weather"),
}
NUMERIC = {"latitude", "longitude", "precipitation", "temp_max", "temp_min", "wind"}
STATES = {
    "AL": "Alabama",
    "AK": "Alaska",
    "AZ": "Arizona",
    "AR": "Arkansas",
    "CA": "California",
    "CO": "Colorado",
    "CT": "Connecticut",
    "DE": "Delaware",
    "FL": "Florida",
    "GA": "Georgia",
    "HI": "Hawaii",
    "ID": "Idaho",
    "IL": "Illinois",
    "IN": "Indiana",
    "IA": "Iowa",
    "KS": "Kansas",
    "KY": "Kentucky",
    "LA": "Louisiana",
    "ME": "Maine",
    "MD": "Maryland",
    "MA": "Massachusetts",
    "MI": "Michigan",
    "MN": "Minnesota",
    "MS": "Mississippi",
    "MO": "Missouri",
    "MT": "Montana",
    "NE": "Nebraska",
    "NV": "Nevada",
    "NH": "New Hampshire",
    "NJ": "New Jersey",
    "NM": "New Mexico",
    "NY": "New York",
    "NC": "North Carolina",
    "ND": "North Dakota",
    "OH": "Ohio",
    "OK": "Oklahoma",
    "OR": "Oregon",
    "PA": "Pennsylvania",
    "RI": "Rhode Island",
    "SC": "South Carolina",
    "SD": "South Dakota",
    "TN": "Tennessee",
    "TX": "Texas",
    "UT": "Utah",
    "VT": "Vermont",
    "VA": "Virginia",
    "WA": "Washington",
    "WV": "West Virginia",
    "WI": "Wisconsin",
    "WY": "Wyoming",
}
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SKIES = {"rain": "rainy", "snow": "snowy", "fog": "foggy", "sun": "sunny", "drizzle": "drizzly"}
YEARS = (2012, 2013, 2014, 2015)


def read_tables() -> dict[str, list[dict[str, str]]]:
    """The two tables as rows of text."""
    data = importlib.resources.files("vega_datasets") / "_data"
    rows = {}
    for table, file in (("airports", "airports.csv"), ("weather", "seattle-weather.csv")):
        with (data / file).open(encoding="utf-8", newline="") as handle:
            rows[table] = list(csv.DictReader(handle))
    rows["airports"] = [
        row for row in rows["airports"] if row["country"] == "USA" and row["state"] in STATES
    ]
    for row in rows["weather"]:
        row["date"] = row["date"][:10].replace("/", "-")
    return {
        table: [{c: row[c] for c in columns} for row in rows[table]]
        for table, columns in TABLES.items()
    }


def database(tables: dict[str, list[dict[str, str]]]) -> sqlite3.Connection:
    """The tables in memory."""
    connection = sqlite3.connect(":memory:")
    for table, columns in TABLES.items():
        kinds = ", ".join(f"{c} {'REAL' if c in NUMERIC else 'TEXT'}" for c in columns)
        connection.execute(f"CREATE TABLE {table} ({kinds})")
        marks = ", ".join(f":{c}" for c in columns)
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", tables[table])
    return connection


def questions() -> Iterator[tuple[str, str, str, str]]:
    """Every (kind, table, question, query) that the templates give."""
    for code, name in STATES.items():
        state, where = name, f"FROM airports WHERE state = '{code}'"
        yield (
            "airport_count",
            "airports",
            f"How many airports are in {state}?",
            f"SELECT COUNT(*) {where}",
        )
        yield (
            "city_count",
            "airports",
            f"How many different cities in {state} have an airport?",
            f"SELECT COUNT(DISTINCT city) {where}",
        )
        yield (
            "airport_extreme",
            "airports",
            f"What is the code of the northernmost airport in {state}?",
            f"SELECT iata {where} ORDER BY latitude DESC LIMIT 1",
        )
    for year in YEARS:
        for number, month in enumerate(MONTHS, 1):
            when, where = f"{month} {year}", f"date LIKE '{year}-{number:02d}%'"
            yield (
                "temperature",
                "weather",
                f"What was the highest temperature in {when}?",
                f"SELECT MAX(temp_max) FROM weather WHERE {where}",
            )
            yield (
                "precipitation",
                "weather",
                f"How much precipitation was there in {when}?",
                f"SELECT SUM(precipitation) FROM weather WHERE {where}",
            )
        for word, adjective in SKIES.items():
            yield (
                "sky_count",
                "weather",
                f"How many {adjective} days were there in {year}?",
                f"SELECT COUNT(*) FROM weather WHERE weather = '{word}' AND date LIKE '{year}%'",
            )
            for number, month in ((1, "January"), (4, "April"), (7, "July"), (11, "November")):
                where = f"weather = '{word}' AND date LIKE '{year}-{number:02d}%'"
                yield (
                    "sky_count",
                    "weather",
                    f"How many {adjective} days were there in {month} {year}?",
                    f"SELECT COUNT(*) FROM weather WHERE {where}",
                )


def build(connection: sqlite3.Connection) -> dict[str, list[dict[str, object]]]:
    """Deal the questions into the splits, each kind in turn."""
    kinds: dict[str, list[dict[str, object]]] = {}
    for kind, table, question, sql in questions():
        rows = connection.execute(sql).fetchall()
        if not rows or rows[0][0] in (None, 0):
            continue  # a wrong query can easily give nothing or zero too
        item = {
            "input": f"Table: {table}({', '.join(TABLES[table])})\nQuestion: {question}",
            "task_type": kind,
            "reference": sql,
        }
        kinds.setdefault(kind, []).append(item)
    rng = random.Random(SEED)
    for pool in kinds.values():
        rng.shuffle(pool)
    splits = {}
    for split, size in SIZES.items():
        names = list(kinds)
        items = [kinds[names[i % len(names)]].pop() for i in range(size)]
        rng.shuffle(items)
        splits[split] = [{"id": f"{split}-{i:03d}", **item} for i, item in enumerate(items)]
    return splits


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="write the data of the demo")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "fixtures" / "demo" / "data"
    )
    out: Path = parser.parse_args().out
    tables = read_tables()
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for table, rows in tables.items():
        with (out / "tables" / f"{table}.csv").open("w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, TABLES[table], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for split, items in build(database(tables)).items():
        (out / split).mkdir(exist_ok=True)
        text = "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n]\n"
        (out / split / "items.json").write_text(text, encoding="utf-8")
        print(f"{split}: {len(items)} items")


if __name__ == "__main__":
    main()
