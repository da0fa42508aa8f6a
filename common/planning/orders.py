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
    """Answered once it is ready."""

    role: Role
    degree: int


class DrainWorker(msgspec.Struct, frozen=True, tag="drain"):
    """Answered once it is gone: it takes nothing new, finishes what it has for `drain_s` at most, and ends."""

    instance: InstanceId


Order = AddWorker | DrainWorker


class Done(msgspec.Struct, frozen=True):
    """`failure`: why not; "" = done."""

    instance: InstanceId = ""
    failure: str = ""


def socket_of(run_dir: Path) -> Path:
    return run_dir / SOCKET


class WorkerOrders(Protocol):
    """What starts and ends workers. Both raise `CohortError`."""

    async def add(self, kind: Kind) -> InstanceId:
        """Returns once it serves."""
        ...

    async def drain(self, instance: InstanceId) -> None:
        """Returns once it is gone."""
        ...
