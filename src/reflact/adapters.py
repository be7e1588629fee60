"""How a run holds the caller's objects: checked once, with defaults for what they leave out.

``check_object`` says what an object lacks before anything is asked. The adapters give each optional
part a default, so no other module asks what an object can do. Code of the caller runs inside
``CatchExits``, and its results are checked where they are returned.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from pydantic import ValidationError

from reflact.config.models import ModelConfig
from reflact.config.training import ALL_SOURCES, TrainerConfig
from reflact.data import DataSet
from reflact.errors import ConfigError, EnvironmentFailure, InterfaceError, ReflactError
from reflact.jsonutil import describe_problems, replace_surrogates
from reflact.protocols import LLM, Annotator, Environment, Proposer, RequestSender, Session, Target
from reflact.records import CriticDescription
from reflact.text import shorten
from reflact.types import Grade, Item, Score, Skill, Split, Turn

# Exceptions that pass through everything: Ctrl-C, a cancellation, and the end of a generator.
INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)

# The most characters of an exception's text that are stored and shown.
MAX_TEXT_CHARS = 2_000


class ExitRaised(Exception):
    """Code of the caller raised an exception that ends a process, such as ``SystemExit``."""


class CatchExits(AbstractContextManager[None]):
    """A block that calls code of the caller: ``sys.exit()`` in it raises ``ExitRaised``.

    So does every other exception that is no ``Exception``, except for ``INTERRUPTIONS``.
    """

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise ``ExitRaised`` in place of an exit."""
        if isinstance(error, BaseExceptionGroup) and error.subgroup(INTERRUPTIONS) is not None:
            return
        while isinstance(error, BaseExceptionGroup):  # the first that is no ``Exception``, if any
            error = next((e for e in error.exceptions if not isinstance(e, Exception)), None)
        if error is None or isinstance(error, (Exception, *INTERRUPTIONS)):
            return
        raise ExitRaised(
            f"the code raised {error!r:.200}, which would end the process; raise another exception"
        ).with_traceback(trace) from None


def read_text(error: BaseException) -> str:
    """Return the text of an exception of the caller's code, cut to ``MAX_TEXT_CHARS``."""
    try:
        return shorten(str(error), MAX_TEXT_CHARS)
    except Exception as another:  # noqa: BLE001 - `__str__` is the caller's code
        return f"(its text cannot be read: {type(another).__name__})"


@contextmanager
def explain_exceptions(what: str, *, pass_on: bool) -> Iterator[None]:
    """Turn an exception of the caller's code into one sentence, unless it is to be passed on.

    Raises:
        ConfigError: The code raised an exception that is none of reflact's, which is its cause.
    """
    try:
        with CatchExits():
            yield
    except ReflactError:
        raise
    except Exception as error:  # callers' code raises anything
        if pass_on:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} failed: {type(error).__name__}: {error} ({Path(frame.filename).name}, line "
            f"{frame.lineno}); set train.raise_on_exception to see the traceback"
        ) from error


def describe_exception(item: Item, error: Exception, target: object, session: object) -> str:
    """Return why a rollout is unmeasured after an exception, and whose code raised it."""
    text = read_text(error)
    if isinstance(error, EnvironmentFailure):
        return text
    who = "environment"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if owner is not None and (owner is session or owner is target):
            who = "agent"
    if isinstance(error, ValidationError):
        wrong = type(error.errors(include_url=False)[0]["input"]).__name__
        text = f"{error.title}: {describe_problems(error)} (got {wrong})"
    return f"the {who} failed on item {item.id}: {type(error).__name__}: {text}"


# Surrounds the rollout of an item with a seed; yields a function that takes its grade, or None.
RolloutContext = Callable[[Item, int], AbstractAsyncContextManager[Callable[[Grade], None] | None]]


