"""The command ``init``: a first configuration, from the data and the names of its columns.

At a terminal it asks what it doubts, with its guess as the default. Elsewhere it stops with the
command that answers the question.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reflact.cli.common import load_trainer_config
from reflact.errors import ConfigError, DataError
from reflact.text import escape_line, shorten

if TYPE_CHECKING:
    from reflact.config.fields import FieldsConfig
    from reflact.data import DataSet

OPENAI_URL = "https://api.openai.com/v1"

# The rows that are shown at a terminal, and the most characters of each.
SHOWN_ROWS = 3
MAX_ROW_CHARS = 300

DATA_SUFFIXES = (".json", ".jsonl", ".csv")

# Words that tell a field, alone or in a longer name, such as "right answer" or "customer_message".
FIELD_WORDS = {
    "input": re.compile(
        "input|question|prompt|problem|instruction|query|message|request|task|text|ticket"
    ),
    "reference": re.compile(
        "references?|answers?|correct|expected|gold|label|solution|truth|output|completion|response"
    ),
}

# Names that tell a field only if they are the whole name.
FIELD_NAMES = {
    "input": re.compile(
        "sentence|content|document|article|passage|review|email|tweet|comment|utterance|body|q"
    ),
    "reference": re.compile(
        "target|result|class|sentiment|intent|decision|verdict|outcome|queue|department|summary"
        "|translation|a"
    ),
}

# Words of a name that is no task and no answer, whatever its other words are.
OTHER_WORDS = re.compile("id|is|nr|no|number|count|length|type|date|url|incorrect|wrong|rejected")

# A name of more words is probably a text, because the file has no header.
MAX_NAME_WORDS = 4

# The beginning of an assertion of promptfoo, such as `contains: Bonjour`.
ASSERTION = re.compile(r"(not-)?[a-z][a-z-]*(\([^)]*\))?:\s*\S")

HEADER = "if the first row is an item, write a header above it, such as input,reference"

STEPS_PER_EPOCH = 4
MIN_BATCH = 4

# A small train split gives so many steps per epoch at least, if a batch then has so many items.
MAX_BATCH = 16

RATIO_LINES = """\
  # To choose another split (train:val:test; the last may be 0):
  # ratio: [1, 1, 1]
"""
TEST_LINES = """
# There is no test split, so the claim at the end rests on the validation items.
test:
  enabled: false
"""
LOCAL_LINES = """\
    # The calls in flight; 1 for a server that answers one call at a time.
    concurrency: 4
    # Seconds for one request: small machines write slowly.
    timeout: 600
    # The most tokens of an answer. If right answers are short and the model does not think first,
    # 64 saves much time.
"""
LOCAL_OPTIMIZER = """\
# The prompt and so many tokens must fit into the server's context together.
    max_tokens: 2048
    timeout: 600"""
SKIP_LINE = "  skip_unanswered: true\n"
EXTRA_LINES = {
    "sql": "  tables: tables  # folder of .csv tables, or a SQLite file\n",
    "rubric": "  # Answers that you marked measure the judge: a file with the columns input,\n"
    "  # answer, sentence and met.\n"
    "  rubric_marks: null\n",
}
SOFT_LINES = """\
# The score of an answer is the share of what it fulfils.
gate:
  metric: soft

"""

# Columns that no template should name.
HIDDEN = frozenset({"files", "expected_output"})

# Gets the system prompt of chats.
SKILL_FILE = "initial_skill.md"
TEMPLATE = """\
# A training of reflact on {data}. Next:
#   reflact check {name} --dry-run   the plan and its cost; sends nothing
#   reflact check {name}             the same with one small call to each model and one graded item
#   reflact train {name}

out_dir: {out_dir}

# The instructions to begin with, such as your prompt of today: a Markdown file, or the folder of a
# skill; null: none.
skill: {skill}

data:
  path: {path}
{fields}  # {sizes}
{ratio}
environment:
  # {why}
  # Others: exact, normalized, contains, token_f1, similarity, numeric, regex, json_fields,
  # json_subset, json_schema, sql, python, checks, rubric, critic.
  grader: {grader}
{extra}  # What the tasks are and what a good answer is; the optimizer reads it.
  description: {description}
  # The message to the target. Other columns of the data may be used too: {columns}.
  template: "{{input}}"

