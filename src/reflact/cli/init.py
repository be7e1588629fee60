"""The command ``init``: a first configuration, guessed from the data."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from reflact.cli.common import load_trainer_config

OPENAI_URL = "https://api.openai.com/v1"

SMALL_MODEL = "preset: small, because {model} is small for an optimizer; a larger one writes better rules"
SAME_MODEL = (
    "the target is also its own optimizer; --optimizer, or models.optimizer.model, names another model"
)

RATIO_LINES = """\
  # To choose another split (train:val:test; the last may be 0):
  # ratio: [1, 1, 1]
"""
TEST_LINES = """
# The folder has no test split, so the claim at the end rests on the validation items.
test:
  enabled: false
"""
STEPS_PER_EPOCH, MIN_BATCH, MAX_BATCH = 4, 4, 16
"""A small train split gives so many steps per epoch at least, if a batch then has so many items."""

LOCAL_LINES = """\
    # The calls in flight; 1 for a server that answers one call at a time.
    concurrency: 4
    # Seconds for one request: small machines write slowly.
    timeout: 600
    # The most tokens of an answer. If right answers are short and the model does not think first, 64 saves much time.
"""
LOCAL_OPTIMIZER = """\
# The prompt and so many tokens must fit into the server's context together.
    max_tokens: {tokens}
    timeout: 600"""
PRESET_LINES = """
# Defaults to begin from. small has short prompts and adds one rule at a time, for an optimizer of less than about
# 3 billion parameters. A larger optimizer writes better rules.
preset: {preset}
"""
SMALL_TOKENS, LARGE_TOKENS = 600, 2048
"""The most tokens of a reply of an optimizer at a local address, if it is small and if it is not known to be so."""
TEMPLATE = """\
# A training of reflact on {data}. Next:
#   reflact check {name}             one small call to each model and one graded item
#   reflact train {name} --dry-run   the plan and its cost; sends nothing
#   reflact train {name}
{preset}
out_dir: {out_dir}

# The instructions to begin with, such as your prompt of today: a Markdown file, or the folder of a skill; null: none.
skill: {skill}

data:
  path: {path}
{fields}  # {sizes}
{ratio}
environment:
  # {why}
  # Others: exact, normalized, token_f1, numeric, regex, json_fields, sql, python, critic.
  grader: {grader}
{extra}  # What the tasks are and what a good answer is; the optimizer reads it.
  description: ""
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
  # The model that writes the instructions. It uses the target's model, address and key unless it has its own.
  optimizer:
    {optimizer}
{critic}
train:
  num_epochs: 2
  batch_size: {batch}
{test}
# The run stops before it exceeds a limit. max_usd needs a known price.
budget:
  max_calls: null
  max_usd: null
"""


def init(  # noqa: PLR0917 - one for each option of the command
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A .csv, .json or .jsonl file, or a folder.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The new configuration; never overwritten.")
    ] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target's model.", show_default=False)
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The optimizer's model. Default: the target's.", show_default=False
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"Root of the API. Default: {OPENAI_URL}.", show_default=False),
    ] = None,
    input_column: Annotated[
        str | None,
        typer.Option("--input", metavar="COLUMN", help="Column of the task.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of the right answer.", show_default=False),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable that holds the key, or null. Default: OPENAI_API_KEY, or null for a local address.",
            show_default=False,
        ),
    ] = None,
    skill: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The instructions to begin with: a Markdown file, or the folder of a skill. Default: none.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a first configuration for your data.

    The command reads DATA and guesses its columns and the grader. At a terminal it asks for the two models and
    their address if you do not name the target with --model. Edit the file as you like.
    """
    from reflact.config.models import is_small_model
    from reflact.errors import ConfigError
    from reflact.reporting.lines import escape_line
    from reflact.skills.package import load_skill
    from reflact.store.artifacts import write_atomically
    from reflact.training.gating import FEW_ITEMS, describe_few_items

    if out.exists() or out.suffix not in {".yaml", ".yml"}:
        problem = "exists already; remove it, or" if out.exists() else "does not end in .yaml;"
        raise ConfigError(f"{out} {problem} choose another file with --out")
    if input_column is not None and input_column == reference:
        raise ConfigError(f"--input and --reference both name {reference!r}; name two columns")
    columns = {"input": input_column, "reference": reference}
    draft = describe_data(data, out, {name: column for name, column in columns.items() if column is not None})
    if skill is not None:
        load_skill(skill)  # says why if it cannot be read
    draft["skill"] = "null" if skill is None else write_path(skill, out)
    if model is None:
        model, optimizer, base_url = ask_for_models(optimizer, base_url)
    write_atomically(out, fill_template(draft, model, optimizer, base_url or OPENAI_URL, api_key_env))
    try:
        load_trainer_config(out, None)
    except ConfigError:
        out.unlink()
        raise
    n_val = int(draft["n_val"])
    for line in (
        draft["sizes"],
        f"columns: {draft['used']}",
        *(
            [f"guessed by content: {draft['by_content']}; to change this, edit data.fields in {out}"]
            if draft["by_content"]
            else []
        ),
        *(
            [f"the target does not see {draft['unseen']}; environment.template can name it"]
            if draft["unseen"]
            else []
        ),
        f"grader {draft['grader']}: {draft['why']}",
        *([SAME_MODEL] if optimizer is None else []),
        *([SMALL_MODEL.format(model=optimizer or model)] if is_small_model(optimizer or model) else []),
        *([f"warning: {describe_few_items(n_val)}"] if n_val < FEW_ITEMS else []),
        f"wrote {out}; next: reflact check {shlex.quote(str(out))}",
    ):
        typer.echo(escape_line(line))


