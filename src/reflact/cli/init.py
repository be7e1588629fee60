"""The command ``init``: a first configuration, from the data and the names of its columns."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from reflact.cli.common import load_trainer_config

OPENAI_URL = "https://api.openai.com/v1"

SMALL_MODEL = "{model} is small for an optimizer; a larger one writes better rules"
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
SENTENCES = frozenset(
    ["assertions", "criteria", "expectations", "expected_behavior", "expected_behaviors", "rubric", "rubrics"]
)
"""Columns of files of tests, such as an `evals.json`, whose lists say in sentences what a good result is."""

ASSERTION = re.compile(r"(not-)?[a-z][a-z-]*(\([^)]*\))?:\s*\S")
"""The beginning of an assertion of promptfoo, such as `contains: Bonjour`."""

HEADER = "if the first row is an item, write a header above it, such as input,reference"

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
    max_tokens: 2048
    timeout: 600"""
TEMPLATE = """\
# A training of reflact on {data}. Next:
#   reflact check {name}             one small call to each model and one graded item
#   reflact train {name} --dry-run   the plan and its cost; sends nothing
#   reflact train {name}

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

    The command knows columns by their names, and chooses the grader. At a terminal it asks for what it does not know:
    a column, the two models and their address. Edit the file as you like.
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
        *([f"{draft['rivals']} may be meant too; data.fields in {out} decides"] if draft["rivals"] else []),
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
    from reflact.config.models import is_local_address

    is_local = is_local_address(base_url)
    key = api_key_env or ("null" if is_local else "OPENAI_API_KEY")
    critic = f"  # The model that grades.\n  critic:\n    model: {quote_yaml(optimizer or model)}\n"
    own = "" if optimizer is None else f"model: {quote_yaml(optimizer)}\n    "
    return TEMPLATE.format(
        **draft,
        critic=critic if draft["grader"] == "critic" else "",
        model=quote_yaml(model),
        base_url=quote_yaml(base_url),
        key="null" if key == "null" else quote_yaml(key),
        pace=LOCAL_LINES if is_local else "",
        optimizer=own + (LOCAL_OPTIMIZER if is_local else "max_tokens: 4096"),
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
    from reflact.config.fields import DEFAULT_COLUMNS, FieldsConfig, list_telling_columns, unfold_row
    from reflact.data import check_dataset, load_dataset, read_rows
    from reflact.environments.dataset import PLAIN_GRADERS, DatasetEnvironment, guess_grader
    from reflact.reporting.lines import escape_line
    from reflact.types import Split

    sample = data
    if data.is_dir():
        files = (p for p in sorted(data.rglob("*")) if p.suffix in {".json", ".jsonl", ".csv"})
        sample = next((p for p in files if "train" in p.relative_to(data).parts[0]), data)
    found = [row for row in read_rows(sample) if isinstance(row.value, dict)] if sample.is_file() else []
    rows = [row.value for row in found]
    unfolded = rows if "input" in columns else [unfold_row(row.value, row.where) for row in found]
    used = find_columns(unfolded, columns, str(sample))
    first = unfolded[0] if unfolded else {}
    default = {
        field: next(filter(first.__contains__, names), None) for field, names in DEFAULT_COLUMNS.items()
    }
    named = {field: used[field] for field in default if field in used and used[field] != default[field]}
    fields = FieldsConfig.model_validate(named)
    has_test = not data.is_dir() or any(
        (data / f"test{end}").exists() for end in ("", ".json", ".jsonl", ".csv")
    )
    dataset = load_dataset(data, None, 42, fields=fields, needs_test=has_test)
    check_dataset(dataset)
    items = [item for split in Split for item in dataset.items(split)]
    rest = list(items[0].metadata)
    telling = [name for field in ("input", "reference") for name in list_telling_columns(field, rest)]
    grader, why = guess_grader([item.reference for item in items]) or (
        "critic",
        "No column is plainly the right answer, so a critic grades."
        + f" If one is, remove {out.name} and name it with --reference ({', '.join(rest)})." * bool(rest),
    )
    if grader in PLAIN_GRADERS:
        DatasetEnvironment(dataset, grade=PLAIN_GRADERS[grader]())  # says which rows it cannot grade
    n_train, n_val, n_test = (len(dataset.items(split)) for split in Split)
    lines = [f"    {field}: {quote_yaml(column)}\n" for field, column in named.items()]
    origins = sorted(rows[0].keys() - first.keys()) if rows else []
    words = [f"{field} from {column!r}" for field, column in sorted(used.items())]
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
        "columns": escape_line(", ".join(f"{{{name}}}" for name in rest) or "there are none"),
        "unseen": ", ".join(map(repr, rest)),
        "used": ", ".join(words) + (f", out of {', '.join(map(repr, origins))}" if origins else ""),
        "rivals": ", ".join(map(repr, telling)),
        "batch": str(choose_batch_size(n_train)),
    }


def choose_batch_size(n_train: int) -> int:
    """Return the items of a batch, so that the last batch of an epoch is not much smaller than the others."""
    n_steps = max(min(STEPS_PER_EPOCH, n_train // MIN_BATCH), math.ceil(n_train / MAX_BATCH), 1)
    return math.ceil(n_train / n_steps)


def find_columns(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the columns of the fields of items by their names; at a terminal, a person is asked if they do not tell.

    Empty columns count as absent.

    Raises:
        DataError: No column or several could be the task, several could be the right answer, or there are tests instead.
    """
    from reflact.config.fields import DEFAULT_COLUMNS, FIELD_NAMES, are_ids, is_labels, list_telling_columns
    from reflact.errors import DataError
    from reflact.jsonutil import flatten_fields

    if not list_telling_columns("input", list(list_filled_columns(rows))):
        rows = [dict(flatten_fields(dict(row))) for row in rows]
    filled = list_filled_columns(rows)
    columns = dict(chosen)
    for field in FIELD_NAMES:
        if field in columns:
            continue
        free = [name for name in filled if name not in columns.values()]
        telling = list_telling_columns(field, free)
        if field == "id":
            telling = [name for name in telling if are_ids([row.get(name) for row in rows])]
        if field == "input":
            telling = [name for name in telling if not is_labels(list(map(str, filled[name])))]
        is_default = bool(telling) and telling[0] in DEFAULT_COLUMNS[field]
        if field == "reference" and not is_default:
            refuse_tests(filled, where)
        if len(telling) == 1 or is_default or (telling and field in {"id", "task_type"}):
            columns[field] = telling[0]
        elif telling or (field == "input" and rows):
            columns[field] = choose_column(field, telling, free, where)
    answer = columns.get("reference")
    if answer in filled.get(str(answer), ()):
        raise DataError(f"{where}: {answer!r} is an answer and no name of a column; {HEADER}")
    return columns


