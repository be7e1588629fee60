"""The target that is a command: an agent in a process of its own, behind a gateway.

target = CommandTarget(["my-agent", "--task", "{task}"], skill_file="SKILL.md")
target = CommandTarget(profile="codex", workspace="my_project")
summary = await Trainer("run.yaml", target=target).train()
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NoReturn, Self

import anyio
from pydantic import ValidationError

from reflact.agents.agent_process import CommandLimits, ProcessEnd, open_rollout_folder, run_process
from reflact.agents.gateway import GatewayAddress
from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.agents.profiles import PROFILES
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReplyError, SkillError
from reflact.jsonutil import describe_problems
from reflact.processes.sandbox import TRUNCATION_VERSION, read_landlock_version
from reflact.protocols import RequestForwarder
from reflact.skill_evals import CaseAnswer, read_case_files
from reflact.skills.package import MAIN_FILE, build_package, load_skill
from reflact.text import suggest_path
from reflact.types import Item, Skill, canonical_json, digest_json

# Version of what a command gets, part of every rollout's key; raise it if that changes.
COMMAND_TARGET_VERSION = 2

PLACEHOLDER = re.compile(r"\{(task|folder|base_url|root_url|token|model)\}")
DEFAULT_VARIABLES: Mapping[str, str] = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_KEY": "{token}",
}
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")

# What an agent leaves behind beside its results, such as caches; names with a leading dot too.
PASSED_OVER = frozenset({"__pycache__", "node_modules"})

# The most files of an answer, and the most bytes of each that a grader reads.
MAX_FILES = 50
MAX_FILE_BYTES = 200_000

# The most characters of a command's error output that a message quotes.
WORDS_OF_ERROR = 500


@dataclass(eq=False, repr=False)
class CommandTarget(GatewayTarget):
    """An agent that is run as a command, once for each rollout, in a folder and a HOME of its own.

    Its requests to a model go to a gateway on 127.0.0.1, which speaks Chat Completions, Responses
    and Messages and forwards them to ``models.target``, where the name of the rollout's folder is
    always ``/reflact-rollout``. The process gets the gateway's address and a token, and no key. All
    processes of the command are ended at a limit, at its end, and if reflact is killed. Unless
    ``confine`` is set, it can write what its user can.

    The agent finds the files of a case (see ``skill_evals``) in its folder, over those of the
    workspace. Its answer then has the files that it made or changed.

    Args:
        command: The program and its arguments; ``{task}``, ``{folder}``, ``{base_url}``,
            ``{root_url}`` (without ``/v1``), ``{token}`` and ``{model}`` are replaced. Without
            ``{task}`` the task goes to standard input.
        profile: ``codex``, ``opencode`` or ``claude-code``: brings the command, the variables, and
            the places of skill and answer; arguments that you give replace those.
        arguments: Further arguments, after those of the profile.
        skill_file: Where the skill is written, below the folder; None if ``seed`` is given.
        skill_name: Writes the skill as a ``SKILL.md`` of this name, to load if it seems useful.
        skill_description: Says when to use it, in the front matter of this ``SKILL.md``.
        seed: The instructions in the agent's requests that the skill replaces. A request must have
            them exactly once, or else the rollout is unmeasured.
        workspace: A folder that is copied for each rollout.
        side_call: A text in the first message of requests that are no part of the task, such as
            that for a title. They need no seed, and are booked under the purpose ``side_call``.
        answer_file: The file, below the folder, with the answer; None for standard output.
        variables: Further environment variables, with placeholders as in ``command``.
        limits: The limits of a rollout, or some of them by name, such as ``{"seconds": 60}``.
        confine: Whether it can write to no file outside the rollout's folder, and signal no other
            process. Modes and times of files stay open to it. Needs Linux 6.2 with Landlock;
            signals need Linux 6.12.
        preflight: Whether a training begins with a test that the agent's requests have the skill.
            Switch it off for an agent that reads the file later, with a tool.
        version: Part of the target's identity; change it with the command's program.

    Raises:
        ConfigError: An argument is wrong, missing, or contradicts another one.
    """

    has_files = True

    command: Sequence[str] = ()
    _: KW_ONLY
    profile: str | None = None
    arguments: Sequence[str] = ()
    skill_file: str | None = None
    skill_name: str | None = None
    skill_description: str | None = None
    seed: str | None = None
    workspace: str | None = None
    side_call: str | None = None
    answer_file: str | None = None
    variables: Mapping[str, str] | None = None
    limits: CommandLimits | Mapping[str, float] = CommandLimits()  # noqa: RUF009 - it is frozen
    confine: bool = False
    preflight: bool = True
    version: str = "1"

    def __post_init__(self) -> None:
        """Fill in the profile, and check all arguments."""
        own_variables = DEFAULT_VARIABLES
        if self.profile is not None:
            own_variables = self._apply_profile(self.profile)
        self.all_variables = {**own_variables, **(self.variables or {})}
        if isinstance(self.command, str) or not self.command:
            raise ConfigError('command is a list, such as ["my-agent", "--task", "{task}"]')
        self.command = (*self.command, *self.arguments)
        try:
            self.all_limits = CommandLimits.model_validate(self.limits)
        except ValidationError as error:
            raise ConfigError(f"limits: {describe_problems(error)}") from error
        self.seconds = self.all_limits.seconds
        if self.workspace is not None and not Path(self.workspace).is_dir():
            folder = Path(self.workspace).resolve()
            raise ConfigError(f"workspace: there is no folder {folder}{suggest_path(folder)}")
        if (self.skill_file is None) == (self.seed is None):
            raise ConfigError(
                "give either skill_file, the skill's place, or seed, which it replaces"
            )
        if self.seed is not None and not self.seed.strip():
            raise ConfigError("seed is empty; give the agent's instructions, word for word")
        if self.skill_name is not None and self.seed is not None:
            raise ConfigError("skill_name has no effect with seed: leave out one of them")
        if self.skill_name is not None and self.skill_description is None:
            raise ConfigError("skill_name needs skill_description, which says when to use it")
        for path in filter(None, (self.skill_file, self.answer_file)):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ConfigError(f"{path} leaves the rollout's folder; name a path below it")
        if self.confine and read_landlock_version() < TRUNCATION_VERSION:
            raise ConfigError(
                "this system cannot confine a command, because confine needs Linux 6.2 with "
                "Landlock; run reflact in a container instead"
            )
        self.write_skill(Skill(text=""))
        self.skill_advice = "look at `seed`"
        if self.skill_file is not None:
            self.skill_advice = (
                f"it is in {self.skill_file} of the rollout's folder, so look whether the agent "
                "reads this file there, or name another one with `skill_file`; if it reads the "
                "file later, with a tool, set `preflight: false`"
            )
        self._identity: str | None = None

    def _apply_profile(self, name: str) -> Mapping[str, str]:
        """Take what is not given from a profile, and return its variables."""
        profile = PROFILES.get(name)
        if profile is None:
            raise ConfigError(f"there is no profile {name!r}; choose from {', '.join(PROFILES)}")
        self.command = self.command or profile.command
        self.answer_file = self.answer_file or profile.answer_file
        self.side_call = self.side_call or profile.side_call
        if self.seed is None and self.skill_file is None:
            self.skill_file = profile.skill_file
            if self.skill_name is not None:
                self.skill_file = f"{profile.skills_folder}/{self.skill_name}/{MAIN_FILE}"
        return profile.variables

    @property
    def identity(self) -> str:
        """The settings and files, as canonical JSON; a run reads the workspace once."""
        return self._identity or self._describe()

    def _describe(self) -> str:
        workspace = None if self.workspace is None else _digest_folder(Path(self.workspace))
        return canonical_json(
            {
                "target": "command",
                "version": [COMMAND_TARGET_VERSION, self.version],
                "command": list(self.command),
                "skill": [self.skill_file, self.skill_name, self.skill_description],
                "seed": self.seed,
                "side_call": self.side_call,
                "workspace": workspace,
                "answer_file": self.answer_file,
                "variables": {**self.all_variables},
                "limits": self.all_limits.model_dump(),
                "confine": self.confine,
                "llm": self.sender_identity,
            }
        )

    @property
    def instructions(self) -> str:
        """The text that a training begins with: ``seed``, or the file that the skill replaces."""
        if self.seed is not None or self.workspace is None or self.skill_name is not None:
            return self.seed or ""
        file = Path(self.workspace, self.skill_file or "")
        return load_skill(file).text if file.is_file() else ""

    def write_skill(self, skill: Skill) -> str:
        """Return the text of the skill's file; ConfigError if its name breaks a rule of skills."""
        if self.skill_name is None:
            return skill.text
        try:
            package = build_package(skill, name=self.skill_name, description=self.skill_description)
        except SkillError as error:
            raise ConfigError(f"skill_name, skill_description: {error}") from error
        return package.files[0].content.decode("utf-8")

    def connect(self, sender: RequestForwarder, config: ModelConfig) -> Self:
        """Return the same target with its requests going through a run."""
        connected = super().connect(sender, config)
        connected._identity = connected._describe()
        return connected

    def session(self, skill: Skill, *, rollout: str) -> CommandSession:
        """Start a rollout; ``rollout`` is its key."""
        return CommandSession(self, skill, rollout)

    def session_for(self, item: Item, skill: Skill, *, rollout: str) -> CommandSession:
        """Start a rollout on an item, whose files it gets."""
        session = self.session(skill, rollout=rollout)
        session.files = read_case_files(item)
        return session