def ask_for_models(optimizer: str | None, base_url: str | None) -> tuple[str, str | None, str]:
    """Return the target's model, that of the optimizer and the address as a person at a terminal names them.

    The optimizer's is None if it is the target's.
    """
    from reflact.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError("which model answers? Name it with --model, or run this command at a terminal")
    model = str(typer.prompt("Model that answers (the target)"))
    if optimizer is None:
        question = "Model that writes the instructions (the optimizer; empty: the target's)"
        optimizer = str(typer.prompt(question, default="", show_default=False)).strip() or None
    return model, optimizer, base_url or str(typer.prompt("Address of the API", default=OPENAI_URL))


def fill_template(
    draft: Mapping[str, str], model: str, optimizer: str | None, base_url: str, api_key_env: str | None
) -> str:
    """Return a configuration; a local address needs no key unless one is named."""
    from reflact.config.models import is_local_address, is_small_model

    is_local = is_local_address(base_url)
    key = api_key_env or ("null" if is_local else "OPENAI_API_KEY")
    critic = f"  # The model that grades.\n  critic:\n    model: {quote_yaml(optimizer or model)}\n"
    own = "" if optimizer is None else f"model: {quote_yaml(optimizer)}\n    "
    is_small = is_small_model(optimizer or model)
    limit = LOCAL_OPTIMIZER.format(tokens=SMALL_TOKENS if is_small else LARGE_TOKENS)
    preset = PRESET_LINES.format(preset="small" if is_small else "default")
    return TEMPLATE.format(
        **draft,
        critic=critic if draft["grader"] == "critic" else "",
        model=quote_yaml(model),
        base_url=quote_yaml(base_url),
        key="null" if key == "null" else quote_yaml(key),
        pace=LOCAL_LINES if is_local else "",
        preset=preset if is_local or is_small else "",
        optimizer=own + (limit if is_local else "max_tokens: 4096"),
    )


def write_path(path: Path, out: Path) -> str:
    """Return a path as the configuration names it: relative to the configuration's folder."""
    return quote_yaml(os.path.relpath(path.resolve(), out.resolve().parent))


