"""Write the items of the tasks of this folder: ``NAME/data/SPLIT/items.jsonl``, the same bytes in each run.

Each task but the three of BIG-bench is made by a function of this file, whose docstring states the task's rules. They
are conventions that nobody can guess and that examples show. All items of a task are different. ``--bigbench`` names
the unpacked source of the package ``bigbench`` 1.0.0 (Apache-2.0), of which three tasks are taken; without it, their
items stay as they are. With ``--check`` nothing is written, and the exit status is 1 if a file differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent.parent.parent / "fixtures" / "demo" / "data"
SIZES = {"train": 24, "val": 20, "test": 60}
Row = dict[str, Any]
Make = Callable[[random.Random], Row]

NAMES = (
    "Anna Berg",
    "Omar Haddad",
    "Li Wen",
    "Petra Novak",
    "Tom Hale",
    "Ines Costa",
    "Jon Dahl",
    "Maya Roth",
)
CITIES = ("Bergen", "Turin", "Leeds", "Graz", "Porto", "Ghent", "Lyon", "Tampere")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January February March April May June July August September October November December".split()  # noqa: SIM905
)

TICKETS: Mapping[str, tuple[str, ...]] = {
    "K4": ("I was charged twice for {thing}.", "The invoice for {thing} shows the wrong amount."),
    "M1": ("The box with {thing} arrived broken.", "{thing} has a crack in its side."),
    "M7": ("{thing} never arrived.", "Tracking says that {thing} is still in the depot."),
    "B2": ("How do I reset my password for {thing}?", "I cannot log in to register {thing}."),
    "R9": ("Which colours do you have for {thing}?", "Does {thing} also come in a larger size?"),
    "T3": ("Please cancel my order of {thing}.", "I no longer want {thing}, stop the order."),
    "P5": (
        "Could we get a discount on fifty of {thing}?",
        "What would {thing} cost for a whole school?",
    ),
}
THINGS = (
    "the lamp",
    "the kettle",
    "the desk",
    "the backpack",
    "the printer",
    "the tent",
    "the bike",
    "the radio",
)
RUSH = ("I need an answer today.", "This is urgent.", "Please reply within the hour.")
CALM = ("Thanks!", "Kind regards.", "No hurry.", "")


def make_ticket(rng: random.Random) -> Row:
    """Code of a customer's message: one for each of seven topics, and ``-Z`` after it if the customer is in a hurry."""
    code = rng.choice(tuple(TICKETS))
    text = rng.choice(TICKETS[code]).format(thing=rng.choice(THINGS))
    is_rush = rng.random() < 0.35
    end = rng.choice(RUSH if is_rush else CALM)
    message = f"{text[0].upper()}{text[1:]} {end}".strip()
    return {
        "input": f"Give the routing code of this message.\n{message}",
        "reference": code + ("-Z" if is_rush else ""),
    }


GOODS = (
    "blue pens",
    "A4 paper",
    "desk lamps",
    "oak shelves",
    "coffee cups",
    "sun hats",
    "wool socks",
    "door locks",
)
ORDERS = (
    "{name} from {city} would like {count} {unit} of {goods}, to be there on {day}.",
    "Please send {count} {unit} of {goods} to {city} by {day}. {name}",
    "Hello, this is {name}. We need {count} {unit} of {goods} on {day}, delivered to {city}.",
    "{count} {unit} of {goods} for {name}, {city}. {day} would be fine.",
)
UNITS = ("boxes", "bags", "crates")


def make_order(rng: random.Random) -> Row:
    """Order line: city's first three letters in capitals, a slash, day of the week (Monday is 1), a slash, count and
    first letter of the unit, a star, the goods, and the surname in brackets.
    """
    name, city, goods, unit = (rng.choice(words) for words in (NAMES, CITIES, GOODS, UNITS))
    day, count = rng.choice(DAYS), rng.randint(2, 60)
    text = rng.choice(ORDERS).format(
        name=name, city=city, count=count, unit=unit, goods=goods, day=day
    )
    line = f"{city[:3].upper()}/{DAYS.index(day) + 1}/{count}{unit[0]}*{goods}[{name.split()[-1]}]"
    return {"input": f"Write the order line.\n{text}", "task_type": unit, "reference": line}


