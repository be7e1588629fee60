"""The shape of the package: who may import whom, how things are named, what is written where.

Each rule is one test, which lists all offenders.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reflact"

RANKS = (
    {"errors", "text", "types", "jsonutil", "lazy", "records", "messages"},
    {"config", "events", "columns", "data", "prompts", "skills", "gate", "concurrency", "processes"},
    {"protocols", "adapters"},
    {"agents"},
    {"stages", "llm", "store", "environments", "targets"},
    {"search", "memory", "proposers"},
    {"calibration"},
    {"integrations", "training", "executors"},
    {"reporting"},
    {"trainer"},
    {"cli", "testing"},
)
"""Packages and root modules from the left to the right: an import goes to the same rank or to the left."""

RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
ADAPTERS = RANKS[4]

THIRD_PARTY = {
    "openai": ("llm/",),
    "instructor": ("llm/",),
    "pydantic_ai": ("targets/", "integrations/pydantic_ai.py", "llm/pydantic_ai.py"),
    "h11": ("agents/gateway.py",),
    "httpx": ("llm/", "testing/", "executors/worker.py"),
    "httpx2": ("llm/",),
    "htpy": ("reporting/html/",),
    "markupsafe": ("reporting/html/",),
    "rich": ("reporting/", "cli/"),
    "typer": ("cli/",),
    "sqlite_utils": ("store/", "memory/"),
    "genai_prices": ("llm/pricing.py",),
    "opentelemetry": ("integrations/opentelemetry.py",),
    "starlette": ("reporting/html/serve.py",),
    "uvicorn": ("reporting/html/serve.py",),
    "pytest": ("integrations/pytest.py",),
    "inspect_ai": ("integrations/inspect_ai.py",),
    "ray": ("executors/ray.py",),
}
"""The folders or files that may load a library."""

STARTERS = re.compile("create_task_group|TaskGroup|create_task|ensure_future|gather|run_coroutine_threadsafe")
PARTICIPLE = re.compile(r"(ed|ing|own|ept|elt|eld|eard|aid|oken|iven|orn)$")
VERBS = re.compile(
    "add|append|apply|bring|embed|exceed|feed|find|hold|keep|lead|load|need|open|pad|proceed|read|seed|send|shed|"
    "speed|spend|spread|succeed|yield"
)
BLANK = re.compile(
    "said|told|held|made|given|kept|place|piece|standing|course|books|news|passed|worn|heard", re.IGNORECASE
)
METAPHORS = re.compile(r"\b(corridor|house|brake|happenings|doors?)\b", re.IGNORECASE)
MARKS = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))

MODULES = sorted(SOURCE.rglob("*.py"))
FOLDERS = ("src", "tests", "scripts", "examples", "benchmarks")
PROGRAMS = ("scripts", "examples", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's syntax tree."""
    return tuple(ast.walk(parse(path)))


