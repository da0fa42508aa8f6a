"""Processes on this machine: forks of two templates, of the workers and of the others. A back end (`hosts.Hosts`).

Called by the supervisor, and by an agent on its node. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from cohort.common.config import Config, dump_config
from cohort.common.http import listeners
from cohort.common.types import InstanceId
from cohort.services.launcher.box import check_added_worker
from cohort.services.launcher.hosts import Supervised
from cohort.services.launcher.plan import ProcessPlan, StopStage
from cohort.services.launcher.processes.child import Child, started
from cohort.services.launcher.processes.forks import Fork, Forks
from cohort.services.launcher.run_files import TEMPLATE_LOG, RunFiles

_ALWAYS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
_UNLESS_SET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class LocalHosts:
    no_restart = ""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._forks: dict[bool, Forks] = {}
        """Templates of workers and, without torch, of all others."""
        self._held: dict[str, list[socket.socket]] = {}
        """Sockets that a process serves and the launcher keeps, so that connections wait while the process is away."""

    def request_places(self, processes: Sequence[Supervised]) -> None:
        """Let processes be forked from a template, which has imported what they need."""
        for workers in (True, False):
            plans = [each.plan for each in processes if _is_worker(each.plan) is workers]
            modules = [f"cohort.services.{plan.folder}.service" for plan in plans]
            if modules and workers not in self._forks:
                self._forks[workers] = Forks(sys.executable, modules, self._files.log_file(TEMPLATE_LOG))

    async def begin(self, process: Supervised) -> Child | Fork:
        plan = process.plan
        command = plan.command(sys.executable, self._files.config_file, self._files.folder)
        log, environment = self._files.log_file(plan.instance), _environment(plan)
        held = [each.fileno() for each in self._held_of(plan)]
        forks = self._forks.get(_is_worker(plan))
        if forks is not None:
            return await forks.child(command, log, environment, held)
        return started(command, log, environment, held)

    def _held_of(self, plan: ProcessPlan) -> list[socket.socket]:
        """Return the sockets held for the process; none where they cannot be bound: the process then reports why."""
        if plan.held and plan.instance not in self._held:
            with contextlib.suppress(OSError):
                self._held[plan.instance] = listeners.bound_everywhere(plan.host, plan.port)
        return self._held.get(plan.instance, [])

    def renew(self) -> None:
        for forks in self._forks.values():
            forks.renew()

    def release(self, process: Supervised) -> None:
        if process.child is not None:
            process.child.kill()
        for listener in self._held.pop(process.plan.instance, ()):
            listener.close()

    def close(self) -> None:
        for forks in self._forks.values():
            forks.end()

    def check(self, config: Config, instance: InstanceId) -> None:
        """Check the worker against the memory that the others have left."""
        check_added_worker(config, instance)

    def configure(self, config: Config) -> None:
        self._files.write_config(dump_config(config))


def _is_worker(plan: ProcessPlan) -> bool:
    return plan.stage is StopStage.WORKERS


def _environment(plan: ProcessPlan) -> Mapping[str, str]:
    """Return the process's environment. Threads come from the configuration, not from the launcher's shell."""
    return {**_UNLESS_SET, **os.environ, **plan.environment, **_ALWAYS}
