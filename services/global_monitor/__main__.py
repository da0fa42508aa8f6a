"""Run the global monitor: `python -m cohort.services.global_monitor --config FILE`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from cohort.common.devices.cores import usable_cores
from cohort.common.errors import ConfigError
from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.http_server import name_server
from cohort.common.planning.orders import WorkerOrders, socket_of
from cohort.common.planning.settings import planner_settings
from cohort.common.process.service import ServiceContext, service_main
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.services.global_monitor.exporter import ClusterCollector, Exporter
from cohort.services.global_monitor.kubernetes_api import KubernetesApi, in_pod
from cohort.services.global_monitor.kubernetes_orders import KubernetesOrders, orderable
from cohort.services.global_monitor.launcher_orders import LauncherOrders
from cohort.services.global_monitor.planner import CONFIG_FILE, ForesightProcess, Planner, PlannerCollector, keep_config
from cohort.services.global_monitor.server import LiveFeed, application
from cohort.services.global_monitor.service import GlobalMonitor


async def build(context: ServiceContext) -> None:
    """Listen, push and serve until asked to stop."""
    config = context.config
    if isinstance(context.bus, ZmqBus):
        # A manager that comes back wants the latest stats, not all it missed.
        for manager, endpoint in context.manager_endpoints.items():
            context.bus.connect(manager, endpoint, high_water_messages=2)
    monitor = GlobalMonitor(
        config,
        context.bus,
        context.clock,
        context.log,
        manager_endpoints=context.manager_endpoints,
        model=context.model_name,
        instance=context.instance,
        incarnation=context.incarnation,
        activity=context.activity,
    )
    context.registry.register(ClusterCollector(monitor.cluster, context.clock.now_s))
    foresight = ForesightProcess(context.run_dir / CONFIG_FILE)
    if config.planner.mode != "off":
        monitor.planner = await _planner(context, monitor, foresight)
        await foresight.start()
        context.registry.register(PlannerCollector(monitor.planner))
    async with aiohttp.ClientSession(trust_env=False) as session:
        exporter = Exporter(context.instance, monitor.cluster, context.registry, session, context.log)
        guard = BrowserGuard(config.monitor.host, config.monitor.allowed_hosts, option="monitor.allowed_hosts")
        app = application(
            exporter,
            monitor.read_state,
            instance=context.instance,
            guard=guard,
            feed=LiveFeed(monitor.live_views, monitor.read_live),
        )
        name_server()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await _listen(runner, config.monitor.host, config.monitor.port)
            context.metrics_url = f"http://{config.monitor.host}:{runner.addresses[0][1]}/metrics"
            context.log.info("live page", url=context.metrics_url.removesuffix("metrics"))
            context.ready = True
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(monitor.serve(), name="serve"),
                    tasks.create_task(monitor.push(), name="push"),
                    tasks.create_task(monitor.live_views.run(), name="look"),
                ]
                if monitor.planner is not None:
                    running.append(tasks.create_task(monitor.planner.run(), name="plan"))
                await context.stopping.wait()
                for task in running:
                    task.cancel()
        finally:
            await foresight.close()
            await runner.cleanup()


async def _planner(context: ServiceContext, monitor: GlobalMonitor, foresight: ForesightProcess) -> Planner:
    """Make the planner. Raises `ConfigError` if it is to act and nothing takes its orders."""
    config, clock, log = context.config, context.clock, context.log
    keep_config(config, context.run_dir / CONFIG_FILE)
    acts = config.planner.mode == "act"
    orders: WorkerOrders | None = None
    if _without_launcher(context.run_dir):  # each worker is in a pod of its own, with a device or cores of its own
        settings = planner_settings(config, kinds=orderable(config) if acts else ())
        if acts:
            orders = KubernetesOrders(config, KubernetesApi.of_pod(os.environ), monitor.cluster, clock, log)
            await orders.check()
    else:
        settings = planner_settings(config, cores=0 if config.on_gpu else usable_cores())
        orders = LauncherOrders(context.run_dir, config) if acts else None
    log.info("planner", mode=settings.mode, bounds=msgspec.to_builtins(settings.bounds))
    return Planner(config, settings, monitor.cluster, clock, log, simulate=foresight.forecast, orders=orders)


def _without_launcher(run_dir: Path) -> bool:
    """Return whether this is Kubernetes without a launcher, whose processes may all be in one pod."""
    return in_pod(os.environ) and not os.path.lexists(socket_of(run_dir))


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(f"monitor.port: cannot listen on {host}:{port}: {error.strerror}") from error


if __name__ == "__main__":
    service_main("global_monitor", build, serve_metrics=False)
