"""One process of the pipeline on the node that Ray chose for it: a Ray actor that keeps it running.

    Ray ─▶ Agent ─▶ a thread with an event loop: the launcher's own `Supervisor`, of one process
             │ methods, in threads of Ray's
    launcher ┘   place ─▶ start(briefing) ─▶ news … ─▶ stop

A process that ends is started again here, by the same rules as on one machine. The actor's end ends it at once: the
kernel kills a child with the thread that started it (`child.py`), and that thread lives as long as the actor. Ray
starts a lost actor anew, on another node if it must; then the launcher gives it the present addresses.

Knows its order, and nothing of other processes but their addresses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import yaml

from cohort import __version__
from cohort.common import paths
from cohort.common.address_book import write_book
from cohort.common.config import Config, dump_config, load_config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.keys.private_files import keep_private, open_private
from cohort.common.planning.orders import socket_of
from cohort.services.launcher import preflight
from cohort.services.launcher.box import check_newcomer
from cohort.services.launcher.console import Line, State
from cohort.services.launcher.on_ray.order import Briefing, News, Order, Place, on_node, own_endpoint
from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.run_files import RunFiles
from cohort.services.launcher.supervisor import Supervisor

WAIT_S = 1.0
"""The longest that a question for news stays open."""
_LOOK_S = 0.1
LOG_BYTES = 256 << 10
"""Of a log, in one answer; of more, the end."""
_PORTS = range(20_000, 32_000)  # below those that systems give to connections, above those of Ray's workers
_KEY_FILE = "cluster.key"


class Agent:
    """Its methods may be called from several threads at once."""

    def __init__(self, order: Order) -> None:
        import ray

        keep_private()
        preflight.raise_open_file_limit()
        context = ray.get_runtime_context()
        self._incarnation = time.time_ns()
        self._order = order
        self._ip = str(ray.util.get_node_ip_address())
        self._node_id = str(context.get_node_id())
        self._held = [_hold_port(self._ip), _hold_port(self._ip)]
        self._inbox_port, metrics_port = (int(each.getsockname()[1]) for each in self._held)
        self._plan = self._plan_here(order.plan, metrics_port)
        self._files = RunFiles(paths.run_dir(order.port) / "nodes" / self._node_id[:8] / order.plan.instance)
        self._view = _View()
        self._lock = threading.Lock()
        self._briefing: Briefing | None = None
        self._settled = False
        """The process's folder is ours, with the configuration in it."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: Supervisor | None = None
        self._stops = 0

    def place(self) -> Place:
        own = own_endpoint(self._plan, self._ip, self._inbox_port)
        return Place(self._incarnation, self._node_id, self._ip, socket.gethostname(), __version__, own)

    def start(self, briefing: Briefing) -> None:
        """Start the process, or tell it and its successors what has changed. An older edition changes nothing."""
        with self._lock:
            before = self._briefing
            if before is not None and briefing.edition <= before.edition:
                return
            self._briefing = briefing
            self._files.make()
            write_book(self._files.folder, briefing.book)
            if self._settled and before is not None and briefing.config != before.config:
                self._files.write_config(dump_config(self._config()))
            if self._thread is None and not self._stops:
                self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
                self._thread.start()

    def news(self, version: int, offset: int, said: int) -> tuple[int, News]:
        """What is new since `version`, with the log from `offset` and the operator's lines from number `said` on;
        waits for something up to `WAIT_S`."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            now, lines = self._view.since(version, said, _LOOK_S)
            data, end, skipped = self._log_from(offset)
            if now != version or lines or data or time.monotonic() > deadline_s:
                state, pid, note = self._view.state
                failure = self._supervisor.failure if self._supervisor is not None else ""
                news = News(
                    self._incarnation, state, pid, note, self._ready_url(), self._view.broken or failure,
                    self._view.ended, data, end, skipped, lines,
                )  # fmt: skip
                return now, news

    def stop(self) -> None:
        """First call: drain and end. Second: kill."""
        with self._lock:
            self._stops += 1
            if self._thread is None:
                self._release_ports()
                self._view.end("")
            elif self._loop is not None and self._supervisor is not None:
                self._loop.call_soon_threadsafe(self._supervisor.request_stop)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        broken = ""
        serve_first()
        try:
            with self._files.claim():
                self._settle()
                asyncio.run(self._supervise())
        except (CohortError, OSError) as error:
            broken = str(error)
        except BaseException as error:
            broken = repr(error)
            raise
        finally:
            self._key_file.unlink(missing_ok=True)
            self._release_ports()
            self._view.end(broken)

    async def _supervise(self) -> None:
        supervisor = Supervisor([self._plan], self._files, self._view, on_change=lambda: None)
        with self._lock:
            self._loop, self._supervisor = asyncio.get_running_loop(), supervisor
            for _ in range(self._stops):
                supervisor.request_stop()
        await supervisor.run(lambda: None)

    def _release_ports(self) -> None:
        for held in self._held:
            held.close()

    @property
    def _key_file(self) -> Path:
        return self._files.folder / _KEY_FILE

    def _settle(self) -> None:
        """What the process finds in its folder; the cluster's key becomes a file for its owner alone."""
        if self._order.key:
            with open_private(self._key_file, "wb") as file:
                file.write(self._order.key.encode())
        if self._order.desk:
            socket_of(self._files.folder).symlink_to(self._order.desk)
        with self._lock:
            config = self._config()
            self._files.write_config(dump_config(config))
            self._settled = True
        if self._order.newcomer:
            check_newcomer(config, self._plan.instance)

    def _config(self) -> Config:
        """The present one, for this node."""
        assert self._briefing is not None
        config = load_config(overrides=yaml.safe_load(self._briefing.config))
        key_file = str(self._key_file) if self._order.key else ""
        return on_node(config, self._plan, self._ip, self._inbox_port, key_file)

    def _plan_here(self, plan: ProcessPlan, metrics_port: int) -> ProcessPlan:
        if plan.passes_metrics_port:
            plan = dataclasses.replace(plan, host=self._ip, port=metrics_port)
        return dataclasses.replace(plan, environment={**plan.environment, **self._order.environment})

    def _ready_url(self) -> str:
        """As other nodes reach it, where they do."""
        plan = self._plan
        return (dataclasses.replace(plan, host=self._ip) if plan.host in ("", "0.0.0.0", "::") else plan).ready_url

    def _log_from(self, offset: int) -> tuple[bytes, int, int]:
        if self._view.state[0] == State.WAITING:
            return b"", 0, 0  # what is there is of an earlier agent
        try:
            with self._files.log_file(self._plan.instance).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                offset = 0 if size < offset else offset  # it was cut or begun anew
                start = max(offset, size - LOG_BYTES)
                file.seek(start)
                data = file.read(LOG_BYTES)
                return data, start + len(data), start - offset
        except FileNotFoundError:
            return b"", 0, 0