class EnvironmentAdapter:
    """The caller's environment, ``own``, inside a run: with defaults, and each result checked."""

    _open_context: RolloutContext | None = None

    def __init__(self, own: Environment) -> None:
        self.own = own

    def surround(self, open_context: RolloutContext) -> Self:
        """Return the environment with a context around each rollout."""
        surrounded = copy.copy(self)
        surrounded._open_context = open_context
        return surrounded

    @property
    def identity(self) -> str:
        """Name, version and settings that influence scores."""
        return self.own.identity

    @property
    def description(self) -> str:
        """What the tasks are and the score measures, for the optimizer."""
        return str(getattr(self.own, "description", ""))

    @property
    def prompt_folder(self) -> Path | None:
        """A folder of prompts for the optimizer, like ``prompts.folder``."""
        folder: Path | None = getattr(self.own, "prompt_folder", None)
        return folder

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of the items, a sentence each."""
        notes: Sequence[str] = getattr(self.own, "notes", ())
        return notes

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic that grades, if one does."""
        return find_critic(self.own)

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""
        return self.own.items(split)

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return an item's right answers, equal ones as equal texts; empty if none is known."""
        list_own = getattr(self.own, "list_right_answers", None)
        return () if list_own is None else list_own(item)

    def render_message(self, item: Item) -> str | None:
        """Return the message with which an item's task begins, if it is known beforehand."""
        render = getattr(self.own, "render_message", None)
        return None if render is None else str(render(item))

    async def set_up(self) -> None:
        """Start what rollouts need, such as a server; called once, before the first rollout."""
        if hasattr(self.own, "set_up"):
            starting = self.own.set_up()
            if not isinstance(starting, Awaitable):
                raise describe_not_async(self.own, EnvironmentAdapter.set_up, starting)
            await starting

    async def close(self) -> None:
        """End what was started; called after the last rollout, however the run ended."""
        close = getattr(self.own, "close", None)
        if close is not None and hasattr(self.own, "set_up"):
            await close()

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Let the session work on an item and grade the result.

        Raises:
            InterfaceError: ``run`` is not async, or returned no grade.
            EnvironmentFailure: A task of its own was cancelled, but not the rollout.
            ExitRaised: It would have ended the process.
        """
        context = nullcontext() if self._open_context is None else self._open_context(item, seed)
        async with context as observe:
            try:
                with CatchExits():
                    running: object = self._start_run(item, session, seed)
                    if not isinstance(running, Awaitable):
                        raise describe_not_async(self.own, Environment.run, running)
                    grade: object = await running
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if anyio.current_effective_deadline() == -math.inf or (task and task.cancelling()):
                    raise
                raise EnvironmentFailure(
                    f"the environment failed on item {item.id}: CancelledError of a task of its "
                    "own; catch it where your code waits for that task"
                ) from error

            if not (isinstance(grade, Grade) and isinstance(grade.score, Score)):
                wrong = grade.score if isinstance(grade, Grade) else grade
                raise InterfaceError(
                    f"`run` of {type(self.own).__name__} returned a value of type "
                    f"{type(wrong).__name__} for item {item.id} in place of a Grade with a Score; "
                    "write return Grade(score=Score.of(right), answer=answer)"
                )
            if observe is not None:
                observe(grade)
            return grade

    def _start_run(self, item: Item, session: Session, seed: int) -> Awaitable[Grade]:
        """Begin the rollout; a subclass may do it elsewhere."""
        return self.own.run(item, session, seed=seed)


class TargetAdapter:
    """The caller's target, ``own``, inside a run: with defaults, and its sessions are checked.

    With ``is_connectable`` it asks its own model and lets the run see these requests. With
    ``preflight`` a training begins with the test that the agent's requests have the skill. With
    ``has_files`` the agent finds the files of a case in its folder.
    """

    def __init__(self, own: Target) -> None:
        self.own: Any = own
        # What the agent can do, for the optimizer.
        self.description = str(getattr(own, "description", ""))
        self.has_files = bool(getattr(own, "has_files", False))
        self.is_connectable = hasattr(own, "connect") and hasattr(own, "describe_model")
        self.preflight = hasattr(own, "test_skill") and bool(getattr(own, "preflight", False))

    @property
    def identity(self) -> str:
        """The settings that influence answers."""
        identity: str = self.own.identity
        return identity

    @property
    def instructions(self) -> str:
        """The agent's instructions; a training begins with them, or with ``skill``."""
        instructions = getattr(self.own, "instructions", "")
        return instructions if isinstance(instructions, str) else ""

    def session_for(self, item: Item, skill: Skill, *, rollout: str) -> Session:
        """Return a new session about an item; InterfaceError if the target returned none."""
        with CatchExits():
            if hasattr(self.own, "session_for"):
                session: Session = self.own.session_for(item, skill, rollout=rollout)
            else:
                session = self.own.session(skill, rollout=rollout)
        _check_session(self.own, session)
        return session

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target`` with the agent's own model and endpoint."""
        if self.is_connectable:
            config = self.own.describe_model(config)
        return config

    def connect(self, sender: RequestSender, config: ModelConfig) -> TargetAdapter:
        """Return the target with its requests going through a run, if it makes any."""
        if not self.is_connectable:
            return self
        return TargetAdapter(self.own.connect(sender, config))

    async def test_skill(
        self, environment: Environment, items: Sequence[Item], skill: Skill, config: ModelConfig
    ) -> str | None:
        """Run the agent without its model until a request has the skill; may return a warning.

        Raises:
            EnvironmentFailure: No request has the skill, or the agent failed before it asked.
        """
        warning: str | None = await self.own.test_skill(environment, items, skill, config)
        return warning