DATES = ("the {day}{suffix} of {month} {year}", "{month} {day}, {year}", "{day} {month} {year}")


def make_date(rng: random.Random) -> Row:
    """Date code: last two digits of the year, a letter for the month (A is January, L is December), two digits of the
    day; if a time is told, a dot and the hour of 24.
    """
    year, month, day = rng.randint(1991, 2034), rng.randint(1, 12), rng.randint(1, 28)
    suffix = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}.get(day, "th")
    text = rng.choice(DATES).format(day=day, suffix=suffix, month=MONTHS[month - 1], year=year)
    code = f"{year % 100:02}{'ABCDEFGHIJKL'[month - 1]}{day:02}"
    hour = rng.choice((None, None, rng.randint(7, 11), rng.randint(13, 22)))
    if hour is not None:
        text += f" at {hour} am" if hour < 12 else f" at {hour - 12} pm"
        code += f".{hour}"
    kind = "date" if hour is None else "date and time"
    return {"input": f"Write the date code of: {text}", "task_type": kind, "reference": code}


MEASURES = {
    "length": ("L", {"metres": 1000, "centimetres": 10, "millimetres": 1}),
    "weight": ("W", {"kilograms": 1000, "grams": 1, "tonnes": 1_000_000}),
    "time": ("T", {"hours": 60, "minutes": 1, "days": 1440}),
    "volume": ("V", {"litres": 1000, "millilitres": 1, "centilitres": 10}),
}


def make_measure(rng: random.Random) -> Row:
    """Measure code: a letter for the kind (L, W, T, V), and the value in millimetres, grams, minutes or millilitres,
    with a full stop at its end.
    """
    kind = rng.choice(tuple(MEASURES))
    letter, units = MEASURES[kind]
    unit = rng.choice(tuple(units))
    count = rng.randint(2, 9) if unit in {"days", "hours", "tonnes"} else rng.randint(2, 95)
    text = rng.choice(("{n} {unit}", "It is {n} {unit}.", "about {n} {unit}")).format(
        n=count, unit=unit
    )
    return {
        "input": f"Write the measure code of: {text}",
        "task_type": kind,
        "reference": f"{letter}{count * units[unit]}.",
    }


def make_sum(rng: random.Random) -> Row:
    """A sum of two or three terms; the answer must be the number and nothing else."""
    terms = [rng.randint(1, 99) for _ in range(rng.choice((2, 2, 3)))]
    signs = [rng.choice("+-") for _ in terms[1:]]
    text = str(terms[0]) + "".join(
        f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True)
    )
    total = terms[0] + sum(
        term if sign == "+" else -term for sign, term in zip(signs, terms[1:], strict=True)
    )
    return {
        "input": f"How much is {text}?",
        "task_type": f"{len(terms)} terms",
        "reference": str(total),
    }


MACHINES = ("pump", "fan", "belt", "valve", "boiler", "crane")
FAULTS = {
    "leaks oil": ("oil leak", "the seal was replaced"),
    "makes a loud noise": ("noise", "the bearing was greased"),
    "does not start": ("no start", "a fuse was changed"),
    "gets too hot": ("heat", "the filter was cleaned"),
}
NOTES = (
    "At {hour} {name} saw that {machine} number {number} in hall {hall} {fault}. {fix}.",
    "{name} called at {hour}: {machine} {number} of hall {hall} {fault}. After an hour, {fix}.",
    "In hall {hall}, {machine} {number} {fault}, as {name} found at {hour}. Later {fix}.",
)


