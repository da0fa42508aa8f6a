"""BucketServe §V: Llama-2-13B on four A100-40GB, against UELLM (four colocated) and DistServe.

Choices that the paper leaves open, made here for all systems alike:

    Mixed        half Alpaca with its prompt template, half LongBench cut to the model's 4,096 tokens
    placement    one prefill and three decode workers for BucketServe and DistServe: the best for DistServe here, since
                 decode memory is what runs out (a 13B model leaves 10 GB of KV on such a device)
    offline      400 requests at second 0 (Fig. 5a, b); throughput counts prompt and output tokens
    SLO          none is printed. Alpaca: first token 0.25 s, later ones 0.1 s (DistServe's for a 13B chatbot);
                 mixed: 2.5 s and 0.15 s. Capacity is the highest rate with 80 % of requests keeping both (Fig. 5c, d)
    server rate  requests a second finished when `_OVERLOAD` times what BucketServe can serve is offered (Fig. 5e, f)
    predictions  of output lengths: log-normal error of sigma 0.3 for all

The baselines are `baseline-uellm` (padded batches) and `baseline-distserve` (variable length). BucketServe runs on the
variable-length path too, so none of its advantage over DistServe is padding: see docs/papers.md. Other attempts are in
`_SYSTEMS`, each a row of its own beside the paper's number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from cohort.common.config import load_config
from cohort.common.types import Role
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, RandomArrivals
from cohort.common.workloads.changes import clip, mixture, with_slos
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import per_token
from cohort.services.simulator.cluster import SimOptions
from cohort.services.simulator.figures.figure import Figure, Lab
from cohort.services.simulator.hardware import Cluster, load_cluster, load_model
from cohort.services.simulator.report import SimReport
from cohort.services.simulator.run import find_capacity, simulate

_OFFLINE_REQUESTS = 400
_ONLINE_S = 60.0
_WARMUP_S = 10.0
_CONTEXT = 4096
_OVERLOAD = 1.3
_SLOS = {"alpaca": per_token(0.25, 0.1), "mixed": per_token(2.5, 0.15)}
_START_PER_S = {"alpaca": 16.0, "mixed": 2.0}
_P_AND_D = {Role.PREFILL: 1, Role.DECODE: 3}
_HALVES = {Role.PREFILL: 2, Role.DECODE: 2}
_PADDED = {"policies": {"iteration": "padded_prefill"}}
_ONE_BUCKET: Mapping[str, Mapping[str, object]] = {**_PADDED, "bucketserve": {"ablation": {"max_buckets": 1}}}
_RECTANGLES = {"baselines": {"padded": True, "ablation": {"rectangular_kv": True}}}


@dataclass(frozen=True, slots=True)
class _System:
    """`pooled`: one instance whose layers lie on all four devices, one of them at work at a time."""

    preset: str
    roles: Mapping[Role, int] = field(default_factory=lambda: _P_AND_D)
    over: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    pooled: bool = False


_SYSTEMS = {
    "bucketserve": _System("bucketserve"),
    "distserve": _System("baseline-distserve"),
    "uellm": _System("baseline-uellm", {Role.UNIFIED: 4}),
    # UELLM's deployer spreads the layers of one model over the devices by their topology (He et al. 2024, HELR).
    "uellm-layers": _System("baseline-uellm", {Role.UNIFIED: 1}, pooled=True),
    "uellm-rectangles": _System("baseline-uellm", {Role.UNIFIED: 4}, _RECTANGLES),
    "uellm-layers-rectangles": _System("baseline-uellm", {Role.UNIFIED: 1}, _RECTANGLES, pooled=True),
    "bucketserve-2p2d": _System("bucketserve", _HALVES),
    "distserve-2p2d": _System("baseline-distserve", _HALVES),
    "bucketserve-p90": _System("bucketserve", over={"bucketserve": {"output_estimate": "p90"}}),
    "bucketserve-padded": _System("bucketserve", over=_PADDED),
    "first-come-padded": _System("bucketserve", over=_ONE_BUCKET),
}


def _workload(name: str, arrivals: Arrivals, count: int, seed: int) -> Workload:
    alpaca = paper_workload("bucketserve-alpaca", AllAtOnce(), count=count, seed=seed)
    if name == "alpaca":
        found = mixture("alpaca", [(1.0, alpaca)], arrivals, count=count, seed=seed)
    else:
        long = clip(paper_workload("bucketserve-longbench", AllAtOnce(), count=count, seed=seed), max_total=_CONTEXT)
        found = mixture("mixed", [(1.0, alpaca), (1.0, long)], arrivals, count=count, seed=seed)
    return with_slos(found, _SLOS[name])


def _simulate(name: str, workload: Workload, options: SimOptions) -> SimReport:
    system, model = _SYSTEMS[name], load_model("llama-2-13b")
    cluster = _pooled() if system.pooled else load_cluster("a100-40:4")
    kv_bytes = int(0.9 * cluster.device.memory_bytes) - model.weights_total_bytes - cluster.device_reserve_bytes
    config = load_config(
        preset=system.preset,
        overrides={
            "engine": {"max_rows": 256, "max_step_tokens": _CONTEXT, "prefill_chunk": _CONTEXT},
            "kv": {"memory_bytes": kv_bytes, "prefix_caching": False},
            **system.over,
        },
    )
    return simulate(config, cluster, model, workload, options, system.roles)


def _pooled() -> Cluster:
    """Four devices that hold one model: the memory of all, the speed of the one whose turn it is. Traffic between them
    (a few kilobytes per row and layer boundary) is left out, in the baseline's favour."""
    cluster = load_cluster("a100-40:1")
    memory = 4 * cluster.device.memory_bytes - 3 * cluster.device_reserve_bytes
    return msgspec.structs.replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def _offline(lab: Lab, name: str) -> SimReport:
    options = lab.options(predictor="noisy", predictor_sigma=0.3)
    return lab.run(
        ("offline", name),
        lambda: _simulate(name, _workload("mixed", AllAtOnce(), _OFFLINE_REQUESTS, lab.seed), options),
    )


