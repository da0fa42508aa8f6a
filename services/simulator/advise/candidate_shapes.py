"""Candidate shapes of a running pipeline, simulated: its traffic replayed with its own policies and its own step times.

Called by `foresee.py`, a process beside the global monitor, and by `planned_day.py` under virtual time. The present
shape comes first; a shape that cannot be the best one is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import msgspec

from cohort.common.config import Config
from cohort.common.config.serving import PlannerConfig
from cohort.common.errors import ConfigError
from cohort.common.planning.shape import Shape
from cohort.common.planning.simulation_jobs import Foreseen, Job, WorkerCost
from cohort.common.planning.traffic import Timing, in_time
from cohort.common.policies import compose
from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork
from cohort.common.policies.step_times.step_cost import BatchShape, linear_seconds, step_seconds
from cohort.common.types import KvGeometry, StepTimes
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.clients import InFlight
from cohort.services.simulator.core.cluster import Measured, SimCluster
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import Cluster, load_link

_TAIL_S = 120.0
"""Time after the last arrival; what has not ended by then is late by any measure."""
_LINKS = {"cpu": "shm-shared", "gpu": "pcie4"}
"""KV transfer is not measured by workers: between processes of one box."""
_ENDLESS_BYTES = 1 << 60
"""Memory without a bound: a worker reports its blocks, not its device's memory."""
_ANY = 1.0


def foresee(
    job: Job, config: Config, model: ModelShape, spent: Callable[[int], None] = lambda requests: None
) -> list[Foreseen]:
    """Replay all requests on each shape that may be the best one. Only the best one counts, so each has to beat those
    before it, and its replay ends once too many requests are late for that. `spent` gets the number of replayed
    requests. Raises `ConfigError` when even the first shape cannot be simulated."""
    found: list[Foreseen] = []
    least, judged = 0.0, len(job.requests) - job.judged_from
    for shape in job.shapes:
        needed, cost = not found or shape in job.keep, job.worker_cost * shape.devices
        spare = 1.0 - cost - least
        if not needed and spare <= 0.0:
            continue
        try:
            timings = replay(job, shape, config, model, late_below=inf if needed else spare * judged, spent=spent)
        except TooManyLate:
            continue
        except ConfigError:
            if not found:
                raise
            continue
        found.append(Foreseen(shape, tuple(timings)))
        score = _share(job, timings) - cost
        least = score + job.bar if len(found) == 1 else max(least, score)
    return found


def _share(job: Job, timings: Sequence[Timing]) -> float:
    pairs = list(zip(job.requests, timings, strict=True))[job.judged_from :]
    met = [in_time(request.slo, timing, job.best_effort_s) for request, timing in pairs]
    return sum(met) / len(met) if met else 1.0


class TooManyLate(Exception):
    """Signal that a shape can no longer be the best one."""


def replay(
    job: Job,
    shape: Shape,
    config: Config,
    model: ModelShape,
    *,
    late_below: float = inf,
    spent: Callable[[int], None] = lambda requests: None,
) -> list[Timing]:
    """Return timings by request. Raises `TooManyLate` once `late_below` of the judged requests are late."""
    config = without_planner(config)
    degrees = [group.degree for group in shape.groups for _ in range(group.count)]
    measured = [_measured(job.costs[degree], degree, model, config) for degree in degrees]
    timings = [Timing()] * len(job.requests)
    ends = late = 0

    def ended(live: InFlight, finished: bool) -> None:
        nonlocal ends, late
        ends += 1
        if finished:
            timings[live.index] = timing_of(live)
        if late_below == inf or live.index < job.judged_from:
            return
        late += not in_time(job.requests[live.index].slo, timings[live.index], job.best_effort_s)
        if late and late >= late_below:
            raise TooManyLate

    cluster = live_cluster(config, len(degrees), job.cores, job.threads)
    last_s = job.requests[-1].at_s if job.requests else 0.0
    options = SimOptions(horizon_s=last_s + _TAIL_S, if_late="")
    sim = SimCluster(config, cluster, model, workload_of(job, config), options, shape.roles, measured=measured)
    sim.clients.on_end = ended
    try:
        sim.run()
    finally:
        spent(ends)
    return timings


def without_planner(config: Config) -> Config:
    """Switch the planner off: simulations of its own do not plan."""
    return msgspec.structs.replace(config, planner=PlannerConfig())


