"""`pytest -p tests.support.forks --forks N`: the tests are collected once, then N forks of that process run them.
`--part K/N`: every N-th file of them.

    collect ─▶ fork N ─▶ each takes the next file when it has run one ─▶ reports to the parent

To collect takes half a minute, most of it imports: processes that each collect for themselves, as pytest-xdist's do,
take N times that. As with its `--dist loadfile`, a file's tests run in one process, in their order;
fixtures of a session exist once a fork. A fork that dies fails the test it ran and leaves the rest of that file undone;
a new one takes its place. Nothing may have started a thread by then: forks would wait for what it holds.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import itertools
import os
import pickle
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.common.http import ports

LONGEST_END_S = 20.0
LOOK_S = 1.0
_INDEX = struct.Struct("I")
_LENGTH = struct.Struct("Q")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forks")
    group.addoption("--forks", type=int, default=0, metavar="N", help="processes that run the tests")
    group.addoption("--part", type=_part, metavar="K/N", help="every N-th file from the K-th on: a long run in parts")


def _part(text: str) -> tuple[int, int]:
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is no part: 2/5 is the second of five")
    return int(first), int(parts)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is None:
        return
    first, parts = config.option.part
    files = set(sorted({item.path for item in items})[first - 1 :: parts])
    others = [item for item in items if item.path not in files]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.path in files]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Tokenizers that are trained when a file is read start no threads for it."""
    ours = bool(session.config.option.forks) and "TOKENIZERS_PARALLELISM" not in os.environ
    if ours:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    collected = yield
    if ours:
        del os.environ["TOKENIZERS_PARALLELISM"]
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    forks = session.config.option.forks
    if not forks or session.config.option.collectonly or session.testsfailed:
        return None
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise pytest.UsageError(f"{threads - 1} threads were started while tests were collected; run without --forks")
    _Parent(session, forks).run()
    return True


class _Parent:
    def __init__(self, session: pytest.Session, forks: int) -> None:
        self._session, self._forks = session, forks
        self._files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
        self._selector = selectors.DefaultSelector()
        self._order, orders = os.pipe()  # the indices of files, in order; a fork reads one at a time
        for index in range(len(self._files)):
            os.write(orders, _INDEX.pack(index))
        os.close(orders)
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # the files take turns

    def run(self) -> None:
        running = [self._fork(number) for number in range(self._forks)]
        try:
            while running:
                self._selector.select(LOOK_S)
                for fork in running[:]:
                    if fork.hear(self._session):
                        continue
                    self._selector.unregister(fork.pipe)
                    running.remove(fork)
                    if fork.lost(self._session):
                        running.append(self._fork(fork.number))
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            for fork in running:
                fork.end()

    def _fork(self, number: int) -> _Fork:
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            # Ports that no other fork tries: between the choice of one and its use another process could take it.
            ports._blocks = itertools.count(next(ports._blocks) + number, self._forks)
            _Child(self._session, self._files, self._order, theirs, number).run()  # never returns
        os.close(theirs)
        os.set_blocking(ours, False)
        fork = _Fork(pid, number, ours)
        self._selector.register(ours, selectors.EVENT_READ, fork)
        return fork


class _Fork:
    """One of them, as the parent sees it."""

    def __init__(self, pid: int, number: int, pipe: int) -> None:
        self.pid, self.number, self.pipe = pid, number, pipe
        self._data = bytearray()
        self._runs: tuple[str, Any] | None = None
        self._node = SimpleNamespace(gateway=SimpleNamespace(id=f"fork{number}"), _workerinfocache=f"[fork {number}]")

    def hear(self, session: pytest.Session) -> bool:
        """Whether it lives. Reports go on to pytest as if the tests ran here."""
        # Not by the end of its pipe alone: a process that it has left behind may hold that open.
        lives = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        with contextlib.suppress(BlockingIOError):
            while received := os.read(self.pipe, 1 << 16):
                self._data += received
            lives = False
        for kind, content in self._messages():
            match kind:
                case "begins":
                    self._runs = content
                case "ends":
                    self._runs = None
                case "report":
                    report = session.config.hook.pytest_report_from_serializable(config=session.config, data=content)
                    report.node = self._node
                    session.config.hook.pytest_runtest_logreport(report=report)
        return lives

    def _messages(self) -> Iterator[tuple[str, Any]]:
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            yield pickle.loads(self._data[_LENGTH.size : end])
            del self._data[:end]

    def lost(self, session: pytest.Session) -> bool:
        """After its last word. Whether it ended before its time: a report says so of the test it ran."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return False
        nodeid, location = self._runs or (f"fork {self.number}", ("", None, ""))
        report = pytest.TestReport(nodeid, location, {}, "failed", f"the process ended with {code}", "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        return self._runs is not None

    def end(self) -> None:
        """It may take apart what its tests have set up, but not for ever."""
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + LONGEST_END_S
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.02)


class _Child:
    """A fork: plugs into its copy of the session, and ends the process."""

    def __init__(
        self, session: pytest.Session, files: list[list[pytest.Item]], order: int, pipe: int, number: int
    ) -> None:
        self._session, self._files, self._order, self._pipe, self._number = session, files, order, pipe, number

    def run(self) -> None:
        code = 3
        try:
            self._prepare()
            while index := os.read(self._order, _INDEX.size):
                items = self._files[_INDEX.unpack(index)[0]]
                # Behind a file's last test all is torn down but what the session has.
                for item, following in zip(items, [*items[1:], self._session], strict=True):
                    self._say("begins", (item.nodeid, item.location))
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    self._say("ends", None)
                # What a file leaves behind is looked through once, not by every collection to come.
                gc.collect()
                gc.freeze()
            self._session._setupstate.teardown_exact(None)
            code = 0
        except KeyboardInterrupt:
            with contextlib.suppress(BaseException):
                self._session._setupstate.teardown_exact(None)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(code)

    def _prepare(self) -> None:
        """Nothing is shared with the other forks but the folder of the run's temporary files."""
        # Not SIGINT, which whoever started this run in the background may have it ignore.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        plugins = self._session.config.pluginmanager
        if (reporter := plugins.getplugin("terminalreporter")) is not None:
            plugins.unregister(reporter)
        if (capture := plugins.getplugin("capturemanager")) is not None:
            capture.stop_global_capturing()
            capture.start_global_capturing()
        base: Path = self._session.config._tmp_path_factory.getbasetemp() / f"fork{self._number}"  # type: ignore[attr-defined]
        while base.exists():
            base = base.with_name(f"{base.name}-again")
        base.mkdir(mode=0o700)
        self._session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
        plugins.register(self)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        config = self._session.config
        self._say("report", config.hook.pytest_report_to_serializable(config=config, report=report))
        return (yield)

    def _say(self, kind: str, content: object) -> None:
        data = pickle.dumps((kind, content))
        data = _LENGTH.pack(len(data)) + data
        while data:
            data = data[os.write(self._pipe, data) :]
