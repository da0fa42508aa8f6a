"""Workers that come and go while the pipeline runs, as the global monitor asks (`planner.mode: act`).

    monitor ──AddWorker, DrainWorker──▶ workers.sock in the run folder ──▶ WorkerDesk ──▶ Supervisor.add, .retire
                                                                              └──▶ Hosts.configure: with these workers

One order at a time. The configuration that all processes read names the workers there are: a process that is started
again finds what the others have. Where workers run the desk does not know (`hosts`). Called by `main`; decides nothing
about shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import assert_never

import msgspec

from cohort.common.config import Config
from cohort.common.config.serving import WorkerGroup
from cohort.common.errors import CohortError
from cohort.common.http import ports
from cohort.common.planning.orders import AddWorker, Done, DrainWorker, Order, socket_of
from cohort.common.types import InstanceId, Role
from cohort.services.launcher.hosts import Hosts
from cohort.services.launcher.plan import worker_plan
from cohort.services.launcher.run_files import RunFilesError
from cohort.services.launcher.supervisor import Supervisor

_LONGEST_LINE = 4096


class WorkerOrders:
    def __init__(self, config: Config, supervisor: Supervisor, hosts: Hosts) -> None:
        self._config = config
        self._supervisor = supervisor
        self._hosts = hosts
        self._one = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def listening(self, folder: Path) -> AsyncIterator[None]:
        """Serve orders on the socket in the run folder."""
        server = await asyncio.start_unix_server(self.serve, socket_of(folder), limit=_LONGEST_LINE)
        try:
            yield
        finally:
            server.close()
            socket_of(folder).unlink(missing_ok=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, an order a line."""
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError, ValueError):
            while line := await reader.readline():
                writer.write(msgspec.json.encode(await self._answered(line)) + b"\n")
                await writer.drain()
        writer.close()

    async def _answered(self, line: bytes) -> Done:
        try:
            order = msgspec.json.decode(line, type=Order)
            async with self._one:
                return Done(await self._done(order))
        except (CohortError, OSError, msgspec.MsgspecError) as error:
            return Done(failure=str(error))

    async def _done(self, order: Order) -> InstanceId:
        match order:
            case AddWorker(role=role, degree=degree):
                return await self.add(role, degree)
            case DrainWorker(instance=instance):
                await self.drain(instance)
                return instance
            case _:
                assert_never(order)

    async def add(self, role: Role, degree: int) -> InstanceId:
        """Add a worker; return when it is ready. Raises `CohortError` without room, or if it does not become ready."""
        before = self._config
        config = with_worker(before, role, degree)
        (instance,) = config.instance_roles.keys() - before.instance_roles.keys()
        self._hosts.check(config, instance)
        self._settle(config)
        try:
            plan = worker_plan(config, instance, ports.free_port())
            await self._supervisor.add(plan, config.planner.start_timeout_s)
        except BaseException:
            self._settle(before)
            raise
        return instance

    async def drain(self, instance: InstanceId) -> None:
        config = without_worker(self._config, instance)
        await self._supervisor.retire(instance)
        self._settle(config)

    def _settle(self, config: Config) -> None:
        self._config = config
        self._hosts.configure(config)


def with_worker(config: Config, role: Role, degree: int) -> Config:
    """Return the configuration with one worker more of this kind, the last of its role."""
    groups = list(config.workers)
    index = max((at for at, group in enumerate(groups) if group.role is role), default=-1)
    if index >= 0 and groups[index].degree == degree:
        groups[index] = msgspec.structs.replace(groups[index], count=groups[index].count + 1)
    else:
        groups.insert(index + 1 if index >= 0 else len(groups), _group(config, role, degree))
    return msgspec.structs.replace(config, workers=tuple(groups))


def without_worker(config: Config, instance: InstanceId) -> Config:
    """Return the configuration without a worker. Raises `RunFilesError` unless it is the last of its role."""
    role = config.instance_roles.get(instance)
    if role is None or instance != [name for name, its in config.instance_roles.items() if its is role][-1]:
        raise RunFilesError(f"{instance} is not the last worker of its role")
    if len(config.instance_roles) == 1:
        raise RunFilesError(f"{instance} is the only worker")
    groups = list(config.workers)
    index = max(at for at, group in enumerate(groups) if group.role is role)
    remaining = max(1, groups[index].count) - 1
    groups[index : index + 1] = [msgspec.structs.replace(groups[index], count=remaining)] if remaining else []
    return msgspec.structs.replace(config, workers=tuple(groups))


def _group(config: Config, role: Role, degree: int) -> WorkerGroup:
    """Return a group of one worker, with as many threads as the others have."""
    threads = max(group.threads for group in config.workers)
    return WorkerGroup(role, 1, threads, degree)
