"""What each process of a pipeline asks a Ray cluster for: resources, and the node it has to be on. Pure.

| process | bundle | where |
|---|---|---|
| worker | CPUs = its threads; GPUs = its ranks, shared where workers share one | any node, its ranks together |
| gateway | `SERVICE_CPUS` | the launcher's node; of several one a node |
| monitor | `SERVICE_CPUS` | the launcher's node, whose address its page has |
| manager, predictor | `SERVICE_CPUS` | the launcher's node; any other where that one has no CPUs left for them |
| manager that stands by | `SERVICE_CPUS` | another node than other managers, where there is one |

When the launcher's node is lost the pipeline ends, so what there is one of is safest there: then no other node takes
more along than its workers. Called by `serving` before anything is placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cohort.common.addresses import GATEWAY, MONITOR, STANDBY_MANAGERS
from cohort.common.config import Config, WorkerGroup
from cohort.common.errors import ConfigError
from cohort.services.launcher.plan import ProcessPlan, StopStage

SERVICE_CPUS: Mapping[str, float] = {
    "gateway": 0.4,
    "bucketing_manager": 0.2,
    "length_predictor": 0.1,
    "global_monitor": 0.1,
}
"""CPUs that Ray counts for the services, by folder. Ray divides by these numbers and limits nobody to them: they are so
small that a node of two cores takes a worker beside all four, which are idle in a pipeline so small."""

_NODE_SHARE = 0.001  # of the resource `node:IP`, of which each node has 1: it binds a bundle to that node
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Node:
    """A node as Ray counts it: totals, not what is free now. `is_launcher_node`: the launcher runs there."""

    node_id: str
    ip: str
    cpus: float
    gpus: float = 0.0
    is_launcher_node: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """One process: its plan, and its bundle as Ray wants it, which may bind it to a node."""

    plan: ProcessPlan
    bundle: Mapping[str, float]
    spread: bool = False
    """Whether it goes on another node than other spread processes of its folder, as far as there are enough nodes."""
    added: bool = False
    """Whether it joins a running pipeline, which goes on without it if it cannot be had."""


def gateway_nodes(requested: str, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of `--gateways N|all`, the launcher's first. Raises `ConfigError`."""
    ordered = sorted(nodes, key=lambda node: not node.is_launcher_node)
    if requested == "all":
        return ordered
    if not requested.isdecimal() or int(requested) < 1:
        raise ConfigError(f"--gateways {requested}: write a number of nodes, or all")
    if int(requested) > len(nodes):
        raise ConfigError(f"--gateways {requested}: one a node, and the cluster has {len(nodes)} node(s)")
    return ordered[: int(requested)]


def with_threads(config: Config, nodes: Sequence[Node], gateways: int) -> Config:
    """Give workers without a number of threads the most with which all fit on the nodes at once. Raises `ConfigError`
    if they do not fit with one thread each."""
    most = int(max(node.cpus for node in nodes))
    if config.engine.threads:
        most = min(most, config.engine.threads)
    elif config.on_gpu:
        most = min(most, config.default_threads(most * max(1, len(config.instance_roles))))
    for threads in range(max(1, most), 0, -1):
        groups = tuple(_with(group, group.threads or threads) for group in config.workers)
        settled = msgspec.structs.replace(config, workers=groups)
        if not _unplaced(_demands(settled, nodes, gateways), nodes):
            return settled
    settled = msgspec.structs.replace(
        config, workers=tuple(_with(group, group.threads or 1) for group in config.workers)
    )
    raise _too_small(_unplaced(_demands(settled, nodes, gateways), nodes), nodes)


def place(
    config: Config, plans: Sequence[ProcessPlan], nodes: Sequence[Node], gateways: Sequence[Node]
) -> list[Placement]:
    """Return a placement for every process of the plan, the gateway's once for each of its nodes. Raises `ConfigError`
    for processes that the cluster could not take even if it were empty."""
    own_node = next((node for node in nodes if node.is_launcher_node), None)
    fits = own_node is not None and own_node.cpus + _TOLERANCE >= sum(SERVICE_CPUS.values())
    placements = []
    for plan in plans:
        if plan.stage is StopStage.WORKERS:
            placements.append(Placement(plan, worker_bundle(config, plan.instance)))
        elif plan.folder == "gateway":
            for index, node in enumerate(gateways):
                name = GATEWAY if index == 0 else f"{GATEWAY}-{index}"
                placements.append(_bound(dataclasses.replace(plan, instance=name), node))
        elif plan.instance not in STANDBY_MANAGERS and own_node is not None and (fits or plan.instance == MONITOR):
            placements.append(_bound(plan, own_node))
        else:
            placements.append(Placement(plan, {"CPU": SERVICE_CPUS[plan.folder]}))
    if config.manager.standbys:
        placements = [dataclasses.replace(each, spread=each.plan.folder == "bucketing_manager") for each in placements]
    missing = _unplaced([(each.plan.instance, each.bundle) for each in placements], nodes)
    if missing:
        raise _too_small(missing, nodes)
    return placements


