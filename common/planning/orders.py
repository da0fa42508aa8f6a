"""What the planner's host asks the launcher, over a Unix socket of the run folder: one JSON line each way.

The small interface behind which other ways to run workers may stand: `add` and `drain` of `WorkerOrders`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from cohort.common.planning.shape import Kind
from cohort.common.types import InstanceId, Role

SOCKET = "workers.sock"


class AddWorker(msgspec.Struct, frozen=True, tag="add"):
    """Order of a worker, answered once it is ready."""

    role: Role
    degree: int


class DrainWorker(msgspec.Struct, frozen=True, tag="drain"):
    """Order to drain a worker, answered once it has ended: it finishes its work within `drain_s`, without new one."""

    instance: InstanceId


Order = AddWorker | DrainWorker


class Done(msgspec.Struct, frozen=True):
    """Reply. `failure`: why not; "" = done."""

    instance: InstanceId = ""
    failure: str = ""


def socket_of(run_dir: Path) -> Path:
    return run_dir / SOCKET


class WorkerOrders(Protocol):
    """Interface that starts and ends workers. Both methods raise `CohortError`."""

    async def add(self, kind: Kind) -> InstanceId:
        """Start a worker. Return once it serves."""
        ...

    async def drain(self, instance: InstanceId) -> None:
        """Drain a worker. Return once it has ended."""
        ...