models:
  # The model that answers, and whose instructions are trained.
  target:
    model: {model}
    base_url: {base_url}
    # The environment variable that holds the key; null for an endpoint without keys.
    api_key_env: {key}
{pace}    max_tokens: 1024
  # The model that writes the instructions. It uses the target's model, address and key unless it
  # has its own.
  optimizer:
    {optimizer}
{critic}
{gate}train:
  num_epochs: 2
  batch_size: {batch}
{test}
# The run stops before it exceeds a limit. max_usd needs a known price.
budget:
  max_calls: null
  max_usd: null
"""


def init(  # noqa: PLR0917 - one for each option of the command
    context: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="A .csv, .json or .jsonl file, or a folder.", show_default=False
        ),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target's model.", show_default=False)
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The new configuration; never overwritten.")
    ] = Path("run.yaml"),
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The optimizer's model. Default: the target's.", show_default=False
        ),
    ] = None,
    base_url: Annotated[str, typer.Option(metavar="URL", help="Root of the API.")] = OPENAI_URL,
    input_column: Annotated[
        str | None,
        typer.Option("--input", metavar="COLUMN", help="Column of the task.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of the right answer.", show_default=False),
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How answers are graded. Default: by the form of the right answers.",
            show_default=False,
        ),
    ] = None,
    description: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the tasks are and what a good answer is.",
            show_default=False,
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable that holds the key, or null. Default: OPENAI_API_KEY, or null for a "
            "local address.",
            show_default=False,
        ),
    ] = None,
    skill: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The instructions to begin with: a Markdown file, or the folder of a skill. "
            "Default: none.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a first configuration for your data.

    The command knows columns by their names, and chooses the grader. At a terminal it shows three
    rows and asks what it doubts; Enter takes its guess. Elsewhere it stops with the complete
    command. Edit the file as you like.
    """
    from reflact.skills.package import load_skill
    from reflact.store.artifacts import write_atomically

    if out.exists() or out.suffix not in {".yaml", ".yml"}:
        problem = "exists already; remove it, or" if out.exists() else "does not end in .yaml;"
        raise ConfigError(f"{out} {problem} choose another file with --out")
    if input_column is not None and input_column == reference:
        raise ConfigError(f"--input and --reference both name {reference!r}; name two columns")
    if skill is not None:
        load_skill(skill)  # says why if it cannot be read
    options = {"input": input_column, "reference": reference}
    columns = {name: column for name, column in options.items() if column is not None}
    questions = Questions(context)
    rows = read_sample(data, columns)
    questions.show_rows(rows)
    values, notes, prompt = describe_data(data, out, rows, columns, grader, questions)
    model = model or questions.ask("model", "model that answers", None)
    if description is None and questions.is_terminal:
        description = questions.ask("description", "what the tasks are, what a good answer is", "")
    values["description"] = quote_yaml(description or "")
    if skill is None:
        skill = find_skill(data, prompt, out, notes)
    values["skill"] = "null" if skill is None else write_path(skill, out)
    values |= describe_models(values["grader"], model, optimizer, base_url, api_key_env)
    write_atomically(out, TEMPLATE.format(**values))
    try:
        load_trainer_config(out, None)
    except ConfigError:
        out.unlink()
        raise
    if optimizer is None:
        option = "--optimizer, or models.optimizer.model, names another model"
        notes.append(f"the target is also its own optimizer; {option}")
    for line in (*notes, f"wrote {out}; next: reflact check {shlex.quote(str(out))} --dry-run"):
        typer.echo(escape_line(line))


