"""Which processes a pipeline consists of: configuration → one `ProcessPlan` each. Pure.

Also settles everything the configuration leaves open (`resolve`), so that the file all processes read holds no choice
that two of them could make differently: model folder, threads per worker, ports given as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import msgspec

from cohort.common.addresses import GATEWAY, MONITOR, gateway_names, manager_names, metrics_port
from cohort.common.config import Config
from cohort.common.config.serving import PlannerConfig
from cohort.common.errors import ConfigError
from cohort.common.types import Role

MONITOR_OFFSET = 1
METRICS_OFFSET = 10
"""Usual distance of the monitor's port and of the first metrics port from the gateway's."""

STOP_MARGIN_S = 7.0
"""Time beyond its own drain time in which a process closes its sockets before it is killed."""

_FOLDER_OF_ROLE = {
    Role.PREFILL: "prefill_worker",
    Role.DECODE: "decode_worker",
    Role.UNIFIED: "prefill_worker",  # the same program; its role comes from the configuration
}


class StopStage(IntEnum):
    """Processes end in this order, each stage after the one before: first the only one that knows what still runs."""

    GATEWAY = 0
    MANAGER = 1
    WORKERS = 2
    OTHERS = 3


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: what to start, where it answers `/ready`, how it ends."""

    instance: str
    folder: str
    stage: StopStage
    host: str
    port: int
    drain_s: float
    passes_metrics_port: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    scheme: str = "http"
    shared: tuple[str, int] | None = None
    """Host and port on which it listens too, beside others of the same kind."""
    held: bool = False
    """The launcher holds the socket of `host` and `port`, so that connections wait while the process is away."""
    starts_alone: bool = False
    """Whether it would take another worker's cores while both start again: the second waits for the first."""
    hands_over: bool = False
    """Whether it serves open connections to their end when it ends for a restart (SIGUSR1 instead of SIGTERM)."""

    @property
    def ready_url(self) -> str:
        return f"{http_base(self.host, self.port, self.scheme)}/ready"

    @property
    def stop_timeout_s(self) -> float:
        return self.drain_s + STOP_MARGIN_S

    def command(self, python: str, config_file: Path, run_dir: Path) -> list[str]:
        """Return the command line. `-P`: a clone's kernels/ in the working folder would hide the package `kernels`."""
        command = [python, "-P", "-m", f"cohort.services.{self.folder}"]
        command += ["--config", str(config_file), "--instance", self.instance, "--run-dir", str(run_dir)]
        if self.passes_metrics_port:
            command += ["--metrics-port", str(self.port)]
        return command


def api_scheme(config: Config) -> str:
    """Return the scheme by which clients reach the gateway."""
    return "https" if config.gateway.tls_cert else "http"


def http_base(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://{reachable}:{port}"


def plan(config: Config, cores: int = 0) -> list[ProcessPlan]:
    """Return all processes of a resolved configuration, in the order a person reads the pipeline.

    `cores` of this machine, 0 if unknown: workers that have more threads between them must yield while they wait,
    unless only one of them computes at a time.
    """
    single = _threads_environment(1)
    host, base, drain_s = config.metrics.host, config.metrics.base_port, 5.0
    folder, page = "bucketing_manager", config.monitor

    def manager(name: str) -> ProcessPlan:
        port = metrics_port(config, folder, name)
        return ProcessPlan(name, folder, StopStage.MANAGER, host, port, drain_s, environment=single)

    plans = [
        *_gateways(config, single),
        ProcessPlan("predictor", "length_predictor", StopStage.OTHERS, host, base, drain_s, environment=single),
        *map(manager, manager_names(config)),
        ProcessPlan(MONITOR, "global_monitor", StopStage.OTHERS, page.host, page.port, drain_s, False, single),
    ]
    threads = {instance: config.rank_threads(instance, 1) for instance in config.instance_roles}
    busy = max if config.gathers else sum  # threads that compute at one time
    of_all_ranks = [each * config.worker_group(instance).local_degree for instance, each in threads.items()]
    if not of_all_ranks:
        raise ConfigError("workers: there is none; name a group, e.g. --set 'workers=[{role: unified}]'")
    crowded = 0 < cores < busy(of_all_ranks)
    for index, instance in enumerate(config.instance_roles):
        environment = _threads_environment(threads[instance], crowded=crowded)
        worker = worker_plan(config, instance, base + 2 + index, environment)
        plans.append(replace(worker, starts_alone=0 < cores < sum(of_all_ranks)))
    return plans


def worker_plan(config: Config, instance: str, port: int, environment: Mapping[str, str] | None = None) -> ProcessPlan:
    """Return the plan of one worker. Without an `environment` others compute on the same cores already."""
    if environment is None:
        environment = _threads_environment(config.rank_threads(instance, 1), crowded=True)
    folder = _FOLDER_OF_ROLE[config.instance_roles[instance]]
    drain_s = config.drain_s
    return ProcessPlan(instance, folder, StopStage.WORKERS, config.metrics.host, port, drain_s, environment=environment)


def _gateways(config: Config, environment: Mapping[str, str]) -> list[ProcessPlan]:
    """Return the gateways' plans. Several share the port, so each has a port of its own for readiness and metrics."""
    gateway, folder, stage = config.gateway, "gateway", StopStage.GATEWAY
    if gateway.processes == 1:
        one = ProcessPlan(GATEWAY, folder, stage, gateway.host, gateway.port, config.drain_s, False, environment)
        return [replace(one, scheme=api_scheme(config), held=True, hands_over=True)]
    host, shared = config.metrics.host, (gateway.host, gateway.port)
    several = []
    for name in gateway_names(config):
        port = metrics_port(config, folder, name)
        each = ProcessPlan(name, folder, stage, host, port, config.drain_s, environment=environment)
        several.append(replace(each, shared=shared, hands_over=True))
    return several


def resolve(config: Config, *, model: Path, cores: int, free_port: Callable[[], int]) -> Config:
    """Settle the options left open. `free_port` is called at most once, for the first of a block of free ports; ports
    configured as 0 take their usual distance from it."""
    replace = msgspec.structs.replace
    default = config.default_threads(cores)
    groups = tuple(replace(group, threads=group.threads or default) for group in config.workers)
    ports = (config.gateway.port, config.monitor.port, config.metrics.base_port)
    block = 0 if all(ports) else free_port()
    # Absolute: processes may be started in another working folder.
    lora = {name: str(Path(folder).expanduser().absolute()) for name, folder in config.model.lora.items()}
    return replace(
        config,
        workers=groups,
        model=replace(config.model, path=str(model), lora=lora),
        gateway=replace(config.gateway, port=config.gateway.port or block),
        monitor=replace(config.monitor, port=config.monitor.port or block + MONITOR_OFFSET),
        metrics=replace(config.metrics, base_port=config.metrics.base_port or block + METRICS_OFFSET),
        planner=_bounded(config),
    )


def _bounded(config: Config) -> PlannerConfig:
    """Return the planner's section with a maximum of workers: unless it is set, the number at the start."""
    planner = config.planner
    if planner.mode == "off" or planner.max_workers:
        return planner
    return msgspec.structs.replace(planner, max_workers=len(config.instance_roles))


def _threads_environment(threads: int, *, crowded: bool = False) -> dict[str, str]:
    """Return variables that bound every library's thread pool to the process's share of the cores. On a crowded machine
    a thread that spins while it waits takes the core of one that works: two workers of two threads each make 72
    tokens/s on two cores instead of 96."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(threads) for name in names} | ({"OMP_WAIT_POLICY": "passive"} if crowded else {})
