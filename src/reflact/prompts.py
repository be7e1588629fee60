"""Prompt files: finding, checking and rendering them.

A prompt is ``NAME/vN.md``: YAML front matter (name, version, role, reply, variables, changelog),
then the system part, a line ``<!-- user -->``, and the user part. Variables are written
``{{name}}``. They are replaced in one pass, so values may contain anything. A line ``{{name?}}`` is
left out, together with the empty line after it, if the value is empty. A released version never
changes.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import Field, JsonValue, ValidationError

from reflact.config.training import PromptsConfig, TrainerConfig
from reflact.errors import PromptError
from reflact.messages import Message, RenderedPrompt
from reflact.text import suggest_path
from reflact.types import FrozenModel

VARIABLE = re.compile(r"\{\{([a-z_]+)\??\}\}")
OPTIONAL_LINE = re.compile(r"^\{\{([a-z_]+)\?\}\}\n+", re.MULTILINE)
USER_PART = "<!-- user -->"
# An angle bracket or a similar character, and the name after it.
OPENING_TAG = re.compile(r"[<\u2039\u27e8\u3008\u02c2][\s/\\\u2044\u2215]*([^\s<>/]+)")
# Unicode categories of invisible characters: controls, formats, combining accents.
INVISIBLE_CATEGORIES = {"Cc", "Cf", "Mn", "Me"}
# Variables that a prompt may omit: advice, context and limits, not material.
OPTIONAL_VARIABLES = {"attempts", "figures", "max_edits", "notes", "task"}
# The first word of the names of analysts' prompts, by ``update.mode``.
ANALYST_PROMPTS = {"patch": "analyst", "rewrite": "suggest"}


class PromptHeader(FrozenModel):
    """The front matter of a prompt file."""

    name: str
    version: int = Field(ge=1)
    role: str
    reply: str
    variables: tuple[str, ...] = ()
    changelog: str


class Prompt(FrozenModel):
    """One version of a prompt."""

    header: PromptHeader
    system: str
    user: str
    checksum: str

    def render(self, values: Mapping[str, str]) -> RenderedPrompt:
        """Replace the variables and return the messages; a prompt may omit ``OPTIONAL_VARIABLES``.

        Raises:
            PromptError: A variable has no value, or a value has no variable.
        """
        wrong = set(values) ^ set(self.header.variables)
        wrong -= OPTIONAL_VARIABLES & set(values)
        if wrong:
            raise PromptError(
                f"prompt {self.header.name} v{self.header.version}: variables do not match: "
                f"{_join_names(wrong)}"
            )

        def fill(part: str) -> str:
            part = OPTIONAL_LINE.sub(lambda match: match[0] if values[match[1]] else "", part)
            return VARIABLE.sub(lambda match: values[match[1]], part)

        messages = [Message(role="system", content=fill(self.system).strip())]
        if self.user:
            messages.append(Message(role="user", content=fill(self.user).strip()))
        return RenderedPrompt(
            name=self.header.name, version=self.header.version, messages=tuple(messages)
        )


class PromptBook(FrozenModel):
    """The prompts of a run, one version of each."""

    prompts: Mapping[str, Prompt]

    def render(self, name: str, values: Mapping[str, str]) -> RenderedPrompt:
        """Render a prompt by name; see ``Prompt.render``."""
        return self.prompts[name].render(values)

    def is_reasoned(self, name: str) -> bool:
        """Whether replies begin with reasoning in free text, without limits of length."""
        return self.prompts[name].header.reply.startswith("Reasoned")

    def identity(self, names: Collection[str]) -> dict[str, JsonValue]:
        """Return version and checksum of the named prompts, for the identity of a run."""
        return {
            f"prompts.{n}": f"v{p.header.version} {p.checksum[:16]}"
            for n, p in sorted(self.prompts.items())
            if n in names
        }


def fence(tag: str, text: str) -> str:
    """Return text between tags that it cannot close: they are lengthened until it lacks them.

    A text also contains a tag if a model may read something as it: a tag in capitals, with spaces,
    with invisible characters, or with up to half of its letters from other scripts.
    """
    opened = _tag_names(text)
    while any(_resembles(name, tag) for name in opened):
        tag += "_"
    return f"<{tag}>\n{text}\n</{tag}>"


def _tag_names(text: str) -> set[str]:
    """Return the names after angle brackets, in lower case and without invisible characters."""
    if "<" not in text and text.isascii():
        return set()
    plain = unicodedata.normalize("NFKD", text).casefold()
    visible = "".join(
        c for c in plain if c.isspace() or unicodedata.category(c) not in INVISIBLE_CATEGORIES
    )
    return set(OPENING_TAG.findall(visible))


def _resembles(name: str, tag: str) -> bool:
    following = name[len(tag) : len(tag) + 1]
    if len(name) < len(tag) or (following.isascii() and re.match(r"\w", following)):
        return False
    other = [a for a, b in zip(name, tag, strict=False) if a != b]
    return 2 * len(other) <= len(tag) and not any(letter.isascii() for letter in other)


def load_prompts(config: PromptsConfig | None = None, *, folder: Path | None = None) -> PromptBook:
    """Load all prompts: pinned versions, else the newest ones.

    Those of ``prompts.folder`` come first, then those of ``folder``, which an environment may
    bring.

    Raises:
        PromptError: A file is missing or malformed, or a name is unknown.
    """
    config = config or PromptsConfig()
    packaged = find_data_folder("prompts")
    pinned = config.versions
    names = list_prompt_names()
    unknown = set(pinned) - set(names)
    if unknown:
        raise PromptError(
            f"prompts.versions: no prompt is called {_join_names(unknown)}; there are "
            f"{_join_names(names)}"
        )
    folders = []
    own = {"prompts.folder": config.folder, "the environment's prompt_folder": folder}
    for key, place in own.items():
        if place is not None and not place.is_dir():
            advice = f"name the one that has NAME/vN.md{suggest_path(place)}"
            raise PromptError(f"{key}: {place} is not a folder; {advice}")
        folders += [] if place is None else [place]
    folders.append(packaged)
    prompts = {name: _find_prompt(name, pinned.get(name), folders) for name in names}
    return PromptBook(prompts=prompts)


def list_prompt_names() -> list[str]:
    """Return the names of the packaged prompts."""
    return sorted(path.name for path in find_data_folder("prompts").iterdir() if path.is_dir())


def find_prompt_file(name: str) -> Path:
    """Return the file of the newest version of a packaged prompt; PromptError if there is none."""
    names = list_prompt_names()
    if name not in names:
        near = [f"; did you mean {one}?" for one in get_close_matches(name, names, n=1)]
        listed = f"; there are {_join_names(names)}"
        raise PromptError(f"no prompt is called {name}{(near or [listed])[0]}")
    return max(list_versions(find_data_folder("prompts"), name).items())[1]


def list_versions(folder: Path, name: str) -> dict[int, Path]:
    """Return the files of a prompt in a folder by version."""
    files = (folder / name).glob("v*.md")
    return {int(file.stem[1:]): file for file in files if file.stem[1:].isdigit()}


def list_used_prompts(config: TrainerConfig) -> frozenset[str]:
    """Return the names of the prompts whose text can influence the result of a run."""
    sources = ("failure",) if config.reflect.failure_only else ("failure", "success")
    mode = config.update.mode
    names: set[str] = set()
    if "edits" in config.search.sources and mode != "full_rewrite":
        names |= {f"{ANALYST_PROMPTS[mode]}_{source}" for source in sources}
        names |= {"merge", "merge_final"}
        if mode == "rewrite":
            names.add("rewrite")
        if config.select.lr_control != "none":
            names.add("ranking")
        if config.select.lr_control == "autonomous":
            names.add("step_size")
    if "rewrite" in config.search.sources or (
        "edits" in config.search.sources and mode == "full_rewrite"
    ):
        names.add("write_document")
    if config.slow_update.enabled:
        names.add("slow_update")
    if config.meta_skill.enabled:
        names.add("meta_skill")
    if config.appendix.enabled:
        names |= {f"lapse_{source}" for source in sources} | {"consolidate"}
    if config.uses_progress:
        names.add("critic")
    if config.environment.grader == "rubric":
        names.add("rubric")
    return frozenset(names)


def find_data_folder(name: str) -> Path:
    """Return the packaged folder ``prompts``, ``demo`` or ``calibration``.

    Raises:
        PromptError: The installation lacks it.
    """
    packaged = Path(str(files("reflact"))) / "_data" / name
    source = Path(__file__).resolve().parents[2] / (
        "prompts" if name == "prompts" else f"fixtures/{name}"
    )
    for folder in (packaged, source):
        if folder.is_dir():
            return folder
    raise PromptError(f"this installation of reflact lacks its folder {name!r}; install it again")


def read_prompt(path: Path) -> Prompt:
    """Read one prompt file.

    Raises:
        PromptError: It cannot be read, its front matter is wrong, or variables and text do not
            match.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt {path}: {error}") from None
    return _parse_prompt(path, text)


