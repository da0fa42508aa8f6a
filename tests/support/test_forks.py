"""Tests that run in forks are reported as if they ran in one process; a fork that dies is no silent gap."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.kinds import by_default

ROOT = Path(__file__).parents[2]


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.forks", "-p", "no:cacheprovider", "-rA"]
    # Into files: what a fork leaves behind may hold them open.
    with (folder / "stdout").open("w+") as stdout, (folder / "stderr").open("w+") as stderr:
        done = subprocess.run(
            [*command, "--rootdir", str(folder), "--forks", "2", *options, str(folder)],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=stdout,
            stderr=stderr,
            timeout=120,
            check=False,
        )
    texts = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def test_every_test_is_reported_once_with_its_output(tmp_path: Path) -> None:
    several = "import pytest\n" + "".join(
        f"def test_{index}(tmp_path):\n    print('says {index}', tmp_path)\n    assert {index} != 3\n"
        for index in range(5)
    )
    files = {f"test_file_{name}.py": several for name in "abc"}
    files["test_other.py"] = (
        "import pytest\n"
        "@pytest.mark.skip(reason='none')\ndef test_skipped(): ...\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise RuntimeError('behind it')\n"
        "def test_broken(broken): ...\n"
    )
    done = run(tmp_path, files)
    assert done.returncode == 1
    assert "3 failed, 13 passed, 1 skipped, 1 error" in done.stdout, done.stdout
    assert done.stdout.count("says 3 ") == 3, "what a test prints stands with its failure"
    assert "RuntimeError: behind it" in done.stdout
    folders = {line.split()[2] for line in done.stdout.splitlines() if line.startswith("says ")}
    assert len(folders) == 15, "no two tests have one folder for their files"


def test_a_fork_that_dies_fails_the_test_it_ran_and_the_other_files_are_run(tmp_path: Path) -> None:
    files = {f"test_{name}.py": "def test_it(): ...\n" for name in "bcdef"}
    files["test_a.py"] = (
        "import os, pathlib, time\n"
        "def test_it():\n"
        "    if os.fork() == 0:  # what is left behind holds its pipe open\n"
        "        while not pathlib.Path('done').exists(): time.sleep(0.02)\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), 9)\n"
        "def test_behind_it(): ...\n"
    )
    files["test_g.py"] = "import os\ndef test_it():\n    os._exit(7)\n"
    try:
        done = run(tmp_path, files)
    finally:
        (tmp_path / "done").touch()
    assert done.returncode == 1
    assert "2 failed, 5 passed" in done.stdout, done.stdout
    assert "FAILED test_a.py::test_it" in done.stdout and "the process ended with -9" in done.stdout
    assert "FAILED test_g.py::test_it" in done.stdout and "the process ended with 7" in done.stdout


def test_fixtures_of_a_session_end_with_each_fork_and_an_error_there_is_seen(tmp_path: Path) -> None:
    conftest = (
        "import os, pathlib, pytest\n"
        "@pytest.fixture(scope='session', autouse=True)\n"
        "def whole():\n"
        "    yield\n"
        "    pathlib.Path(f'ended-{os.getpid()}').touch()\n"
        "    assert os.environ.get('WELL'), 'badly ended'\n"
    )
    test = "import os, pathlib\ndef test_it(): pathlib.Path(f'ran-{os.getpid()}').touch()\n"
    done = run(tmp_path, {"conftest.py": conftest, **{f"test_{name}.py": test for name in "abcd"}})
    assert done.returncode == 1 and "4 passed" in done.stdout and "badly ended" in done.stderr, done.stdout
    ran, ended = ({path.name.partition("-")[2] for path in tmp_path.glob(f"{word}-*")} for word in ("ran", "ended"))
    assert ran and ran == ended


@pytest.mark.parametrize("options", by_default([("-x",), ("--maxfail=2",)], ("--maxfail=2",)), ids=str)
def test_a_limit_of_failures_ends_all(tmp_path: Path, options: tuple[str, ...]) -> None:
    failing = "import time\n" + "".join(f"def test_{index}():\n    assert 0\n" for index in range(200))
    done = run(tmp_path, {f"test_{name}.py": failing for name in "ab"}, *options)
    assert done.returncode == 1 and "stopping after" in done.stdout, done.stdout
    failed = done.stdout.count("\nFAILED ")
    assert 1 <= failed < 400


def test_no_two_forks_try_the_same_port(tmp_path: Path) -> None:
    text = (
        "from cohort.common.http.ports import free_port\n"
        "def test_it():\n"
        "    print('ports', *(free_port() for _ in range(5)))\n"
    )
    done = run(tmp_path, {f"test_{name}.py": text for name in "abcdefgh"})
    chosen = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ports ")]
    assert len(chosen) == 8 and len({port for each in chosen for port in each}) == 40, done.stdout


def test_threads_of_collecting_are_refused(tmp_path: Path) -> None:
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_it(): ...\n"
    )
    done = run(tmp_path, {"test_it.py": text})
    assert done.returncode == 4 and "1 threads were started while tests were collected" in done.stderr


def test_parts_are_disjoint_and_together_everything(tmp_path: Path) -> None:
    files = {f"test_{name}.py": f"def test_{name}(): ...\n" for name in "abcde"}
    ran = [
        [line for line in run(tmp_path, files, "--part", part).stdout.splitlines() if line.startswith("PASSED")]
        for part in ("1/2", "2/2")
    ]
    assert sorted(map(len, ran)) == [2, 3]
    assert len({line for part in ran for line in part}) == 5
    with pytest.raises(argparse.ArgumentTypeError, match="2/5 is the second of five"):
        forks._part("3/2")
