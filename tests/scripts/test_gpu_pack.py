"""What `scripts/gpu_pack` brings, together with what the GPU machine holds, is all that `gpu_check` imports there.

The machine's packages are a recorded list (scripts/gpu_machine.txt). A folder of links to the installed packages of
that list and of the pack stands in for the machine; every section, and every process that one starts, is imported
from it, and the tests that sections run are collected. Versions are those installed here.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.examples import another_of_its_kind
from tests.support.kinds import by_default

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_pack"
LIMIT_S = 120
SECTIONS = sorted(
    ".".join(("cohort", *file.relative_to(ROOT).with_suffix("").parts))
    for file in (ROOT / "services" / "bench" / "gpu_check").rglob("*.py")
    if file.stem != "__init__"
)
STARTED = (  # with -m, by `pipeline`, `kv_transfer` and the runner, or by what these start
    *(f"cohort.services.{name}.__main__" for name in ("bench", "launcher", "gateway", "global_monitor", "rank_host")),
    *(f"cohort.services.{name}.__main__" for name in ("bucketing_manager", "cli", "length_predictor")),
    *(f"cohort.services.{name}.__main__" for name in ("decode_worker", "prefill_worker")),
    *(f"cohort.services.gateway.text.{name}_process" for name in ("grammar", "template")),
    "cohort.services.launcher.processes.template",
    "cohort.services.length_predictor.training",
    "cohort.services.bench.http.measuring",
    "cohort.common.engine.worker.follower_process",
    "cohort.common.engine.worker.profile_process",
    "cohort.common.transport.ucx_link",
    "cohort.kernels.cpu.build",
)
LATE = (  # within functions
    *("compressed_tensors.quantization", "llguidance.gbnf_to_lark", "safetensors.torch", "tokenizers", "uvloop"),
)
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
   importlib.import_module(name)
"""
SECTION = """
import runpy
runpy.run_module("cohort.services.bench.gpu_check", run_name="__main__")
"""


def plain(name: str) -> str:
    """One spelling of a package; a variant for CUDA 12 counts as the one for CUDA 13, a successor that the machine's
    older huggingface-hub does without as what that one takes."""
    found = re.sub(r"-cu1[23]$", "", re.sub(r"[-_.]+", "-", name.lower()))
    return {"httpx2": "httpx", "httpcore2": "httpcore", "truststore": "certifi"}.get(found, found)


@functools.cache
def on_the_machine() -> frozenset[str]:
    lines = (ROOT / "scripts" / "gpu_machine.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(plain(line) for line in lines if line and not line.startswith("#"))


@functools.cache
def in_the_pack() -> frozenset[str]:
    command = [sys.executable, str(SCRIPT), "--list"]
    pins = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.split()
    return frozenset(plain(pin.partition("==")[0]) for pin in pins)


def machine(folder: Path, packages: Iterable[str], code: str = IMPORT) -> list[str]:
    """The command line of a Python that finds the standard library, Cohort and these packages, and no others; it runs
    `code`."""
    allowed = set(packages)
    site = folder / "site"
    site.mkdir()
    (site / "cohort").symlink_to(ROOT / "cohort")
    for found in metadata.distributions():
        if plain(found.name) in allowed:
            for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
                link = site / top
                if not link.exists():
                    link.symlink_to(Path(str(found.locate_file(top))))
    return [sys.executable, "-I", "-S", "-B", "-c", f"import sys; sys.path.append({str(site)!r})\n{code}"]


def imported(command: list[str], modules: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *modules], capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )


def script() -> ModuleType:
    spec = importlib.util.spec_from_loader("gpu_pack", SourceFileLoader("gpu_pack", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@another_of_its_kind()
@pytest.mark.slow
def test_every_section_finds_what_it_imports(tmp_path: Path) -> None:
    command = machine(tmp_path, on_the_machine() | in_the_pack())
    told = imported(command, [*SECTIONS, *STARTED, *LATE])
    assert told.returncode == 0, told.stderr


def section(folder: Path, name: str, pytest_options: str) -> str:
    """What this section prints there. It must end well."""
    command = machine(folder, on_the_machine() | in_the_pack(), SECTION)
    environment = {**os.environ, "PYTEST_ADDOPTS": pytest_options, "TRITON_INTERPRET": "1"}
    words = [name, "--device", "cpu", "--folder", str(folder / "run")]
    told = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


@another_of_its_kind()
@pytest.mark.slow
def test_every_test_is_collected(tmp_path: Path) -> None:
    """A file that cannot be imported is a row that fails."""
    told = section(tmp_path, "tests", "--collect-only")
    files = {file.name for file in (ROOT / "tests" / "kernels" / "gpu").rglob("test_*.py")} - {"test_compile.py"}
    assert {name for name in files if f"<Module {name}>" in told} == files


@another_of_its_kind()
@pytest.mark.slow
def test_a_section_of_tests_runs(tmp_path: Path) -> None:
    """With what it imports only while it runs; a file that cannot be imported would be a row that fails."""
    told = section(tmp_path, "tests", "-k unified")
    assert "2 passed, 0 failed, 0 skipped" in told, told


@pytest.mark.parametrize("name", by_default(["llguidance", "pyzmq"], "llguidance"))
def test_a_package_left_out_is_missed(tmp_path: Path, name: str) -> None:
    command = machine(tmp_path, (on_the_machine() | in_the_pack()) - {name})
    section, grammar = "cohort.services.bench.gpu_check.__main__", "cohort.services.gateway.text.grammar_process"
    module, importer = {"pyzmq": ("zmq", section), "llguidance": ("llguidance", grammar)}[name]
    told = imported(command, [importer])
    assert told.returncode == 1 and f"No module named '{module}" in told.stderr


def test_what_cohort_depends_on_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (words for extra in ("engine", "predictor") for words in project["optional-dependencies"][extra])
    needed = {plain(Requirement(words).name) for words in (*project["dependencies"], *extras)}
    assert needed - on_the_machine() - in_the_pack() == {"gguf"}, "whose files a GPU is not given"


def test_what_packed_packages_depend_on_is_there() -> None:
    """As far as they are installed here: UCX's are where a set-up has brought them."""
    there = on_the_machine() | in_the_pack()
    missing = {}
    for found in metadata.distributions():
        if plain(found.name) in in_the_pack():
            needs = [Requirement(words) for words in found.requires or ()]
            absent = {need.name for need in needs if plain(need.name) not in there and _applies(need)}
            if absent:
                missing[found.name] = absent
    assert missing == {}


def _applies(need: Requirement) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"})


def test_nothing_is_packed_that_is_there() -> None:
    assert in_the_pack() & on_the_machine() == set()


def test_a_wheel_loses_headers_and_archives_alone(tmp_path: Path) -> None:
    record = "lib.dist-info/RECORD"
    files = {"lib/__init__.py": "x = 1", "lib/include/lib.h": "int x;", "lib/lib64/lib.a": "!", "lib/lib64/lib.so": "!"}
    wheel = tmp_path / "lib-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as new:
        for name, text in files.items():
            new.writestr(name, text)
        new.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    script().lighten(wheel)
    with zipfile.ZipFile(wheel) as lighter:
        kept = ["lib/__init__.py", "lib/lib64/lib.so", record]
        assert lighter.namelist() == kept
        assert lighter.read(record).decode() == "".join(f"{name},,\n" for name in kept)
