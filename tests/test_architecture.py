"""Rules about the tree that neither ruff nor import-linter can say. Each failure names file and line."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

from cohort.common.addresses import ROLES
from cohort.common.config import CONFIGS_DIR, Config, load_config

ROOT = Path(__file__).resolve().parent.parent
CODE = ("common", "kernels", "services")
PAPERS = ("alignedserve", "bros", "bucketserve", "dynaserve", "ecoserve")

Import = tuple[Path, int, str]


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


class Called(NamedTuple):
    """Of a call: `a.b.c` as it is written, "" for what is no such name; of a keyword a constant, or `...`."""

    line: int
    name: str
    positional: int
    keywords: dict[str | None, object]


@functools.cache  # eight tests look into every file, and syntax trees that stay slow every garbage collection down
def parts_of(path: Path) -> tuple[str | None, list[Import], list[Called]]:
    """Its docstring; every imported module by its dotted name, `from` imports with what they take; its calls."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    imports: list[Import] = []
    calls: list[Called] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else ... for k in node.keywords}
            calls.append(Called(node.lineno, dotted(node.func), len(node.args), keywords))
        elif isinstance(node, ast.Import):
            imports += [(path, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imports += [(path, node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return ast.get_docstring(tree), imports, calls


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{before}.{node.attr}" if isinstance(node, ast.Attribute) and (before := dotted(node.value)) else ""


def docstring_of(path: Path) -> str | None:
    return parts_of(path)[0]


def imports_of(path: Path) -> list[Import]:
    return parts_of(path)[1]


def calls_of(path: Path) -> list[Called]:
    return parts_of(path)[2]


def shown(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


def test_the_import_root_is_links():
    for name in (*CODE, "configs"):
        link = ROOT / "cohort" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}", f"cohort/{name} must be a link to ../{name}"


BARE = re.compile(r"\b(from|import)\b([^\n]|\\\n)*(?<![.\w])(" + "|".join(CODE) + r")\b")
"""Also in files that import none: the others need no syntax tree."""


def test_imports_go_through_the_root():
    """Bare `services`, `common`, `kernels` collide with other people's packages."""
    suspects = [file for file in sources(*CODE, "tests", "scripts") if BARE.search(file.read_text(encoding="utf-8"))]
    found = [
        shown(path, line, name)
        for file in suspects
        for path, line, name in imports_of(file)
        if name.split(".")[0] in CODE
    ]
    assert found == []


def test_no_module_imports_scripts_or_tests():
    found = [
        shown(path, line, name)
        for file in sources(*CODE)
        for path, line, name in imports_of(file)
        if name.split(".")[0] in ("scripts", "tests")
    ]
    assert found == []


def test_no_pickle():
    """Nothing that unpickles: not by name, and not through torch.load without weights_only."""
    found = []
    for file in sources(*CODE):
        found += [
            shown(path, line, name)
            for path, line, name in imports_of(file)
            if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib")
        ]
        for call in calls_of(file):
            if call.name == "torch.load" and call.keywords.get("weights_only") is not True:
                found.append(shown(file, call.line, "torch.load without weights_only=True"))
            if call.name in ("np.load", "numpy.load") and call.keywords.get("allow_pickle", False):
                found.append(shown(file, call.line, "np.load with allow_pickle"))
    assert found == []


def test_databases_are_opened_in_one_place():
    """Where all get the same journal, modes and deadline."""
    callers = {
        str(file.relative_to(ROOT))
        for file in sources(*CODE)
        for call in calls_of(file)
        if call.name == "sqlite3.connect"
    }
    assert callers == {"common/sqlite_file.py"}


PRINTERS = {
    "common/process/service.py",
    "services/rank_host/service.py",  # one line on stderr before logging exists
    "kernels/cpu/build.py",
    "kernels/gpu/compile_offline.py",
}
TERMINAL_PROGRAMS = ("services/cli/", "services/bench/", "services/launcher/")


def test_services_log_and_do_not_print():
    found = [
        shown(file, call.line, call.name)
        for file in sources(*CODE)
        if str(file.relative_to(ROOT)) not in PRINTERS and not str(file.relative_to(ROOT)).startswith(TERMINAL_PROGRAMS)
        for call in calls_of(file)
        if call.name == "print"
    ]
    assert found == []


HIDDEN_CHANCE = re.compile(r"(random\.(?!Random$)\w+|(np|numpy)\.random\.(?!Generator|default_rng|SeedSequence)\w+)$")


def test_policies_and_machines_take_time_and_chance_as_arguments():
    """`random.Random(seed)` is an argument; `random.random()` is hidden state. So is NumPy's global generator."""
    clocks = {"time", "datetime", "asyncio", "threading", "socket", "zmq", "torch", "secrets", "uuid"}
    found = []
    for file in sources("common/policies", "common/machines", "common/kv"):
        found += [shown(p, line, name) for p, line, name in imports_of(file) if name.split(".")[0] in clocks]
        for call in calls_of(file):
            if HIDDEN_CHANCE.match(call.name) or call.name in ("print", "open", "input"):
                found.append(shown(file, call.line, call.name))
            if call.name in ("np.random.default_rng", "numpy.random.default_rng", "random.Random"):
                found += [] if call.positional else [shown(file, call.line, f"{call.name}() without a seed")]
    assert found == []


def test_papers_do_not_know_each_other():
    """Only compose.py and the combination import several."""
    found = []
    for paper in PAPERS:
        others = {f"cohort.common.policies.{other}" for other in PAPERS if other != paper}
        for file in sources(f"common/policies/{paper}"):
            found += [
                shown(path, line, name)
                for path, line, name in imports_of(file)
                if any(name == other or name.startswith(other + ".") for other in others)
            ]
    assert found == []


def test_every_service_can_be_started_and_read():
    """Every folder under services/ has `__main__.py`; the six processes have `service.py`, where one begins to read."""
    processes = set(ROLES)
    folders = [path for path in (ROOT / "services").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} >= processes
    assert [path.name for path in folders if not (path / "__main__.py").exists()] == []
    assert [name for name in sorted(processes) if not (ROOT / "services" / name / "service.py").exists()] == []


def test_every_module_has_a_docstring():
    found = [
        str(file.relative_to(ROOT))
        for file in sources(*CODE, "scripts")
        if file.read_text(encoding="utf-8").strip() and docstring_of(file) is None
    ]
    assert found == []


LINES = 800
LONGER = {
    "common/messages.py",  # the protocol, read as one
    "common/policies/interface.py",  # the contract of all policies, likewise
}


def test_files_can_be_read_at_one_sitting():
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in sources(*CODE, "cohort", "scripts", "tests")  # its links are not followed: each file once
    }
    assert set(lengths) >= LONGER
    assert [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > LINES and name not in LONGER] == []


FILES = 20


def test_a_folder_can_be_seen_at_a_glance():
    """Of Python files, in code and tests alike."""
    count: dict[str, int] = {}
    for file in sources(*CODE, "scripts", "tests"):
        folder = str(file.parent.relative_to(ROOT))
        count[folder] = count.get(folder, 0) + 1
    assert {folder: files for folder, files in count.items() if files > FILES} == {}


def test_every_room_says_what_it_knows():
    """The docstring of a folder's `__init__.py`: what lives there and what it may know, in three lines at least."""
    rooms = [file for file in sources(*CODE) if file.name == "__init__.py" and "The room" in (docstring_of(file) or "")]
    assert len(rooms) >= 25
    assert [
        str(file.relative_to(ROOT)) for file in rooms if len(file.read_text(encoding="utf-8").splitlines()) < 3
    ] == []


def test_the_tree_on_the_page_is_the_tree():
    """docs/architecture.md names every folder of code, two levels deep and the rooms below, and no other."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed, above = [], []
    for line in page.split("## The tree")[1].split("```")[1].strip("\n").splitlines():
        if found := re.match(r"( *)(\w+)/ ", line):
            above = [*above[: len(found[1]) // 2], found[2]]
            listed.append("/".join(above))
    there = [
        str(file.parent.relative_to(ROOT))
        for file in sources(*CODE)
        if file.name == "__init__.py" and len(file.relative_to(ROOT).parts) <= 4
    ]
    assert [folder for folder in listed if folder.split("/")[0] in CODE] == sorted(there)


def test_nothing_is_left_for_later():
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError)\b")
    found = [
        shown(file, number, line.strip())
        for file in sources(*CODE, "scripts")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


def test_processes_without_tensors_start_without_torch():
    """One process imports what each runs, until one has brought torch."""
    modules = [
        *(f"{name}.service" for name in ("gateway", "bucketing_manager", "global_monitor", "length_predictor")),
        *("launcher.main", "bench.http.command"),
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n"
    code += " importlib.import_module(f'cohort.services.{name}')\n if 'torch' in sys.modules: sys.exit(name)"
    command = [sys.executable, "-P", "-c", code, *modules]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- configuration files -----------------------------------------------------------------------------------------


PRESETS = sorted(CONFIGS_DIR.glob("presets/*.yaml"))


@pytest.mark.parametrize("path", [*sorted(CONFIGS_DIR.glob("*.yaml")), *PRESETS], ids=lambda path: path.name)
def test_every_configuration_file_loads(path: Path):
    assert load_config([path]).workers


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_named_like_its_file_and_its_policies_exist(path: Path):
    from cohort.common.policies.compose import check_names

    config = load_config(preset=path.stem)
    assert config.name == path.stem
    check_names(config)


def test_the_default_file_is_the_built_in_defaults():
    assert load_config([CONFIGS_DIR / "default.yaml"]) == Config()


def test_the_default_file_lists_and_explains_every_option():
    command = [sys.executable, "-P", str(ROOT / "scripts" / "make_default_config.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    written = yaml.safe_load((CONFIGS_DIR / "default.yaml").read_text(encoding="utf-8"))
    first, rest = list(written)[:10], list(written)[10:]
    assert all("." in name or name == "workers" for name in first), "those that an operator sets"
    assert rest == [name for name in Config.__struct_fields__ if name not in first]
    for section, value in msgspec.to_builtins(Config()).items():
        if isinstance(value, dict):
            assert list(written[section]) == [key for key in value if f"{section}.{key}" not in first]


def test_the_default_preset_is_the_default():
    assert load_config(preset="cohort") == Config()
