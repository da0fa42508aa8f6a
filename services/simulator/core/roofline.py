"""Upper bound of the rate that a cluster can serve, whatever decides and however well its kernels run.

A request needs the FLOPs of its tokens and of the pairs of attention, and for every decoded token a read of its KV and
of its part of the weights. No cluster does more than the peaks of its data sheets:

    rate ≤ min(peak FLOP/s / FLOPs a request, peak bytes/s / bytes a request)

Both are means over the requests of a workload. What might be saved is left out, so that the bound holds: prompts that
may be cached, weights that prompts read, KV copies of tensor parallelism, and with drafts all reads. `check` compares a
simulated rate: one above the bound is a mistake of the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cohort.common.config import Config
from cohort.common.errors import InvariantViolated
from cohort.common.policies.cost_model import ModelShape
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.hardware.hardware import Cluster, as_stored

_EDGES = 1.05
"""Factor for work that was done before the window in which answers are counted."""


class BeyondRoofline(InvariantViolated):
    """A simulation served more than the devices' peaks allow."""


def roofline(
    model: ModelShape, cluster: Cluster, config: Config, items: Sequence[WorkItem], *, drafts: bool = False
) -> float:
    """Return requests a second. `drafts`: several tokens may be verified in one read. Raises `ValueError` without
    items."""
    if not items:
        raise ValueError("no requests, no bound")
    model = as_stored(model, config, cluster)
    longest = config.model.max_model_len or model.max_positions
    needs = [_needs(model, item, longest) for item in items]
    flops, positions, decoded = (sum(each) / len(needs) for each in zip(*needs, strict=True))
    peak_flops, peak_bytes = peaks(cluster)
    bound = peak_flops / flops if flops else math.inf  # the context refuses all
    if drafts:
        return bound
    rows = config.engine.max_rows
    read = positions * model.kv_geometry(1).token_bytes / model.layers + decoded * model.read_bytes(rows) / rows
    return min(bound, peak_bytes / read) if read else bound


def check(served_per_s: float, bound_per_s: float, label: str) -> None:
    """Raise `BeyondRoofline` when more was served than the bound allows."""
    if served_per_s > _EDGES * bound_per_s:
        raise BeyondRoofline(
            f"{label}: {served_per_s:.4g} requests/s were served, the devices' peaks allow {bound_per_s:.4g} at most: "
            "the cost model is wrong here, and so is every figure of this simulation (please report it)"
        )


def peaks(cluster: Cluster) -> tuple[float, float]:
    """Return FLOP/s and bytes/s of all devices together."""
    flops = read = 0.0
    for part in cluster.parts or (cluster,):
        instances = min(part.instances, part.cores) if part.cores else part.instances / part.workers_per_device
        devices = instances * part.tensor_parallel
        flops += devices * part.device.flops_per_s
        read += devices * part.device.memory_bytes_per_s
    return flops, read


def _needs(model: ModelShape, item: WorkItem, longest: int) -> tuple[float, float, float]:
    """Return the FLOPs of a request, the KV positions that its decoded tokens read, summed over layers, and the number
    of these tokens; zeros of one that the context refuses."""
    prompt = item.prompt_tokens
    output = min(item.output_tokens, longest - prompt)
    if output < 1:
        return 0.0, 0.0, 0.0
    cached = prompt - 1 if item.hash_ids or item.session else 0
    end = prompt + output - 1  # the last token is sampled, never computed
    windowed = model.layers - model.full_layers if model.window else 0
    full = model.layers - windowed

    def seen(start: int) -> float:
        """Return the positions that tokens from `start` on see, summed over tokens and layers."""
        pairs = full * (_pairs(end) - _pairs(start))
        return pairs + windowed * (_pairs(end, model.window) - _pairs(start, model.window))

    flops = (
        2.0 * model.active_parameters * (end - cached)
        + 2.0 * model.head_parameters * output
        + 4.0 * model.heads * (model.pair_dim or model.head_dim) * seen(cached)
    )
    return flops, seen(prompt), output - 1.0


def _pairs(tokens: int, window: int = 0) -> float:
    """Return the query-key pairs of the first tokens, each of which sees itself and what the window holds before it."""
    within = min(tokens, window) if window else tokens
    return within * (within + 1) / 2.0 + (tokens - within) * window