def _bound(plan: ProcessPlan, node: Node) -> Placement:
    """Bind a service to a node. One without CPUs, as many a head node is, takes it all the same."""
    cpus = SERVICE_CPUS[plan.folder]
    share = {"CPU": cpus} if node.cpus >= cpus else {}
    return Placement(plan, {**share, f"node:{node.ip}": _NODE_SHARE})


def added_worker(config: Config, plan: ProcessPlan) -> Placement:
    """Return the placement of a worker of `config` that comes while the others run."""
    return Placement(plan, worker_bundle(config, plan.instance), added=True)


def worker_bundle(config: Config, instance: str) -> dict[str, float]:
    """Return the resources that a worker takes of its node. Its ranks exchange results in every layer, so a bundle is
    never divided between nodes."""
    bundle: dict[str, float] = {"CPU": float(config.worker_threads(instance, 1))}
    if config.on_gpu:
        bundle["GPU"] = config.worker_group(instance).local_degree / max(1, config.engine.workers_per_gpu)
    return bundle


def check_possible(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise `ConfigError` if none of the nodes, given by their totals, could take the bundle if it were empty."""
    if not any(_takes(have, bundle) for have in nodes):
        raise ConfigError(f"no node of the Ray cluster has {describe_bundle(bundle)}")


def _demands(config: Config, nodes: Sequence[Node], gateways: int) -> list[tuple[str, Mapping[str, float]]]:
    """Return what `place` will request, near enough to choose a number of threads by."""
    own = next((node for node in nodes if node.is_launcher_node and node.cpus > 0), None)
    services = sum(SERVICE_CPUS.values())
    bound = {f"node:{own.ip}": _NODE_SHARE} if own is not None and own.cpus >= services else {}
    demands: list[tuple[str, Mapping[str, float]]] = [("the services", {"CPU": services, **bound})]
    others = [node for node in nodes if node is not own and node.cpus > 0][: max(0, gateways - 1)]
    demands += [("a gateway", {"CPU": SERVICE_CPUS["gateway"], f"node:{node.ip}": _NODE_SHARE}) for node in others]
    demands += [("a manager", {"CPU": SERVICE_CPUS["bucketing_manager"]})] * config.manager.standbys
    return demands + [(name, worker_bundle(config, name)) for name in config.instance_roles]


def _unplaced(
    demands: Sequence[tuple[str, Mapping[str, float]]], nodes: Sequence[Node]
) -> list[tuple[str, Mapping[str, float]]]:
    """Return demands that find no node, when bound and large ones choose first, each the node with most left."""
    free = [
        {"CPU": node.cpus, "GPU": node.gpus, f"node:{node.ip}": 1.0}
        for node in sorted(nodes, key=lambda node: node.is_launcher_node)
    ]
    order = sorted(
        demands, key=lambda each: (-len(_binding(each[1])), -each[1].get("GPU", 0.0), -each[1].get("CPU", 0.0))
    )
    missing = []
    for name, bundle in order:
        taking = [have for have in free if _takes(have, bundle)]
        if not taking:
            missing.append((name, bundle))
            continue
        chosen = max(taking, key=lambda have: (have["GPU"], have["CPU"]))
        for kind, much in bundle.items():
            chosen[kind] -= much
    return missing


def _takes(have: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(have.get(kind, 0.0) + _TOLERANCE >= much for kind, much in bundle.items())


def _binding(bundle: Mapping[str, float]) -> list[str]:
    return [kind for kind in bundle if kind.startswith("node:")]


def _with(group: WorkerGroup, threads: int) -> WorkerGroup:
    return msgspec.structs.replace(group, threads=threads)


def _too_small(missing: Sequence[tuple[str, Mapping[str, float]]], nodes: Sequence[Node]) -> ConfigError:
    wanted = "; ".join(f"{name} wants {describe_bundle(bundle)}" for name, bundle in missing)
    has = ", ".join(f"{node.ip}: {node.cpus:g} CPUs" + (f", {node.gpus:g} GPUs" if node.gpus else "") for node in nodes)
    return ConfigError(f"the Ray cluster is too small: {wanted}, beside what the others take; its nodes: {has}")


def describe_bundle(bundle: Mapping[str, float]) -> str:
    """Format a bundle: 2 CPUs, 1 GPU on 10.0.0.7."""
    parts = [f"{bundle[kind]:g} {kind}{'s' if bundle[kind] != 1 else ''}" for kind in ("CPU", "GPU") if kind in bundle]
    where = [kind.removeprefix("node:") for kind in _binding(bundle)]
    return ", ".join(parts or ["a place"]) + (f" on {where[0]}" if where else "")
