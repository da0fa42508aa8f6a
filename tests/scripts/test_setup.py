"""The set-up as far as it can be tried without installing: what it does when nothing, or little, is to be done.

A whole set-up in an empty clone is what continuous integration does by running `.ci/run`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)
SCRIPTS += [ROOT / ".ci" / "run", ROOT / "docker" / "entrypoint"]


def setup(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "setup", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_executed(script: Path):
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    match text.splitlines()[0].rpartition("/")[2].removeprefix("env ").split()[0]:
        case "bash" | "sh" as shell:
            subprocess.run([shell, "-n", script], check=True, timeout=10)
        case interpreter:
            assert interpreter.startswith("python")
            compile(text, str(script), "exec")


def test_help_and_unknown_options():
    told = setup("--help")
    assert told.returncode == 0 and "COHORT_TORCH_INDEX" in told.stdout
    wrong = setup("--devel")
    assert wrong.returncode == 2 and "--devel" in wrong.stderr


@pytest.fixture
def finished(tmp_path: Path) -> dict[str, str]:
    """An environment that looks set up: interpreter, stamp with today's fingerprint, model."""
    venv, cache = tmp_path / "venv", tmp_path / "cache"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    # Says that it fits and has everything; anything that would be installed is noted instead.
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho 12\n')
    python.chmod(0o755)
    (venv / "pyvenv.cfg").write_text("version = 3.11.7\n")
    model = cache / "models" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / ".complete").touch()
    environment = {"COHORT_VENV": str(venv), "COHORT_CACHE_DIR": str(cache), "COHORT_BUILD_KERNELS": "no"}
    first = setup(**environment)
    assert first.returncode == 0, first.stderr
    (tmp_path / "calls").unlink()
    return environment


def test_the_second_run_does_nothing(finished: dict[str, str], tmp_path: Path):
    again = setup(**finished)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert not (tmp_path / "calls").exists()


def test_development_needs_more_than_serving_but_not_the_other_way_round(finished: dict[str, str], tmp_path: Path):
    assert setup("--dev", **finished).returncode == 0
    assert "dev.txt" in (tmp_path / "calls").read_text()
    (tmp_path / "calls").unlink()
    assert not (Path(finished["COHORT_VENV"]) / ".cohort-serve").exists()
    assert setup(**finished).stdout == ""
    assert not (tmp_path / "calls").exists()


def test_packages_of_a_killed_set_up_are_installed_anew(finished: dict[str, str]):
    packages = Path(finished["COHORT_VENV"]) / "lib" / "python3.11" / "site-packages"
    half, whole = packages / "half-1.dist-info", packages / "whole-1.dist-info"
    for info in (half, whole):
        info.mkdir(parents=True)
    (whole / "RECORD").touch()
    (Path(finished["COHORT_VENV"]) / ".cohort-serve").unlink()
    assert setup(**finished).returncode == 0
    assert not half.exists() and whole.exists()


def test_a_foreign_folder_is_never_removed(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("…")
    refused = setup(COHORT_VENV=str(precious), COHORT_CACHE_DIR=str(tmp_path / "cache"))
    assert refused.returncode == 1 and "is no virtual environment" in refused.stderr
    assert (precious / "thesis.txt").exists()


def test_an_interpreter_that_does_not_fit_is_named(tmp_path: Path):
    refused = setup(COHORT_VENV=str(tmp_path / "v"), COHORT_CACHE_DIR=str(tmp_path / "c"), COHORT_PYTHON="/bin/false")
    assert refused.returncode == 1 and "COHORT_PYTHON=/bin/false is not a Python 3.11 or 3.12" in refused.stderr


def test_two_at_once_wait_for_each_other(finished: dict[str, str]):
    """The second finds the lock taken, says so, and goes on when it is free."""
    (Path(finished["COHORT_VENV"]) / ".cohort-serve").unlink()
    lock = Path(finished["COHORT_CACHE_DIR"]) / "setup.lock"
    holder = subprocess.Popen(["flock", str(lock), "sh", "-c", "echo held; sleep 1"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    waited = setup(**finished)
    holder.communicate(timeout=10)
    assert waited.returncode == 0
    assert "another set-up is running" in waited.stdout
