"""What `import reflact` costs and brings along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_site import list_doors, list_undocumented, render_reference

import reflact

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "opentelemetry",
    "openai",
    "instructor",
    "pydantic_ai",
    "httpx",
    "httpx2",
    "rich",
    "typer",
    "sqlite_utils",
    "htpy",
)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import reflact; print(*{*sys.modules} - before)"
    loaded = {name.partition(".")[0] for name in python(code).split()}
    assert loaded - set(sys.stdlib_module_names) == {"reflact"}


def test_help_loads_no_client_library() -> None:
    code = (
        "import sys\nfrom reflact.cli import main\nsys.argv = ['reflact', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"print(*(m for m in {(*HEAVY[:6], 'pydantic')!r} if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "train" in done.stdout
    assert done.stderr.strip() == ""


WATCHED_LOOP = f"""
import asyncio, sys, threading, tempfile
from contextlib import suppress
from pathlib import Path
from reflact import Trainer
from reflact.errors import ModelError
from reflact.messages import CallId
from reflact.training.check import CHECK_PROMPT, ReadyReply
from reflact.calibration import connect
from reflact.config.models import ModelConfig
import ssl

used = set()

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread() and name.partition(".")[0] in {HEAVY!r}:
            used.add(name)

def watch_certificates(self, *arguments, load=ssl.SSLContext.load_verify_locations, **named):
    if threading.current_thread() is threading.main_thread():
        used.add("certificates")
    return load(self, *arguments, **named)

ssl.SSLContext.load_verify_locations = watch_certificates
sys.meta_path.insert(0, Watch())
folder = Path(tempfile.mkdtemp())
model = dict(model="m", base_url="https://127.0.0.1:9/v1", api_key_env=None, max_retries=0)
items = [(str(number), str(number)) for number in range(6)]

async def open_model():
    async with connect(ModelConfig(**model), store=folder / "calls.db") as llm:
        with suppress(ModelError):
            await llm.ask(CHECK_PROMPT, ReadyReply, call_id=CallId(role="critic", purpose="check", step=0))

async def train():
    trainer = Trainer.from_items(
        train=items[:2], val=items[2:4], test=items[4:], grade=lambda item, answer: 0.0, target="m", optimizer="m",
        models__target__base_url=model["base_url"], models__target__api_key_env=None,
        models__target__max_retries=0, out_dir=str(folder / "run"), report=False,
    )
    assert (await trainer.train()).status == "failed"

asyncio.run(WORK())
assert "openai" in sys.modules
print(*used)
"""


@pytest.mark.parametrize("work", ["open_model", "train"])
def test_the_first_model_never_holds_the_event_loop(work: str) -> None:
    assert python(WATCHED_LOOP.replace("WORK", work)) == ""


@pytest.mark.slow
def test_callers_can_check_the_types_of_their_configuration(tmp_path: Path) -> None:
    example = ROOT / "examples" / "typed_configuration.py"
    code = example.read_text(encoding="utf-8")
    (tmp_path / "right.py").write_text(code, encoding="utf-8")
    wrong = code.replace('policy="ranked"', "policy=3").replace("num_epochs=1", "epochs=1")
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    options = [
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path}",
        "-O",
        "json",
    ]
    command = [sys.executable, "-m", "mypy", *options]
    done = subprocess.run(
        [*command, "right.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(error["file"], error["code"]) for error in found] == [
        ("wrong.py", "call-arg"),
        ("wrong.py", "arg-type"),
    ]


def test_every_exported_name_exists() -> None:
    assert [name for name in reflact.__all__ if getattr(reflact, name, None) is None] == []
    assert set(reflact.__all__) <= set(dir(reflact))
    with pytest.raises(AttributeError, match="Trainr"):
        reflact.Trainr  # noqa: B018


def test_every_public_name_is_documented() -> None:
    assert list_undocumented() == []
    modules = {door.split(".")[1] for door in list_doors() if "." in door}
    assert [name for name in modules if name not in str(reflact.__doc__)] == []
    page = render_reference("reflact")
    assert "# reflact" in page
    assert "### Trainer.from_items" in page
    assert "- `train`: " in page
