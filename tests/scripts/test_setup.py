"""The set-up as far as it can be tried without installing: what it does when nothing, or little, is to be done.

A whole set-up in an empty clone is what continuous integration does by running `.ci/run`.
"""

from __future__ import annotations

import os
import subprocess
import time
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


def test_two_at_once_wait_for_each_other(finished: dict[str, str], tmp_path: Path):
    """The second finds the lock taken, says so, and goes on when it is free."""
    (Path(finished["COHORT_VENV"]) / ".cohort-serve").unlink()
    lock = Path(finished["COHORT_CACHE_DIR"]) / "setup.lock"
    holding = ["flock", str(lock), "sh", "-c", "echo held; read end"]
    holder = subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    said, waits = tmp_path / "said", [ROOT / "scripts" / "setup"]
    with said.open("w") as out:
        waiting = subprocess.Popen(waits, env={**os.environ, **finished}, stdin=subprocess.DEVNULL, stdout=out)
    try:
        deadline_s = time.monotonic() + 60
        while "another set-up is running" not in said.read_text():
            assert time.monotonic() < deadline_s and waiting.poll() is None
            time.sleep(0.02)
        holder.communicate(timeout=10)
        assert waiting.wait(60) == 0
    finally:
        holder.kill()
        waiting.kill()


# -- the CUDA build for the driver ---------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """A virtual environment without torch; its index has no builds for CUDA 12.9, and what is installed is noted."""
    venv, cache = tmp_path / "venv", tmp_path / "cache"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
    *torch.__version__*) exit 1 ;;
    *"install "*torch==*) echo "$@" >>{tmp_path}/torch ;;
esac
case "$*" in *+cu129*) exit 1 ;; esac
echo 12
"""
    )
    python.chmod(0o755)
    (venv / "pyvenv.cfg").write_text("version = 3.11.7\n")
    return {"COHORT_VENV": str(venv), "COHORT_CACHE_DIR": str(cache), "COHORT_BUILD_KERNELS": "no"}


def asked(tmp_path: Path) -> list[str]:
    """The torch requirements that were tried, in order."""
    lines = (tmp_path / "torch").read_text().splitlines()
    return [word for line in lines for word in line.split() if word.startswith("torch==")]


PINNED = next(
    line for line in (ROOT / "scripts/requirements/torch.txt").read_text().splitlines() if line.startswith("torch==")
)


@pytest.mark.parametrize(
    ("driver", "tried"),
    [
        ("580.65.06", [PINNED]),  # the build that an index has without being asked
        ("590.10", [PINNED]),
        ("575.57.08", [f"{PINNED}+cu129", f"{PINNED}+cu126"]),  # the newest that it has
        ("550.54.15", [f"{PINNED}+cu126"]),
        ("525.60.13", [f"{PINNED}+cu126"]),
    ],
)
def test_torch_is_the_build_that_the_driver_runs(
    bare: dict[str, str], tmp_path: Path, driver: str, tried: list[str]
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho {driver}\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    real = Path("/proc/driver/nvidia/version").exists()  # it would answer first
    bare |= {"COHORT_DRIVER": driver} if real else {}
    done = setup("--no-model", **bare, PATH=path, COHORT_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stderr
    assert asked(tmp_path) == tried
    assert f"driver {driver}" in done.stdout


def test_a_build_and_an_index_by_name(bare: dict[str, str], tmp_path: Path) -> None:
    index = "https://index.invalid/%CUDA%/simple"
    done = setup("--no-model", **bare, COHORT_ACCELERATOR="cuda", COHORT_CUDA="cu126", COHORT_TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    assert "--index-url https://index.invalid/cu126/simple" in (tmp_path / "torch").read_text()
    assert asked(tmp_path) == [f"{PINNED}+cu126"]


def test_without_a_gpu_the_cpu_build(bare: dict[str, str], tmp_path: Path) -> None:
    index = "https://index.invalid/%CUDA%"
    done = setup("--no-model", **bare, COHORT_ACCELERATOR="cpu", COHORT_TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    alone, whole = (tmp_path / "torch").read_text().splitlines()  # this one cannot be imported by itself
    assert "--index-url https://index.invalid/cpu" in alone and "--index-url https://index.invalid/cpu" in whole
    assert "--no-deps" in alone and "--no-deps" not in whole
    assert asked(tmp_path) == [PINNED, PINNED]


def test_what_cannot_be_had_is_said_with_the_ways_out(bare: dict[str, str], tmp_path: Path) -> None:
    old = setup("--no-model", **bare, COHORT_ACCELERATOR="cuda", COHORT_DRIVER="470.82.01")
    assert old.returncode == 1 and "driver 470.82.01 runs no CUDA build" in old.stderr
    none = setup("--no-model", **bare, COHORT_ACCELERATOR="cuda", COHORT_DRIVER="575.57.08", COHORT_CUDA="cu129")
    assert none.returncode == 1
    for way in ("COHORT_TORCH_INDEX", "update the driver to 580.65.06", "COHORT_ACCELERATOR=cpu"):
        assert way in none.stderr
    wrong = setup("--no-model", **bare, COHORT_CUDA="cu118")
    assert wrong.returncode == 1 and "COHORT_CUDA=cu118 is none of cu126, cu129, cu130" in wrong.stderr
