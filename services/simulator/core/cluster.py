"""One simulation: the virtual cluster with a cost model for an engine, links for a network and a trace for clients.

    trace ─▶ TraceClients ─Offered─▶ gateway ─▶ manager ─▶ workers ─StartStep─▶ CostEngine
                  ▲ Deliver             │                     │ KV runs ─▶ KvFlights ─▶ SimNetwork
                  └─────────────────────┘

The same three machines and the policies of `compose.py` as in the live services; only what performs is replaced. The
processes have met before the first request arrives: virtual time 0 is a cluster at rest. `profile_points` is what
`cohort profile` would write for a simulated instance: the same shapes, timed by the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import DrainEnded, DrainStarted
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.machines.manager.manager import ManagerMachine
from cohort.common.machines.worker.worker_state import REPORT_INTERVAL_S
from cohort.common.policies import compose
from cohort.common.policies.cost_model import CostModel, ModelShape, StepWork, prefill_pairs
from cohort.common.policies.interface import Placement
from cohort.common.policies.settings import EngineSettings, settings_of
from cohort.common.process import garbage
from cohort.common.types import InstanceId, Role
from cohort.common.virtual_cluster.cluster import GATEWAY, MANAGER, VirtualCluster
from cohort.common.virtual_cluster.plugins import Cadence, Node
from cohort.common.workloads.items import ClosedLoopUsers, WorkItem, Workload
from cohort.services.simulator.core.clients import TraceClients
from cohort.services.simulator.core.deployment import Deployment, kv_blocks, spread_roles
from cohort.services.simulator.core.engine import CostEngine, SimWorker
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.tally import WallTime, WorkerTally, timed
from cohort.services.simulator.hardware.acceptance import Acceptance
from cohort.services.simulator.hardware.draft_price import DraftPrice, Holds, MeasuredPrice, ModelledPrice
from cohort.services.simulator.hardware.hardware import Cluster, as_stored
from cohort.services.simulator.hardware.simulated_network import SimNetwork

_DRAIN_POLL_S = 0.1
_SETTLING_S = 4.0
"""Virtual time before the first arrival, in which processes meet."""
# The shapes of a simulated profile.
_CONTEXTS = (128, 512, 2048, 8192)
_CHUNKS = (16, 64, 256, 512, 1024, 2048)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured instance: the time of its iterations, its blocks on the device and in host memory."""

    cost: CostModel
    blocks: int
    host_blocks: int


