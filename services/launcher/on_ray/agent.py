"""One process of the pipeline on the node that Ray chose for it: a Ray actor that is its parent.

    launcher ─▶ place ─▶ begin(briefing) ─▶ state_since … ─▶ terminate, kill  of one child after the other

Whether a process that ended is begun again the launcher's supervisor says, by the same rules as on one machine. The
actor's end ends it at once: the kernel kills a child with the thread that started it (`child.py`). Ray starts a lost
actor anew, on another node if it must; then the launcher gives it the present addresses.

Knows its order, and nothing of other processes but their addresses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from cohort.common import paths
from cohort.common.address_book import write_book
from cohort.common.config import Config, dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.common.keys.private_files import keep_private, open_private
from cohort.common.planning.orders import socket_of
from cohort.services.launcher import preflight
from cohort.services.launcher.hosts import Life, Supervised
from cohort.services.launcher.local_hosts import LocalHosts
from cohort.services.launcher.on_ray.order import AgentState, Order, Place, SharedConfig, on_node, own_endpoint
from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.run_files import RunFiles, read_log

WAIT_S = 1.0
"""Longest time that a request for the state stays open."""
_POLL_S = 0.1  # and the shortest, or a log that grows all the time would be requested all the time
_PORTS = range(20_000, 32_000)  # below those that systems give to connections, above those of Ray's workers
_KEY_FILE = "cluster.key"


class Agent:
    """Ray calls its methods in one event loop, and that in one thread for as long as the actor lives."""

    def __init__(self, order: Order) -> None:
        import ray

        keep_private()
        preflight.raise_open_file_limit()
        self._incarnation = time.time_ns()
        self._order = order
        self._ip = str(ray.util.get_node_ip_address())
        node_id = str(ray.get_runtime_context().get_node_id())
        self._held = [_hold_port(self._ip), _hold_port(self._ip)]
        self._inbox_port, metrics_port = (int(each.getsockname()[1]) for each in self._held)
        self._process = Supervised(self._local_plan(order.plan, metrics_port))
        self._files = RunFiles(paths.run_dir(order.port) / "nodes" / node_id[:8] / order.plan.instance)
        self._hosts = LocalHosts(self._files)
        self._briefing: SharedConfig | None = None
        self._settled = False
        """Whether the process's folder is this agent's, with its configuration and a log."""
        self._life: asyncio.Task[int] | None = None
        """Task that waits for the process and returns its exit code."""

    async def place(self) -> Place:
        own = own_endpoint(self._process.plan, self._ip, self._inbox_port)
        return Place(self._incarnation, self._ip, own, self._ready_url())

    async def brief(self, briefing: SharedConfig) -> None:
        """Store addresses and configuration for the process and its successors. An older edition changes nothing."""
        before = self._briefing
        if before is not None and briefing.edition <= before.edition:
            return
        self._briefing = briefing
        self._files.make()
        write_book(self._files.folder, briefing.book)
        if self._settled:
            self._files.write_config(dump_config(self._config()))

    async def begin(self, briefing: SharedConfig) -> int:
        """Begin the process unless it runs, and return its pid. Raises `CohortError`, `OSError`."""
        await self.brief(briefing)
        if self._life is None or self._life.done():
            serve_first()
            with ExitStack() as life:
                life.enter_context(self._files.claim())
                life.callback(self._key_file.unlink, missing_ok=True)
                self._settle()
                self._process.child = child = await self._hosts.begin(self._process)
                self._life = asyncio.create_task(_ended(child, life.pop_all()))
        assert self._process.child is not None
        return self._process.child.pid

    async def state_since(self, offset: int) -> AgentState:
        """Return the log from `offset` on, and the exit code once the process has ended; waits up to `WAIT_S`."""
        if self._life is None:  # requested of the one before, which is lost
            return AgentState(self._incarnation, None, b"", 0, 0)
        deadline_s = time.monotonic() + WAIT_S
        log = self._files.log_file(self._process.plan.instance)
        self._files.limit_log(self._process.plan.instance)
        while True:
            await asyncio.wait((self._life,), timeout=_POLL_S)
            ended = self._life.done()  # checked before the log is read: then all of it is there
            data, end, skipped = read_log(log, offset)
            if ended or data or time.monotonic() > deadline_s:
                return AgentState(self._incarnation, self._life.result() if ended else None, data, end, skipped)

    async def terminate(self) -> None:
        """Ask the process to drain and end."""
        if self._process.child is not None:
            self._process.child.terminate()

    async def kill(self) -> None:
        if self._process.child is not None:
            self._process.child.kill()

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _key_file(self) -> Path:
        return self._files.folder / _KEY_FILE

    def _settle(self) -> None:
        """Write what the process finds in its folder; the cluster's key becomes a file for its owner alone."""
        if self._order.key:
            with open_private(self._key_file, "wb") as file:
                file.write(self._order.key.encode())
        if self._order.orders_socket:
            socket_of(self._files.folder).symlink_to(self._order.orders_socket)
        if self._settled:
            return
        self._files.start_log(self._process.plan.instance)
        config = self._config()
        self._files.write_config(dump_config(config))
        self._settled = True
        if self._order.joins_running:
            self._hosts.check(config, self._process.plan.instance)

    def _config(self) -> Config:
        """Return the current configuration for this node."""
        assert self._briefing is not None
        config = load_config(overrides=yaml.safe_load(self._briefing.config))
        key_file = str(self._key_file) if self._order.key else ""
        return on_node(config, self._process.plan, self._ip, self._inbox_port, key_file)

    def _local_plan(self, plan: ProcessPlan, metrics_port: int) -> ProcessPlan:
        if plan.passes_metrics_port:
            plan = dataclasses.replace(plan, host=self._ip, port=metrics_port)
        return dataclasses.replace(plan, environment={**plan.environment, **self._order.environment})

    def _ready_url(self) -> str:
        """Return the readiness URL, with this node's address in place of a wildcard."""
        plan = self._process.plan
        return (dataclasses.replace(plan, host=self._ip) if plan.host in ("", "0.0.0.0", "::") else plan).ready_url


async def _ended(child: Life, meanwhile: ExitStack) -> int:
    with meanwhile:
        return await child.wait()


def serve_first() -> None:
    """Raise this thread, and all it starts, to normal priority. Ray starts its workers at niceness 15, which their
    children inherit: on a busy node a pipeline would get a thirtieth of a core and not be ready in time. Where the node
    does not permit it, `RAY_worker_niceness=0` for `ray start` does the same."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _hold_port(ip: str) -> socket.socket:
    """Bind a port that nobody else holds: of several agents on a node no two get the same. The socket never listens,
    and lets the process bind the port too with `SO_REUSEADDR`, as all of the pipeline's do."""
    for port in random.sample(_PORTS, len(_PORTS)):
        held = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        try:
            held.bind((ip, port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise ConfigError(f"no free port on {ip} between {_PORTS.start} and {_PORTS.stop}")