class _View:
    """In place of the launcher's console: keeps what the supervisor would show until the launcher asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._said: list[str] = []
        self.state: tuple[str, int, str] = (State.WAITING, 0, "")
        self.broken = ""
        """Why nothing could be started here."""
        self.ended = False

    def update(self, instance: str, state: State, *, pid: int | None = None, note: str = "") -> None:
        with self._changed:
            self.state = (state, self.state[1] if pid is None else pid, note)
            self._version += 1
            self._changed.notify_all()

    def say(self, text: str, *, style: str = "") -> None:
        """What the supervisor says of one process, the launcher says of all; but that it had to be killed."""
        if style and self.state[0] != State.FAILED:
            with self._changed:
                self._said.append(text)
                self._changed.notify_all()

    def echo_log(self, instance: str, raw: str) -> None:
        """The launcher has the whole log."""

    def settle(self) -> None: ...

    def add(self, line: Line) -> None: ...

    def remove(self, instance: str) -> None: ...

    def end(self, broken: str) -> None:
        with self._changed:
            self.broken, self.ended = broken, True
            self._version += 1
            self._changed.notify_all()

    def since(self, version: int, said: int, timeout_s: float) -> tuple[int, list[str]]:
        with self._changed:
            if self._version == version and len(self._said) <= said:
                self._changed.wait(timeout_s)
            return self._version, self._said[said:]


def serve_first() -> None:
    """Ray starts its workers at niceness 15, and what they start inherits it: on a node that does anything else a
    pipeline would get a thirtieth of a core, and not be ready in time. Of this thread, and of all it starts; where the
    node does not permit it, `RAY_worker_niceness=0` for `ray start` does the same."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _hold_port(ip: str) -> socket.socket:
    """Bound to a port that nobody else holds: of several agents on a node no two get the same. It never listens, and
    lets the process bind the port too, which asks for that (`SO_REUSEADDR`), as all of the pipeline's do."""
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
