"""Where descriptions of models, devices and clusters lie: in configs/, or where `cohort profile --save` writes.

    configs/FOLDER/NAME.yaml                   shipped
    CACHE/profiles/FOLDER/NAME.yaml            the user's own (CACHE: `common/paths.py`)

A name is looked up in both; one that both have is an error, so that no command simulates another machine than the one
that was meant. Reads YAML; every mistake is a `ConfigError` that names the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from cohort.common import paths
from cohort.common.config import CONFIGS_DIR
from cohort.common.errors import ConfigError

_T = TypeVar("_T")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def user_folder() -> Path:
    return paths.cache_dir() / "profiles"


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a profile may be saved under this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--save {name}: a name of lower-case letters, digits and . _ - is wanted")
    for folder in ("devices", "clusters"):
        shipped = CONFIGS_DIR / folder / f"{name}.yaml"
        if shipped.is_file():
            raise ConfigError(f"--save {name}: {shipped} has that name already; choose another")


def names(folder: str) -> list[str]:
    return sorted({path.stem for base in (CONFIGS_DIR, user_folder()) for path in (base / folder).glob("*.yaml")})


def locate(name: str, folder: str, near: Path | None = None) -> Path | None:
    """Find the file of a name; None without one. `near`: a file whose neighbours count, too, as a cluster that was
    written with `--to` names its device. Raises `ConfigError` where two files have the name."""
    file = f"{name.lower()}.yaml"
    found = [base / folder / file for base in (CONFIGS_DIR, user_folder()) if (base / folder / file).is_file()]
    if len(found) > 1:
        raise ConfigError(f"two {folder} are named {name!r}: {found[0]} and {found[1]}; rename or remove the second")
    if not found and near is not None and (near.parent.parent / folder / file).is_file():
        found = [near.parent.parent / folder / file]
    return found[0] if found else None


def mapping(name: str, folder: str, near: Path | None = None) -> dict[str, Any]:
    """Read a named file, or a file by its path. Raises `ConfigError`."""
    path = Path(name) if Path(name).is_file() else locate(name, folder, near)
    if path is None:
        known = ", ".join(names(folder))
        raise ConfigError(f"no {folder[:-1]} named {name!r}; there are: {known} (or a YAML file)")
    return read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(data).__name__}")
    return data


def converted(data: Any, kind: type[_T], origin: str) -> _T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error
