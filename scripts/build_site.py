"""Build the documentation as a site in build/site, with a reference of all public names.

The pages of docs/ are copied, links to files outside of it become pages, and zensical builds them with
``--strict``: a link that leads nowhere ends the build with an error. So does a page that loads anything from
another server, and a public name without a docstring.

Usage: python scripts/build_site.py [FOLDER]
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOORS = (
    "reflact",
    "reflact.config",
    "reflact.environments",
    "reflact.targets",
    "reflact.agents",
    "reflact.proposers",
    "reflact.calibration",
    "reflact.calibration.events",
    "reflact.memory",
    "reflact.types",
    "reflact.stages",
    "reflact.llm",
    "reflact.events",
    "reflact.errors",
    "reflact.reporting",
    "reflact.testing",
)
"""The modules whose names are public; those of ``reflact.integrations`` are listed by their folder."""

MOVED = {
    "](docs/": "](",
    "](examples/": "](../examples/",
    "](CHANGELOG.md)": "](changelog.md)",
    "[MIT](LICENSE)": "MIT",
}
"""Links of README and the changelog, which stand above docs/, and what they are on the site."""

TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
PROGRAM = re.compile(r"\]\(\.\./(examples/([\w-]+)\.(\w+))\)")
SECTION = re.compile(r"^\*\*(.+)\*\*$", re.MULTILINE)
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([\w-]+\.md)\)", re.MULTILINE)
DOC_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:")
QUOTE = "'"
QUOTED = re.compile(r"(?<=: )'([^']*)'")
PATH = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
)
HREF = re.compile(r"<(?:a|img|script|link)\b[^>]*?\b(?:src|href)=\"?([^\"# >?]+)")


def list_doors() -> list[str]:
    """Return the names of all public modules."""
    folder = ROOT / "src" / "reflact" / "integrations"
    return [
        *DOORS,
        *sorted(f"reflact.integrations.{path.stem}" for path in folder.glob("[a-z]*.py")),
    ]


def list_names(door: ModuleType) -> list[str]:
    """Return the public names of a module, in the order in which it lists them."""
    names = getattr(door, "__all__", None)
    if names is not None:
        return list(names)
    own = ((name, value) for name, value in vars(door).items() if not name.startswith("_"))
    return [
        name
        for name, value in own
        if (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__ == door.__name__
    ]


@cache
def read_notes(module: str) -> dict[str, str]:
    """Return the docstrings that follow the assignments of a module."""
    found = importlib.import_module(module)
    body = ast.parse(inspect.getsource(found)).body
    notes: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [getattr(node, "target", getattr(node, "name", None))]
        )
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            notes |= {
                one.id: inspect.cleandoc(str(after.value.value))
                for one in targets
                if isinstance(one, ast.Name)
            }
    return notes


def find_note(name: str, value: Any) -> str:
    """Return the docstring of a name: its own, or for a constant the one that follows its assignment."""
    if inspect.isclass(value) or inspect.isroutine(value):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        return inspect.cleandoc(own or "")
    modules = [module for module in sorted(sys.modules) if module.startswith("reflact")]
    return next((notes[name] for module in modules if name in (notes := read_notes(module))), "")


def to_markdown(docstring: str) -> str:
    """Return a docstring in Google's style as Markdown: its sections become lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.replace("``", "`").splitlines():
        if line in DOC_SECTIONS:
            section = line
            lines += ["", f"**{line.removesuffix(':')}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section in ("", "Example:", "Examples:") or not line:
            lines.append(line)
        elif line.startswith("     "):
            lines.append(f"  {line.strip()}")
        elif section in ("Returns:", "Yields:"):
            lines.append(line.strip())
        else:
            name, colon, text = line.strip().partition(": ")
            lines.append(f"- `{name}`: {text}" if colon else f"- {name}")
    return "\n".join(lines)


def sign(name: str, value: Any) -> str:
    """Return the signature of a class or function as a block of code, or nothing if it has none to show."""
    protocol = getattr(value, "_is_protocol", False)
    if protocol or (inspect.isclass(value) and issubclass(value, BaseException)):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts = []
    for one in signature.parameters.values():
        named = one.kind is one.KEYWORD_ONLY and "*" not in "".join(part[:1] for part in parts)
        parts += ["*"] if named else []
        parts += [] if one.name in ("self", "cls") else [QUOTED.sub(r"\1", PATH.sub("", str(one)))]
    returned = signature.return_annotation
    shown = (
        ""
        if returned is signature.empty or inspect.isclass(value)
        else inspect.formatannotation(returned)
    )
    end = f" -> {PATH.sub('', shown.strip(QUOTE))}" if shown else ""
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return f"```python\n{line}\n```\n"


def describe(name: str, value: Any, level: str = "##") -> Iterator[str]:
    """Yield the sections of a public name: itself, and the methods of a class."""
    yield f"{level} {name}\n"
    if inspect.isclass(value) or inspect.isroutine(value):
        yield sign(name.rpartition(".")[2], value)
    yield to_markdown(find_note(name, value.fget if isinstance(value, property) else value)) + "\n"
    if inspect.isclass(value) and value.__module__.startswith("reflact"):
        for method, member in vars(value).items():
            shown = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if (
                not method.startswith("_")
                and isinstance(shown, property | FunctionType)
                and shown.__doc__
            ):
                yield from describe(f"{name}.{method}", shown, "###")


def list_undocumented() -> list[str]:
    """Return the public names that have no docstring."""
    doors = ((name, importlib.import_module(name)) for name in list_doors())
    return [
        f"{where}.{name}"
        for where, door in doors
        for name in list_names(door)
        if name != "__version__" and not find_note(name, getattr(door, name))
    ]


def render_reference(where: str) -> str:
    """Return the page of a public module."""
    door = importlib.import_module(where)
    parts = [f"# {where}\n", to_markdown(inspect.cleandoc(door.__doc__ or "")) + "\n"]
    for name in list_names(door):
        if name != "__version__":
            parts += describe(name, getattr(door, name))
    return "\n".join(parts)


def to_tabs(text: str) -> str:
    """Return a page with its sections from ``<!-- tabs -->`` to ``<!-- end of tabs -->`` as tabs.

    The source stays a list of sections, which any other reader of Markdown shows as it is.
    """

    def turn(found: re.Match[str]) -> str:
        _, *parts = HEADING.split(found[1])
        tabs = zip(parts[::2], parts[1::2], strict=True)
        return "\n".join(f'=== "{title}"\n{textwrap.indent(body, "    ")}' for title, body in tabs)

    return TABS.sub(turn, text)


def copy_pages(pages: Path) -> None:
    """Copy docs/, README and the changelog, and add pages for the names and the programs that they link to."""
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.toml"))
    for name in ("README.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for old, new in MOVED.items():
            text = text.replace(old, new)
        (pages / name.lower()).write_text(text, encoding="utf-8")
    for page in sorted(pages.glob("*.md")):
        text = to_tabs(
            page.read_text(encoding="utf-8").replace("```python runnable\n", "```python\n")
        )
        for path, name, kind in PROGRAM.findall(text):
            code = (ROOT / path).read_text(encoding="utf-8")
            (pages / f"code-{name}.md").write_text(
                f"# {path}\n\n````{kind}\n{code}````\n", encoding="utf-8"
            )
        text = PROGRAM.sub(r"](code-\2.md)", text.replace("](../README.md", "](readme.md"))
        page.write_text(text, encoding="utf-8")
    (pages / "api").mkdir()
    for door in list_doors():
        (pages / "api" / f"{door}.md").write_text(render_reference(door), encoding="utf-8")


def write_config(folder: Path) -> Path:
    """Write the configuration of the builder, with the navigation of docs/index.md."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    _, *parts = SECTION.split(index)
    nav: list[Any] = [{"Home": "index.md"}]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        nav.append({title: [{name: page} for name, page in ENTRY.findall(body)]})
    nav.append({"Python names": [{door: f"api/{door}.md"} for door in list_doors()]})
    path = folder / "mkdocs.yml"
    path.write_text(yaml.safe_dump({**config, "nav": nav}, sort_keys=False), encoding="utf-8")
    return path


def find_faults(site: Path) -> list[str]:
    """Return what loads from another server when a page is read, and links to files that are missing."""
    faults = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        faults += [f"{page.name}: loads {found}" for found in LOADED.findall(text)]
        faults += [
            f"{page.name}: {link}"
            for link in HREF.findall(text)
            if page.name != "404.html"
            if ":" not in link and not (page.parent / link).exists()
        ]
    return faults


def main(arguments: list[str]) -> int:
    """Build the site and say what is wrong with it."""
    folder = Path(arguments[0] if arguments else ROOT / "build").resolve()
    for old in ("pages", "site", ".cache"):
        shutil.rmtree(folder / old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if undocumented := list_undocumented():
        print(f"these public names have no docstring: {', '.join(undocumented)}", file=sys.stderr)
        return 1
    copy_pages(folder / "pages")
    config = write_config(folder)
    builder = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [builder, "build", "--strict", "-f", config],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr), file=sys.stderr)
        return 1
    if faults := find_faults(folder / "site"):
        print("\n".join(faults), file=sys.stderr)
        return 1
    print(f"built {folder / 'site' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