def describe_data(data: Path, out: Path, columns: Mapping[str, str]) -> dict[str, str]:
    """Return what a data file says about its configuration, as values of the template.

    Args:
        data: The file or folder.
        out: The configuration.
        columns: The columns of fields that the caller knows.

    Raises:
        DataError: The data cannot be read, is not fit for a run, or has no column that could be the input.
    """
    from reflact.config.fields import CHAT_COLUMNS, FIELD_NAMES, FieldsConfig, unfold_row
    from reflact.data import check_dataset, load_dataset, read_rows
    from reflact.environments.dataset import PLAIN_GRADERS, DatasetEnvironment, guess_grader
    from reflact.reporting.lines import escape_line
    from reflact.types import Split

    sample = data
    if data.is_dir():
        files = (p for p in sorted(data.rglob("*")) if p.suffix in {".json", ".jsonl", ".csv"})
        sample = next((p for p in files if "train" in p.relative_to(data).parts[0]), data)
    found = [row.value for row in read_rows(sample)] if sample.is_file() else []
    rows = [row for row in found if isinstance(row, dict)]
    unfolded = rows if "input" in columns else [unfold_row(row) for row in rows]
    guess = guess_fields(unfolded, columns, str(sample))
    if unfolded and (chat := CHAT_COLUMNS & (rows[0].keys() - unfolded[0].keys())):
        guess = guess._replace(note=f", both out of {' and '.join(map(repr, sorted(chat, reverse=True)))}")
    elif unfolded and "instruction" in rows[0].keys() - unfolded[0].keys():
        guess = guess._replace(note=", out of 'instruction', 'input' and 'output'")
    elif guess.usual.get("input") == "question" and "context" in unfolded[0]:
        guess = guess._replace(note="; the input begins with 'context'")
    fields, used = FieldsConfig.model_validate(guess.named), guess.describe()
    has_test = not data.is_dir() or any(
        (data / f"test{end}").exists() for end in ("", ".json", ".jsonl", ".csv")
    )
    dataset = load_dataset(data, None, 42, fields=fields, needs_test=has_test)
    check_dataset(dataset)
    items = [item for split in Split for item in dataset.items(split)]
    others = ", ".join(f"{{{name}}}" for name in items[0].metadata)
    references = [item.reference for item in items]
    grader, why = guess_grader(references) or ("critic", "")
    why = why or describe_missing_answer(unfolded, list(items[0].metadata), guess, out)
    if grader in PLAIN_GRADERS:
        DatasetEnvironment(dataset, grade=PLAIN_GRADERS[grader]())  # says which rows it cannot grade
    n_train, n_val, n_test = (len(dataset.items(split)) for split in Split)
    named = guess.named
    lines = [f"    {name}: {quote_yaml(named[name])}\n" for name in FIELD_NAMES if name in named]
    return {
        "data": escape_line(str(data)),
        "name": escape_line(shlex.quote(out.name)),
        "out_dir": quote_yaml("runs/" + re.sub(r"[^\w.-]+", "-", data.resolve().stem)),
        "path": write_path(data, out),
        "fields": "  fields:\n" + "".join(lines) if lines else "",
        "ratio": "" if data.is_dir() else RATIO_LINES,
        "test": "" if n_test else TEST_LINES,
        "sizes": f"{len(items)} items: {n_train} train, {n_val} validation, {n_test} test",
        "n_val": str(n_val),
        "grader": grader,
        "why": escape_line(why),
        "extra": "  tables: tables  # folder of .csv tables\n" if grader == "sql" else "",
        "columns": escape_line(others or "there are none"),
        "unseen": ", ".join(map(repr, items[0].metadata)),
        "used": used,
        "by_content": " and ".join(guess.by_content),
        "batch": str(choose_batch_size(n_train)),
    }


