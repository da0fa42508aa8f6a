"""Processes of a pipeline as forks of one that has imported what they import, as the launcher starts many workers: a
start costs a tenth of the imports' two seconds. That real starts work is `tests/services/launcher`'s."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from cohort.services.launcher.processes.child import adopt_orphans
from cohort.services.launcher.processes.template import LARGEST_ORDER_BYTES

READY_TIMEOUT_S = 120.0
_MANAGING = ("gateway", "length_predictor", "bucketing_manager", "global_monitor")
_SERVICES = (*_MANAGING, "prefill_worker", "decode_worker", "rank_host")
_WITHOUT_TIDYING = """
import atexit, os, sys, threading
from cohort.services.launcher.processes import template
code = 0
try:
    template.main()
except SystemExit as end:
    code = end.code
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush(), sys.stderr.flush()
os._exit(code or 0)
"""
"""The template, whose forks end as processes do, but for taking every module apart: a quarter of a second each, most of
it for copies of pages that were shared."""


class ForkedProcess:
    """What the tests use of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:  # its group first, before the id can belong to another process
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float = READY_TIMEOUT_S) -> int:
        """Exit code, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """None to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Template:
    """Ends with the tests' process, as its forks do."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _WITHOUT_TIDYING, "--orders", str(theirs.fileno()), *modules]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=dict(environment), start_new_session=True, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._ordering = threading.Lock()
        self._serial = 0
        adopt_orphans()
        self._receive()

    def fork(self, module: str, arguments: Sequence[str], log: IO[bytes]) -> ForkedProcess:
        with self._ordering:
            self._serial += 1
            order = {"order": self._serial, "module": module, "arguments": list(arguments), "launcher": os.getpid()}
            socket.send_fds(self._orders, [json.dumps(order).encode()], [log.fileno()])
            return ForkedProcess(self._receive()["pid"])

    def _receive(self) -> dict[str, int]:
        ready, _, _ = select.select([self._orders], [], [], READY_TIMEOUT_S)
        data = self._orders.recv(LARGEST_ORDER_BYTES) if ready else b""
        if not data:
            raise RuntimeError(f"the template of the processes does not answer (exit code {self.process.poll()})")
        answer: dict[str, int] = json.loads(data)
        return answer


_templates: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], _Template] = {}
_IMPORTED = tuple(f"cohort.services.{name}.service" for name in _SERVICES)


def fork(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    imported: tuple[str, ...] = _IMPORTED,
) -> ForkedProcess:
    """`python -m module arguments`, with standard output and error to `log`. One template for each environment: the
    size of an OpenMP pool is read at import. `imported` by the template."""
    wanted = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    key = (imported, tuple(sorted(wanted.items())))
    if key not in _templates:
        _templates[key] = _Template(wanted, imported)
    return _templates[key].fork(module, arguments, log)