class Questions:
    """Asks at a terminal; elsewhere a question ends the command with the one to type instead."""

    def __init__(self, context: typer.Context) -> None:
        self._context = context
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def show_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the first rows of the data."""
        for number, row in enumerate(rows[:SHOWN_ROWS] if self.is_terminal else (), 1):
            text = json.dumps(dict(row), ensure_ascii=False, default=str)
            typer.echo(escape_line(f"row {number}: {shorten(text, MAX_ROW_CHARS)}"))

    def ask(
        self, option: str, question: str, guess: str | None, *, problem: str | None = None
    ) -> str:
        """Return the answer, by default the guess.

        Raises:
            DataError: There is no terminal; names the problem and the command with the option.
        """
        if self.is_terminal:
            if problem is not None:
                typer.echo(escape_line(problem))
            return str(typer.prompt(question, default=guess)).strip()
        words = problem or f"name the {question}"
        raise DataError(f"{words}; type: {spell_command(self._context, option)}")


def spell_command(context: typer.Context, option: str) -> str:
    """Return the command that was typed, with a further option, and the model if it is missing."""
    words = ["reflact", "init"]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            if parameter.param_type_name == "option":
                words.append(parameter.opts[0])
            words.append(str(context.params[name]))
    missing = [option]
    if context.params["model"] is None and option != "model":
        missing.append("model")
    given = {"input": "COLUMN", "reference": "COLUMN"}
    ends = [f"--{one} {given.get(one, 'NAME')}" for one in missing]
    return " ".join([shlex.join(words), *ends])


def describe_models(
    grader: str, model: str, optimizer: str | None, base_url: str, api_key_env: str | None
) -> dict[str, str]:
    """Return the values of the template for models; a local address needs no key."""
    from reflact.config.models import is_local_address

    is_local = is_local_address(base_url)
    key = api_key_env or ("null" if is_local else "OPENAI_API_KEY")
    critic = f"  # The model that grades.\n  critic:\n    model: {quote_yaml(optimizer or model)}\n"
    own = "" if optimizer is None else f"model: {quote_yaml(optimizer)}\n    "
    return {
        "critic": critic if grader in {"critic", "rubric"} else "",
        "gate": SOFT_LINES if grader in {"checks", "rubric"} else "",
        "model": quote_yaml(model),
        "base_url": quote_yaml(base_url),
        "key": "null" if key == "null" else quote_yaml(key),
        "pace": LOCAL_LINES if is_local else "",
        "optimizer": own + (LOCAL_OPTIMIZER if is_local else "max_tokens: 4096"),
    }


def write_path(path: Path, out: Path) -> str:
    """Return a path as the configuration names it: relative to the configuration's folder."""
    return quote_yaml(os.path.relpath(path.resolve(), out.resolve().parent))


def find_skill(data: Path, prompt: str | None, out: Path, notes: list[str]) -> Path | None:
    """Return the skill whose cases the data are, or a new file with the prompt of chats."""
    from reflact.store.artifacts import write_atomically

    folder = data.resolve().parent.parent
    if data.name == "evals.json" and (folder / "SKILL.md").is_file():
        notes.append(f"the initial skill is that of the cases: {folder}")
        return folder
    if prompt is None:
        return None
    path = out.with_name(SKILL_FILE)
    if path.exists():
        raise ConfigError(
            f"the chats have a system prompt for {path}, which exists already; remove it, or name "
            "the initial skill with --skill"
        )
    write_atomically(path, prompt)
    notes.append(f"the initial skill is the system prompt of the chats: {path}")
    return path


