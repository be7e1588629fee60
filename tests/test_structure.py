"""The shape of the house: who may import whom, how long things may be, what is said where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reflact"

RANKS = (
    {"errors", "types", "brief", "values", "records", "results", "memory"},
    {
        "calls",
        "roles",
        "critic_config",
        "environment_config",
        "config",
        "telemetry_config",
        "loading",
        "events",
        "data",
        "skill",
        "tail",
        "cards",
        "memory_cards",
        "schedule",
        "gate",
        "paired",
        "early_stop",
        "betting",
        "planning",
        "intervals",
        "prompts",
        "tasks",
        "views",
        "aside",
        "exports",
        "folding",
        "summing",
        "estimates",
        "forecast",
    },
    {"ports", "memory_ports", "calibration_ports", "conventions", "telemetry", "traced"},
    {"stages", "calibration", "llm", "store", "environments", "targets", "report"},
    {"wiring", "critics", "connection", "history", "importing", "memory_store", "pages"},
    {"trainer", "run", "steps", "rolling", "judging", "closing", "ending", "halting", "clock"},
    {"cli", "testing"},
)
ROOMS = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
ADAPTERS = RANKS[3]

THIRD_PARTY = {
    "openai": ("llm/", "targets/"),
    "instructor": ("llm/structured.py",),
    "pydantic_ai": ("targets/",),
    "httpx": ("llm/", "testing/"),
    "httpx2": ("llm/",),
    "htpy": ("pages/",),
    "markupsafe": ("pages/",),
    "rich": ("report/", "cli/"),
    "typer": ("cli/",),
    "sqlite_utils": ("store/database.py", "store/migrations.py"),
    "genai_prices": ("llm/pricing.py",),
    "opentelemetry": ("conventions.py", "telemetry.py"),
    "mlflow": ("report/mlflow.py",),
}
STARTERS = {
    "create_task_group",
    "TaskGroup",
    "create_task",
    "ensure_future",
    "gather",
    "run_coroutine_threadsafe",
}

MODULES = sorted(SOURCE.rglob("*.py"))
FILES = sorted(
    path
    for folder in ("src", "tests", "scripts", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))


@cache
def parse(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """Return the room that a module of the package belongs to; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


NAMES = {name_of(path): path for path in MODULES}


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            below = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in NAMES else node.module for name in below)


def own_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    return {name for name in imports(path) if name.split(".")[0] == "reflact"}


def type_only(path: Path) -> set[str]:
    """Return the modules that a file imports for its annotations alone."""
    blocks = (
        node.body
        for node in ast.walk(parse(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.name for body in blocks for node in body if isinstance(node, ast.Import) for alias in node.names
    }


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a file, nested ones included."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_room_has_a_rank() -> None:
    """No module stands outside the plan of the house."""
    assert {room for name in NAMES if (room := room_of(name))} <= ROOMS.keys()


@each_module
def test_left_never_imports_right(path: Path) -> None:
    """A room imports rooms of its own rank or further left, deferred and type-only imports included."""
    here = room_of(name_of(path))
    if here is None:
        return
    for name in own_imports(path):
        there = room_of(name)
        assert there is not None, f"{path.name} imports the package's own front door"
        assert ROOMS[there] <= ROOMS[here], f"{here} must not import {name}"


@each_module
def test_rooms_behind_ports_do_not_know_each_other(path: Path) -> None:
    """Stages, models, stores, environments, targets and reports meet only where a run is composed."""
    here = room_of(name_of(path))
    if here in ADAPTERS:
        assert {room_of(name) for name in own_imports(path)} & ADAPTERS <= {here}


def test_stages_do_not_import_stages() -> None:
    """Among the algorithm's stages only those that roll out import another one."""
    allowed = {("evaluate", "rollout"), ("final_test", "rollout"), ("final_test", "evaluate")}
    allowed |= {("gather", "rollout"), ("gather", "reflect")}
    stages = {"gather", "rollout", "reflect", "aggregate", "select", "update", "evaluate", "final_test"}
    pairs = {
        (path.stem, below)
        for path in MODULES
        if path.parent.name == "stages" and path.stem in stages
        for below in stages
        if f"reflact.stages.{below}" in own_imports(path)
    }
    assert pairs <= allowed


def test_imports_have_no_cycles() -> None:
    """No module reaches itself through imports, deferred ones included."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"import cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name in done:
            return
        for below in sorted(own_imports(NAMES[name]) & NAMES.keys() - {name}):
            visit(below, (*above, name))
        done.add(name)

    for name in sorted(NAMES.keys() - {"reflact"}):
        visit(name, ())


@each_module
def test_client_libraries_stay_in_their_rooms(path: Path) -> None:
    """Each slow third-party library is loaded by one room, some by one file."""
    place = path.relative_to(SOURCE).as_posix()
    for name in set(imports(path)) - type_only(path):
        rooms = THIRD_PARTY.get(name.split(".")[0])
        assert rooms is None or place.startswith(rooms), f"{place} must not import {name}"


@each_module
def test_only_tasks_starts_tasks(path: Path) -> None:
    """Task groups are opened in tasks.py; nothing is started and forgotten."""
    if path.name == "tasks.py":
        return
    ours = {
        alias.asname or alias.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reflact.stages.")
        for alias in node.names
    }
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in ours):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in STARTERS, f"{path.name}:{node.lineno} starts tasks with {called}"


@each_module
def test_functions_and_modules_stay_short(path: Path) -> None:
    """A function has at most 60 lines below its docstring, a module at most 400."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, f"{path.name} is too long"
    for function in functions(path):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert length <= 60, f"{path.name}: {function.name} has {length} lines"


@each_module
def test_only_the_command_line_prints(path: Path) -> None:
    """Outside cli/ nothing prints, touches the standard streams, or ends the process."""
    if room_of(name_of(path)) == "cli":
        return
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"print", "input", "exit"}, f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
            assert node.attr not in {"stdout", "stderr", "exit"}, f"{path.name}:{node.lineno}"


@each_module
def test_nothing_is_global(path: Path) -> None:
    """No module changes its own globals or the process environment."""
    for node in ast.walk(parse(path)):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno}: global"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            text = " ".join(ast.unparse(target) for target in targets)
            assert "os.environ" not in text, f"{path.name}:{node.lineno}: writes the environment"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"os.putenv", "os.unsetenv", "logging.basicConfig"}, f"{path.name}: {called}"


@each_module
def test_no_bare_dict_crosses_a_door(path: Path) -> None:
    """Public functions neither take nor return untyped dictionaries."""
    for function in functions(path):
        if function.name.startswith("_"):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for note in [*(a.annotation for a in arguments), function.returns]:
            text = "" if note is None else ast.unparse(note)
            assert not re.search(r"\bdict\b(?!\[)|\bdict\[\w+, Any\]", text, re.IGNORECASE), (
                f"{path.name}: {function.name} has {text}"
            )


@each_module
def test_public_things_are_documented(path: Path) -> None:
    """Each module, class and public function says in a docstring what it is."""
    tree = parse(path)
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            public = not node.name.startswith("_") and node.name != "__getattr__"
            assert not public or ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_left_to_do(path: Path) -> None:
    """No file carries marks of unfinished work."""
    marks = re.compile(
        "|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"))
    )
    found = marks.search(path.read_text(encoding="utf-8"))
    assert found is None, f"{path}: {found and found.group()}"


def test_every_test_names_its_behaviour() -> None:
    """Each test function has a docstring."""
    bare = [
        f"{path.name}: {function.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for function in functions(path)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert bare == []
