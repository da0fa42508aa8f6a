"""Scripts of docs/clients.md, run as they stand there: in this process, or in a client's own virtual environment.

`COHORT_CLIENTS` names a folder of such environments (`scripts/client_venvs` makes it); a client that is not in it is
skipped, with a reason that says so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline import Pipeline
from tests.examples import nightly

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = "COHORT_CLIENTS"
WITHOUT = f"{FOLDERS} names no folder of clients (scripts/client_venvs makes one)"
ADDRESS, MODEL = "http://127.0.0.1:8000", "SmolLM2-135M-Instruct"
_FOLDERS = re.compile(r"(~|\$HOME)/\.cache/cohort/models/SmolLM2-135M-Instruct")


def script_of(page: str, heading: str, language: str, pipeline: Pipeline) -> str:
    """The one script under this heading of a page in docs/, for this pipeline instead of the default one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    [code] = re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)
    assert ADDRESS in code and MODEL in code
    folder = Path(pipeline.config.model.path)
    served = pipeline.config.model.served_name or folder.name
    code = _FOLDERS.sub(lambda _: str(folder), code)
    return code.replace(ADDRESS, pipeline.url).replace(f'"{MODEL}"', repr(served)).replace(MODEL, served)


def run_here(heading: str, pipeline: Pipeline) -> dict[str, Any]:
    """What the script's names stand for after it was run in this process. By default its answers in words end sooner:
    the model takes most of the time."""
    found: dict[str, Any] = {"__name__": "script"}
    code = script_of("clients.md", heading, "python", pipeline)
    exec(code if nightly() else re.sub(r"(tokens=)40\b", r"\g<1>12", code), found)
    return found


def environment_of(client: str) -> Path:
    """Its `bin`. Skips the test where there is none."""
    folder = os.environ.get(FOLDERS)
    if not folder:
        pytest.skip(WITHOUT)
    found = Path(folder).expanduser().absolute() / client / "bin"
    if not (found / "python").exists():
        pytest.skip(f"{client} is not in {folder} (scripts/client_venvs {folder} {client} makes it)")
    return found


def program_of(client: str, name: str) -> str:
    """A program that npm installed. Skips the test where there is none."""
    folder = os.environ.get(FOLDERS)
    if not folder:
        pytest.skip(WITHOUT)
    found = Path(folder).expanduser().absolute() / client / "node_modules" / ".bin" / name
    if not found.exists():
        pytest.skip(f"{client} is not in {folder} (scripts/client_venvs {folder} {client} makes it)")
    return str(found)


def run_there(client: str, command: list[str], folder: Path, timeout_s: float = 300.0) -> str:
    """What a command of the client's environment wrote; it may reach nothing but this machine."""
    programs = environment_of(client)
    mine = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    environment = {
        **mine,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HF_HOME": str(folder / "huggingface"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, (
        f"{client} failed with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def names_there(client: str, heading: str, names: dict[str, str], pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Expressions over a script's names, after it was run with the client's interpreter; their values as JSON."""
    environment_of(client)
    code = script_of("clients.md", heading, "python", pipeline)
    told = ", ".join(f"{name!r}: {expression}" for name, expression in names.items())
    file = folder / "script.py"
    file.write_text(f"{code}\nimport json as _json\nprint(chr(10) + _json.dumps({{{told}}}))\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(run_there(client, ["python", str(file)], folder).splitlines()[-1])
    return found