def describe_data(  # noqa: PLR0917 - one for each thing that the caller may know
    data: Path,
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    grader: str | None,
    questions: Questions,
) -> tuple[dict[str, str], list[str], str | None]:
    """Return the values of the template for a data file, what a person should know about them, and
    the system prompt if all rows are chats with the same one.

    Args:
        data: The file or folder.
        out: The configuration.
        rows: Its rows.
        columns: The columns of fields that the caller knows.
        grader: The grader, if the caller knows it.
        questions: Asks what is in doubt.

    Raises:
        DataError: The data cannot be read or is not fit for a run, or something is in doubt and
            nobody can be asked.
    """
    from reflact.config.fields import DEFAULT_COLUMNS, FieldsConfig
    from reflact.environments.dataset import PLAIN_GRADERS, DatasetEnvironment
    from reflact.environments.guess import guess_grader
    from reflact.training.gating import FEW_ITEMS, describe_few_items
    from reflact.types import Split

    used = find_columns(rows, columns, str(data), questions, needs_answer=grader != "critic")
    named = {}
    for field, column in used.items():
        usual = next((name for name in DEFAULT_COLUMNS[field] if rows and name in rows[0]), None)
        if column != usual:
            named[field] = column
    dataset = load_data(data, FieldsConfig.model_validate(named))
    items = [item for split in Split for item in dataset.items(split)]
    n_unanswered = sum(item.reference in (None, "") for item in items)
    skips = 0 < n_unanswered < len(items)
    if skips:
        dataset = load_data(data, FieldsConfig.model_validate(named), skip_unanswered=True)
        items = [item for split in Split for item in dataset.items(split)]
    n_train, n_val, n_test = (len(dataset.items(split)) for split in Split)
    prompts = {str(item.metadata.get("system", "")) for item in items}
    prompt = next(iter(prompts)) if len(prompts) == 1 and "" not in prompts else None
    hidden = HIDDEN if prompt is None else {*HIDDEN, "system"}
    rest = [name for name in items[0].metadata if name not in hidden]
    guess = guess_grader([item.reference for item in items])
    if guess is None:
        guess = "critic", "The items have no right answers, so a critic grades."
    name, why = guess
    if grader is None and questions.is_terminal:
        grader = questions.ask("grader", "grader", name, problem=why)
    if grader not in {None, name}:
        why = "Chosen by you."
    grader = grader or name
    if grader in PLAIN_GRADERS:
        # says which rows it cannot grade
        DatasetEnvironment(dataset, grade=PLAIN_GRADERS[grader]())
    fields = "".join(f"    {field}: {quote_yaml(column)}\n" for field, column in named.items())
    sizes = f"{len(items)} items: {n_train} train, {n_val} validation, {n_test} test"
    values = {
        "data": escape_line(str(data)),
        "name": escape_line(shlex.quote(out.name)),
        "out_dir": quote_yaml("runs/" + re.sub(r"[^\w.-]+", "-", data.resolve().stem)),
        "path": write_path(data, out),
        "fields": (f"  fields:\n{fields}" if fields else "") + SKIP_LINE * skips,
        "ratio": "" if data.is_dir() else RATIO_LINES,
        "test": "" if n_test else TEST_LINES,
        "sizes": sizes,
        "grader": grader,
        "why": escape_line(why),
        "extra": EXTRA_LINES.get(grader, ""),
        "columns": escape_line(", ".join(f"{{{name}}}" for name in rest) or "there are none"),
        "batch": str(choose_batch_size(n_train)),
    }
    listed = ", ".join(f"{field} from {column!r}" for field, column in used.items())
    notes = [sizes, f"columns: {listed}", *dataset.notes]
    if rest:
        names = ", ".join(map(repr, rest))
        notes.append(f"the target does not see {names}; environment.template can name it")
    notes.append(f"grader {grader}: {why}")
    if n_val < FEW_ITEMS:
        notes.append(f"warning: {describe_few_items(n_val)}")
    return values, notes, prompt