def adapt_environment(value: Environment) -> EnvironmentAdapter:
    """Return an environment with its defaults and checks."""
    return value if isinstance(value, EnvironmentAdapter) else EnvironmentAdapter(value)


def adapt_target(value: Target | TargetAdapter) -> TargetAdapter:
    """Return a target with its defaults and checks."""
    return value if isinstance(value, TargetAdapter) else TargetAdapter(value)


def find_critic(value: object) -> CriticDescription | None:
    """Return the critic that a grader, an environment or an annotator uses, if any."""
    critic: CriticDescription | None = getattr(value, "scored_by", None)
    return critic


# The lines that explain what is missing, as a caller would write them.
TURNS_LINE = (
    'self.turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))'
)
ITEMS_LINE = 'return a list of items, such as [Item(id="1", input="2 + 2", reference="4")]'


def read_turns(session: Session | None) -> tuple[Turn, ...]:
    """Return the turns of a session, without lone surrogates, which a database cannot store."""
    turns = []
    for turn in () if session is None else session.turns:
        if not isinstance(turn, Turn):
            raise InterfaceError(
                f"`turns` of {type(session).__name__} has a {type(turn).__name__} in place of a "
                f"Turn; write {TURNS_LINE}"
            )
        turns.append(Turn(role=turn.role, content=replace_surrogates(turn.content)))
    return tuple(turns)


def _check_session(target: object, session: object) -> None:
    """Raise InterfaceError if a target returned something that is no session."""
    turns = getattr(session, "turns", None)
    if not hasattr(session, "reply"):
        problem = f"no `reply`; add {_write_definition(Session.reply)}"
    elif not isinstance(turns, tuple | list):
        problem = (
            f"`turns` of type {type(turns).__name__}, which must be a tuple of Turn; write "
            f"self.turns = () in its __init__ and {TURNS_LINE} in its `reply`"
        )
    else:
        return
    raise InterfaceError(
        f"`session` of {type(target).__name__} returned a value of type {type(session).__name__}, "
        f"which has {problem}"
    )


ObjectRole = Literal["target", "environment", "optimizer", "annotator", "proposer"]

# The methods that an object must have.
REQUIRED_PARTS: Mapping[ObjectRole, Sequence[Callable[..., Any]]] = {
    "target": (Target.session,),
    "environment": (Environment.items, Environment.run),
    "optimizer": (LLM.ask,),
    "annotator": (Annotator.annotate,),
    "proposer": (Proposer.propose,),
}

# The class for agents of pydantic-ai, which is imported only if one is named.
AGENT_CLASS = "reflact.targets.pydantic_ai:PydanticAITarget"


