"""The shape of the package: who may import whom, how things are named, what is written where.

Each rule is one test, which lists all offenders. ``pytest -rP`` shows the longest functions and modules.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reflact"

# Packages and root modules from the left to the right: an import goes to the same rank or to the left.
RANKS = (
    {"errors", "text", "types", "jsonutil", "lazy", "records", "messages"},
    {"config", "events", "data", "skill_evals", "prompts", "skills", "gate", "concurrency", "processes"},
    {"protocols", "adapters"},
    {"agents"},
    {"stages", "llm", "store", "environments", "targets"},
    {"search", "memory", "proposers"},
    {"calibration"},
    {"integrations", "training", "executors"},
    {"reporting"},
    {"trainer"},
    {"sweep"},
    {"cli", "testing"},
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
ADAPTERS = RANKS[4]

# The folders or files that may load a library.
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

# Conditional expressions inside call arguments that are left, by package; lower a number when you mend some.
CONDITIONAL_ARGUMENTS = {"calibration": 24, "training": 12, "llm": 9, "cli": 8, "integrations": 6}
CONDITIONAL_ARGUMENTS |= {"reporting": 6, "search": 2, "testing": 3, "memory": 2, "stages": 2}
CONDITIONAL_ARGUMENTS |= {"environments": 1, "gate": 1, "processes": 1}

# Numbers with a name and no comment that are left, by package; lower a number when you mend some.
BARE_CONSTANTS = {"processes": 31, "reporting": 27, "calibration": 8, "llm": 6, "stages": 6, "skills": 4}
BARE_CONSTANTS |= {"targets": 4, "cli": 4, "environments": 2, "gate": 1, "store": 1}

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
LINE_LENGTH = 100
PRAGMA = re.compile(r"\s*# (noqa|type:).*")

MODULES = sorted(SOURCE.rglob("*.py"))
PROGRAMS = [
    path for name in ("scripts", "examples", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))
]
FILES = [*MODULES, *PROGRAMS, *sorted((ROOT / "tests").rglob("*.py"))]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parse(path)))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_of(module: str) -> str:
    """Return the package or root module that a module belongs to; empty for ``reflact`` itself."""
    return module.partition(".")[2].partition(".")[0]


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


def list_imports() -> Iterator[tuple[str, str]]:
    for name, path in NAMES.items():
        if top_of(name):
            yield from ((name, below) for below in sorted(own_imports(path)) if below != name)


def type_only(path: Path) -> set[str]:
    blocks = (n.body for n in nodes(path) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    return {
        alias.name for body in blocks for node in body if isinstance(node, ast.Import) for alias in node.names
    }


def functions(path: Path) -> Iterator[Function]:
    yield from (node for node in nodes(path) if isinstance(node, Function))


def show(path: Path, node: ast.AST | None = None) -> str:
    """Return where something stands."""
    line = "" if node is None else f":{getattr(node, 'lineno', '')}"
    return f"{path.relative_to(ROOT)}{line}"


def test_imports_go_one_way() -> None:
    assert {top_of(name) for name in NAMES} - {""} <= RANK.keys()
    assert [pair for pair in list_imports() if RANK[top_of(pair[1])] > RANK[top_of(pair[0])]] == []


def find_cycle(below: Mapping[str, set[str]]) -> list[str]:
    """Return a way from a node back to it; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in sorted(below.get(name, ())):
                if cycle := visit(other, (*above, name)):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in sorted(below) if (cycle := visit(name, ()))), [])


def test_imports_have_no_cycles() -> None:
    modules, packages = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, below in list_imports():
        modules[name].add(below)
        if top_of(name) != top_of(below):
            packages[top_of(name)].add(top_of(below))
    assert find_cycle(modules) == []
    assert find_cycle(packages) == []


def test_adapters_do_not_know_each_other() -> None:
    wrong = [
        (name, below)
        for name, below in list_imports()
        if {top_of(name), top_of(below)} <= ADAPTERS and top_of(name) != top_of(below)
    ]
    assert wrong == []


def test_programs_import_names_that_exist() -> None:
    """Benchmarks, scripts and examples, which no other test may run, import nothing that was renamed or moved."""
    unknown = [
        f"{show(path, node)}: {node.module}.{alias.name}"
        for path in PROGRAMS
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "reflact"
        for alias in node.names
        if f"{node.module}.{alias.name}" not in NAMES
        and not hasattr(importlib.import_module(str(node.module)), alias.name)
    ]
    assert not unknown, unknown


def test_libraries_stay_where_they_belong() -> None:
    wrong = [
        f"{show(path)} imports {name}"
        for path in MODULES
        for name in imports(path) - type_only(path)
        if (places := THIRD_PARTY.get(name.split(".")[0])) is not None
        and not path.relative_to(SOURCE).as_posix().startswith(places)
    ]
    assert wrong == []


