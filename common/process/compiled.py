"""Compiled modules in the place of their sources, where `scripts/compile` has made some and nothing changed since.

They lie apart from the sources, in `build/compiled` of the clone, where no importer of Python's own looks. `use` puts
one in front of these that hands them out, but only if every source that they were made from and checked against is the
same now, and this is the Python that they were made for. Otherwise it says so on stderr, and everything runs
interpreted as without them: compiled code never stands for a source that it was not made from. `COHORT_COMPILED=no`
leaves them out.

Loaded by every process of a clone that has compiled modules, before anything else: light, and first to be trusted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
FOLDER = os.path.join(ROOT, "build", "compiled")
MANIFEST = "manifest.json"
SUFFIX = EXTENSION_SUFFIXES[0]


class Compiled:
    """For `sys.meta_path`. Finds compiled modules by their full name, and likewise the library that they share."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._modules = {name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX)}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        file = os.path.join(self._folder, f"{fullname}{SUFFIX}")
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))


def manifest(root: str, sources: Iterable[str]) -> dict[str, Any]:
    """What modules that are compiled now are good for: this Python, and these sources (paths below `root`)."""
    return {"python": SUFFIX, "sources": {name: [*_stamp(root, name), _digest(root, name)] for name in sources}}


def refusal(root: str, folder: str) -> str:
    """Why the compiled modules of a folder are not to be used; "" if they are."""
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
            made = json.load(file)
        python, sources = made["python"], made["sources"]
        changed = sorted(name for name, known in sources.items() if not _same(root, name, *known))
    except (OSError, ValueError, KeyError, TypeError):
        return "they are incomplete"
    if python != SUFFIX:
        return f"they are for {python}, this Python takes {SUFFIX}"
    return f"{len(changed)} of their sources changed since, {changed[0]} for one" if changed else ""


def use(root: str = ROOT, folder: str = FOLDER) -> None:
    """Before the first of the modules is imported."""
    if os.environ.get("COHORT_COMPILED") == "no" or not os.path.isdir(folder):
        return
    if why := refusal(root, folder):
        sys.stderr.write(f"cohort: compiled modules are not used: {why} (`scripts/compile` anew, or `--remove`)\n")
    else:
        sys.meta_path.insert(0, Compiled(folder))


def _same(root: str, name: str, size: int, changed_ns: int, digest: str) -> bool:
    """Read only if it was written since: files of another checkout with the same bytes are the same."""
    try:
        return _stamp(root, name) == (size, changed_ns) or _digest(root, name) == digest
    except FileNotFoundError:
        return False


def _stamp(root: str, name: str) -> tuple[int, int]:
    """Size, and time of the last change in nanoseconds."""
    status = os.stat(os.path.join(root, name))
    return status.st_size, status.st_mtime_ns


def _digest(root: str, name: str) -> str:
    import hashlib  # only where a stamp differs

    with open(os.path.join(root, name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