class SimCluster:
    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        model: ModelShape,
        workload: Workload,
        options: SimOptions,
        roles: Mapping[Role, int] | None = None,
        placement: Placement | None = None,
        *,
        measured: Sequence[Measured] = (),
        grows: bool = False,
    ) -> None:
        """`placement` replaces the configured one: an oracle, say, that no configuration has. `measured`: every
        instance, by number; () = by model and devices. `grows`: `roles` may name fewer instances than the cluster has;
        the others are places for `add_worker`."""
        workload.check()
        compose.check_names(config)
        plans_ahead = settings_of(config, EngineSettings).plan_ahead
        acceptance = Acceptance(options.acceptance, options.seed, options.draft_rates)
        if acceptance:
            speculation = config.speculation.settled("cpu")
        else:  # nothing is ever expected, so nothing is drafted, and steps that repeat are one
            speculation = msgspec.structs.replace(config.speculation, mode="off")
        config = msgspec.structs.replace(config, speculation=speculation)
        model = as_stored(model, config, cluster)
        self.config, self.cluster, self.model, self.options = config, cluster, model, options
        self.geometry = model.kv_geometry(config.kv.block_size, grouped=compose.groups_layers(config))
        parts = [cluster.of(number) for number in range(cluster.instances)]
        costs = {} if measured else {part.device: cost_model(model, part) for part in parts}
        self.costs = [each.cost for each in measured] or [costs[part.device] for part in parts]
        """Cost model of every instance, by number."""
        blocks = [(each.blocks, each.host_blocks) for each in measured]
        draft = options.draft_model if config.speculation.mode == "model" else None
        blocks = blocks or [kv_blocks(config, part, model, self.geometry, draft) for part in parts]
        self._draft_costs = {} if draft is None else {part.device: cost_model(draft, part) for part in parts}
        largest = max(on_device for on_device, _ in blocks)
        longest = min(config.model.max_model_len or model.max_positions, self.geometry.positions(largest))
        self.roles = named = {
            f"{role.value}-{index}": role
            for role, count in (roles or spread_roles(config, cluster.instances)).items()
            for index in range(count)
        }
        if len(named) > cluster.instances or (len(named) < cluster.instances and not grows):
            raise ConfigError(f"roles name {len(named)} instances, the cluster has {cluster.instances}")
        self.longest = longest
        """Positions that a sequence can have."""
        self.shares_prompts = shared = _prompts_are_shared(config, workload)
        uses_draft_model = config.speculation.mode == "model"
        deployment = Deployment(
            config=config,
            options=options,
            model=model,
            geometry=self.geometry,
            blocks=blocks,
            longest=longest,
            roles=named,
            profile=partial(self._profile, longest) if options.profiled else None,
            device_of=partial(_device_of, cluster) if measured else None,
            draft_price=self._draft_price if uses_draft_model else None,
            foresee_steps=plans_ahead and cluster.shares,
            placement=placement,
            shared_prompts=shared,
        )
        self.wall = {"worker": WallTime(), "manager": WallTime()}
        network = SimNetwork(cluster, self.geometry)
        self.ports = network.ports
        cadence = Cadence(
            report_s=REPORT_INTERVAL_S,
            worker_tick_s=0.0,
            manager_tick_s=0.0,
            gateway_tick_s=0.0,
            adapter_load_s=options.adapter_load_s,
        )
        self.virtual = VirtualCluster(
            deployment,
            named,
            network,
            cadence,
            start_s=-_SETTLING_S,
            goes_on=lambda: not self._done(),
            around=self._time,
        )
        self.events = self.virtual.events
        self._places = cluster.instances - len(named)
        self.clients = TraceClients(
            self.virtual,
            options,
            max_model_len=longest,
            distinct_prompts=shared,
            acceptance=acceptance,
            uses_draft_model=uses_draft_model,
        )
        self.engine = CostEngine(self.virtual, self.clients, cluster, self.costs, self.geometry, config, options)
        self.virtual.clients, self.virtual.engine = self.clients, self.engine
        self._arrivals = iter(workload.items)
        self._more_arrivals = True
        self._users = [(part, ClosedLoopUsers(part)) for part in workload.closed_loop]
        self._parts_to_start = len(self._users)
        self.virtual.start()

    @property
    def workers(self) -> list[SimWorker]:
        return [worker for worker in self.virtual.workers if isinstance(worker, SimWorker)]

    @property
    def gateway(self) -> GatewayMachine:
        machine: GatewayMachine = self.virtual.nodes[GATEWAY].machine
        return machine

    @property
    def manager(self) -> ManagerMachine:
        machine: ManagerMachine = self.virtual.nodes[MANAGER].machine
        return machine

    def run(self) -> None:
        """Run from the first arrival until everything has ended, or to the horizon."""
        self._next_arrival()
        if self.options.warmup_s:
            self.events.at(self.options.warmup_s, self._begin_counting)
        for number, (part, _) in enumerate(self._users):
            self.events.at(part.start_s, self._start_users, number)
        try:
            with garbage.seldom():
                self.events.run(self.options.horizon_s, self._done)
        except Exception as error:
            error.add_note(f"in the simulation of seed {self.options.seed}")
            raise
        if not self._done():
            for worker in self.workers:
                self.engine.catch_up(worker, self.options.horizon_s)
            self.clients.end_at(self.options.horizon_s)

    # -- workers that come and go ------------------------------------------------------------------------------

    def add_worker(self, name: InstanceId, role: Role) -> None:
        """Start a worker. Raises `ConfigError` when the cluster has no place left; drained workers keep theirs."""
        if not self._places or name in self.roles:
            raise ConfigError(f"no place for {name} in cluster {self.cluster.name}")
        self._places -= 1
        self.roles[name] = role
        self.virtual.start_worker(name)

    def drain_worker(self, name: InstanceId, longest_s: float, on_removed: Callable[[], None]) -> None:
        """Drain a worker as a live one: it takes nothing new, and ends when idle, or after `longest_s`."""
        worker = self.virtual.nodes[name]
        self.virtual.feed(worker, DrainStarted())
        deadline_s = self.events.now_s + longest_s

        def poll() -> None:
            if not worker.machine.idle and self.events.now_s < deadline_s:
                self.events.at(self.events.now_s + _DRAIN_POLL_S, poll)
                return
            self.virtual.feed(worker, DrainEnded())
            self.events.at(self.events.now_s + _DRAIN_POLL_S, end)  # once its last message has arrived

        def end() -> None:
            self.virtual.kill(name)
            del self.roles[name]
            on_removed()

        poll()

    def _begin_counting(self) -> None:
        """Count from now on: the warm-up is over."""
        now_s = self.events.now_s
        self.clients.begin_counting(now_s)
        self.engine.together = True
        for worker in self.workers:
            self.engine.catch_up(worker, now_s)
            kv = worker.machine.kv.metrics()
            worker.tally = WorkerTally.begin(worker.machine.counters, int(kv.get("allocation_failures_total", 0)))

    def _done(self) -> bool:
        return not self._more_arrivals and not self._parts_to_start and not self.clients.live

    def _time(self, node: Node) -> None:
        name = "worker" if isinstance(node, SimWorker) else node.name
        if name in self.wall:
            node.handle = timed(node.handle, self.wall[name])

    def _profile(self, longest: int, number: int) -> bytes:
        engine = self.config.engine
        return profile_points(self.costs[number], longest, engine.max_rows, engine.max_step_tokens)

    def _draft_price(self, number: int, holds: Holds) -> DraftPrice:
        cost = self._draft_costs.get(self.cluster.of(number).device)
        return MeasuredPrice(self.options.draft_s) if cost is None else ModelledPrice(cost, holds)

    # -- arrivals ----------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        item = next(self._arrivals, None)
        if item is None:
            self._more_arrivals = False
        else:
            self.events.at(item.arrival_s, self._arrive_and_next, item)

    def _arrive_and_next(self, item: WorkItem) -> None:
        self._next_arrival()
        self._arrive(item, None)

    def _arrive(self, item: WorkItem, users: ClosedLoopUsers | None) -> None:
        answered = None if users is None else (lambda now_s: self._answered(users))
        self.clients.arrive(self.events.now_s, item, answered)

    def _start_users(self, number: int) -> None:
        self._parts_to_start -= 1
        users = self._users[number][1]
        for item in users.start(self.events.now_s):
            self._arrive(item, users)

    def _answered(self, users: ClosedLoopUsers) -> None:
        # As an event of its own: an answer ends in the middle of a gateway's effects.
        self.events.at(self.events.now_s, self._send_next, users)

    def _send_next(self, users: ClosedLoopUsers) -> None:
        for item in users.answered(self.events.now_s):
            self._arrive(item, users)