def test_one_module_starts_tasks() -> None:
    wrong = [
        show(path, node)
        for path in MODULES
        if path.name != "concurrency.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and STARTERS.fullmatch(ast.unparse(node.func).rpartition(".")[2])
    ]
    assert wrong == []


def test_only_the_command_line_prints() -> None:
    wrong = [
        show(path, node)
        for path in MODULES
        if top_of(name_of(path)) != "cli"
        for node in nodes(path)
        if (isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"print", "input", "exit"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr", "sys.exit"})
    ]
    assert wrong == []


def test_nothing_is_global() -> None:
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
                wrong.append(show(path, node))
    assert wrong == []


def test_no_bare_dict_is_passed() -> None:
    wrong = []
    for path in MODULES:
        for function in functions(path):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            for note in [*(a.annotation for a in arguments), function.returns]:
                text = "" if note is None else ast.unparse(note)
                is_bare = re.search(r"\bdict\b(?!\[)|\bdict\[\w+, Any\]", text, re.IGNORECASE)
                if is_bare and not function.name.startswith("_"):
                    wrong.append(f"{show(path, function)} {function.name}: {text}")
    assert wrong == []


def test_names_say_something() -> None:
    """No blank words; public functions begin with a verb, but for 2 of 100; a class name has one meaning."""
    public = [
        (path, node)
        for path in MODULES
        for node in parse(path).body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [show(path, node) for path, node in public if BLANK.fullmatch(node.name)] == []
    assert [show(path) for path in MODULES if BLANK.fullmatch(path.stem)] == []
    classes = Counter(node.name for _, node in public if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
    verbs = [(path, node) for path, node in public if isinstance(node, Function)]
    wrong = [
        f"{show(path, node)} {node.name}"
        for path, node in verbs
        if PARTICIPLE.search(first := node.name.split("_")[0]) and not VERBS.fullmatch(first)
    ]
    assert len(wrong) < 0.02 * len(verbs), wrong


def test_lines_are_plain() -> None:
    lines = [(path, n, line) for path in MODULES for n, line in enumerate(read(path).splitlines(), 1)]
    long = [f"{show(path)}:{n}" for path, n, line in lines if len(PRAGMA.sub("", line)) > LINE_LENGTH]
    assert long == []
    assert [f"{show(path)}:{n}" for path, n, line in lines if METAPHORS.search(line)] == []
    assert [show(path) for path in FILES if MARKS.search(read(path))] == []


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several names, and does not exchange or move any of them."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    names = {ast.unparse(part) for target in node.targets for part in getattr(target, "elts", ())}
    return bool(names) and not names & {ast.unparse(part) for part in ast.walk(node.value)}


def test_a_statement_does_one_thing() -> None:
    assert [show(path, node) for path in MODULES for node in nodes(path) if is_parallel(node)] == []
    found = defaultdict(list)
    for path in MODULES:
        calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
        values = [value for call in calls for value in (*call.args, *(word.value for word in call.keywords))]
        found[top_of(name_of(path))] += [show(path, v) for v in values if isinstance(v, ast.IfExp)]
    assert {
        top: where for top, where in found.items() if len(where) > CONDITIONAL_ARGUMENTS.get(top, 0)
    } == {}


def test_a_constant_has_a_reason() -> None:
    """A comment before a number with a name, or before its paragraph, says what it is for."""
    found = defaultdict(list)
    for path in MODULES:
        lines = read(path).splitlines()
        for node in parse(path).body:
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
                continue
            parts = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            is_number = parts and all(isinstance(part, int | float) for part in parts)
            if not (
                node.targets[0].id.isupper()
                and is_number
                and isinstance(node.value, ast.Constant | ast.BinOp)
            ):
                continue
            above = node.lineno - 1
            while above and lines[above] and "#" not in lines[above]:
                above -= 1
            if "#" not in lines[above]:
                found[top_of(name_of(path))].append(show(path, node))
    assert {top: where for top, where in found.items() if len(where) > BARE_CONSTANTS.get(top, 0)} == {}


def test_the_longest_functions_and_modules_are_shown() -> None:
    """A reader sees where the size is; no length is refused."""
    sizes = [
        (int(node.end_lineno or 0) - node.lineno + 1, show(path, node))
        for path in MODULES
        for node in functions(path)
    ]
    modules = [(len(read(path).splitlines()), show(path)) for path in MODULES]
    for title, rows in (("functions", sizes), ("modules", modules)):
        listed = [f"{n:6} {where}" for n, where in sorted(rows)[:-11:-1]]
        print("\n".join([f"the longest {title}:", *listed]))  # noqa: T201 - a report
