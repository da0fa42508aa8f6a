"""A1 · What alignment could gain at the very most: full iterations of each kind of batch, by the cost model alone.

No policy, no queue, no KV transfer: memory full, batches of the synthetic mix drawn at random. `served alike`: short
and long requests are decoded in batches of their own, in the shares in which they come. `short ones first`: the long
ones wait for ever, as they do in the density first search while short ones keep coming and starvation is not handled.
"""

from __future__ import annotations

from random import Random
from statistics import fmean

from cohort.common.policies.cost_model import CostModel, DecodeAttention, StepWork
from cohort.common.workloads.arrivals import AllAtOnce
from cohort.common.workloads.papers import paper_workload
from cohort.services.simulator.figures.claim import Standing
from cohort.services.simulator.figures.figure import Figure, Lab
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

_ROWS, _FILLED, _BATCHES, _SHORT = 1024, 0.97, 20, 0.95


def _prefixes(name: str) -> list[int]:
    """Prefix lengths that rows have in the middle of their decoding: a random part of the answer is there."""
    random = Random(0)
    items = paper_workload(name, AllAtOnce(), count=2000).items
    return [item.prompt_tokens + random.randrange(item.output_tokens) for item in items]


def _batch(random: Random, kinds: list[tuple[float, list[int]]], most_positions: float) -> list[int]:
    """Rows at random until an iteration or the memory is full."""
    rows: list[int] = []
    while len(rows) < _ROWS:
        (lengths,) = random.choices([lengths for _, lengths in kinds], [share for share, _ in kinds])
        row = random.choice(lengths)
        if sum(rows) + row > most_positions:
            break
        rows.append(row)
    return rows


def _tokens_per_s(cost: CostModel, kinds: list[tuple[float, list[int]]], most_positions: float) -> float:
    random = Random(1)
    batches = [_batch(random, kinds, most_positions) for _ in range(_BATCHES)]
    seconds = [
        cost.step_s(StepWork(len(b), len(b), len(b), decode_rows=len(b), decode_context=sum(b), longest_context=max(b)))
        for b in batches
    ]
    return fmean(len(b) for b in batches) / fmean(seconds)


def ceiling(model_name: str, attention: DecodeAttention, *, fair: bool) -> float:
    """Decode throughput of aligned full batches over that of mixed ones."""
    cluster, model = load_cluster("h100-80"), load_model(model_name)
    cost = CostModel(model, cluster.device, cluster.stack, decode_attention=attention)
    left = 0.9 * cluster.device.memory_bytes - model.weights_total_bytes - cluster.device_reserve_bytes
    positions = _FILLED * left / model.kv_geometry(1).token_bytes
    short, long = _prefixes("alignedserve-short"), _prefixes("alignedserve-long")
    mixed = _tokens_per_s(cost, [(_SHORT, short), (1.0 - _SHORT, long)], positions)
    of_short = _tokens_per_s(cost, [(1.0, short)], positions)
    if not fair:
        return of_short / mixed
    return 1.0 / (_SHORT / of_short + (1.0 - _SHORT) / _tokens_per_s(cost, [(1.0, long)], positions)) / mixed


def _figure(model: str, attention: DecodeAttention, *, fair: bool) -> Figure:
    def measure(lab: Lab) -> float:
        return ceiling(model, attention, fair=fair)

    order = "served alike" if fair else "short ones first"
    kernels = attention.replace("_", " ").replace("kv", "KV")
    return Figure(
        f"alignedserve-ceiling-{model}-{attention}-{'alike' if fair else 'short'}",
        "alignedserve",
        "AlignedServe Fig. 7, ceiling by the cost model",
        f"synthetic, 95 % short, {model}",
        "mixed batches",
        "decode throughput of full aligned batches",
        "x",
        1.35,
        measure,
        f"{kernels}, {order}",
        Standing.BESIDE,
    )


CEILINGS: tuple[Figure, ...] = tuple(
    _figure(model, attention, fair=fair)
    for model in ("opt-2.7b", "opt-13b")
    for attention in ("split_kv", "unit_per_row", "unit_last")
    for fair in (True, False)
)
