"""What `main` and the worker desk ask of that which keeps the processes running: on this machine, or on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cohort.common.config import Config
from cohort.common.types import InstanceId
from cohort.services.launcher.console import Console
from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.run_files import ProcessMark, RestartState, RunFiles


class Keeper(Protocol):
    """`Supervisor` on this machine, `RaySupervisor` on several."""

    @property
    def marks(self) -> dict[str, ProcessMark]: ...

    @property
    def nodes(self) -> dict[str, str]: ...

    @property
    def ready_urls(self) -> dict[str, str]: ...

    @property
    def restart(self) -> RestartState: ...

    def request_restart(self) -> None: ...

    def request_stop(self) -> None: ...

    async def run(self, on_ready: Callable[[], None]) -> int: ...


MakeKeeper = Callable[[RunFiles, Console, Callable[[], None]], Keeper]


class WorkerHosts(Protocol):
    """Where workers come and go beneath the desk: this machine, or the nodes of a cluster."""

    def check(self, config: Config, instance: InstanceId) -> None:
        """Raises `CohortError` where this worker of `config`, which is to come, cannot be had."""
        ...

    def configure(self, config: Config) -> None:
        """Every process that is started from now on reads this, wherever it is."""
        ...

    async def add(self, plan: ProcessPlan, timeout_s: float) -> None:
        """Returns when it is ready. Raises `CohortError` where it is not, by then; nothing of it stays."""
        ...

    async def retire(self, instance: str) -> None:
        """It drains and ends, for good; returns when it is gone, after its plan's deadline by force."""
        ...
