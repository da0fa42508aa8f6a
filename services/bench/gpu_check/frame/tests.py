"""Sections that are tests of this checkout (tests/kernels/gpu): each is an item, its row written when it has ended.

pytest runs within the section's process, so the guard holds for tests as for other items: behind a dead device none is
begun. Needs pytest and hypothesis; no other plugin that happens to be installed is loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

import cohort
from cohort.services.bench.gpu_check.frame.context import Check

_FOLDER = "tests/kernels/gpu"
_TEST_S = 120.0  # some compile dozens of variants
_OPTIONS = ("-m", "not slow", "-s", "-v", "--tb=no", "--continue-on-collection-errors", "-p", "hypothesispytest")
"""Options of pytest. Nothing is captured: a test's output is in the log when its process is ended."""


def run(check: Check, *chosen: str) -> None:
    """Run `chosen`: files or tests of the folder (none: all), and further options of pytest's."""
    source = _linked(check.folder)
    if source is None:
        check.found.add_note("tests", "they come with a checkout alone", "not run")
        return
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.setdefault("COHORT_TEST_CACHES", str(check.folder))  # its cache folder is the run's own already
    folder = source / _FOLDER
    words = [str(folder / word) if ".py" in word else word for word in chosen] or [str(folder)]
    words += ["--rootdir", str(source), "-o", f"cache_dir={check.folder / 'pytest'}"]
    words.append(f"--hypothesis-profile={'gpu' if check.device.type == 'cuda' else 'default'}")
    rows = _Rows(check)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest takes an exit for a test's failure, and goes on
    with torch.inference_mode(False):
        status = pytest.main([*words, *_OPTIONS], [rows])
    check.found.add_note("tests", ", ".join(f"{count} {what}" for what, count in rows.counts.items()))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        check.found.checked("pytest", False, f"ended with {status!r}")


def _linked(folder: Path) -> Path | None:
    """Return a folder from which `tests` is imported and nothing else of the checkout, whose folders would hide other
    people's packages of the same names. None outside a checkout."""
    root, source = Path(cohort.__file__).resolve().parent.parent, folder / "source"
    if not (root / _FOLDER).is_dir():
        return None
    source.mkdir(parents=True, exist_ok=True)
    for name in ("tests", "pyproject.toml"):
        if not (source / name).is_symlink():
            (source / name).symlink_to(root / name)
    return source


class _Rows:
    """pytest's hooks: rows, deadlines, and the end where no further test can tell anything."""

    def __init__(self, check: Check) -> None:
        self._found, self._guard = check.found, check.guard
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        with self._guard.deadline(_TEST_S):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        with self._guard.deadline(_TEST_S):
            yield
            self._guard.settle()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            self._guard.judge(_name(item.nodeid), call.excinfo.value)
        elif report.passed and report.when == "call":
            self._found.checked(_name(item.nodeid), True)
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if (why := self._guard.why_not()) != "" and not item.session.shouldstop:
            item.session.shouldstop = why
            self._found.add_note("the section's other tests", why, "not run")
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines() or ["?"]
            print(report.longreprtext, flush=True)
            self._found.checked(f"{_name(report.nodeid)}: collected", False, lines[-1])


def _name(nodeid: str) -> str:
    return nodeid.removeprefix(f"{_FOLDER}/")