def cost_model(model: ModelShape, part: Cluster) -> CostModel:
    """Make the cost model of these equal instances."""
    return CostModel(
        model, part.device, part.stack, tensor_parallel=part.tensor_parallel, decode_attention=part.decode_attention
    )


def _device_of(cluster: Cluster, number: int) -> str:
    return f"device-{number // cluster.workers_per_device}"


def _prompts_are_shared(config: Config, workload: Workload) -> bool:
    parts = (workload.items, *(part.items for part in workload.closed_loop))
    return config.kv.prefix_caching and any(item.hash_ids or item.session for items in parts for item in items)


def profile_points(cost: CostModel, max_context: int, max_rows: int, max_step_tokens: int) -> bytes:
    """Make what `cohort profile` would write for a simulated instance, so that schedulers which learn iteration times
    start as live ones do. JSON with `points`, in the live command's form; the shapes are those of `profile_process`
    without mixed iterations: schedulers learn the price of mixing while they run."""
    points = [
        {"shape": {"rows": rows, "tokens_per_row": tokens, "context": context}, "median_s": cost.step_s(work)}
        for rows, tokens, context, work in _shapes(max_context, max_rows, max_step_tokens)
    ]
    return msgspec.json.encode({"points": points})


def _shapes(max_context: int, max_rows: int, max_tokens: int) -> Iterator[tuple[int, int, int, StepWork]]:
    contexts = [context for context in _CONTEXTS if context <= max_context]
    for tokens in _CHUNKS:
        if tokens <= min(max_tokens, max_context):
            for context in [tokens, *(context for context in contexts if context >= 2 * tokens)]:
                pairs = prefill_pairs(context - tokens, tokens)
                yield 1, tokens, context, StepWork(tokens, 1, 1, pairs, context)
    for rows in _ROWS:
        if rows <= min(max_rows, max_tokens):
            for context in contexts:
                yield rows, 1, context, StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