def list_filled_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each column that at least half of the rows have."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if value not in (None, "", [], {}) and name != "metadata":
                values.setdefault(name, []).append(value)
    return {name: filled for name, filled in values.items() if 2 * len(filled) >= len(rows)}


def choose_column(field: str, telling: Sequence[str], columns: Sequence[str], where: str) -> str:
    """Return the column that a person at a terminal names; else raise DataError with the columns to choose from."""
    from reflact.errors import DataError

    what = {"input": "the task", "reference": "the right answer"}[field]
    listed = ", ".join(map(repr, telling or columns)) or "none"
    if sys.stdin.isatty():
        return str(typer.prompt(f"Column of {what} ({listed})"))
    problem = f"several columns may be {what}" if telling else f"no column looks like {what}"
    raise DataError(
        f"{where}: {problem}; name it with --{field}, which data.fields.{field} keeps (the columns are {listed})"
        + f"; {HEADER}" * (where.endswith(".csv") and not telling)
    )


def refuse_tests(columns: Mapping[str, Sequence[Any]], where: str) -> None:
    """Raise DataError if a column has sentences or assertions about an answer in place of right answers."""
    from reflact.errors import DataError

    for name, values in columns.items():
        if (name in SENTENCES and isinstance(values[0], list)) or (
            name.startswith("__expected") and any(ASSERTION.match(str(value)) for value in values)
        ):
            raise DataError(
                f"{where}: the column {name!r} has sentences or assertions about an answer, which no grader of reflact reads "
                "yet; write right answers into a column and name it with --reference, or grade with a function of your own"
            )


def quote_yaml(text: str) -> str:
    """Return a text as a scalar of YAML on one line; a plain word stays as it is."""
    import yaml

    is_plain = re.fullmatch(r"[A-Za-z][\w.-]*", text, re.ASCII) is not None and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text)