def check_object(role: ObjectRole, value: object) -> None:
    """Check that an object has the methods of its role; none is called, and no property is read.

    Raises:
        ConfigError: Something is missing, or has other arguments; names the line to write.
    """
    problem = _find_other_thing(role, value)
    if problem is not None:
        raise ConfigError(f"the {role} {problem}")
    if not (hasattr(type(value), "identity") or hasattr(value, "identity")):
        raise _build_error(role, value, "identity", "is missing", _write_identity(value))
    for method in REQUIRED_PARTS[role]:
        name = method.__name__
        problem = _find_problem(getattr(value, name, None), method)
        if problem is not None:
            raise _build_error(role, value, name, problem, _write_definition(method))


def check_texts(role: ObjectRole, value: Any) -> None:
    """Raise ConfigError if an object's identity, or its description if it has one, is no text."""
    examples = {"identity": _write_identity(value), "description": 'description = "..."'}
    for name, line in examples.items():
        text = getattr(value, name, "")
        if not isinstance(text, str):
            problem = f"is of type {type(text).__name__}, and no text"
            lines = f"{line}, or @property above def {name}(self)"
            raise _build_error(role, value, name, problem, lines)


def read_dataset(environment: EnvironmentAdapter) -> DataSet:
    """Return the items of all splits; ConfigError if ``items`` returned something else."""
    splits: dict[str, Any] = {"train": (), "val": (), "test": ()}
    for split in Split:
        returned: Any = environment.items(split)
        try:
            splits[split.value] = tuple(returned)
            data = DataSet.model_validate(splits)
        except (TypeError, ValidationError) as error:
            name = _describe("environment", environment.own)
            raise ConfigError(
                f"`items` of {name} returned {returned!r:.100}, of type {type(returned).__name__}, "
                f"for the {split.value} split; {ITEMS_LINE}"
            ) from error
    return data


def describe_not_async(
    value: object, method: Callable[..., Any], returned: object
) -> InterfaceError:
    """Return the error about a method that returned something that cannot be awaited."""
    return InterfaceError(
        f"`{method.__name__}` of {type(value).__name__} is not async: it returned a value of type "
        f"{type(returned).__name__}; write {_write_definition(method)}"
    )


def is_pydantic_agent(value: object) -> bool:
    """Whether an object is an agent of pydantic-ai, which is not imported for the answer."""
    return any(
        base.__module__.startswith("pydantic_ai.") and base.__name__ == "AbstractAgent"
        for base in type(value).__mro__
    )


def _find_other_thing(role: ObjectRole, value: object) -> str | None:
    """Return how to pass a class, a text, a function or an agent of pydantic-ai; None: no such."""
    if isinstance(value, type):
        return f"is the class {value.__name__}; pass an object: {role}={value.__name__}()"
    if isinstance(value, str):
        return f"is the text {value!r:.80}; pass an object, or name it in the configuration"
    if role == "target" and is_pydantic_agent(value):
        return "is an agent of pydantic-ai; pass target=reflact.targets.PydanticAITarget(agent)"
    if role == "target" and inspect.isroutine(value):
        return (
            f"is the function {value.__name__}; if it calls your agent, pass "
            f"target=reflact.targets.FunctionTarget({value.__name__})"
        )
    return None


def _find_problem(own: Any, method: Callable[..., Any]) -> str | None:
    """Return why a caller's method cannot be called as reflact calls it; None if it can."""
    if own is None:
        return "is missing"
    if not callable(own):
        return f"is a {type(own).__name__}, and no method"
    code = getattr(inspect.unwrap(own), "__code__", None)
    where = ""
    if code is not None:
        where = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    is_async = inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own)
    if is_async and not inspect.iscoroutinefunction(method):
        return f"is async{where}, and reflact does not wait for it"
    parameters = list(inspect.signature(method).parameters.values())[1:]
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # it is written in C
        return None
    try:
        signature.bind(*[None] * (len(parameters) - len(named)), **named)
    except TypeError as error:
        return f"has other arguments{where}: {error}"
    return None


