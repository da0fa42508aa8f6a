"""Where the processes of a pipeline run: what the supervisor asks of a back end, and what both see of them.

    Supervisor ── request_places, begin, release ──▶ Hosts ─┬─ LocalHosts  children of this process  (local_hosts.py)
         └──────▶ Pipeline ◀────────────────────────────────┴─ Actors      agents on Ray's nodes     (on_ray/actors.py)

Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cohort.common.config import Config
from cohort.common.errors import CohortError
from cohort.common.types import InstanceId
from cohort.services.launcher.console import Console
from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.processes.restart_policy import RestartPolicy
from cohort.services.launcher.run_files import RunFiles


class HostLost(CohortError):
    """Loss of what runs a process, or was to; it comes again. `waits`: for a place on any node."""

    def __init__(self, reason: str, *, waits: bool = False) -> None:
        super().__init__(reason)
        self.waits = waits


class NotStarted(CohortError):
    """A process cannot be begun, and another try would end the same."""


class Life(Protocol):
    """Handle on a running process: a `Child`, a `Fork` of a template, or a child of an agent on a node."""

    @property
    def pid(self) -> int: ...

    @property
    def running(self) -> bool: ...

    async def wait(self) -> int:
        """Return the exit code, negative for a signal. Raises `HostLost`, `NotStarted` if its host is gone."""

    def terminate(self) -> None: ...

    def hand_over(self) -> None: ...

    def kill(self) -> None: ...


class Supervised:
    """One process and its history."""

    def __init__(self, plan: ProcessPlan, *, added: bool = False) -> None:
        """`added` while the pipeline runs, which goes on without this process if it cannot start."""
        self.plan = plan
        self.added = added
        self.task: asyncio.Task[None] | None = None
        self.policy = RestartPolicy()
        self.child: Life | None = None
        self.node, self.ready_url = "", plan.ready_url
        """Node of the process ("" on one machine), and its readiness URL; a back end may change both."""
        self.leaving = asyncio.Event()
        """Event: the process is to end for good."""
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self.failure = ""
        self.renewed = False
        """Whether it was asked to end, to be started again at once."""
        self.killed = False
        """Whether the supervisor killed it because it did not end in time."""

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running


@dataclass(slots=True)
class Pipeline:
    """`on_change` is called when what the launcher's state file says has changed."""

    files: RunFiles
    console: Console
    on_change: Callable[[], None]
    processes: list[Supervised] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    kill_now: asyncio.Event = field(default_factory=asyncio.Event)


class Hosts(Protocol):
    no_restart: str
    """Reason why there is no rolling restart; "" if there is one."""

    def request_places(self, processes: Sequence[Supervised]) -> None:
        """Request places for all these processes at once. Raises `CohortError` if one cannot be had."""

    async def begin(self, process: Supervised) -> Life:
        """Begin one life of the process. Raises `HostLost`, `NotStarted`."""

    def renew(self) -> None:
        """Run whatever begins from now on from the files as they are now."""

    def release(self, process: Supervised) -> None:
        """Remove all that is left of the process. May be called again."""

    def close(self) -> None:
        """Free what all processes shared; called after the last release."""

    def check(self, config: Config, instance: InstanceId) -> None:
        """Raise `CohortError` if this additional worker of `config` cannot be had."""

    def configure(self, config: Config) -> None:
        """Give this configuration to every process that is started from now on, on any node."""