def name_of(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_of(module: str) -> str | None:
    """Return the package or root module that a module belongs to; None for ``reflact`` itself."""
    return module.partition(".")[2].partition(".")[0] or None


NAMES = {name_of(path): path for path in MODULES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the full names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in NAMES else str(node.module) for name in full}
    return frozenset(names)


def own_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, but the package itself."""
    return {name for name in imports(path) if name.startswith("reflact.")}


def type_only(path: Path) -> set[str]:
    """Return the modules that a file imports for its annotations alone."""
    blocks = (
        node.body
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    return {
        alias.name for body in blocks for node in body if isinstance(node, ast.Import) for alias in node.names
    }


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a file, nested ones included."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def shown(path: Path, node: ast.AST | None = None) -> str:
    """Return where something stands."""
    line = "" if node is None else f":{getattr(node, 'lineno', '')}"
    return f"{path.relative_to(ROOT)}{line}"


def test_every_package_has_a_rank() -> None:
    """No module stands outside the order of imports."""
    assert {top for name in NAMES if (top := top_of(name))} <= RANK.keys()


def test_imports_go_one_way() -> None:
    """A module imports its own rank or further left, deferred and type-only imports included."""
    wrong = [
        f"{name} imports {below}"
        for name, path in NAMES.items()
        if (here := top_of(name)) is not None
        for below in own_imports(path)
        if RANK[str(top_of(below))] > RANK[here]
    ]
    assert wrong == []


def test_programs_import_names_that_exist() -> None:
    """Benchmarks, scripts and examples, which no other test may run, import nothing that was renamed or moved."""
    unknown = [
        f"{shown(path, node)}: {node.module}.{alias.name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] in PROGRAMS
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "reflact"
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
    ]
    assert not unknown, unknown


def test_adapters_do_not_know_each_other() -> None:
    """Stages, models, stores, environments and targets meet only where a run is composed."""
    wrong = [
        f"{name} imports {below}"
        for name, path in NAMES.items()
        if (here := top_of(name)) in ADAPTERS
        for below in own_imports(path)
        if top_of(below) in ADAPTERS - {here}
    ]
    assert wrong == []


def test_stages_do_not_import_stages() -> None:
    """Among the stages of a step only those that roll out import another one."""
    allowed = {("evaluate", "rollout"), ("final_test", "rollout"), ("final_test", "evaluate")}
    allowed |= {("reflect", "rollout"), ("slow_update", "rollout")}
    stages = {"rollout", "reflect", "aggregate", "select", "update", "evaluate", "final_test"}
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


def test_libraries_stay_where_they_belong() -> None:
    """Each slow third-party library is loaded by one package, some by one file."""
    wrong = [
        f"{shown(path)} imports {name}"
        for path in MODULES
        for name in imports(path) - type_only(path)
        if (places := THIRD_PARTY.get(name.split(".")[0])) is not None
        and not path.relative_to(SOURCE).as_posix().startswith(places)
    ]
    assert wrong == []


def test_one_module_starts_tasks() -> None:
    """Task groups are opened in concurrency.py; nothing is started and forgotten."""
    wrong = [
        f"{shown(path, node)} starts tasks with {called}"
        for path in MODULES
        if path.name != "concurrency.py"
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and STARTERS.fullmatch(
            called := node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
    ]
    assert wrong == []


def test_only_the_command_line_prints() -> None:
    """Outside cli/ nothing prints, touches the standard streams, or ends the process."""
    wrong = [
        shown(path, node)
        for path in MODULES
        if top_of(name_of(path)) != "cli"
        for node in nodes(path)
        if (isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"print", "input", "exit"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr", "sys.exit"})
    ]
    assert wrong == []


def test_nothing_is_global() -> None:
    """No module changes its own globals, the process environment or the logging of its host."""
    wrong = []
    for path in MODULES:
        for node in nodes(path):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign | ast.Delete):
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                targets = [node.target]
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if (
                isinstance(node, ast.Global)
                or any("os.environ" in ast.unparse(target) for target in targets)
                or called in {"os.putenv", "os.unsetenv", "logging.basicConfig"}
            ):
                wrong.append(shown(path, node))
    assert wrong == []


def test_no_bare_dict_is_passed() -> None:
    """Public functions neither take nor return untyped dictionaries."""
    wrong = []
    for path in MODULES:
        for function in functions(path):
            if function.name.startswith("_"):
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            for note in [*(a.annotation for a in arguments), function.returns]:
                text = "" if note is None else ast.unparse(note)
                if re.search(r"\bdict\b(?!\[)|\bdict\[\w+, Any\]", text, re.IGNORECASE):
                    wrong.append(f"{shown(path, function)} {function.name}: {text}")
    assert wrong == []


def test_functions_begin_with_a_verb() -> None:
    """Fewer than 2 of 100 public functions begin with a participle or a gerund."""
    public = [
        (path, node)
        for path in MODULES
        for node in parse(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    wrong = [
        f"{shown(path, node)} {node.name}"
        for path, node in public
        if PARTICIPLE.search(first := node.name.split("_")[0]) and not VERBS.fullmatch(first)
    ]
    assert len(wrong) < 0.02 * len(public), wrong


def test_names_say_something() -> None:
    """No module, class or public function is named by a blank word."""
    wrong = [shown(path) for path in MODULES if BLANK.fullmatch(path.stem)]
    for path in MODULES:
        wrong += [
            f"{shown(path, node)} {node.name}"
            for node in nodes(path)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and BLANK.fullmatch(node.name)
        ]
    assert wrong == []


def test_a_class_name_has_one_meaning() -> None:
    """No public class name occurs twice in the package."""
    places = defaultdict(list)
    for path in MODULES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(shown(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_private_metaphors() -> None:
    """The source uses the words of the field, not pictures of its own."""
    wrong = [
        f"{shown(path)}:{number} {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if METAPHORS.search(line)
    ]
    assert wrong == []


def test_there_are_few_modules() -> None:
    """The package has at most 155 modules beside those that adapt a library of others, at most 14 in its root."""
    modules = [path for path in MODULES if path.name != "__init__.py"]
    assert sum(path.parent.name not in {"agents", "integrations", "executors"} for path in modules) <= 155
    assert sum(path.parent == SOURCE for path in modules) <= 14


def test_nothing_is_left_to_do() -> None:
    """No file carries marks of unfinished work."""
    assert [shown(path) for path in FILES if MARKS.search(path.read_text(encoding="utf-8"))] == []


def test_every_test_names_its_behaviour() -> None:
    """Each test function has a docstring."""
    wrong = [
        f"{shown(path, node)} {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in parse(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert wrong == []
