"""What pyproject.toml asks for can be had as wheels from the package index that pip has here: resolved, no more."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.examples import another_of_its_kind

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("3.11", "3.12")
RESOLVING_S = 600.0


def resolve(python: str, *requirements: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary", ":all:", "--python-version", python, "--target", "/nonexistent"]
    return subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=RESOLVING_S, check=False)


@functools.cache
def offline() -> bool:
    return resolve(PYTHONS[0], "--no-deps", "pip").returncode != 0


@pytest.mark.slow
@another_of_its_kind()
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", ["", *sorted(PROJECT["optional-dependencies"].keys() - {"dev"})])
def test_every_extra_resolves(extra: str, python: str) -> None:
    if offline():
        pytest.skip("pip reaches no package index")
    done = resolve(python, *PROJECT["optional-dependencies"].get(extra, PROJECT["dependencies"]))
    assert done.returncode == 0, done.stderr[-2000:]