def timing_of(live: InFlight) -> Timing:
    since_s = live.item.arrival_s
    gaps = max(1, live.produced - 1)
    return Timing(live.first_s - since_s, (live.last_s - live.first_s) / gaps, live.last_s - since_s)


def workload_of(job: Job, config: Config) -> Workload:
    """Make the workload. Shared beginnings of prompts become blocks that are equal in all of them."""
    block = config.kv.block_size
    return Workload(
        "live traffic",
        tuple(
            WorkItem(
                each.at_s,
                each.prompt_tokens,
                each.output_tokens,
                each.traffic_class,
                each.slo,
                hash_ids=tuple(range(each.shared_tokens // block)),
                hash_block=block if each.shared_tokens >= block else 0,
            )
            for each in job.requests
        ),
    )


def live_cluster(config: Config, instances: int, cores: int, threads: int) -> Cluster:
    """Return equal places for workers, on one box. `cores` that workers of `threads` threads share; 0: none are shared.

    Workers that have all cores each, or a GPU together, compute in turn; fewer threads share the cores as they come.
    """
    link = load_link(_LINKS["gpu" if config.on_gpu else "cpu"])
    in_turn = instances if cores and threads >= cores else 1
    if config.on_gpu:
        in_turn = max(1, config.engine.workers_per_gpu)
    crowded = in_turn == 1 and instances * threads > cores > 0
    return Cluster(
        name="live",
        device=learned_device(),
        device_reserve_bytes=0,
        cpu=not config.on_gpu,
        instances=instances,
        tensor_parallel=1,
        per_host=0,
        within=link,
        across=link,
        stack=StackShape("learned", 0.0, 0.0, 0.0),
        decode_attention="split_kv",
        cores=max(1, cores // max(1, threads)) if crowded else 0,
        workers_per_device=in_turn,
    )


def _measured(cost: WorkerCost, degree: int, model: ModelShape, config: Config) -> Measured:
    geometry = model.kv_geometry(config.kv.block_size, grouped=compose.groups_layers(config))
    block_bytes = geometry.block_bytes * model.kv_copies(degree)
    return Measured(LearnedCost(cost.times, model), cost.blocks, config.kv.host_memory_bytes // block_bytes)


# -- the time of an iteration as a live worker has learned it, in the place of the cost model --------------------------


class LearnedCost(CostModel):
    """Seconds of an iteration by the constants of a closed form (`step_cost.py`) of a worker's reports; copies to host
    memory by the learned time of a position."""

    def __init__(self, times: StepTimes, model: ModelShape) -> None:
        super().__init__(model, learned_device(), StackShape("learned", 0.0, 0.0, 0.0))
        self._times = times
        self._copied_byte_s = times.copy_s / model.kv_geometry(1).token_bytes

    def step_s(self, work: StepWork) -> float:
        if work.rows == 0:
            return 0.0
        prefill_tokens, prefill_rows = work.tokens - work.decode_rows, work.rows - work.decode_rows
        shape = BatchShape(prefill_tokens, prefill_rows, work.pairs, work.decode_rows, work.decode_context)
        return step_seconds(self._times, shape)

    def repeated_s(self, work: StepWork, steps: int) -> list[float]:
        times, context, rows = self._times, work.decode_context, work.decode_rows
        fixed = times.step_s + times.row_s * work.rows + linear_seconds(times, work.tokens)
        position_s = times.position_s
        return [fixed + position_s * each for each in range(context, context + steps * rows, rows)]

    def swap_s(self, swapped_bytes: int) -> float:
        return swapped_bytes * self._copied_byte_s

    def flops(self, work: StepWork) -> float:
        """Return 0: utilisation means nothing without the device's peak."""
        return 0.0


def learned_device() -> DeviceShape:
    """Return a device without bounds: its figures are unknown."""
    return DeviceShape("learned", _ANY, _ANY, _ENDLESS_BYTES, _ANY, _ANY, _ANY, 1, _ANY, _ANY, 0.0, _ANY)


def model_of(geometry: KvGeometry, name: str, max_positions: int) -> ModelShape:
    """Return a shape with the sizes of KV alone; the learned times cover the rest."""
    return ModelShape(
        name,
        geometry.num_layers,
        geometry.head_dim,
        geometry.num_kv_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.head_dim,
        False,
        1,
        True,
        max_positions,
        1,
        geometry.dtype_bytes,
        geometry.window,
    )