def _throughput(lab: Lab, name: str) -> float:
    overall = _offline(lab, name).overall
    return overall.prompt_tokens_per_s + overall.output_tokens_per_s


def _online(lab: Lab, system: str, name: str, rate: float) -> SimReport:
    options = lab.options(predictor="noisy", predictor_sigma=0.3, warmup_s=_WARMUP_S, horizon_s=_ONLINE_S)
    count = round(rate * _ONLINE_S * 1.2) + 20
    return lab.run(
        ("online", system, name, rate),
        lambda: _simulate(system, _workload(name, RandomArrivals(rate), count, lab.seed), options),
    )


def _capacity(lab: Lab, system: str, name: str) -> float:
    """The highest rate at which 80 % keep their promise."""
    found = find_capacity(lambda rate: _online(lab, system, name, rate), _START_PER_S[name], 0.8, tolerance=0.06)
    return found.rate_per_s


def _served(lab: Lab, system: str, name: str) -> float:
    """Requests a second that leave when more come than any of the systems can serve."""
    rate = _OVERLOAD * _online(lab, "bucketserve", name, 4 * _START_PER_S[name]).overall.requests_per_s
    return _online(lab, system, name, rate).overall.requests_per_s


def _line(lab: Lab, name: str) -> float:
    """Requests served over requests offered, at the rate at which DistServe is full."""
    rate = _served(lab, "distserve", name)
    return _online(lab, "bucketserve", name, rate).overall.requests_per_s / rate


def _overhead(lab: Lab) -> float:
    """B11 · measured wall-clock time of everything the manager decides, over the time that is served."""
    report = _offline(lab, "bucketserve")
    return report.measured.manager_events * report.measured.manager_mean_us * 1e-6 / report.duration_s


def _utilisation(lab: Lab) -> float:
    instances = _offline(lab, "bucketserve").instances
    return 100.0 * sum(instance.busy for instance in instances) / len(instances)


def _ratio(
    figure: str,
    name: str,
    workload: str,
    other: str,
    metric: str,
    paper: float,
    note: str = "",
    ours: str = "bucketserve",
) -> Figure:
    def measure(lab: Lab) -> float:
        match metric:
            case "throughput":
                found, theirs = _throughput(lab, ours), _throughput(lab, other)
            case "rate at 80 % attainment":
                found, theirs = _capacity(lab, ours, name), _capacity(lab, other, name)
            case _:
                found, theirs = _served(lab, ours, name), _served(lab, other, name)
        return found / theirs if theirs else math.nan

    id_ = f"bucketserve-{figure.lower()}-{name}-{other}"
    if ours != "bucketserve":
        id_ += f"-by-{ours.removeprefix('bucketserve-')}"
    return Figure(id_, "bucketserve", f"BucketServe Fig. {figure}", workload, other, metric, "x", paper, measure, note)


