"""Processes as forks of a template, which imports for all of them, at their first start and at each later one.

Called by `local_hosts`. Where a template has failed, a process is started without one: a `Fork` is to the supervisor
what a `Child` is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cohort.common.keys.private_files import open_private
from cohort.services.launcher.processes.child import Child, Running, adopt_orphans, started
from cohort.services.launcher.processes.template import LARGEST_ORDER_BYTES

_READY_TIMEOUT_S = 120.0
_FORK_TIMEOUT_S = 10.0
"""The longest a template takes to fork, which is milliseconds: beyond, it is stopped by a signal or hangs."""
_MODULE = "cohort.services.launcher.processes.template"


class TemplateLost(OSError):
    """End of the template, or no answer from it."""


class Fork(Running):
    """Process that a template has forked."""


class Template:
    """One template and the processes that it forks."""

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
        asyncio.get_running_loop().add_reader(self._orders, self._read_births)

    async def fork(self, module: str, arguments: Sequence[str], log_file: Path, listeners: Sequence[int]) -> Fork:
        """Fork a process that runs `module` and serves `listeners`. Raises `TemplateLost`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._ready.wait()
        if self._closed or not self._ready.is_set():
            raise TemplateLost("the template does not run")
        self._serial += 1
        order = {"order": self._serial, "module": module, "arguments": list(arguments), "launcher": os.getpid()}
        born: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        self._forking[self._serial] = born
        with open_private(log_file, "ab") as log:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [log.fileno(), *listeners])
        await asyncio.wait((born,), timeout=_FORK_TIMEOUT_S)
        if not born.done():
            self.end()  # which ends all that wait for it
        return await born

    def end(self) -> None:
        """Kill the template; what it has forked lives on."""
        self._process.kill()

    def _read_births(self) -> None:
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
        if not message:
            self._ready.set()
            return
        born = self._forking.pop(message["order"])
        if message["pid"] == 0:
            born.set_exception(TemplateLost("no process can be forked"))
        else:
            born.set_result(Fork(message["pid"]))

    def _lost(self) -> None:
        self._closed = True
        self._ready.set()
        asyncio.get_running_loop().remove_reader(self._orders)
        self._orders.close()
        for born in self._forking.values():
            born.set_exception(TemplateLost("the template has ended"))
        self._forking.clear()


class Forks:
    """The templates of processes that import the same: one for each environment."""

    def __init__(self, python: str, modules: Sequence[str], log_file: Path) -> None:
        self._python = python
        self._modules = sorted(set(modules))
        self._log_file = log_file
        self._templates: dict[tuple[tuple[str, str], ...], Template] = {}
        adopt_orphans()

    async def child(
        self, command: Sequence[str], log_file: Path, environment: Mapping[str, str], listeners: Sequence[int] = ()
    ) -> Fork | Child:
        """Start `command` (PYTHON -P -m MODULE ARGUMENTS) as a fork, or as a new process if the template fails."""
        try:
            return await self.prepare(environment).fork(command[3], command[4:], log_file, listeners)
        except OSError:
            self._templates.pop(_key(environment), None)
            return started(command, log_file, environment, listeners)

    def prepare(self, environment: Mapping[str, str]) -> Template:
        """Return the template of an environment, which begins to import if it is new."""
        key = _key(environment)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = Template(self._python, self._modules, self._log_file, environment)
        return template

    def renew(self) -> None:
        """Fork from new templates, which import present files."""
        self.end()

    def end(self) -> None:
        for template in self._templates.values():
            template.end()
        self._templates.clear()


def _key(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))