@cache
def _parse_prompt(path: Path, text: str) -> Prompt:
    parts = re.split(r"^---\n", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0]:
        raise PromptError(f"{path}: a prompt starts with front matter between two lines of ---")
    try:
        header = PromptHeader.model_validate(yaml.safe_load(parts[1]))
    except (yaml.YAMLError, ValidationError) as error:
        raise PromptError(
            f"{path}: front matter is wrong: {' '.join(str(error).split())}"
        ) from None
    system, _, user = parts[2].partition(USER_PART)
    used = set(VARIABLE.findall(parts[2]))
    if used != set(header.variables):
        raise PromptError(
            f"{path}: variables in text and front matter differ: "
            f"{_join_names(used ^ set(header.variables))}"
        )
    if (header.name, f"v{header.version}") != (path.parent.name, path.stem):
        raise PromptError(f"{path}: its front matter is that of {header.name} v{header.version}")
    checksum = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Prompt(header=header, system=system.strip(), user=user.strip(), checksum=checksum)


def _find_prompt(name: str, version: int | None, folders: Sequence[Path]) -> Prompt:
    """Return the pinned or the newest version of a prompt, of the first folder that has it."""
    for folder in folders:
        paths = list_versions(folder, name)
        chosen = version if version is not None else max(paths, default=None)
        if chosen in paths:
            prompt = read_prompt(paths[chosen])
            _check_reply(prompt, paths[chosen])
            return prompt
    wanted = f"v{version}" if version is not None else "any version"
    raise PromptError(f"prompt {name}: {wanted} is not in {_join_names(str(p) for p in folders)}")


def _check_reply(prompt: Prompt, path: Path) -> None:
    """Raise PromptError if the front matter names a reply that no call asks such a prompt for."""
    packaged = list_versions(find_data_folder("prompts"), prompt.header.name)
    known = {read_prompt(file).header.reply for file in packaged.values()}
    if prompt.header.reply not in known:
        raise PromptError(
            f"{path}: its front matter names the reply {prompt.header.reply}; a prompt "
            f"{prompt.header.name} has {' or '.join(sorted(known))}"
        )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
