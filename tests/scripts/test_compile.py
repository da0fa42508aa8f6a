"""`scripts/compile`: what it changes in its copy of the sources. Nightly: compiled simulations say the same."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples import nightly

ROOT = Path(__file__).resolve().parent.parent.parent
SIMULATION = ("simulate", "--trace", "256x64", "--rate", "8", "--duration", "30", "--cluster", "a100-80:2")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_modules", ROOT / "scripts" / "compile_modules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_is_there_once_and_checked(script: ModuleType):
    assert len(set(script.MODULES)) == len(script.MODULES)
    checked = {str(file.relative_to(ROOT)) for pattern in script.CHECKED for file in ROOT.glob(pattern)}
    assert set(script.MODULES) <= checked


def test_classes_with_interpreted_subclasses_are_opened(script: ModuleType):
    parents = script.interpreted_parents()
    assert {"ContinuousBatching", "ArrivalQueues", "PagedAllocator", "KvAllocator", "CostModel"} <= parents
    assert "WorkerMachine" not in parents


def test_what_changes_in_the_copy(script: ModuleType):
    text = "\n".join(
        (
            *('"""Head."""', "from __future__ import annotations", "@dataclass(slots=True, eq=False)"),
            *("class Open:", "    x: int", "@dataclass(slots=True)", "class Closed(Open): ..."),
            *("class BlockSharing(ABC): ...", "class Message(msgspec.Struct): ..."),
        )
    )
    adapted = script.opened(script.without_slots(text), {"Open", "BlockSharing", "Message"})
    assert adapted.split("\n") == [
        *('"""Head."""', "from __future__ import annotations", "from mypy_extensions import mypyc_attr"),
        *("@mypyc_attr(allow_interpreted_subclasses=True)", "@dataclass(eq=False)", "class Open:", "    x: int"),
        *("@dataclass", "class Closed(Open): ...", "@mypyc_attr(native_class=False)"),
        *("class BlockSharing(ABC): ...", "class Message(msgspec.Struct): ..."),
    ]


@pytest.mark.skipif(not nightly(), reason="compiles for minutes: scripts/test --nightly")
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["unified", "disaggregated", "ecoserve"])
def test_compiled_simulations_say_the_same(preset: str, clone: Path):
    """`ecoserve` has an allocator that inherits from a compiled one and from a mixin."""
    said = [simulated(clone, preset, compiled) for compiled in ("yes", "no")]
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With compiled modules."""
    root = tmp_path_factory.mktemp("clone")
    for part in ("cohort", "common", "services", "kernels", "configs", "tests", "scripts"):
        shutil.copytree(ROOT / part, root / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "COHORT_VENV": str(Path(sys.executable).parent.parent)}
    subprocess.run([root / "scripts" / "compile"], env=environment, check=True, timeout=1200)
    return root


def simulated(root: Path, preset: str, compiled: str) -> dict[str, Any]:
    """The report, but for measured times; checked that it was made as asked."""
    program = (
        "import sys; from cohort.services.cli.__main__ import main; code = main(sys.argv[1:]);"
        "from cohort.common.machines.worker import worker; sys.stderr.write(worker.__file__); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *SIMULATION, "--model", "llama-2-13b", "--preset", preset, "--json", "-"],
        env={**os.environ, "COHORT_COMPILED": compiled, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stderr.endswith(".so" if compiled == "yes" else "worker.py")
    [report] = json.loads(done.stdout)
    assert report.pop("measured")
    return report
