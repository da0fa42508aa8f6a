"""The skeleton of every process: start, metrics and health, heartbeat, drain, end.

A service's `__main__.py` calls `service_main(role, build)` and is done; `build` is the service itself, a coroutine
that runs until `context.stopping` is set, drains within its own drain time and returns.

    parse options ─▶ bus ─▶ build running ──SIGTERM, SIGINT──▶ draining ──build returns──▶ Farewell ─▶ exit 0
         │                      │                                │
    ConfigError: exit 2     exception, `fail`: exit 1  hard deadline: build is cancelled; a second signal: exit at once

Decides exit codes, and that a process reports to the monitor without ever depending on it. Where inboxes are and which
port metrics take: `addresses.py`. Never knows what a service does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cohort import __version__
from cohort.common import paths
from cohort.common.address_book import follow_book
from cohort.common.addresses import (
    MONITOR,
    ROLES,
    EndpointName,
    advertised_host,
    bind_address,
    endpoint_of,
    inbox_of,
    manager_endpoints,
    metrics_port,
    model_name,
    never_dialling,
)
from cohort.common.clock import Clock, SystemClock
from cohort.common.config import Config, load_config
from cohort.common.devices.inventory import this_machine
from cohort.common.errors import ConfigError, ModelError, NoDeviceLeft, PeerUnreachable
from cohort.common.http import exposure
from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.http_server import listening, name_server, refuse_foreign_pages
from cohort.common.keys.private_files import keep_private, private_folder, require_private
from cohort.common.messages import Farewell, Heartbeat
from cohort.common.process.activity import Activity
from cohort.common.process.log_levels import listen_for_levels
from cohort.common.process.logs import configure_logging, log_loop_errors
from cohort.common.process.metrics import CONTENT_TYPE, TOKEN_HEADER, MetricFactory, exposition
from cohort.common.seeds import discover, with_own_inbox
from cohort.common.transport.bus import Bus
from cohort.common.transport.security import load_keys
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import InstanceId

HEARTBEAT_S = 0.5
DRAIN_MARGIN_S = 3.0  # beyond a service's own drain time, before its build is cancelled
CANCEL_S = 3.0  # the longest a cancelled build may take to clean up
EXIT_NO_DEVICE = 75  # every share of every GPU is taken (EX_TEMPFAIL: the same start may succeed later)
FAREWELL_QUEUE_MESSAGES = 4  # a monitor that comes back wants the latest heartbeats, not all it missed


@dataclass(slots=True)
class ServiceContext:
    """The surroundings of a service. `stats` and `ready` are the service's to set: they ride in every heartbeat and
    answer /ready, as do `facts`, fixed words about the process, `warnings`, sentences for the live page, and `counts`.
    `metrics_url` too, by a service that serves its metrics on its own application. `private_registry` has the series
    that name API keys: the monitor alone gets them, by the `metrics_token` of the heartbeats. `renamed_registry` has
    what other series say too, under another server's names: all but the monitor get it, so that no sum has it twice.

    `drain_s` is the service's own drain time; the hard deadline lies `DRAIN_MARGIN_S` beyond it.
    """

    config: Config
    instance: str
    role: str
    incarnation: int
    bus: Bus
    log: structlog.stdlib.BoundLogger
    clock: Clock
    registry: CollectorRegistry
    run_dir: Path
    private_registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    renamed_registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    metrics_token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    stats: Callable[[], dict[str, float]] = dict
    facts: Callable[[], dict[str, str]] = dict
    warnings: Callable[[], list[str]] = list
    counts: Callable[[], dict[str, list[float]]] = dict
    ready: bool = False
    activity: Activity = field(default_factory=Activity)
    connection_ended: Callable[[InstanceId], None] = lambda _: None
    """Callback for the end of a connection to a manager or the monitor."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    metrics_url: str = ""
    drain_s: float = 5.0
    failure: Exception | None = None
    """Error that ends the process now, without a drain; set by `fail`."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: Exception) -> None:
        """End the process with this error, whichever part noticed it. The first one counts."""
        self.failure = self.failure or error
        self.failed.set()

    def on_end(self, peer: InstanceId) -> None:
        """Report as usual for a while: another process will be there, and know nothing of this one."""
        self.activity.work.set()
        self.connection_ended(peer)

    @property
    def model_name(self) -> str:
        """Name of the model for clients; the constant label of all metrics."""
        return model_name(self.config)

    @property
    def metrics(self) -> MetricFactory:
        """Factory for the families of `metrics.py`."""
        return MetricFactory(self.registry, model_name=self.model_name, instance=self.instance)

    @property
    def private_metrics(self) -> MetricFactory:
        """Factory for series that only the monitor may see."""
        return MetricFactory(self.private_registry, model_name=self.model_name, instance=self.instance)

    def exposition(self, headers: Mapping[str, str]) -> bytes:
        """Return Prometheus text for a request with these headers."""
        shown = headers.get(TOKEN_HEADER, "").encode(errors="replace")
        if secrets.compare_digest(shown, self.metrics_token.encode()):
            return exposition(self.registry) + exposition(self.private_registry)
        return exposition(self.registry) + exposition(self.renamed_registry)

    def endpoint_of(self, name: EndpointName) -> str:
        return endpoint_of(self.config, name, self.run_dir)

    @property
    def manager_endpoints(self) -> dict[str, str]:
        """Endpoints by manager, in the order in which managers are asked to lead."""
        return manager_endpoints(self.config, self.run_dir)


Build = Callable[[ServiceContext], Coroutine[Any, Any, None]]


def service_main(
    role: str, build: Build, *, inbox: bool | str = True, serve_metrics: bool | Callable[[Config], bool] = True
) -> NoReturn:
    """Run one process from its command line to its exit code.

    `inbox`: True binds the role's own, False none, a string that endpoint. `serve_metrics` False, or by configuration:
    the service serves `metrics_routes(context)` on an application of its own and sets `context.metrics_url`.
    """
    keep_private()
    options = option_parser(role).parse_args()
    try:
        config = load_config(options.config, preset=options.preset, machine=this_machine)
        instance = options.instance or ROLES.get(role, role)
        run_dir = options.run_dir or paths.run_dir(config.gateway.port)
        log = configure_logging(config.logging, service=role, instance=instance)
    except ConfigError as error:
        print(f"cohort {role}: {error}", file=sys.stderr)
        sys.exit(2)
    metrics = serve_metrics(config) if callable(serve_metrics) else serve_metrics
    service = _Service(role, build, config, instance, run_dir, log, inbox, metrics, options.metrics_port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(service.run())
    logging_done()
    sys.exit(code)


def option_parser(role: str) -> argparse.ArgumentParser:
    """Return the parser of every role: `config`, `preset`, `instance`, `run_dir`, `metrics_port`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m cohort.services.{role}",
        description=f"Run Cohort's {role.replace('_', ' ')} as one process. `cohort serve` starts a whole pipeline; "
        "by hand, give all its processes the same configuration.",
        epilog="Exit codes: 0 ended on request, 1 failed, 2 a wrong option or configuration, 75 no share of a GPU is "
        "left. SIGTERM or Ctrl-C drains and ends; a second one ends at once.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML configuration; may be repeated, later files win",
    )
    parser.add_argument("--preset", default="", metavar="NAME", help="preset from configs/presets, beneath the files")
    parser.add_argument(
        "--instance",
        default="",
        metavar="NAME",
        help=f"name of this process in the pipeline (default: {ROLES.get(role, role)})",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the pipeline's sockets (default: in the cache folder, by gateway port)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=None,
        metavar="PORT",
        help="port of /metrics and /health (default: from metrics.base_port; 0 = any)",
    )
    return parser


