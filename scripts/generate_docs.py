"""Write the generated pages of docs/ from the code: keys, commands, events, dependencies.

It also writes the tables of events into events.md.

Usage: python scripts/generate_docs.py [--check]

With --check it writes nothing, and exits with 1 if a page is not current.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel

from reflact import errors, events
from reflact.calibration.config import CalibrateConfig
from reflact.cli.app import app
from reflact.config.loading import is_changeable
from reflact.config.models import ConfigSection
from reflact.config.training import TrainerConfig
from reflact.types import GateAction

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "docs" / "dependencies.toml"
NOTE = "<!-- Written by scripts/generate_docs.py; do not edit. -->"
TABLE = ("| key | type | default | change | meaning |", "|---|---|---|---|---|")
FIRST_KEYS = (
    "out_dir",
    "skill",
    "data.path",
    "data.ratio",
    "environment.grader",
    "environment.description",
    "models.target.model",
    "models.target.base_url",
    "models.target.api_key_env",
    "models.optimizer.model",
    "train.num_epochs",
    "budget.max_usd",
)
EVENT_TABLES = re.compile(r"(<!-- events: [^\n]* -->\n).*?(<!-- end -->)", re.DOTALL)


TYPE_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    NoneType: "null",
}


def configuration() -> str:
    """Return the reference of all configuration keys."""
    lines = [
        "# Configuration",
        NOTE,
        "",
        "A configuration is a YAML or TOML file, or a mapping in Python. If a key is unknown, the error names the",
        "nearest known key. Paths of inputs are relative to the file. `out_dir` is relative to the folder in which",
        "you start the command. On the command line, `--set section.key=value` overrides any key; values are YAML.",
        "",
        "You may change a key marked *yes* under **change** between two starts of the same run. All other keys, the",
        "data, the prompts and the initial skill are the run's *identity*. If you change one of them, it is another",
        "run: set `fork: true`, or another `out_dir`.",
        "",
        "If `models.optimizer` does not set a connection key (`model`, `base_url`, `api`, `api_version`,",
        "`api_key_env`, `key`, `mode`), it uses the target's value. At the same endpoint, it also uses the target's",
        "limits, and for the same model its prices. `models.critic` does the same, but must set its `model`. The",
        "keys of `models.critic` and `critic` are used only if a critic grades or annotates.",
    ]
    table = {row[0]: row for row in list_config_keys()}
    lines += [
        "",
        "## The keys that people set first",
        "",
        *TABLE,
        *(_row(*table[key]) for key in FIRST_KEYS),
    ]
    rows = [
        row
        for key, row in table.items()
        if not key.startswith(("models.optimizer.", "models.critic."))
    ]
    rows = [(key.replace("models.target.", "models.ROLE."), *others) for key, *others in rows]
    lines += ["", "## Top level", "", *TABLE, *(_row(*row) for row in rows if "." not in row[0])]
    for name, field in TrainerConfig.model_fields.items():
        own = [row for row in rows if row[0].startswith(f"{name}.")]
        if own:
            lines += ["", f"## {name}", "", str(inspect.getdoc(field.annotation))]
            lines += ["ROLE is `target`, `optimizer` or `critic`."] * (name == "models")
            lines += ["", *TABLE, *(_row(*row) for row in own)]
    lines += ["", "## Calibration", ""]
    lines += [
        "The configuration of `reflact calibrate` ([guide](calibration.md)) has these keys, and `models.critic`,",
        "`critic`, `budget`, `prompts` and `replay` as above. `memory` and `store` are relative to the folder in",
        "which the command starts. You may change any value between starts.",
        "",
        *TABLE,
    ]
    shared = tuple(f"{name}." for name in ("models", "critic", "budget", "prompts", "replay"))
    lines += [
        _row(*row) for row in list_config_keys(CalibrateConfig) if not row[0].startswith(shared)
    ]
    return "\n".join(lines) + "\n"


def list_config_keys(
    section: type[ConfigSection] = TrainerConfig, prefix: str = ""
) -> Iterator[tuple[str, str, str, bool, str]]:
    """Yield (key, type, default, changeable, description) of every key, in order."""
    descriptions = _read_descriptions(section)
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            yield from list_config_keys(kind, f"{prefix}{name}.")
            continue
        default = "required"
        if not field.is_required():
            default = _format_default(field.get_default(call_default_factory=True))
        text = descriptions.get(name, "")
        yield f"{prefix}{name}", _type_name(kind), default, is_changeable(field), text


def _read_descriptions(section: type[ConfigSection]) -> dict[str, str]:
    """Return the strings below the fields of a section and of its bases, each on one line."""
    texts = {}
    for kind in (kind for kind in reversed(section.__mro__) if issubclass(kind, ConfigSection)):
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text:
                texts[ast.unparse(field.target)] = " ".join(
                    str(ast.literal_eval(below.value)).split()
                )
    return texts


def _format_default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_format_default, value))}]"
    return str(value)


def _type_name(kind: Any) -> str:
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is Callable:
        return "function"
    if origin in {Union, UnionType}:
        return " or ".join(map(_type_name, arguments))
    if origin in {dict, Mapping} or issubclass(kind, BaseModel):
        return "mapping"
    return TYPE_NAMES[kind]


def _row(key: str, kind: str, default: str, changeable: bool, description: str) -> str:
    shown = default or '""'
    cells = (f"`{key}`", kind, f"`{shown}`", "yes" if changeable else "", description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def commands() -> str:
    """Return the commands with their parameters."""
    lines = ["# Commands", NOTE, ""]
    lines += [
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | completed |",
        "| 1 | a run ended without completing; the reason is printed |",
        "| 2 | the input is wrong, such as a key, a model, a port or a file; no call was paid for |",
        "| 130, 143, 129 | ended by Ctrl-C, SIGTERM or a closed terminal (SIGHUP); run the same command again to resume |",
        "",
        "After the first signal, a run starts no new work. Running work may finish within `train.grace_seconds`. If",
        "the step then needs no more work, it is stored. The second signal ends the run at once. `calibrate` waits",
        "at most ten seconds for running work. `eval` and the commands that only read end at the first signal.",
    ]
    for name, command in _commands(typer.main.get_group(app)):
        lines += ["", f"## reflact {name}", "", inspect.cleandoc(command.help or "")]
        lines += ["", "| parameter | default | meaning |", "|---|---|---|"]
        lines += [_parameter(parameter) for parameter in command.params]
    return "\n".join(lines) + "\n"


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield all commands with their names, those of groups with the group's before them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {below}", one) for below, one in _commands(command))
        else:
            yield name, command


def _parameter(parameter: Any) -> str:
    flag = getattr(parameter, "is_flag", False)
    named = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
    words = named if flag else [*named, parameter.metavar]
    given = None if flag or parameter.multiple else parameter.default
    default = "required" if parameter.required else "" if given is None else f"`{given}`"
    cells = (f"`{' '.join(words)}`", default, parameter.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def draw_errors(kind: type[Exception], indent: str = "") -> Iterator[str]:
    """Yield a line for each subclass of an error, with the first paragraph of its docstring."""
    below = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    for one in below:
        branch, trunk = ("└── ", "    ") if one is below[-1] else ("├── ", "│   ")
        paragraph = str(one.__doc__).partition("\n\n")[0]
        meaning = " ".join(paragraph.split()).removesuffix(".").replace("``", "`")
        yield f"{indent + branch + one.__name__:<30}{meaning}"
        yield from draw_errors(one, indent + trunk)


def error_tree() -> list[str]:
    """Return the lines of the tree of errors, with each error's meaning."""
    return [
        "## Errors",
        "",
        "Import these classes from `reflact.errors`. No error removes finished work from the store.",
        "[Commands](cli.md) lists the exit codes.",
        "",
        "```text",
        "ReflactError",
        *draw_errors(errors.ReflactError),
        "```",
    ]