class CommandSession(GatewaySession):
    """One run of the command; ``files`` are those of a case."""

    has_files = True
    files: Mapping[str, bytes] | None = None
    _target: CommandTarget
    _times: Mapping[str, int]

    async def reply(self, message: str) -> str:
        """Run the command on a task and return its answer.

        Raises:
            ReplyError: It failed, or reached a limit; its rollout scores 0.
            EnvironmentFailure: It cannot work here, or got a second message.
        """
        async with open_rollout_folder() as own:
            folder = own / "work"
            self._folder = json.dumps(str(own), ensure_ascii=False)[1:-1]
            await anyio.to_thread.run_sync(self._write_folder, folder)
            self._times = await anyio.to_thread.run_sync(_list_times, folder)
            async with self._serve_task(message) as address:
                end = await self._run(own, address)
            if end.how != 0 or end.problem is not None:
                self._raise_failure(end, folder)
            if self._target.seed is not None and not self._last:
                raise EnvironmentFailure(
                    "the command sent no request to the gateway, so the skill had no effect: let "
                    "it call its model at OPENAI_BASE_URL, or name the address in `variables`"
                )
            output = self._hide_folder(end.output)
            return await anyio.to_thread.run_sync(self._read_answer, folder, output)

    def _write_folder(self, folder: Path) -> None:
        target = self._target
        if target.workspace is not None:
            shutil.copytree(target.workspace, folder, symlinks=True)
        for path in (folder, folder.parent / "home", folder.parent / "tmp"):
            path.mkdir(exist_ok=True)
        for name, content in (self.files or {}).items():
            path = folder / name
            if not is_inside(path, folder):
                raise EnvironmentFailure(f"the file {name} of a case leaves the folder: rename it")
            path.write_bytes(content)
        if target.skill_file is None:
            return
        path = folder / target.skill_file
        if not is_inside(path, folder):
            raise EnvironmentFailure(
                f"a link in the workspace leads skill_file {target.skill_file} out of the "
                "rollout's folder: remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(target.write_skill(self.skill), encoding="utf-8")

    async def _run(self, own: Path, address: GatewayAddress) -> ProcessEnd:
        """Run the command in the folder of the rollout."""
        target = self._target
        values = {
            "task": self._task or "",
            "folder": str(own / "work"),
            "base_url": address.base_url,
            "root_url": address.root_url,
            "token": address.token,
            "model": target.model,
        }

        def fill(text: str) -> str:
            return PLACEHOLDER.sub(lambda match: values[match[1]], text)

        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {"HOME": str(own / "home"), "TMPDIR": str(own / "tmp")}
        variables |= {name: fill(value) for name, value in target.all_variables.items()}
        text = values["task"]
        if any("{task}" in part for part in target.command):
            text = ""
        return await run_process(
            [fill(part) for part in target.command],
            text,
            folder=own,
            variables=variables,
            limits=target.all_limits,
            confine=target.confine,
        )

    def _raise_failure(self, end: ProcessEnd, folder: Path) -> NoReturn:
        """Raise EnvironmentFailure if the command cannot work here, and ReplyError if it failed."""
        if end.problem is not None:
            raise EnvironmentFailure(f"the command {end.problem}")
        for part in self._target.command:
            if Path(part).is_file() and not (folder / part).exists():
                raise EnvironmentFailure(
                    f"the command failed, and {part} is not in the folder in which it runs: give "
                    "the full path, or put the file into the folder that `workspace` names"
                )
        words = " ".join(end.errors[-WORDS_OF_ERROR:].split())
        how = end.how if isinstance(end.how, str) else f"ended with {end.how}"
        cause = f": {words}" if words else ""
        raise ReplyError(f"the command {how}{cause}{self._explain_null()}", reasons=())

    def _read_answer(self, folder: Path, output: str) -> str:
        """Return the answer; in a case with the files that the agent made or changed."""
        text = self._read_text(folder, output)
        if self.files is None:
            return text
        times = _list_times(folder)
        changed = sorted(name for name in times if times[name] != self._times.get(name))
        files = {name: _read_file(folder / name) for name in changed[:MAX_FILES]}
        return CaseAnswer(output=text, files=files).model_dump_json()

    def _read_text(self, folder: Path, output: str) -> str:
        """Return the answer of a command that ended, without white space around it."""
        name = self._target.answer_file
        if name is None:
            return output.strip()
        path = folder / name
        if not (path.is_file() and is_inside(path, folder)):
            raise ReplyError(f"the command wrote no file {name}", reasons=())
        with path.open("rb") as file:
            return (
                file.read(self._target.all_limits.output_bytes).decode("utf-8", "replace").strip()
            )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with its links followed, is below a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _list_times(folder: Path) -> dict[str, int]:
    """Return when each file below a folder was changed, without caches and hidden files."""
    times = {}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") or part in PASSED_OVER for part in parts)
        if not is_hidden and path.is_file() and is_inside(path, folder):
            times["/".join(parts)] = path.stat().st_mtime_ns
    return times


def _read_file(path: Path) -> str:
    """Return the begin of a file's text, or what it is if it is no text."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES)
    text = content.decode("utf-8", "replace")
    if "\0" in text or text.count("\ufffd") > 1:  # the end may cut a character
        return f"(a file of {path.stat().st_size} bytes that is no text)"
    return text


def _digest_folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return digest_json([[str(path.relative_to(folder)), path.read_bytes().hex()] for path in files])