def choose_batch_size(n_train: int) -> int:
    """Return the items of a batch, so that the last batch of an epoch is not much smaller than the others."""
    n_steps = max(min(STEPS_PER_EPOCH, n_train // MIN_BATCH), math.ceil(n_train / MAX_BATCH), 1)
    return math.ceil(n_train / n_steps)


def describe_missing_answer(
    rows: Sequence[Mapping[str, Any]], others: Sequence[str], guess: GuessedFields, out: Path
) -> str:
    """Say that a critic grades, and how to name the column of the right answer if there is one.

    Args:
        rows: The rows of the data file.
        others: The columns that fill no field.
        guess: The columns of the fields.
        out: The configuration.
    """
    from reflact.config.fields import list_answer_columns

    columns = [*others, *(guess.named[field] for field in ("task_type", "id") if field in guess.named)]
    if not columns:
        return "No column looks like the right answer, so a critic grades."
    task = {**guess.usual, **guess.named}.get("input", "")
    likely = list_answer_columns(rows, [name for name in columns if any(name in row for row in rows)], task)
    listed = ", ".join(dict.fromkeys([*likely, *columns]))
    return (
        "No column is plainly the right answer, so a critic grades. If one is, remove "
        f"{out.name} and name it with --reference (the likeliest first: {listed})."
    )


class GuessedFields(NamedTuple):
    """The columns of the fields of items.

    Attributes:
        named: Those that need a line in ``data.fields``, by field.
        usual: Those that need none, by field.
        by_content: Fields whose columns have no telling name.
        note: More about them, in words.
    """

    named: Mapping[str, str]
    usual: Mapping[str, str]
    by_content: Sequence[str]
    note: str = ""

    def describe(self) -> str:
        """Return all fields with their columns, in words."""
        columns = {**self.usual, **self.named}
        words = (f"{field} from {column!r}" for field, column in sorted(columns.items()))
        return ", ".join(words) + self.note


def guess_fields(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, str], where: str) -> GuessedFields:
    """Return the columns of the fields of items, by their names or else by their contents.

    Raises:
        DataError: No column could be the input, or the first row is no header.
    """
    from reflact.errors import DataError
    from reflact.jsonutil import flatten_fields

    guess = _guess_from_columns(rows, chosen, lambda name: name)
    if "input" not in {*guess.named, *guess.usual} and rows:
        flat = [dict(flatten_fields(dict(row))) for row in rows]
        guess = _guess_from_columns(flat, chosen, lambda name: name.rpartition(".")[2])
    if "input" not in {*guess.named, *guess.usual} and rows:
        listed = ", ".join(map(repr, rows[0])) or "none"
        raise DataError(
            f"{where}: no column looks like the task; name it with --input, and that of the right answer with "
            f"--reference (the columns are {listed})"
        )
    column = guess.named.get("reference")
    if "reference" in guess.by_content and any(row.get(str(column)) == column for row in rows):
        raise DataError(
            f"{where}: the first row looks like an item and not like a header, because {column!r} is an answer of other "
            "rows too; write a header above it, such as input,reference"
        )
    return guess


def _guess_from_columns(
    rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, str], shorten: Callable[[str], str]
) -> GuessedFields:
    """Return the guess for columns whose names count as ``shorten`` gives them."""
    from reflact.config.fields import (
        FIELD_NAMES,
        are_ids,
        guess_column,
        guess_task,
        is_labels,
        is_quoted,
        list_answer_columns,
        list_texts,
    )

    known = {"input": ("input", "question"), "reference": ("reference", "answers", "answer")}
    first, most = rows[0] if rows else {}, len(rows) * 0.9
    columns = [name for name in first if sum(name in row for row in rows) >= most]
    usual = {
        field: own[0]
        for field in FIELD_NAMES
        if (own := [name for name in known.get(field, (field,)) if name in columns])
    }
    named, by_content = dict(chosen), list[str]()
    for field in FIELD_NAMES:
        if field in named or field in usual:
            continue
        free = [name for name in columns if name not in {*named.values(), *usual.values(), "metadata"}]
        short = {shorten(name): name for name in free}
        tasks = [name for name in short if field != "input" or not is_labels(list_texts(rows, short[name]))]
        column = short.get(guess_column(field, tasks) or "")
        if field == "id" and not are_ids([row.get(str(column)) for row in rows]):
            column = None
        if column is None and field in {"input", "reference"}:
            task = named.get("input") or usual.get("input")
            answer = short.get(guess_column("reference", list(short)) or "")
            others = [name for name in free if name not in {answer, "context"}]
            answers = list_answer_columns(rows, others, task) if field == "reference" and task else ()
            column = (
                guess_task(rows, others) if field == "input" else answers[0] if len(answers) == 1 else None
            )
            by_content += [field] if column else []
        if column:
            named[field] = column
    found, task = named.keys() | usual, named.get("input") or usual.get("input")
    if task and "id" in named.keys() - chosen and "reference" not in found:
        free = [name for name in columns if name not in {*named.values(), *usual.values()}]
        likely = (list_texts(rows, name) for name in list_answer_columns(rows, free, task))
        if not any(map(is_labels, likely)) and is_quoted(rows, named["id"], task):
            named["reference"] = named.pop("id")
            by_content.append("reference")
    return GuessedFields(named, usual, by_content)


def quote_yaml(text: str) -> str:
    """Return a text as a scalar of YAML on one line; a plain word stays as it is."""
    import yaml

    is_plain = re.fullmatch(r"[A-Za-z][\w.-]*", text, re.ASCII) is not None and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text)
