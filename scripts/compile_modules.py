"""Compiles the modules that simulations spend their time in, with mypyc: `scripts/compile`.

    sources ──copy, adapted──▶ build/compiling ──mypyc──▶ C ──gcc──▶ build/compiled, with the digests of all sources

Sources stay as they are. In the copy two things change that mypyc needs and that mean the same:

- Slots of dataclasses go: attributes of compiled classes have fixed places anyway.
- A class that an interpreted one inherits from says so (`mypyc_attr`): presets' schedulers, allocators, test doubles.

mypyc is part of mypy, which the checks need. Objects are kept with a digest of all that they were made from, so that a
second run compiles what changed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cohort.common.process.compiled import FOLDER, MANIFEST, SUFFIX, manifest  # noqa: E402

MODULES = (
    *(f"common/{name}.py" for name in ("sampling_inputs", "sequence")),
    *(f"common/kv/{name}.py" for name in ("block_pool", "free_blocks", "lease")),
    *(f"common/policies/{name}.py" for name in ("cost_model", "kv_interface", "sequences", "serving_views")),
    *(f"common/policies/baselines/{name}.py" for name in ("arrival_queues", "batch_builder", "continuous_batching")),
    *(f"common/policies/baselines/{name}.py" for name in ("fcfs", "paged_allocation", "placements")),
    "common/machines/entry.py",
    "common/machines/senders.py",
    *(f"common/machines/gateway/{name}.py" for name in ("gateway", "ledger", "admission_desk", "prediction_desk")),
    "common/machines/gateway/manager_link.py",
    *(f"common/machines/manager/{name}.py" for name in ("manager", "roster", "dispatcher", "cluster_load", "settling")),
    *(f"common/machines/worker/{name}.py" for name in ("worker", "worker_state", "worker_report", "worker_counters")),
    *(f"common/machines/worker/{name}.py" for name in ("token_updates", "computed_rows", "fast_forward", "onward")),
    *(f"common/machines/worker/{name}.py" for name in ("kv_sender", "kv_receiver", "kv_stall", "parked_pool")),
    *(f"common/machines/worker/{name}.py" for name in ("adapter_desk", "plan_ahead", "scored_prompts")),
    "common/machines/worker/speculation_desk.py",
    *(f"common/virtual_cluster/{name}.py" for name in ("cluster", "events", "kv_flights", "plugins")),
    *(f"services/simulator/core/{name}.py" for name in ("cluster", "engine", "clients", "work", "statistics", "tally")),
    *(f"services/simulator/hardware/{name}.py" for name in ("simulated_network", "network")),
)
"""Where samples of both presets fell. With few of them, calls between compiled and interpreted code cost the gain."""

CHECKED = (
    "common/*.py",
    *(f"common/{part}/**/*.py" for part in ("config", "kv", "machines", "planning", "policies", "virtual_cluster")),
    *("common/workloads/**/*.py", "services/simulator/**/*.py", "scripts/compile_modules.py"),
)
"""What compiled modules are made from or may refer to: all of it, as a compiled caller relies on its callees' types."""
COPIED = ("common", "services", "kernels")
INTERPRETED_BASES = frozenset({"Protocol", "enum.Enum", "msgspec.Struct", "Exception"})
MIXINS = frozenset({"BlockSharing"})
"""Second bases: stay ordinary classes, or their places of attributes would clash with those of the first."""
_DATACLASS = re.compile(r"@dataclass\(([^)]*)\)")
_CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\)", re.MULTILINE)
_MYPY = """[mypy]
mypy_path = .
explicit_package_bases = True
ignore_missing_imports = True
"""
_GENERATE = """import json, sys
from mypyc.build import mypycify
made = mypycify(["--config-file=mypy.ini", *sys.argv[1:]], opt_level="2", debug_level="0", multi_file=True)
parts = [(each.name, each.sources, each.include_dirs, each.extra_compile_args) for each in made]
json.dump(parts, open("extensions.json", "w"))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compile")
    parser.add_argument("--remove", action="store_true")
    options = parser.parse_args()
    target = Path(FOLDER)
    work = target.parent / "compiling"
    shutil.rmtree(target, ignore_errors=True)  # first: half of the new ones beside the old ones would be neither
    if options.remove:
        shutil.rmtree(work, ignore_errors=True)
        return 0
    sources = sorted({str(file.relative_to(ROOT)) for pattern in CHECKED for file in ROOT.glob(pattern)})
    made = manifest(str(ROOT), sources)  # as they are before they are read: an edit meanwhile shows afterwards
    adapted_copy(work)
    generated(work)
    libraries = work / "compiled"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    built(work, libraries)
    (libraries / MANIFEST).write_text(json.dumps(made))
    libraries.rename(target)
    print(f"[compile] {len(MODULES)} modules, {sum(file.stat().st_size for file in target.iterdir()) >> 10} KiB")
    return 0


def adapted_copy(work: Path) -> None:
    tree = work / "cohort"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    (tree / "__init__.py").write_text('__version__ = ""\n')
    for part in COPIED:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    inherited = interpreted_parents()
    for module in MODULES:
        file = tree / module
        file.write_text(opened(without_slots(file.read_text()), inherited))
    (work / "mypy.ini").write_text(_MYPY)
    (work / "generate.py").write_text(_GENERATE)


def interpreted_parents() -> set[str]:
    """Names of classes that a class outside of `MODULES` inherits from, and of theirs in turn."""
    bases: dict[str, set[str]] = {}
    wanted: list[str] = []
    for file in (file for part in (*COPIED, "tests") for file in (ROOT / part).rglob("*.py")):
        for name, given in _CLASS.findall(file.read_text()):
            names = {base.strip().split("[")[0].split(".")[-1] for base in given.split(",")}
            bases.setdefault(name, set()).update(names)
            if str(file.relative_to(ROOT)) not in MODULES:
                wanted += names
    found = set[str]()
    while wanted:
        if (name := wanted.pop()) not in found:
            found.add(name)
            wanted += bases.get(name, ())
    return found


def opened(text: str, inherited: set[str]) -> str:
    """A module whose classes that interpreted ones inherit from say so."""
    lines, marks = text.split("\n"), list[tuple[int, str]]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in inherited:
            if INTERPRETED_BASES & {ast.unparse(base) for base in node.bases}:
                continue
            how = "native_class=False" if node.name in MIXINS else "allow_interpreted_subclasses=True"
            first = min(node.lineno, *(each.lineno for each in node.decorator_list), sys.maxsize)
            marks.append((first - 1, f"@mypyc_attr({how})"))
    for line, mark in reversed(marks):
        lines.insert(line, mark)
    if marks:
        lines.insert(lines.index("from __future__ import annotations") + 1, "from mypy_extensions import mypyc_attr")
    return "\n".join(lines)


def without_slots(text: str) -> str:
    """A module whose dataclasses have none."""

    def decorator(found: re.Match[str]) -> str:
        others = [option for option in found[1].split(", ") if option != "slots=True"]
        return f"@dataclass({', '.join(others)})" if others else "@dataclass"

    return _DATACLASS.sub(decorator, text)


def generated(work: Path) -> None:
    """C of all modules, into the folder's `build`."""
    print("[compile] mypyc", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "generate.py", *(f"cohort/{module}" for module in MODULES)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mypyc failed:\n{(done.stdout + done.stderr)[-4000:]}")


def built(work: Path, target: Path) -> None:
    """Objects of all C, as many at once as there are cores, then a library of each module and their common one."""
    include, compiler = sysconfig.get_paths()["include"], os.environ.get("CC", "gcc")
    headers = b"".join(file.read_bytes() for file in sorted((work / "build").rglob("*.h")))
    libraries = json.loads((work / "extensions.json").read_text())

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[:2])} … failed:\n{done.stderr[-4000:]}")

    def compile_one(source: str, folders: list[str], flags: list[str]) -> str:
        command = [compiler, "-c", "-fPIC", "-DNDEBUG", "-fwrapv", *flags, "-w"]
        command += [f"-I{folder}" for folder in (include, *folders)]
        made, note = (work / source).with_suffix(".o"), (work / source).with_suffix(".from")
        made_from = hashlib.sha256((work / source).read_bytes() + headers + repr(command).encode()).hexdigest()
        if not (made.exists() and note.exists() and note.read_text() == made_from):
            print(f"[compile] {Path(source).stem.removeprefix('__native_').replace('___', '.')}", flush=True)
            note.unlink(missing_ok=True)
            run(*command, source, "-o", str(made))
            note.write_text(made_from)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [
            [pool.submit(compile_one, source, folders, flags) for source in sources]
            for _, sources, folders, flags in libraries
        ]
        for (name, *_), waiting in zip(libraries, objects, strict=True):
            made = [each.result() for each in waiting]
            run(compiler, "-shared", "-s", *made, "-o", str(target / f"{name}{SUFFIX}"))


if __name__ == "__main__":
    sys.exit(main())
