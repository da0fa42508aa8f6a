"""Sections of tests: a row for each, whatever the others do, and whatever ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cohort.services.bench.gpu_check.frame.report import read_rows
from tests.examples import another_of_its_kind

RUN = """
import sys
from pathlib import Path
import torch
from cohort.services.bench.gpu_check.frame import tests
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import Guard
from cohort.services.bench.gpu_check.frame.report import Findings

folder, cpu = Path(sys.argv[1]), torch.device("cpu")

def probe(_):
    if (folder / "dead").exists():
        raise RuntimeError("an illegal memory access was encountered")

tests._linked, tests._TEST_S = lambda _: folder, 1.0
found = Findings("tests", folder / "rows")
tests.run(Check(cpu, False, folder, found, Guard(found, cpu, 300, probe=probe), folder))
"""
FIRST = """
import os, time
import pytest, torch

@pytest.mark.parametrize("case", [1, 2])
def test_right(case):
    pass

def test_wrong():
    assert 1 == 2, "one is not two"

def test_large():
    raise torch.OutOfMemoryError("51 GiB")

@pytest.mark.skip
def test_skipped():
    pass

def test_endless():
    time.sleep(600)

def test_ends():
    LAST

def test_after():
    pass
"""


def rows(folder: Path, last: str) -> tuple[int, list[tuple[str, str]]]:
    tests = folder / "tests" / "kernels" / "gpu"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(FIRST.replace("LAST", last))
    (tests / "test_b.py").write_text("import not_there\n")
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    found = read_rows(folder / "rows")
    assert found, done.stdout + done.stderr
    notes = {row.name: row.note for row in found}
    assert "one is not two" in notes["test_a.py::test_wrong"] and "51 GiB" in notes["test_a.py::test_large"]
    return done.returncode, [(row.name, row.verdict) for row in found]


BEFORE = [
    ("test_b.py: collected", "fail"),
    ("test_a.py::test_right[1]", "pass"),
    ("test_a.py::test_right[2]", "pass"),
    ("test_a.py::test_wrong", "fail"),
    ("test_a.py::test_large", "info"),
    ("test_a.py::test_endless", "fail"),
]


@another_of_its_kind()
def test_one_that_fails_hides_none_of_the_others(tmp_path: Path) -> None:
    after = [("test_a.py::test_ends", "pass"), ("test_a.py::test_after", "pass"), ("tests", "info")]
    assert rows(tmp_path, "pass") == (0, [*BEFORE, *after])


@another_of_its_kind()
def test_a_crash_loses_no_row_before_it(tmp_path: Path) -> None:
    assert rows(tmp_path, "os._exit(5)") == (5, BEFORE)


def test_behind_a_dead_device_none_is_begun(tmp_path: Path) -> None:
    """An illegal access leaves a context in which every later call throws."""
    after = [("test_a.py::test_ends", "fail"), ("the section's other tests", "not run"), ("tests", "info")]
    assert rows(tmp_path, f"open({str(tmp_path / 'dead')!r}, 'w').close()") == (0, [*BEFORE, *after])