def _build_error(
    role: ObjectRole, value: object, part: str, problem: str, line: str
) -> ConfigError:
    return ConfigError(f"`{part}` of {_describe(role, value)} {problem}; write {line}")


def _describe(role: ObjectRole, value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ in {"__main__", "builtins"} else f"{kind.__module__}."
    return f"the {role}, of type {module}{kind.__qualname__},"


def _write_identity(value: object) -> str:
    return f'identity = "{type(value).__name__}, version 1"'


def _write_definition(method: Callable[..., Any]) -> str:
    """Return the first line of a method as a caller would write it, without types."""
    signature = inspect.signature(method)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    written = signature.replace(parameters=bare, return_annotation=signature.empty)
    begin = "async def" if inspect.iscoroutinefunction(method) else "def"
    return f"{begin} {method.__name__}{written}:"


def load_named_target(config: TrainerConfig) -> Target | None:
    """Return the target that ``target.kind`` names; None for a chat model.

    An agent of pydantic-ai becomes a ``PydanticAITarget``; its options are those of that class, and
    a text with a colon among them is an import path again.

    Raises:
        ConfigError: There is no such object, it raises an error, or it is no target.
    """
    kind = config.target.kind
    if kind == "chat":
        return None
    value = _load("target.kind", kind, "targets")
    options: dict[str, Any] = {**config.target.options}
    if is_pydantic_agent(value):
        for name, option in options.items():
            if isinstance(option, str) and ":" in option:
                options[name] = _load(f"target.options.{name}", option, "targets")
        options["agent"] = value
        value = _load("target.kind", AGENT_CLASS, "targets")
    target: Target = _make("target", kind, value, options)
    if is_pydantic_agent(target):
        target = _load("target.kind", AGENT_CLASS, "targets")(target)
    return target


def load_named_environment(config: TrainerConfig) -> Environment | None:
    """Return the environment that ``environment.name`` names; None for a data set."""
    name = config.environment.name
    if name == "dataset":
        return None
    value = _load("environment.name", name, "environments")
    environment: Environment = _make("environment", name, value, config.environment.options)
    return environment


def load_named_proposer(config: TrainerConfig) -> Proposer | None:
    """Return the proposer among ``search.sources``, or None without one."""
    name = config.search.own
    if name is None:
        return None
    value = _load("search.sources", name, "proposers", known=ALL_SOURCES)
    proposer: Proposer = _make("proposer", name, value, {})
    return proposer


def _load(key: str, name: str, group: str, *, known: Sequence[str] = ()) -> Any:
    """Return the object behind ``module:name``, or the entry point of a group of reflact's."""
    module, colon, attribute = name.partition(":")
    try:
        with CatchExits():
            if colon:
                return reduce(getattr, attribute.split("."), import_module(module))
            entries = {entry.name: entry for entry in entry_points(group=f"reflact.{group}")}
            if name in entries:
                return entries[name].load()
    except Exception as error:  # a module may raise anything while it is imported
        reason = f"{key}: {name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(reason) from error
    names = ", ".join(sorted({*entries, *known})) or "none"
    raise ConfigError(
        f"{key}: no installed package offers {name!r} as an entry point of reflact.{group} (there "
        f"are: {names}); write module:name to import an object"
    )


def _make(role: ObjectRole, name: str, value: Any, options: Mapping[str, Any]) -> Any:
    """Return an object as it is, or what a class or function makes from the options."""
    if callable(value) and not hasattr(type(value), "identity"):
        try:
            with CatchExits():
                value = value(**options)
        except ReflactError:
            raise
        except Exception as error:  # named code may raise anything
            reason = f"{role}.options: {name} failed with them: {type(error).__name__}: {error}"
            raise ConfigError(reason) from error
    elif options:
        raise ConfigError(f"{role}.options has no effect: {name} is an object, not a class")
    if not is_pydantic_agent(value):
        try:
            check_object(role, value)
        except ConfigError as error:
            raise ConfigError(f"{name} cannot be used: {error}") from None
    return value
