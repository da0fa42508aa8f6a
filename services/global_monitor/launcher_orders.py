"""Orders for workers, sent to the launcher of this machine (`planning/orders.py`). Called by `planner.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from cohort.common.errors import CohortError, ConfigError
from cohort.common.planning.orders import AddWorker, Done, DrainWorker, Order, socket_of
from cohort.common.planning.shape import Kind
from cohort.common.types import InstanceId


class OrderFailed(CohortError):
    """The launcher is gone, or it could not do what it was asked."""


class LauncherOrders:
    def __init__(self, run_dir: Path) -> None:
        """Raises `ConfigError` where no launcher takes orders: under Ray, Kubernetes, or by hand."""
        self._socket = socket_of(run_dir)
        if not self._socket.is_socket():
            raise ConfigError(
                "planner.mode: act needs a launcher on this machine that takes orders (`cohort serve`), and there is "
                f"none at {self._socket}; on Kubernetes or a Ray cluster set advise"
            )

    async def add(self, kind: Kind) -> InstanceId:
        role, degree = kind
        return (await self._ask(AddWorker(role, degree))).instance

    async def drain(self, instance: InstanceId) -> None:
        await self._ask(DrainWorker(instance))

    async def _ask(self, order: Order) -> Done:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                writer.write(msgspec.json.encode(order) + b"\n")
                done = msgspec.json.decode(await reader.readline(), type=Done)
            finally:
                writer.close()
        except (OSError, msgspec.MsgspecError) as error:
            raise OrderFailed(f"the launcher does not answer: {error}") from error
        if done.failure:
            raise OrderFailed(done.failure)
        return done
