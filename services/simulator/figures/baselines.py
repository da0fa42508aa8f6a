"""DynaServe Table 1: vLLM colocated and disaggregated, Qwen-2.5-14B on two A100s, three request shapes.

How the cells are measured, the same way for all six. The paper says that rates were raised until the system was
saturated, and not to which rates. So there are two operating points:

    throughput   arrivals at `_OVERLOAD` times the paper's throughput: more than either system can serve. Its rate
                 in the long run is its throughput.
    TBT          arrivals at the paper's own throughput of that cell: both systems then do the same work per second.

What mixing prompts and decodes costs is not printed, and everything else about the engine is fixed by the device file.
`MIXED_SHARE` is the one number chosen here: of 0, 0.05, 0.1, 0.15 and 0.2 the one that leaves the smallest error in the
colocated cells (logarithms; without the P99 of reasoning, where theirs preempts). It holds for all figures of
DynaServe; its results are not looked at for it.

Settings are the ones the paper states or vLLM's defaults: chunks and batches of 2,048 tokens, at most 256 rows,
0.9 of the device's memory for weights and KV, recomputation after preemption, first come first served.
Figures count after `_WARMUP_S`, so neither the empty start nor the drained end is in them.
"""

from __future__ import annotations

from functools import partial

from cohort.common.config import load_config
from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.papers import paper_workload
from cohort.services.simulator.core.report import SimReport, Slice
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.figures.figure import Figure, Lab, Standing
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

MIXED_SHARE = 0.1
"""Share by which iterations with prompts and decodes take longer."""
_OVERLOAD = 1.4
_WARMUP_S = 240.0
_END_S = 720.0

_SHAPES = {
    "dynaserve-code": "prompt 8192, output 32",
    "dynaserve-balanced": "prompt 2048, output 512",
    "dynaserve-reasoning": "prompt 219, output 1467",
}
_PRESETS = {"disaggregated": "P/D disaggregated (1P + 1D)", "unified": "P/D colocated, chunked prefill"}

_TABLE_1: dict[tuple[str, str], tuple[float, float, float]] = {
    # (shape, preset): throughput in requests/s, p50 and p99 of the time between tokens in ms
    ("dynaserve-code", "disaggregated"): (0.83, 22.70, 58.09),
    ("dynaserve-code", "unified"): (1.49, 309.68, 352.93),
    ("dynaserve-balanced", "disaggregated"): (2.56, 47.00, 65.11),
    ("dynaserve-balanced", "unified"): (2.83, 46.86, 336.81),
    ("dynaserve-reasoning", "disaggregated"): (1.68, 50.63, 74.47),
    ("dynaserve-reasoning", "unified"): (2.86, 47.99, 162.67),
}


def _simulate(lab: Lab, shape: str, preset: str, rate: float) -> SimReport:
    cluster, model = (
        load_cluster("a100-80:2", {"stack": "graphs", "mixed_share": MIXED_SHARE}),
        load_model("qwen2.5-14b"),
    )
    # vLLM's rule: nine tenths of the device hold weights, workspace and KV.
    kv_bytes = int(0.9 * cluster.device.memory_bytes) - model.weights_total_bytes - cluster.device_reserve_bytes
    config = load_config(
        preset=preset,
        overrides={
            "engine": {"max_rows": 256, "max_step_tokens": 2048, "prefill_chunk": 2048, "preemption": "recompute"},
            "kv": {"memory_bytes": kv_bytes},
        },
    )
    workload = paper_workload(shape, RandomArrivals(rate), duration_s=_END_S, seed=lab.seed)
    return simulate(config, cluster, model, workload, lab.options(horizon_s=_END_S, warmup_s=_WARMUP_S))


def _cell(shape: str, preset: str) -> list[Figure]:
    requests_per_s, p50_ms, p99_ms = _TABLE_1[shape, preset]
    where = f"dynaserve-table1-{shape.removeprefix('dynaserve-')}-{preset}"
    head, standing = ("baselines", "DynaServe Table 1", _SHAPES[shape], _PRESETS[preset]), _standing(shape, preset)

    of_p99 = _standing(shape, preset, p99=True)

    def at_rate(lab: Lab, rate: float) -> Slice:
        return lab.run((shape, preset, rate), lambda: _simulate(lab, shape, preset, rate)).overall

    def throughput(lab: Lab) -> float:
        return at_rate(lab, _OVERLOAD * requests_per_s).requests_per_s

    def between(quantile: str, lab: Lab) -> float:
        found = at_rate(lab, requests_per_s).tbt_ms
        return float(getattr(found, quantile)) if found else float("nan")

    fitted, note = _FITTED if preset == "unified" else "", _P99_NOTES.get((shape, preset), "")
    offered, pressed = (f"offered {of}the paper's throughput{fitted}" for of in ("", f"{_OVERLOAD} x "))
    rate = ("throughput", "requests/s", requests_per_s)
    return [
        Figure(f"{where}-throughput", *head, *rate, throughput, pressed, standing),
        Figure(f"{where}-p50-tbt", *head, "p50 TBT", "ms", p50_ms, partial(between, "p50"), offered, standing),
        Figure(f"{where}-p99-tbt", *head, "p99 TBT", "ms", p99_ms, partial(between, "p99"), note, of_p99),
    ]


def _standing(shape: str, preset: str, *, p99: bool = False) -> Standing:
    """Return the standing: the colocated cells chose `MIXED_SHARE`, but for the P99 of reasoning."""
    chose = preset == "unified" and not (p99 and shape == "dynaserve-reasoning")
    return Standing.ANCHOR if chose else Standing.CLAIM


_FITTED = "; the price of mixing is fitted to this system's cells"
_P99_NOTES = {
    ("dynaserve-code", "disaggregated"): "jitter of the real decode process is not modelled",
    ("dynaserve-reasoning", "unified"): "theirs is saturated and preempts; ours serves the same rate without",
}

FIGURES: tuple[Figure, ...] = tuple(figure for shape, preset in _TABLE_1 for figure in _cell(shape, preset))
