"""The target that is a command: an agent in a process of its own, which asks its model through a
gateway.

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
from pathlib import Path
from typing import NoReturn, Self

import anyio
from pydantic import JsonValue, ValidationError

from reflact.agents.agent_process import (
    CommandLimits,
    ProcessEnd,
    open_rollout_folder,
    run_process,
)
from reflact.agents.gateway import GatewayAddress, open_gateway
from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.agents.profiles import PROFILES, AgentProfile
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReplyError, SkillError
from reflact.jsonutil import describe_problems
from reflact.processes.sandbox import TRUNCATION_VERSION, read_landlock_version
from reflact.protocols import RequestSender
from reflact.skills.package import MAIN_FILE, build_package, load_skill
from reflact.text import suggest_path
from reflact.types import Skill, canonical_json, digest_json

# Version of what a command gets, part of every rollout's key; raise it if that changes.
COMMAND_TARGET_VERSION = 2

PLACEHOLDER = re.compile(r"\{(task|folder|base_url|root_url|token|model)\}")
DEFAULT_VARIABLES: Mapping[str, str] = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_KEY": "{token}",
}
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")

# The most characters of a command's error output that a message quotes.
WORDS_OF_ERROR = 500


class CommandTarget(GatewayTarget):
    """An agent that is run as a command, once for each rollout, in a folder and a HOME of its own.

    Its requests to a model go to a gateway on 127.0.0.1, which speaks Chat Completions, Responses
    and Messages and forwards them to ``models.target``, where the name of the rollout's folder is
    always ``/reflact-rollout``. The process gets the gateway's address and a token, and no key. All
    processes of the command are ended at a limit, at its end, and if reflact is killed. Unless
    ``confine`` is set, it can write what its user can.

    Args:
        profile: A command-line agent by name: ``codex``, ``opencode`` or ``claude-code``. It brings
            the command, the variables, and the places of skill and answer; arguments that you give
            replace those.
        command: The program and its arguments; ``{task}``, ``{folder}``, ``{base_url}``,
            ``{root_url}`` (without ``/v1``), ``{token}`` and ``{model}`` are replaced. Without
            ``{task}`` the task goes to standard input.
        arguments: Further arguments, after those of the profile.
        skill_file: Where the skill is written, below the folder, in place of a file of the
            workspace; None if ``seed`` is given.
        skill_name: Writes the skill as a ``SKILL.md`` of this name, which the agent loads if it
            seems useful.
        skill_description: Says when to use it, in the front matter of this ``SKILL.md``.
        seed: The instructions in the agent's requests that the skill replaces. A request must have
            them exactly once, or else the rollout is unmeasured.
        workspace: A folder that is copied for each rollout; a relative path begins at the current
            folder.
        side_call: A text in the first message of requests that are no part of the task, such as
            that for a title. They need no seed, and are booked under the purpose ``side_call``.
        answer_file: The file, below the folder, with the answer; None for standard output.
        variables: Environment variables beside PATH, HOME and TMPDIR; placeholders as in
            ``command``. Those of a profile stay.
        limits: The limits of a rollout, or some of them by name, such as ``{"seconds": 60}``.
        confine: Whether it can write to no file outside the rollout's folder, and signal no other
            process. Modes and times of files stay open to it. Needs Linux 6.2 with Landlock;
            signals need Linux 6.12.
        preflight: Whether a training begins with a test that the agent's requests have the skill.
            Switch it off for an agent that reads the file later, with a tool.
        version: Part of the target's identity; change it with the command's program.

    Raises:
        ConfigError: The command or ``seed`` is empty, neither or both of ``skill_file`` and
            ``seed`` are given, a path leaves the folder, ``workspace`` is no folder, or the
            profile, a limit or the skill's name is wrong.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        profile: str | None = None,
        arguments: Sequence[str] = (),
        skill_file: str | None = None,
        skill_name: str | None = None,
        skill_description: str | None = None,
        seed: str | None = None,
        workspace: str | None = None,
        side_call: str | None = None,
        answer_file: str | None = None,
        variables: Mapping[str, str] | None = None,
        limits: CommandLimits | Mapping[str, float] = CommandLimits(),  # noqa: B008 - it is frozen
        confine: bool = False,
        preflight: bool = True,
        version: str = "1",
    ) -> None:
        own_variables = DEFAULT_VARIABLES
        if profile is not None:
            known = _find_profile(profile)
            own_variables = known.variables
            command = command or known.command
            answer_file = answer_file or known.answer_file
            side_call = side_call or known.side_call
            if seed is None and skill_file is None:
                skill_file = known.skill_file
                if skill_name is not None:
                    skill_file = f"{known.skills_folder}/{skill_name}/{MAIN_FILE}"
        if isinstance(command, str) or not command:
            raise ConfigError(
                'command is a list of the program and its arguments: ["my-agent", "{task}"]'
            )
        if workspace is not None and not Path(workspace).is_dir():
            folder = Path(workspace).resolve()
            raise ConfigError(f"workspace: there is no folder {folder}{suggest_path(folder)}")
        if (skill_file is None) == (seed is None):
            raise ConfigError(
                "a command needs either skill_file, where it reads the skill, or seed, which it "
                "replaces"
            )
        if seed is not None and not seed.strip():
            raise ConfigError(
                "seed is empty; give the agent's instructions, word for word, or skill_file"
            )
        if skill_name is not None and (seed is not None or skill_description is None):
            raise ConfigError(
                "skill_name needs skill_description, which says when to use the skill, and no seed"
            )
        for path in filter(None, (skill_file, answer_file)):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ConfigError(f"{path} leaves the rollout's folder; name a path below it")
        if confine and read_landlock_version() < TRUNCATION_VERSION:
            raise ConfigError(
                "this system cannot confine a command, because confine needs Linux 6.2 with "
                "Landlock; leave confine out, and run reflact in a container"
            )
        try:
            self.limits = CommandLimits.model_validate(limits)
        except ValidationError as error:
            raise ConfigError(f"limits: {describe_problems(error)}") from error
        self.seconds = self.limits.seconds
        self.command = (*command, *arguments)
        self.skill_file = skill_file
        self.skill_name = skill_name
        self.skill_description = skill_description
        self.seed = seed
        self.workspace = workspace
        self.answer_file = answer_file
        self.variables = {**own_variables, **(variables or {})}
        self.side_call = side_call
        self.confine = confine
        self.preflight = preflight
        self.write_skill(Skill(text=""))
        self._version = version
        self._identity: str | None = None

    @property
    def skill_advice(self) -> str:
        """Where the agent gets the skill, and what to change if it does not."""
        if self.skill_file is None:
            return "look at `seed`"
        return (
            f"it is in {self.skill_file} of the rollout's folder, so look whether the agent reads "
            "this file there, or name another one with `skill_file`; if it reads the file later, "
            "with a tool, set `preflight: false`"
        )

    @property
    def identity(self) -> str:
        """The settings and files, as canonical JSON; a run reads the workspace once."""
        return self._identity or self._describe()

    def _describe(self) -> str:
        settings: dict[str, JsonValue] = {
            "target": "command",
            "version": [COMMAND_TARGET_VERSION, self._version],
            "command": list(self.command),
            "skill": [self.skill_file, self.skill_name, self.skill_description],
            "seed": self.seed,
            "side_call": self.side_call,
            "workspace": None if self.workspace is None else _digest_folder(Path(self.workspace)),
            "answer_file": self.answer_file,
            "variables": dict(self.variables),
            "limits": self.limits.model_dump(),
            "confine": self.confine,
            "llm": None if self._sender is None else self._sender.identity,
        }
        return canonical_json(settings)

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

    def connect(self, sender: RequestSender, config: ModelConfig) -> Self:
        """Return the same target with its requests going through a run."""
        connected = super().connect(sender, config)
        connected._identity = connected._describe()
        return connected

    def session(self, skill: Skill, *, rollout: str) -> CommandSession:
        """Start a rollout; ``rollout`` is its key."""
        return CommandSession(self, skill, rollout)