def logging_done() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def metrics_routes(context: ServiceContext) -> list[web.RouteDef]:
    """Return /metrics, /health and /ready of one process."""
    started_s = context.clock.now_s()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=context.exposition(request.headers), headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "status": "draining" if context.stopping.is_set() else "ok",
                "role": context.role,
                "instance": context.instance,
                "version": __version__,
                "incarnation": context.incarnation,
                "uptime_s": round(context.clock.now_s() - started_s, 3),
            }
        )

    async def ready(_: web.Request) -> web.Response:
        now = context.ready and not context.stopping.is_set()
        return web.json_response({"ready": now}, status=200 if now else 503)

    return [web.get("/metrics", metrics), web.get("/health", health), web.get("/ready", ready)]


def process_stats() -> dict[str, float]:
    """Return what every process reports of itself: memory, open files, tasks."""
    stats = {"asyncio_tasks": float(len(asyncio.all_tasks()))}
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", encoding="ascii") as statm:
            stats["rss_bytes"] = float(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        stats["open_fds"] = float(len(os.listdir("/proc/self/fd")))
    return stats


class BusCollector(Collector):
    """The bus's counters, read at the moment of the scrape."""

    def __init__(self, bus: ZmqBus, *, model_name: str, instance: str) -> None:
        self._bus = bus
        self._labels = (model_name, instance)

    def collect(self) -> Iterator[Metric]:
        counters = self._bus.counters
        for name, value, meaning in (
            ("sent", counters.sent, "Control messages sent"),
            ("received", counters.received, "Control messages received"),
            ("malformed", counters.malformed, "Control messages skipped because they were not ours"),
            ("forged", counters.forged, "Control messages skipped because their sender never dials this process"),
            ("unreachable", counters.unreachable, "Control messages that could not be handed to a peer"),
        ):
            family = CounterMetricFamily(f"cohort_bus_{name}", meaning, labels=("model_name", "instance"))
            family.add_metric(self._labels, value)
            yield family


@dataclass
class _Service:
    """One run of one process."""

    _role: str
    _build: Build
    _config: Config
    _instance: str
    _run_dir: Path
    _log: structlog.stdlib.BoundLogger
    _inbox: bool | str
    _serve_metrics: bool
    _metrics_port: int | None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _signals: int = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        log_loop_errors(loop, self._log)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        listen_for_levels(self._run_dir, self._instance, self._config.logging.level, self._log, loop)
        try:
            return await self._serve()
        except Exception as error:
            causes = list(_leaves(error))
            if all(isinstance(cause, ConfigError | ModelError) for cause in causes):
                for cause in causes:
                    self._log.error(str(cause), error=type(cause).__name__)
                return EXIT_NO_DEVICE if any(isinstance(cause, NoDeviceLeft) for cause in causes) else 2
            self._log.critical("service failed", exc_info=causes[0] if len(causes) == 1 else error)
            return 1

    async def _serve(self) -> int:
        self._config = await with_own_inbox(self._config, self._role, self._instance, self._run_dir)
        self._make_run_dir()
        bus = self._open_bus()
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._config = await stack.enter_async_context(discover(self._config, self._role, self._run_dir, bus))
                context = self._context(bus)
                bus.watch_dialled({MONITOR, *context.manager_endpoints}, context.on_end)
                if self._serve_metrics:
                    context.metrics_url = await self._start_metrics(context, stack)
                self._log.info(
                    "started",
                    pid=os.getpid(),
                    endpoint=bus.endpoint,
                    metrics_url=context.metrics_url,
                    incarnation=context.incarnation,
                    preset=self._config.name,
                )
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(self._heartbeat(context, bus), name="heartbeat"),
                        tasks.create_task(follow_book(self._run_dir, bus.redial), name="addresses"),
                    ]
                    try:
                        await self._run_build(context)
                    finally:
                        for task in background:
                            task.cancel()
            if self._role != "global_monitor":
                with contextlib.suppress(PeerUnreachable):
                    bus.send(MONITOR, Farewell(context.instance, context.incarnation))
        finally:
            await bus.close()
        self._log.info("ended")
        return 0

    def _make_run_dir(self) -> None:
        """Make the run folder. Raises `ConfigError` if others could enter the folder of sockets."""
        private_folder(self._run_dir)
        endpoints = [endpoint_of(self._config, name, self._run_dir) for name in get_args(EndpointName)]
        endpoints += manager_endpoints(self._config, self._run_dir).values()
        if self._inbox is True:
            endpoints += inbox_of(self._config, self._role, self._instance, self._run_dir)
        if any(endpoint.startswith("ipc://") for endpoint in endpoints):
            require_private(self._run_dir, "--run-dir")

    async def _run_build(self, context: ServiceContext) -> None:
        """Run the service until it returns, or is cancelled because it drains beyond its deadline."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._build(context), name=self._role)
            stopping = tasks.create_task(self._stopping.wait(), name="stopping")
            failed = tasks.create_task(context.failed.wait(), name="failed")
            await asyncio.wait((running, stopping, failed), return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and context.failure is None:
                deadline_s = context.drain_s + DRAIN_MARGIN_S
                self._log.info("draining", deadline_s=deadline_s)
                await asyncio.wait((running, failed), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                if context.failure is None:
                    self._log.warning("drain deadline passed, cancelling", deadline_s=context.drain_s + DRAIN_MARGIN_S)
                running.cancel()
                await asyncio.wait((running,), timeout=CANCEL_S)
                if not running.done():
                    self._log.critical("service does not end when cancelled, leaving it")
                    logging_done()
                    os._exit(1)
            elif not self._stopping.is_set():
                self._log.info("service returned by itself")
            stopping.cancel()
            failed.cancel()
        if context.failure is not None:
            raise context.failure

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            self._log.warning("second signal, ending at once", signal=signal.Signals(number).name)
            logging_done()
            os._exit(128 + number)
        self._log.info("asked to stop", signal=signal.Signals(number).name)
        self._stopping.set()

    def _open_bus(self) -> ZmqBus:
        bind, advertise = "", ""
        if isinstance(self._inbox, str):
            bind = bind_address(self._inbox, self._config.endpoints.bind_host)
            advertise = self._inbox
        elif self._inbox:
            bind, advertise = inbox_of(self._config, self._role, self._instance, self._run_dir)
        exposure.check_endpoints(self._config)
        keys = load_keys(self._config.security.curve_secret_key_file)
        return ZmqBus(self._instance, bind, keys, advertise=advertise, never_dial=never_dialling(self._role))

    def _context(self, bus: ZmqBus) -> ServiceContext:
        registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=registry)
        registry.register(BusCollector(bus, model_name=model_name(self._config), instance=self._instance))
        return ServiceContext(
            config=self._config,
            instance=self._instance,
            role=self._role,
            # Milliseconds: grows over restarts, and a browser's numbers hold it exactly.
            incarnation=time.time_ns() // 1_000_000,
            bus=bus,
            log=self._log,
            clock=SystemClock(),
            registry=registry,
            run_dir=self._run_dir,
            stopping=self._stopping,
            drain_s=drain_time_s(self._config, self._role),
        )

    async def _start_metrics(self, context: ServiceContext, stack: contextlib.AsyncExitStack) -> str:
        requested = self._metrics_port
        port = metrics_port(self._config, self._role, self._instance) if requested is None else requested
        host = self._config.metrics.host
        try:
            listener = listening(host, port)
        except OSError as error:
            if requested is not None:
                raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}") from error
            # Serving does not depend on where metrics are read, and heartbeats say where: take any port.
            self._log.warning("metrics port is taken, using another", host=host, port=port, error=error.strerror)
            listener = listening(host, 0)
        guard = BrowserGuard(host, (), option="metrics.host")
        application = web.Application(middlewares=[refuse_foreign_pages(guard)])
        application.add_routes(metrics_routes(context))
        name_server()
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()
        return f"http://{advertised_host(self._config, host)}:{listener.getsockname()[1]}/metrics"

    async def _heartbeat(self, context: ServiceContext, bus: ZmqBus) -> None:
        """Send a heartbeat every `HEARTBEAT_S`, seldom while quiet; a monitor that is away costs nothing."""
        if self._role == "global_monitor":
            return  # it knows itself
        bus.connect(MONITOR, context.endpoint_of("monitor"), high_water_messages=FAREWELL_QUEUE_MESSAGES)
        lag = context.metrics.gauge("event_loop_lag_seconds", "How late the last heartbeat was: blocked event loop")()
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            lag.set(max(0.0, loop.time() - due_s))
            quiet_s = context.activity.quiet_s()
            try:
                stats, counts = {**process_stats(), **context.stats()}, context.counts()
            except Exception:
                self._log.exception("stats for the heartbeat could not be read")
                stats, counts = {}, {}
            with contextlib.suppress(PeerUnreachable):
                bus.send(
                    MONITOR,
                    Heartbeat(
                        instance=context.instance,
                        role=context.role,
                        incarnation=context.incarnation,
                        pid=os.getpid(),
                        ready=context.ready and not context.stopping.is_set(),
                        metrics_url=context.metrics_url,
                        stats=stats,
                        facts=context.facts(),
                        warnings=context.warnings(),
                        metrics_token=context.metrics_token,
                        counts=counts,
                        quiet_s=quiet_s,
                    ),
                )
            due_s = loop.time() + HEARTBEAT_S + quiet_s
            await context.activity.pause(HEARTBEAT_S, quiet_s)


def drain_time_s(config: Config, role: str) -> float:
    """Return the time in which a service may finish its work."""
    return config.drain_s if role in ("gateway", "prefill_worker", "decode_worker") else 5.0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