def read_sample(data: Path, columns: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the rows of a data file, or of the train split of a folder, as items are read."""
    from reflact.config.fields import FieldsConfig, unfold_row
    from reflact.data import read_rows

    if data.is_dir():
        files = (path for path in sorted(data.rglob("*")) if path.suffix in DATA_SUFFIXES)
        data = next((path for path in files if "train" in path.relative_to(data).parts[0]), data)
    if not data.is_file():
        return []
    fields = FieldsConfig.model_validate(columns)
    rows = [row.value for row in read_rows(data, fields) if isinstance(row.value, dict)]
    return [row if "input" in columns else unfold_row(row) for row in rows]


def load_data(data: Path, fields: FieldsConfig, *, skip_unanswered: bool = False) -> DataSet:
    """Return the data set, which is fit for a run; a folder needs no test split."""
    from reflact.data import check_dataset, load_dataset

    names = [f"test{end}" for end in ("", ".json", ".jsonl", ".csv")]
    needs_test = not data.is_dir() or any((data / name).exists() for name in names)
    dataset = load_dataset(
        data, None, fields=fields, needs_test=needs_test, skip_unanswered=skip_unanswered
    )
    check_dataset(dataset)
    return dataset


def choose_batch_size(n_train: int) -> int:
    """Return the items of a batch, so that the last one of an epoch is not much smaller."""
    n_steps = max(min(STEPS_PER_EPOCH, n_train // MIN_BATCH), math.ceil(n_train / MAX_BATCH), 1)
    return math.ceil(n_train / n_steps)


def find_columns(
    rows: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, str],
    where: str,
    questions: Questions,
    *,
    needs_answer: bool,
) -> dict[str, str]:
    """Return the columns of the task and the right answer by their names.

    Columns that are empty in most rows count as absent.

    Raises:
        DataError: It is in doubt which column is the task or the right answer, and nobody can be
            asked; or there are tests instead.
    """
    from reflact.config.fields import DEFAULT_COLUMNS
    from reflact.jsonutil import flatten_fields

    if not list_telling_columns("input", list(list_filled_columns(rows))):
        rows = [dict(flatten_fields(dict(row))) for row in rows]
    filled = list_filled_columns(rows)
    columns = dict(chosen)
    for field, what in (("input", "the task"), ("reference", "the right answer")):
        if field in columns:
            continue
        free = [name for name in filled if name not in columns.values()]
        telling = list_telling_columns(field, free)
        is_default = bool(telling) and telling[0] in DEFAULT_COLUMNS[field]
        if field == "reference" and not is_default:
            refuse_tests(filled, where)
        if len(telling) == 1 or is_default:
            columns[field] = telling[0]
        elif rows and (field == "input" or needs_answer):
            listed = ", ".join(map(repr, telling or free)) or "none"
            problem = (
                f"several columns may be {what}" if telling else f"no column looks like {what}"
            )
            problem = f"{where}: {problem}; name it with --{field} (the columns are {listed})"
            if not telling and where.endswith(".csv"):
                problem += f"; {HEADER}"
            if field == "reference":
                problem += "; without right answers, --grader critic lets a model grade"
            guess = (telling or free or [""])[0] if telling or field == "input" else ""
            question = f"column of {what}"
            if chosen_column := questions.ask(field, question, guess, problem=problem):
                columns[field] = chosen_column
    answer = columns.get("reference")
    if answer in filled.get(str(answer), ()):
        raise DataError(f"{where}: {answer!r} is an answer and no name of a column; {HEADER}")
    return columns


def list_telling_columns(field: str, columns: Sequence[str]) -> list[str]:
    """Return the columns whose names tell a field of an item; the default one comes first."""
    from reflact.config.fields import DEFAULT_COLUMNS

    default = [name for name in DEFAULT_COLUMNS[field] if name in columns]
    others = [name for name in columns if name not in default and _is_telling(field, name)]
    return default + others


def _is_telling(field: str, column: str) -> bool:
    inner = re.split(r"\.(?=\S)", column)[-1]
    words = re.findall(r"[^\W_]+", inner.lower())
    if not 0 < len(words) <= MAX_NAME_WORDS:
        return False
    if len(words) == 1 and FIELD_NAMES[field].fullmatch(words[0]):
        return True
    other_field = FIELD_WORDS["reference" if field == "input" else "input"]
    others = [word for word in words if OTHER_WORDS.fullmatch(word) or other_field.fullmatch(word)]
    is_told = any(FIELD_WORDS[field].fullmatch(word) for word in words)
    return is_told and not [word for word in others if word != "text"]


def list_filled_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each column that at least half of the rows have."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if value not in (None, "", [], {}) and name != "metadata":
                values.setdefault(name, []).append(value)
    return {name: filled for name, filled in values.items() if 2 * len(filled) >= len(rows)}


def refuse_tests(columns: Mapping[str, Sequence[Any]], where: str) -> None:
    """Raise DataError if a column has assertions of promptfoo about an answer, not answers."""
    for name, values in columns.items():
        if name.startswith("__expected") and any(map(ASSERTION.match, map(str, values))):
            raise DataError(
                f"{where}: the column {name!r} has assertions about an answer, which no grader of "
                "reflact reads; write right answers into a column and name it with --reference, or "
                "sentences into a list named assertions"
            )


def quote_yaml(text: str) -> str:
    """Return a text as a scalar of YAML on one line; a plain word stays as it is."""
    import yaml

    is_plain = re.fullmatch(r"[A-Za-z][\w.-]*", text, re.ASCII) is not None
    return text if is_plain and yaml.safe_load(text) == text else json.dumps(text)
