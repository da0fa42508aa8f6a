"""Orders for workers, sent to the launcher of this machine (`planning/orders.py`). Called by `planner.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from cohort.common.config import Config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.planning.orders import AddWorker, Done, DrainWorker, Order, socket_of
from cohort.common.planning.shape import Kind
from cohort.common.types import InstanceId

_OVERHEAD_S = 60.0
"""The longest that an order takes beside the start or the drain of its worker, by force at the end."""


class OrderFailed(CohortError):
    """The launcher is gone, or it could not do what it was asked."""


class LauncherOrders:
    def __init__(self, run_dir: Path, config: Config) -> None:
        """Raise `ConfigError` if no launcher takes orders: where processes are started by hand."""
        self._longest_s = config.planner.start_timeout_s + config.drain_s + _OVERHEAD_S
        self._socket = socket_of(run_dir).resolve()  # on Ray a link to the launcher's own
        try:
            found = self._socket.is_socket()
        except PermissionError:  # of another user's launcher
            found = False
        if not found:
            raise ConfigError(
                "planner.mode: act needs a launcher on this machine that takes orders (`cohort serve`, also on Ray), "
                f"and there is none at {self._socket}; without one set advise"
            )

    async def add(self, kind: Kind) -> InstanceId:
        role, degree = kind
        return (await self._call(AddWorker(role, degree))).instance

    async def drain(self, instance: InstanceId) -> None:
        await self._call(DrainWorker(instance))

    async def _call(self, order: Order) -> Done:
        try:
            async with asyncio.timeout(self._longest_s):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(msgspec.json.encode(order) + b"\n")
                    done = msgspec.json.decode(await reader.readline(), type=Done)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise OrderFailed(f"the launcher has not answered for {self._longest_s:.0f} s") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise OrderFailed(f"the launcher does not answer: {error}") from error
        if done.failure:
            raise OrderFailed(done.failure)
        return done