class CommandSession(GatewaySession):
    """One run of the command."""

    def __init__(self, target: CommandTarget, skill: Skill, rollout: str) -> None:
        super().__init__(
            target.require_sender(),
            skill,
            rollout,
            seed=target.seed,
            side_call=target.side_call,
        )
        self._target = target

    async def reply(self, message: str) -> str:
        """Run the command on a task and return its answer.

        Raises:
            ReplyError: It failed, or reached a limit; its rollout scores 0.
            EnvironmentFailure: It cannot work here, or got a second message.
        """
        self._take_task(message)
        async with open_rollout_folder() as own:
            folder = own / "work"
            self._folder = json.dumps(str(own), ensure_ascii=False)[1:-1]
            await anyio.to_thread.run_sync(self._write_folder, folder)
            model = self._target._model
            async with open_gateway(self._answer, model=model, on_refusal=self._refuse) as address:
                with anyio.CancelScope() as scope:
                    self._stop = scope.cancel
                    end = await self._run(own, address)
            if self._failure is not None:
                raise self._failure
            if end.how != 0 or end.problem is not None:
                self._raise_failure(end, folder)
            if self._target.seed is not None and not self._last:
                raise EnvironmentFailure(
                    "the command sent no request to the gateway, so the skill had no effect: let "
                    "it call its model at OPENAI_BASE_URL, or at the address that `variables` "
                    "gives it"
                )
            return await anyio.to_thread.run_sync(
                self._read_answer, folder, self._hide_folder(end.output)
            )

    def _write_folder(self, folder: Path) -> None:
        target = self._target
        if target.workspace is not None:
            shutil.copytree(target.workspace, folder, symlinks=True)
        for path in (folder, folder.parent / "home", folder.parent / "tmp"):
            path.mkdir(exist_ok=True)
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
        if self._target.answer_file is None:
            return output.strip()
        path = folder / self._target.answer_file
        if not (path.is_file() and is_inside(path, folder)):
            raise ReplyError(f"the command wrote no file {self._target.answer_file}", reasons=())
        with path.open("rb") as file:
            return file.read(self._target.limits.output_bytes).decode("utf-8", "replace").strip()

    async def _run(self, own: Path, address: GatewayAddress) -> ProcessEnd:
        """Run the command in the folder of the rollout."""
        target = self._target
        values = {
            "task": self._task or "",
            "folder": str(own / "work"),
            "base_url": address.base_url,
            "root_url": address.root_url,
            "token": address.token,
            "model": target._model,
        }
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {"HOME": str(own / "home"), "TMPDIR": str(own / "tmp")}
        variables |= {name: _fill(value, values) for name, value in target.variables.items()}
        text = values["task"]
        if any("{task}" in part for part in target.command):
            text = ""
        return await run_process(
            [_fill(part, values) for part in target.command],
            text,
            folder=own,
            variables=variables,
            limits=target.limits,
            confine=target.confine,
        )


def _find_profile(name: str) -> AgentProfile:
    if name not in PROFILES:
        raise ConfigError(
            f"there is no profile {name!r}; choose from {', '.join(PROFILES)}, or give a command"
        )
    return PROFILES[name]


def _fill(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with its links followed, is below a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _digest_folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return digest_json([[str(path.relative_to(folder)), path.read_bytes().hex()] for path in files])