def make_note(rng: random.Random) -> Row:
    """Log line of a report: hall and machine as ``hall H / machine N``, the fault in the house's words, what was done
    after an arrow, and the surname at the end.
    """
    machine, fault, name = rng.choice(MACHINES), rng.choice(tuple(FAULTS)), rng.choice(NAMES)
    hall, number, hour = (
        rng.choice("ABCDEF"),
        rng.randint(1, 9),
        f"{rng.randint(7, 19)}:{rng.choice((10, 25, 40))}",
    )
    short, fix = FAULTS[fault]
    text = rng.choice(NOTES).format(
        hour=hour, name=name, machine=machine, number=number, hall=hall, fault=fault, fix=fix
    )
    text = ". ".join(part[:1].upper() + part[1:] for part in text.split(". "))
    done = fix.removeprefix("the ").removeprefix("a ").replace(" was ", " ")
    line = f"hall {hall} / {machine} {number} : {short} -> {done} ( {name.split()[-1]} )"
    return {
        "input": f"Write the log line of this report.\n{text}",
        "task_type": machine,
        "reference": line,
    }


FIELDS = ("phone", "room", "badge")


def make_call(rng: random.Random) -> Row:
    """A question about a person of a table that ``desk.py`` serves; its docstring has the rule of the table's keys."""
    name, city, field = rng.choice(NAMES), rng.choice(CITIES), rng.choice(FIELDS)
    values = {
        "phone": str(rng.randint(2000, 9999)),
        "room": f"{rng.choice('ABCD')}{rng.randint(10, 49)}",
        "badge": str(rng.randint(100, 999)),
    }
    asked = f"What is the {field} of {name} in {city}?"
    return {
        "input": asked,
        "task_type": field,
        "person": name,
        "city": city,
        "field": field,
        **values,
    }


MAKERS: Mapping[str, Make] = {
    "tickets": make_ticket,
    "orders": make_order,
    "dates": make_date,
    "units": make_measure,
    "sums": make_sum,
    "notes": make_note,
    "desk": make_call,
}
BIG_BENCH = ("object_counting", "hyperbaton", "operators")


def make_rows(name: str, make: Make) -> list[Row]:
    """Return the items of a task, each with an input of its own."""
    rng, rows = random.Random(f"{name} 1"), dict[str, Row]()
    while len(rows) < sum(SIZES.values()):
        row = make(rng)
        rows.setdefault(row["input"], row)
    return list(rows.values())


def read_sql() -> list[Row]:
    """Return the questions of the demo, mixed, so that its splits are not those of this task."""
    rows = [
        {name: row[name] for name in ("input", "task_type", "reference")}
        for split in SIZES
        for row in json.loads((DEMO / split / "items.json").read_text(encoding="utf-8"))
    ]
    random.Random("sql 1").shuffle(rows)
    return rows[: sum(SIZES.values())]


def read_big_bench(source: Path, name: str) -> list[Row]:
    """Return items of a BIG-bench task that are not long."""
    path = source / "bigbench" / "benchmark_tasks" / name / "task.json"
    task = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        {
            "input": f"{task.get('task_prefix', '')}\n{one['input']}".strip(),
            "reference": _find_right(one),
        }
        for one in task["examples"]
        if len(one["input"]) < 300
    ]
    random.Random(f"{name} 1").shuffle(rows)
    return rows[: sum(SIZES.values())]


def _find_right(example: Mapping[str, Any]) -> str:
    """Return an example's right answer; a list of right answers ends with the number."""
    if "target" in example:
        target = example["target"]
        return target if isinstance(target, str) else str(target[-1])
    return max(example["target_scores"], key=example["target_scores"].get)


def render_splits(name: str, rows: list[Row]) -> Iterator[tuple[Path, str]]:
    """Yield the files of a task and their text."""
    start = 0
    for split, size in SIZES.items():
        lines = [
            json.dumps({"id": f"{name}-{number:03}", **rows[number]})
            for number in range(start, start + size)
        ]
        yield HERE / name / "data" / split / "items.jsonl", "\n".join(lines) + "\n"
        start += size


def main() -> int:
    """Write all files, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bigbench", type=Path, default=None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    tasks = {name: make_rows(name, make) for name, make in MAKERS.items()} | {"sql": read_sql()}
    if options.bigbench is not None:
        tasks |= {name: read_big_bench(options.bigbench, name) for name in BIG_BENCH}
    files = [file for name, rows in tasks.items() for file in render_splits(name, rows)]
    if options.check:
        return int(
            any(
                not path.exists() or path.read_text(encoding="utf-8") != text
                for path, text in files
            )
        )
    for path, text in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