_MIXED = "Alpaca + LongBench"

_HELR = "one model over four devices, one at work at a time, as UELLM deploys it"
_UNPAGED = "its cache one rectangle a batch, not pages"
_BOTH_PADDED = "both padded: buckets against one bucket"
_OFFLINE = f"{_MIXED}, offline"
_RATE = "rate at 80 % attainment"

FIGURES: tuple[Figure, ...] = (
    _ratio("5a", "mixed", _OFFLINE, "uellm", "throughput", 3.58, "the paper's best case; four models, one a device"),
    _ratio("5a", "mixed", _OFFLINE, "uellm-rectangles", "throughput", 3.58, _UNPAGED),
    _ratio("5a", "mixed", _OFFLINE, "uellm-layers", "throughput", 3.58, _HELR),
    _ratio("5a", "mixed", _OFFLINE, "uellm-layers-rectangles", "throughput", 3.58, f"{_HELR}; {_UNPAGED}"),
    _ratio("5a", "mixed", _OFFLINE, "distserve", "throughput", 1.31, "the paper's best case"),
    _ratio("5a", "mixed", _OFFLINE, "distserve-2p2d", "throughput", 1.31, "two and two", ours="bucketserve-2p2d"),
    _ratio("5a", "mixed", _OFFLINE, "uellm", "throughput", 3.58, "two prefill, two decode", ours="bucketserve-2p2d"),
    _ratio("5a", "mixed", _OFFLINE, "first-come-padded", "throughput", 1.31, _BOTH_PADDED, ours="bucketserve-padded"),
    _ratio("5a", "mixed", _OFFLINE, "distserve", "throughput", 1.31, "memory by p90", ours="bucketserve-p90"),
    Figure(
        "bucketserve-5b-utilisation",
        "bucketserve",
        "BucketServe Fig. 5b",
        _OFFLINE,
        "itself",
        "GPU utilisation",
        "%",
        81.66,
        _utilisation,
        "ours: share of time in iterations, mean of all four",
    ),
    _ratio("5c", "alpaca", "Alpaca", "distserve", _RATE, 1.37),
    _ratio("5c", "alpaca", "Alpaca", "first-come-padded", _RATE, 1.37, _BOTH_PADDED, ours="bucketserve-padded"),
    _ratio("5d", "mixed", _MIXED, "distserve", _RATE, 1.93),
    _ratio("5d", "mixed", _MIXED, "distserve-2p2d", _RATE, 1.93, "two and two", ours="bucketserve-2p2d"),
    _ratio("5d", "mixed", _MIXED, "first-come-padded", _RATE, 1.93, _BOTH_PADDED, ours="bucketserve-padded"),
    _ratio("5e", "alpaca", "Alpaca", "uellm", "server rate", 1.975),
    _ratio("5e", "alpaca", "Alpaca", "uellm-layers", "server rate", 1.975, _HELR),
    _ratio("5e", "alpaca", "Alpaca", "uellm-layers-rectangles", "server rate", 1.975, f"{_HELR}; {_UNPAGED}"),
    _ratio("5f", "mixed", _MIXED, "distserve", "server rate", 1.4),
    _ratio("5f", "mixed", _MIXED, "uellm", "server rate", 3.47),
    _ratio("5f", "mixed", _MIXED, "uellm-layers", "server rate", 3.47, _HELR),
    _ratio("5f", "mixed", _MIXED, "uellm-layers-rectangles", "server rate", 3.47, f"{_HELR}; {_UNPAGED}"),
    Figure(
        "bucketserve-5f-mixed-line",
        "bucketserve",
        "BucketServe Fig. 5f",
        _MIXED,
        "itself",
        "served over offered",
        "x",
        1.0,
        lambda lab: _line(lab, "mixed"),
        "on y = x where DistServe is full; ours: a window of 50 s",
    ),
    Figure(
        "bucketserve-6a-overhead",
        "bucketserve",
        "BucketServe Fig. 6a",
        _OFFLINE,
        "itself",
        "share of time spent deciding",
        "%",
        1.0,
        lambda lab: 100.0 * _overhead(lab),
        "paper: less than; ours: everything the manager does",
    ),
)
