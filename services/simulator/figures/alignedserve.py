"""AlignedServe §4: OPT-2.7B on H100s, against vLLM, DistServe and FastGen, and with parts switched off.

What the paper leaves open, and what is taken here for all systems alike:

    devices     two H100s (the paper has eight): two unified instances, or one prefill and one decode worker
    lengths     synthetic: 95 % short (16 to 999 tokens), 5 % long (1,000 to 8,000), outputs uniform 32 to 512;
                LongBench-like: long ones only; ShareGPT as EcoServe prints it; Azure: lognormal with mean and deviation
                measured on the published 2023 conversation trace
    load        more than any of the systems can serve, from second 0; figures count from `_WARMUP_S` to `_END_S`
    P99 TPOT    of iterations, which is what the paper says it characterises: of all gaps between two tokens
    starvation  off, as where the paper measures TTFT: no threshold is printed
    kernels     decode attention "unit per row" (a long row can hold the others up) unless the note says "split KV"
                (the KV of all rows is read at the device's bandwidth, as kernels with split KV do)
"""

from __future__ import annotations

import math

from cohort.common.config import load_config
from cohort.common.policies.cost_model import DecodeAttention
from cohort.common.types import Role
from cohort.common.workloads.arrivals import AllAtOnce, RandomArrivals
from cohort.common.workloads.changes import mixture
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.services.simulator.cluster import SimOptions
from cohort.services.simulator.figures.figure import Figure, Lab
from cohort.services.simulator.hardware import load_cluster, load_model
from cohort.services.simulator.report import SimReport
from cohort.services.simulator.run import simulate

_WARMUP_S, _END_S = 30.0, 60.0
_CONTEXT = 10_240
_HOST_BYTES = 200_000_000_000
_OFFERED_PER_S = {"synthetic": 20.0, "longbench": 6.0, "sharegpt": 30.0, "azure": 20.0}
_NAMES = {
    "synthetic": "synthetic, 95 % short", "longbench": "LongBench-like", "sharegpt": "ShareGPT", "azure": "Azure",
}  # fmt: skip
_UNIFIED = {"baseline-vllm", "baseline-chunked-prefill"}
_PARTS = {"": {}, "no prefetch": {"prefetch": False}, "no prefetch, FCFS": {"prefetch": False, "aligned": False},
          "FCFS": {"aligned": False}}  # fmt: skip


def _workload(name: str) -> Workload:
    rate = _OFFERED_PER_S[name]
    arrivals, count = RandomArrivals(rate), int(rate * _END_S)
    if name == "sharegpt":
        return paper_workload("ecoserve-sharegpt", arrivals, count=count)
    if name == "azure":
        return paper_workload("alignedserve-azure", arrivals, count=count)
    long = paper_workload("alignedserve-long", AllAtOnce(), count=count)
    if name == "longbench":
        return paper_workload("alignedserve-long", arrivals, count=count)
    short = paper_workload("alignedserve-short", AllAtOnce(), count=count)
    return mixture("mixed", [(0.95, short), (0.05, long)], arrivals, count=count)


def _run(lab: Lab, name: str, preset: str, attention: DecodeAttention = "unit_per_row", parts: str = "") -> SimReport:
    def one() -> SimReport:
        cluster = load_cluster("h100-80:2", {"decode_attention": attention, "host_memory_bytes": _HOST_BYTES})
        model = load_model("opt-2.7b")
        kv_bytes = int(0.9 * cluster.device.memory_bytes) - model.weights_total_bytes - cluster.device_reserve_bytes
        config = load_config(preset=preset, overrides={
            "engine": {"max_rows": 256, "max_step_tokens": 8192, "prefill_chunk": 8192},
            "kv": {"memory_bytes": kv_bytes, "prefix_caching": False},
            "model": {"max_model_len": _CONTEXT},
            "alignedserve": {"starvation_s": 1e6, **_PARTS[parts]},
        })  # fmt: skip
        roles = {Role.UNIFIED: 2} if preset in _UNIFIED else {Role.PREFILL: 1, Role.DECODE: 1}
        options = SimOptions(horizon_s=_END_S, warmup_s=_WARMUP_S)
        return simulate(config, cluster, model, _workload(name), options, roles)

    return lab.run((name, preset, attention, parts), one)


def _throughput(report: SimReport) -> float:
    return report.overall.output_tokens_per_s


def _p99_tpot(report: SimReport) -> float:
    """The paper means the latency of iterations by its P99 TPOT: ours is of the gaps between tokens,
    not of requests' averages, which the wait in the pool is part of."""
    return report.overall.tbt_ms.p99 if report.overall.tbt_ms is not None else math.nan