def dependencies() -> str:
    """Return the list of dependencies with the reason for each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    lines = ["# Dependencies", NOTE]
    extras = project["project"]["optional-dependencies"].values()
    for title, group, wanted in (
        ("At run time", "run", project["project"]["dependencies"]),
        ("Extras", "extras", [text for extra in extras for text in extra]),
        ("For development", "dev", project["dependency-groups"]["dev"]),
        ("For the documentation", "docs", project["dependency-groups"]["docs"]),
    ):
        difference = set(reasons[group]) ^ {_name(text) for text in wanted}
        if difference:
            raise SystemExit(
                f"{REASONS.name} and pyproject.toml differ in {', '.join(sorted(difference))}"
            )
        lines += ["", f"## {title}", "", "| package | why |", "|---|---|"]
        lines += [f"| `{text}` | {reasons[group][_name(text)]} |" for text in wanted]
    return "\n".join(lines) + "\n"


def _name(requirement: str) -> str:
    end = next(
        (i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement)
    )
    return requirement[:end]


def event_page() -> str:
    """Return docs/events.md with the events as they are now."""
    kinds = get_args(get_args(events.Event)[0])
    durable, live = (
        [kind for kind in kinds if kind.durable is durable] for durable in (True, False)
    )
    lines = ["", "## Durable events", "", "| kind | fields | meaning |", "|---|---|---|"]
    lines += [_event(kind, _fields(kind)) for kind in durable]
    lines += [
        "",
        "## Live events",
        "",
        "| kind | fields | newest of | meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        _event(kind, _fields(kind), ", ".join(f"`{n}`" for n in kind.subject_fields) or "all")
        for kind in live
    ]
    lines += [
        "",
        f"`Stage` is one of {_words(events.Stage)}.",
        f"`Action` is one of {_words(GateAction)}.",
        "",
        *error_tree(),
    ]
    tables = "\n".join([*lines, "", ""])
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    return EVENT_TABLES.sub(lambda found: f"{found[1]}{tables}{found[2]}", page)


def _event(kind: type[Any], *cells: str) -> str:
    meaning = " ".join(inspect.cleandoc(kind.__doc__ or "").removeprefix("Live: ").split())
    meaning = (meaning[:1].upper() + meaning[1:]).replace("``", "`")
    named = f"`{kind.model_fields['kind'].default}`<br>`{kind.__name__}`"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (named, *cells, meaning)) + " |"


def _fields(kind: type[Any]) -> str:
    common = {"kind", *events.WarningIssued.model_fields} - {"message"}
    rows = (
        f"`{name}` {_type(f.annotation)}"
        for name, f in kind.model_fields.items()
        if name not in common
    )
    return "<br>".join(rows)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return {events.Stage: "Stage", GateAction: "Action"}.get(annotation, _words(annotation))
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)


def _words(literal: Any) -> str:
    return ", ".join(f"`{word}`" for word in get_args(literal))


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each generated page with its text."""
    yield ROOT / "docs" / "events.md", event_page()
    yield ROOT / "docs" / "configuration.md", configuration()
    yield ROOT / "docs" / "cli.md", commands()
    yield ROOT / "docs" / "dependencies.md", dependencies()


def main(arguments: list[str]) -> int:
    """Write the pages, or print which are not current."""
    stale = [
        (page, text)
        for page, text in pages()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    for page, text in stale:
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} is not current; run `make docs`", file=sys.stderr)
        else:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
