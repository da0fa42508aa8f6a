"""`cohort serve --on ray[=ADDRESS]`: configuration → checks → placements → the back end. Called by `main`.

What is settled by this machine on one machine is settled by the cluster here: GPUs, threads, who listens where.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cohort.common.addresses import MONITOR
from cohort.common.config import Config
from cohort.common.devices.cores import usable_cores
from cohort.common.errors import ConfigError
from cohort.common.http import ports
from cohort.common.http.exposure import is_loopback
from cohort.common.planning.orders import socket_of
from cohort.common.transport.security import generate_keys
from cohort.services.launcher.box import on_box, summary
from cohort.services.launcher.hosts import Pipeline
from cohort.services.launcher.on_ray.actors import Actors
from cohort.services.launcher.on_ray.cluster import Cluster, gpus_of
from cohort.services.launcher.on_ray.order import Order, passed_environment
from cohort.services.launcher.on_ray.placement import Node, Placement, gateway_nodes, place, with_threads
from cohort.services.launcher.plan import plan, resolve


@dataclass(frozen=True, slots=True)
class RayPipeline:
    """Result of `settle`: configuration and placements, before anything is placed."""

    cluster: Cluster
    config: Config
    placements: Sequence[Placement]
    box: str

    def hosts(self, pipeline: Pipeline) -> Actors:
        key = cluster_key(self.config)
        orders_socket = str(socket_of(pipeline.files.folder)) if self.config.planner.mode == "act" else ""

        def order_of(placement: Placement) -> Order:
            plan = placement.plan
            passed = passed_environment(self.config.gateway.api_keys, os.environ) if plan.folder == "gateway" else {}
            orders_at = orders_socket if plan.instance == MONITOR else ""
            return Order(plan, self.config.gateway.port, key, passed, placement.added, orders_at)

        return Actors(self.cluster.ray, pipeline, self.placements, order_of, self.config)


def settle(cluster: Cluster, config: Config, *, model: Path, gateways: str, workers_given: bool) -> RayPipeline:
    """Settle configuration and placements. Raises `ConfigError`, `ModelError` for what this cluster cannot serve."""
    check(config)
    at = gateway_nodes(gateways, cluster.nodes)
    if len(at) > 1 and is_loopback(config.gateway.host):
        raise ConfigError(
            f"--gateways {gateways}: on other nodes nobody reaches a gateway that listens on {config.gateway.host}; "
            "--host 0.0.0.0, with API keys or gateway.open=true"
        )
    facts = cluster.survey(model, with_weights=config.model.weights == "files")
    gpus = gpus_of(cluster.nodes, facts)
    config = on_box(config, gpus, workers_given=workers_given, model=model)
    cores = usable_cores()
    if not cluster.local:
        config = with_threads(config, cluster.nodes, len(at))
    config = resolve(config, model=model, cores=cores, free_port=ports.free_port)
    config = config if cluster.local else with_cores(config, cluster.nodes)
    plans = plan(config, cores if cluster.local else 0)
    placements = place(config, plans, cluster.nodes, at)
    names = {node.ip for node in cluster.nodes}
    box = summary(config, gpus)
    nodes = f"{len(cluster.nodes)} Ray node(s), {', '.join(sorted(names))}"
    return RayPipeline(cluster, config, placements, f"{nodes}\n{box}" if box else nodes)


def with_cores(config: Config, nodes: Sequence[Node]) -> Config:
    """Give the planner the cores of all nodes: its simulations assume that each worker has its own, as Ray arranges."""
    cores = config.planner.cores or int(sum(node.cpus for node in nodes))
    return msgspec.structs.replace(config, planner=msgspec.structs.replace(config.planner, cores=cores))


def check(config: Config) -> None:
    """Raise `ConfigError` for options that mean one machine, or fixed addresses."""
    if config.gateway.processes > 1:
        raise ConfigError("gateway.processes: on Ray gateways do not share a port of one machine; use --gateways N")
    endpoints = config.endpoints
    for name in ("manager", "standby_managers", "predictor", "monitor", "gateway", "worker"):
        if getattr(endpoints, name):
            raise ConfigError(f"endpoints.{name}: on Ray addresses follow from the nodes; leave it empty")


def cluster_key(config: Config) -> str:
    """Return the content of the configured key file, or of a new one: what leaves a node is encrypted unless
    `security.allow_plain` says that nobody listens. Raises `ConfigError`."""
    named = config.security.curve_secret_key_file
    if named:
        try:
            return Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"security.curve_secret_key_file: {named}: no readable key file: {error}") from error
    if config.security.allow_plain:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "cluster.key"
        generate_keys(made)
        return made.read_text(encoding="utf-8")