def _gain(
    figure: str, name: str, other: str, paper: float, *, attention: DecodeAttention = "unit_per_row",
    latency: bool = False, note: str = "",
) -> Figure:  # fmt: skip
    """Throughput over the other's, or the other's P99 TPOT over ours: more is better."""
    metric = "P99 time between tokens, times lower" if latency else "decode throughput"

    def measure(lab: Lab) -> float:
        ours, theirs = _run(lab, name, "alignedserve", attention), _run(lab, name, other, attention)
        if latency:
            return _p99_tpot(theirs) / _p99_tpot(ours)
        return _throughput(ours) / _throughput(theirs)

    kind = "split" if attention == "split_kv" else "unit"
    id_ = f"alignedserve-{figure}-{name}-{other.removeprefix('baseline-')}-{'tpot' if latency else 'rate'}-{kind}"
    kernels = "split KV" if attention == "split_kv" else ""
    return Figure(
        id_, "alignedserve", f"AlignedServe Fig. {figure}", _NAMES[name], other, metric, "x", paper, measure,
        "; ".join(part for part in (kernels, note) if part),
    )


def _lost(lab: Lab, before: str, after: str, attention: DecodeAttention) -> float:
    """Throughput that goes with a part, in percent of what there was with it."""
    whole = _throughput(_run(lab, "azure", "alignedserve", attention, before))
    return 100.0 * (1.0 - _throughput(_run(lab, "azure", "alignedserve", attention, after)) / whole)


def _ablation(id_: str, without: str, before: str, after: str, paper: float, attention: DecodeAttention) -> Figure:
    return Figure(
        f"alignedserve-14-{id_}", "alignedserve", "AlignedServe Fig. 14", _NAMES["azure"], f"without {without}",
        "decode throughput lost", "%", paper, lambda lab: _lost(lab, before, after, attention),
        "split KV" if attention == "split_kv" else "",
    )  # fmt: skip


def _mixed(lab: Lab, name: str) -> float:
    """Share of iterations with decodes of more than one batch, in percent."""
    reports = [each for each in _run(lab, name, "alignedserve").instances if each.decode_steps]
    return 100.0 * sum(each.mixed_steps for each in reports) / sum(each.decode_steps for each in reports)


def _mixed_figure(name: str, paper: float) -> Figure:
    return Figure(
        f"alignedserve-mixed-{name}", "alignedserve", "AlignedServe §4.4", _NAMES[name], "itself",
        "iterations that hold more than one batch", "%", paper, lambda lab: _mixed(lab, name),
        "paper: at most, on OPT-6.7B; ours: answers end at different times, the last keep a batch alive",
    )  # fmt: skip


def _ttft(lab: Lab, name: str) -> float:
    found = _run(lab, name, "alignedserve").overall.ttft_ms
    return found.mean / 1000.0 if found is not None else math.nan


def _ttft_figure(name: str, paper: float) -> Figure:
    return Figure(
        f"alignedserve-15-{name}", "alignedserve", "AlignedServe Fig. 15", _NAMES[name], "itself", "mean TTFT", "s",
        paper, lambda lab: _ttft(lab, name), "ours: the first token leaves with the prefill, the second waits",
    )  # fmt: skip


_VLLM, _DISTSERVE, _FASTGEN = "baseline-vllm", "baseline-distserve", "baseline-chunked-prefill"
_BOTH = "there both devices decode, here one"
_BEST = "the paper's best case"

FIGURES: tuple[Figure, ...] = (
    _gain("7", "synthetic", _VLLM, 1.32, note=_BOTH),
    _gain("7", "synthetic", _DISTSERVE, 1.35),
    _gain("7", "synthetic", _DISTSERVE, 1.35, attention="split_kv"),
    _gain("7", "synthetic", _FASTGEN, 1.85, note=_BOTH),
    _gain("8", "longbench", _DISTSERVE, 1.98, note=_BEST),
    _gain("8", "sharegpt", _DISTSERVE, 1.35, note=_BEST),
    _gain("8", "azure", _DISTSERVE, 1.98, note=_BEST),
    _gain("9", "synthetic", _DISTSERVE, 1.74, latency=True, note="paper: 1.74 to 3.05 over all systems and models"),
    _gain("9", "synthetic", _FASTGEN, 1.74, latency=True, note=f"paper: 1.74 to 3.05 over all; {_BOTH}"),
    _ablation("prefetch", "prefetch", "", "no prefetch", 14.73, "unit_per_row"),
    _ablation("alignment", "alignment, too", "no prefetch", "no prefetch, FCFS", 28.51, "unit_per_row"),
    _ablation("alignment-split", "alignment", "", "FCFS", 28.51, "split_kv"),
    _mixed_figure("sharegpt", 8.61),
    _mixed_figure("longbench", 12.37),
    _ttft_figure("sharegpt", 1.49),
    _ttft_figure("longbench", 2.54),
)
