"""The machines of a simulated cluster, from a configuration and a cluster's description."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import LinkAddresses
from cohort.common.machines.gateway.gateway import GatewayMachine, GatewaySettings
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.policies import compose
from cohort.common.policies.cost_model import ModelShape
from cohort.common.policies.interface import Placement
from cohort.common.types import InstanceId, KvGeometry, Role, WorkerCapacity
from cohort.common.virtual_cluster.cluster import MANAGER
from cohort.services.simulator.core.engine import SimWorker
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.draft_price import DraftPrice, Holds
from cohort.services.simulator.hardware.hardware import Cluster


@dataclass(kw_only=True)
class Deployment:
    """Factory of a simulation's machines, made as in the live services (`Builder`); by number where they differ."""

    config: Config
    options: SimOptions
    model: ModelShape
    geometry: KvGeometry
    blocks: Sequence[tuple[int, int]]
    """Blocks on devices, and in host memory."""
    longest: int
    roles: Mapping[InstanceId, Role]
    profile: Callable[[int], bytes] | None
    """Start of schedulers that learn step times, if they do."""
    device_of: Callable[[int], str] | None
    """Name of its device for policies; None: each has its own."""
    draft_price: Callable[[int, Holds], DraftPrice] | None
    """Price of its draft model's steps, by whether the worker holds a sequence."""
    foresee_steps: bool
    """Whether they plan ahead, also of steps with prompts, whose times they then learn."""
    placement: Placement | None
    shared_prompts: bool

    def __post_init__(self) -> None:
        config = self.config
        # Where no prompt shares anything the prefix cache can only miss: hashing every block would change nothing. And
        # the prompts are all made of the same token then: nothing may look for common prefixes.
        if not self.shared_prompts:
            config = msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, prefix_caching=False))
        self.config = config
        self._lists_queue = compose.reads_queues(config, self.placement or compose.placement(config))
        self._learns = compose.wants_step_times(config) or (
            self.placement is not None and self.placement.wants_step_times
        )
        self._learns |= config.planner.mode != "off" or config.speculation.drafts or self.foresee_steps
        self._random = Random(self.options.seed)
        self._numbers = itertools.count()

    def make_gateway(self, name: InstanceId, incarnation: int, now_s: float) -> GatewayMachine:
        config = self.config
        settings = GatewaySettings.of(config)
        return GatewayMachine(
            name,
            incarnation,
            "",
            settings if self.options.slo_defaults else replace(settings, rt_ttft_slo_s=0.0, rt_tpot_slo_s=0.0),
            compose.admission(config),
            now_s,
            predictor="" if self.options.predictor == "none" else "predictor",
        )

    def make_manager(self, name: InstanceId, incarnation: int, now_s: float) -> ManagerMachine:
        config = self.config
        return ManagerMachine(
            name,
            incarnation,
            ManagerSettings.of(config),
            compose.prefill_order(config),
            self.placement or compose.placement(config),
            compose.late_binding(config),
            now_s,
        )

    def make_worker(self, name: InstanceId, incarnation: int, now_s: float) -> SimWorker:
        config, number = self.config, next(self._numbers)
        geometry, (num_blocks, host_blocks) = self.geometry, self.blocks[number]
        kv = compose.allocation(config, geometry, num_blocks, host_blocks)
        capacity = WorkerCapacity(
            self.roles[name],
            self.model.name,
            min(self.longest, geometry.positions(num_blocks)),
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.dtype_bytes,
            geometry.block_size,
            num_blocks,
            host_blocks,
            config.engine.max_rows,
            config.engine.max_step_tokens,
            device=name if self.device_of is None else self.device_of(number),
            window=kv.geometry.window,
            groups=kv.geometry.groups,
        )
        settings = msgspec.structs.replace(
            WorkerSettings.of(config, ("link",)), learns=self._learns, lists_queue=self._lists_queue
        )
        machine = WorkerMachine(
            WorkerSetup(name, incarnation, "", MANAGER, capacity, settings),
            compose.iteration(config),
            kv,
            Random(self._random.getrandbits(32)),
        )
        if self.profile is not None:
            for learned in (machine.scheduler.learned, machine.observed):
                if learned is not None:
                    learned.import_state(self.profile(number))
        machine.handle(now_s, LinkAddresses({"link": b""}))
        price = None if self.draft_price is None else self.draft_price(number, machine.state.holds)
        return SimWorker(name, machine, number=number, draft_price=price)


def spread_roles(config: Config, instances: int) -> dict[Role, int]:
    """Scale the preset's workers to this many instances: every role at least one, shares as even as can be."""
    counts: dict[Role, int] = {}
    for group in config.workers:
        counts[group.role] = counts.get(group.role, 0) + max(1, group.count)
    if len(counts) > instances and config.gathers:  # roles are preferences
        return {Role.UNIFIED: instances}
    if len(counts) > instances:
        raise ConfigError(
            f"{len(counts)} roles ({', '.join(role.value for role in counts)}) need as many instances; the cluster has "
            f"{instances}"
        )
    total = sum(counts.values())
    spread = {role: max(1, instances * count // total) for role, count in counts.items()}

    # Instances left over by rounding go to the role furthest below its share.
    def above(role: Role) -> float:
        return spread[role] - instances * counts[role] / total

    while sum(spread.values()) < instances:
        spread[min(counts, key=above)] += 1
    while sum(spread.values()) > instances:
        spread[max((role for role in spread if spread[role] > 1), key=above)] -= 1
    return spread


def kv_blocks(
    config: Config, cluster: Cluster, model: ModelShape, geometry: KvGeometry, draft: ModelShape | None = None
) -> tuple[int, int]:
    """Compute the blocks of each of these equal instances, on its devices and in host memory, by the rules of the live
    worker: a `draft` model has its KV under the same block ids. Raises `ConfigError` when the model does not fit."""
    devices = cluster.tensor_parallel
    total = devices * (cluster.device.memory_bytes - cluster.device_reserve_bytes) // cluster.workers_per_device
    free = total - model.weights_total_bytes - (0 if draft is None else draft.weights_total_bytes)
    if free <= 0:
        raise ConfigError(
            f"cluster {cluster.name}: tensor_parallel: {model.name} has {model.weights_total_bytes / 1e9:.1f} GB of "
            f"weights, {devices} x {cluster.device.name} hold {total / 1e9:.1f} GB"
        )
    kv = config.kv
    memory = kv.cpu_bytes if cluster.cpu else kv.memory_bytes or int(kv.memory_fraction * free)
    drafted_bytes = 0 if draft is None else draft.kv_geometry(geometry.block_size).block_bytes
    block_bytes = geometry.block_bytes * model.kv_copies(devices)
    blocks = memory // (block_bytes + drafted_bytes)
    if blocks < 2 or memory > free:
        raise ConfigError(
            f"cluster {cluster.name}: {memory / 1e9:.2f} GB for the KV cache of {model.name} ({free / 1e9:.2f} GB are "
            f"left beside the weights, a block is {block_bytes / 1e6:.2f} MB): change kv.memory_bytes or "
            "tensor_parallel"
        )
    host = cluster.host_memory_bytes or config.kv.host_memory_bytes
    return blocks, host // block_bytes
