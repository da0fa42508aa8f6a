"""One supervised process and its history, as supervisor and rolling restart share it. Decides nothing."""

from __future__ import annotations

import asyncio
import socket

from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.processes.child import Child
from cohort.services.launcher.processes.forks import Fork
from cohort.services.launcher.processes.restart_policy import RestartPolicy


class Supervised:
    """One process and its history."""

    def __init__(self, plan: ProcessPlan, *, added: bool = False) -> None:
        """`added` while the pipeline runs: it goes on without it, where this one cannot start."""
        self.plan = plan
        self.added = added
        self.leaving = asyncio.Event()
        """Asked to end, and not to come back."""
        self.failure = ""
        self.policy = RestartPolicy()
        self.child: Child | Fork | None = None
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self.renewed = False
        """It was asked to end, to be started again at once."""
        self.killed = False
        """By us: it did not end in time."""
        self.listeners: list[socket.socket] = []

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running
