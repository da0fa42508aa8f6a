"""Where a model comes from: what `model.path` says becomes a folder or a GGUF file of this machine.

    a folder or a file         as it is, whatever else its name could mean
    `org/name`                 a snapshot in Hugging Face's cache; fetched from the hub where that is permitted
    `org/name:path/x.gguf`     a GGUF file of such a repository, likewise

Decides this alone: the launcher, `cohort doctor`, the tools that load a model and the containers call it. Looks up the
cache by its documented layout and opens no connection; `fetch` does, in a process of its own, since the hub's client
takes 40 MB and more than a second to import.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import msgspec

from cohort.common.config import Config
from cohort.common.errors import ConfigError, ModelError
from cohort.common.paths import cache_dir

Permission = Literal["no", "ask", "yes"]
"""Whether a model may be fetched; `ask`: the person at the terminal says so."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
TOKENIZER_BESIDE_GGUF = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that are taken before the tokenizer in a GGUF file's metadata, where the first of them is there."""
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

_PREFIX = "models--"
_LONGEST_ID = 96  # characters of org and name together: the hub's own bound
_ID = re.compile(r"(?P<repo>(?:\w[\w.-]*/)?\w[\w.-]*)(?::(?P<file>.+))?", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub: `repo`, and one GGUF file of it, or "" for the model in Hugging Face format."""

    repo: str
    file: str = ""

    @classmethod
    def of(cls, name: str) -> HubId | None:
        """Read an id; None for what can only be a path. Raises `ModelError` for a file that is no GGUF file."""
        found = _ID.fullmatch(name)
        if found is None or len(repo := found["repo"]) > _LONGEST_ID or ".." in repo or "--" in repo:
            return None
        file = found["file"] or ""
        if file and (not file.endswith(".gguf") or ".." in file.split("/") or file.startswith("/")):
            raise ModelError(f"{name}: after the colon stands the name of a GGUF file: {repo}:FILE.gguf")
        return cls(repo, file)

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo

    @property
    def folder(self) -> str:
        return f"{_PREFIX}{self.repo.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class Found:
    """A model of this machine. `path`: its folder or GGUF file, absolute; `name`: the id that named it, or ""."""

    path: Path
    name: str = ""


def permission(flag: bool) -> Permission:
    """Return what --download, else COHORT_DOWNLOAD, else a terminal permits. Raises `ConfigError`."""
    said = os.environ.get("COHORT_DOWNLOAD", "")
    if said not in ("", "0", "1"):
        raise ConfigError(f"COHORT_DOWNLOAD={said}: write 1 (models may be fetched) or 0")
    if flag or said == "1":
        return "yes"
    return "ask" if not said and sys.stdin.isatty() and sys.stderr.isatty() else "no"


def located(config: Config, download: Permission = "no") -> Config:
    """Return the configuration with a local `model.path`; clients know a model that was named by an id by that id,
    unless `model.served_name` has another. Raises `ModelError`."""
    model = config.model
    if not model.path:
        return config
    found = find(model.path, model.revision, with_weights=model.weights == "files", download=download)
    settled = msgspec.structs.replace(model, path=str(found.path), served_name=model.served_name or found.name)
    return msgspec.structs.replace(config, model=settled)


def find(name: str, revision: str = "", *, with_weights: bool = True, download: Permission = "no") -> Found:
    """Return the model that a path or an id means. A path need not exist: who reads it says so. `revision`: a branch,
    tag or commit, "" = main. Raises `ModelError` with the cure."""
    path = Path(name).expanduser()
    wanted = None if path.exists() else HubId.of(name)
    if wanted is None:
        return Found(path.resolve())
    constants = _constants()
    revision = revision or constants.DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelError(f"model.revision: {revision!r} is no branch, tag or commit")
    incomplete = ""
    for cache in caches():
        snapshot = _snapshot(cache / wanted.folder, revision)
        if snapshot is None:
            continue
        incomplete = _lacking(snapshot, wanted, with_weights=with_weights)
        if not incomplete:
            return Found(snapshot / wanted.file, name)
    here = f"{name}: no such folder, and not in Hugging Face's cache ({caches()[0]})"
    if revision != constants.DEFAULT_REVISION:
        here += f" at revision {revision}"
    if incomplete:
        here = f"{name}: in Hugging Face's cache, but {incomplete}"
    if constants.is_offline_mode():
        raise ModelError(f"{here}{near(wanted.repo)}; HF_HUB_OFFLINE is set, so it cannot be fetched")
    if download == "no":
        raise ModelError(
            f"{here}{near(wanted.repo)}; --download (COHORT_DOWNLOAD=1) fetches it from {constants.ENDPOINT}"
        )
    return Found(_fetched(wanted, revision, with_weights=with_weights, ask=download == "ask") / wanted.file, name)


def shown_name(folder: Path) -> str:
    """Return a folder's name as clients may see it, without where it lies: of a snapshot its repository's id."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_PREFIX):
        return _repository(folder.parent.parent)
    return folder.name


def caches() -> tuple[Path, Path]:
    """Return the folders that are looked up: Hugging Face's, and Cohort's own, which takes what is fetched where the
    first cannot be written (a container's is mounted read-only)."""
    return Path(_constants().HF_HUB_CACHE), cache_dir() / "hub"


def near(repo: str) -> str:
    """Return a clause with the models of the caches whose names are near this one, "" without any."""
    known = {name.lower(): name for cache in caches() for name in _known(cache)}
    known.pop(repo.lower(), None)
    close = difflib.get_close_matches(repo.lower(), known, n=3, cutoff=0.7)
    return f" (there: {', '.join(known[each] for each in close)})" if close else ""


def _constants() -> ModuleType:
    from huggingface_hub import constants

    return constants


def _known(cache: Path) -> Iterator[str]:
    return map(_repository, cache.glob(f"{_PREFIX}*"))


def _repository(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX).replace("--", "/", 1)


def _snapshot(repository: Path, revision: str) -> Path | None:
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (repository / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _lacking(snapshot: Path, wanted: HubId, *, with_weights: bool) -> str:
    """Return what a snapshot lacks to be served, "" if nothing. Raises `ModelError` for a damaged index."""
    for entry in (snapshot / wanted.file,) if wanted.file else sorted(snapshot.iterdir()):
        if entry.is_symlink() and not entry.exists():
            return f"{entry.name} links to {entry.readlink()}, which is not there (the cache's folder belongs together)"
    if wanted.file:
        return "" if (snapshot / wanted.file).is_file() else f"{wanted.file} is missing"
    if not (snapshot / "config.json").is_file():
        return "config.json is missing"
    if not any((snapshot / name).is_file() for name in TOKENIZER_FILES):
        return "its tokenizer is missing"
    if not with_weights:
        return ""
    from cohort.common.engine.config.safetensors_header import read_index  # which the gateway does without

    parts = set(read_index(snapshot / INDEX).values()) if (snapshot / INDEX).is_file() else {WEIGHTS}
    missing = sorted(part for part in parts if not (snapshot / part).is_file())
    return f"{len(missing)} of {len(parts)} files of weights are missing ({missing[0]})" if missing else ""


def _fetched(wanted: HubId, revision: str, *, with_weights: bool, ask: bool) -> Path:
    """Run `fetch` and return the snapshot that it made; its progress goes to stderr. It ends by itself: each of its
    reads has a deadline. Raises `ModelError` with what it said."""
    into = next((cache for cache in caches() if _writable(cache)), None)
    if into is None:
        raise ModelError(
            f"{wanted}: neither {caches()[0]} nor {caches()[1]} can be written; HF_HUB_CACHE names the first"
        )
    command = [sys.executable, "-P", "-m", "cohort.common.hub.fetch", wanted.repo, revision, str(into)]
    command += [*(("--file", wanted.file) if wanted.file else ()), *(() if with_weights else ("--no-weights",))]
    command += ["--ask"] if ask else []
    quiet = {} if sys.stderr.isatty() else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | quiet)
    said = done.stdout.strip()
    if done.returncode != 0:
        raise ModelError(said or f"{wanted}: the process that fetches it ended with status {done.returncode}")
    return Path(said)


def _writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
