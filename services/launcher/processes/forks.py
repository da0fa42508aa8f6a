"""Workers as forks of a template process, which imports for all of them, at their first start and at each later one.

Called by the supervisor, which starts a `Child` itself where there is no template: another kind of process, or a
template that has failed. A forked worker is to the supervisor what a `Child` is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cohort.common.keys.private_files import open_private
from cohort.services.launcher.processes.child import Child
from cohort.services.launcher.processes.template import LARGEST_ORDER_BYTES

_READY_TIMEOUT_S = 120.0
_MODULE = "cohort.services.launcher.processes.template"
_KILLED = -int(signal.SIGKILL)


class TemplateLost(OSError):
    """End of the template, or no answer from it."""


class Fork:
    """Worker that a template has forked; the same to its owner as a `Child`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        """Return the exit code, negative for a signal. May be awaited by several and cancelled freely."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def hand_over(self) -> None:
        """Ask it to drain: a worker has no port to hand over."""
        self.terminate()

    def kill(self) -> None:
        """End it and all it started, now."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._signal(signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Set its exit code, as the template reported it or because the template has ended."""
        if self.running:
            self._ended.set_result(code)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Template:
    """One template process and the workers that it has forked."""

    def __init__(self, python: str, modules: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        command = [python, "-P", "-m", _MODULE, "--orders", str(theirs.fileno()), *modules]
        self._process = Child(command, log_file, environment, [theirs.fileno()])
        theirs.close()
        self._ready = asyncio.Event()
        self._closed = False
        self._serial = 0
        self._forking: dict[int, asyncio.Future[Fork]] = {}
        self._forks: dict[int, Fork] = {}
        asyncio.get_running_loop().add_reader(self._orders, self._read_exits)

    @property
    def forks(self) -> int:
        """Workers of it that live."""
        return len(self._forks)

    async def fork(self, module: str, arguments: Sequence[str], log_file: Path) -> Fork:
        """Fork a worker that runs `module`. Raises `TemplateLost`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._ready.wait()
        if self._closed or not self._ready.is_set():
            raise TemplateLost("the template of the workers does not run")
        self._serial += 1
        order = {"order": self._serial, "module": module, "arguments": list(arguments), "template": self._process.pid}
        born: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        self._forking[self._serial] = born
        with open_private(log_file, "ab") as log:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [log.fileno()])
        return await born

    def end(self) -> None:
        """Kill the template and all that it has forked."""
        self._process.kill()

    def _read_exits(self) -> None:
        try:
            data = self._orders.recv(LARGEST_ORDER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        message = json.loads(data)
        match message:
            case {"order": int(order), "pid": int(pid)}:
                fork = self._forks[pid] = Fork(pid)
                self._forking.pop(order).set_result(fork)
            case {"pid": int(pid), "code": int(code)}:
                self._forks.pop(pid).ended(code)
            case _:
                self._ready.set()

    def _lost(self) -> None:
        """Mark the workers as ended: the kernel kills them with their template."""
        self._closed = True
        self._ready.set()
        asyncio.get_running_loop().remove_reader(self._orders)
        self._orders.close()
        for fork in self._forks.values():
            fork.ended(_KILLED)
        for born in self._forking.values():
            born.set_exception(TemplateLost("the template of the workers has ended"))
        self._forks.clear()
        self._forking.clear()


class Forks:
    """The templates of a pipeline: one for each environment of its workers."""

    def __init__(self, python: str, modules: Sequence[str], log_file: Path) -> None:
        self._python = python
        self._modules = sorted(set(modules))
        self._log_file = log_file
        self._templates: dict[tuple[tuple[str, str], ...], Template] = {}
        self._former: list[Template] = []

    async def child(self, command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> Fork | Child:
        """Start `command` (PYTHON -P -m MODULE ARGUMENTS) as a fork, or as a new process if the template fails."""
        for former in [each for each in self._former if not each.forks]:
            former.end()
            self._former.remove(former)
        try:
            return await self.prepare(environment).fork(command[3], command[4:], log_file)
        except OSError:
            self._templates.pop(_key(environment), None)
            return Child(command, log_file, environment)

    def prepare(self, environment: Mapping[str, str]) -> Template:
        """Return the template of an environment, which begins to import if it is new."""
        key = _key(environment)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = Template(self._python, self._modules, self._log_file, environment)
        return template

    def renew(self) -> None:
        """Fork workers from new templates, which import present files. Former ones end with the last of their
        workers."""
        self._former += self._templates.values()
        self._templates.clear()

    def end(self) -> None:
        for template in (*self._templates.values(), *self._former):
            template.end()


def _key(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))
