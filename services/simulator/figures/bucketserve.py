"""BucketServe §V: Llama-2-13B on four A100-40GB, against UELLM (four colocated) and DistServe.

What the paper leaves open, and what is taken here for all systems alike:

    Mixed        half Alpaca with its prompt template, half LongBench cut to the model's 4,096 tokens
    placement    one prefill and three decode workers for BucketServe and DistServe: the best for DistServe here, since
                 decode memory is what runs out (a 13B model leaves 10 GB of KV on such a device)
    offline      400 requests at second 0 (Fig. 5a, b); throughput counts prompt and output tokens
    SLO          none is printed. Alpaca: first token 0.25 s, later ones 0.1 s (DistServe's for a 13B chatbot);
                 mixed: 2.5 s and 0.15 s. Capacity is the highest rate with 80 % of requests keeping both (Fig. 5c, d)
    server rate  requests a second finished when `_OVERLOAD` times what BucketServe can serve is offered (Fig. 5e, f)
    predictions  of output lengths: log-normal error of sigma 0.3 for all

The baselines are `baseline-uellm` (padded batches) and `baseline-distserve` (variable length). BucketServe runs on the
variable-length path too, so none of its advantage over DistServe is padding: see docs/papers.md.
"""

from __future__ import annotations

import math

from cohort.common.config import load_config
from cohort.common.types import Role
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, RandomArrivals
from cohort.common.workloads.changes import clip, mixture, promise
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import per_token
from cohort.services.simulator.cluster import SimOptions
from cohort.services.simulator.figures.figure import Figure, Lab
from cohort.services.simulator.hardware import load_cluster, load_model
from cohort.services.simulator.report import SimReport
from cohort.services.simulator.run import find_capacity, simulate

_OFFLINE_REQUESTS = 400
_ONLINE_S = 60.0
_WARMUP_S = 10.0
_CONTEXT = 4096
_OVERLOAD = 1.3
_SLOS = {"alpaca": per_token(0.25, 0.1), "mixed": per_token(2.5, 0.15)}
_START_PER_S = {"alpaca": 16.0, "mixed": 2.0}
_ROLES = {"baseline-uellm": {Role.UNIFIED: 4}}
_P_AND_D = {Role.PREFILL: 1, Role.DECODE: 3}


def _workload(name: str, arrivals: Arrivals, count: int) -> Workload:
    alpaca = paper_workload("bucketserve-alpaca", AllAtOnce(), count=count)
    if name == "alpaca":
        found = mixture("alpaca", [(1.0, alpaca)], arrivals, count=count)
    else:
        long = clip(paper_workload("bucketserve-longbench", AllAtOnce(), count=count), max_total=_CONTEXT)
        found = mixture("mixed", [(1.0, alpaca), (1.0, long)], arrivals, count=count)
    return promise(found, _SLOS[name])


def _simulate(preset: str, workload: Workload, options: SimOptions) -> SimReport:
    cluster, model = load_cluster("a100-40:4"), load_model("llama-2-13b")
    kv_bytes = int(0.9 * cluster.device.memory_bytes) - model.weights_total_bytes - cluster.device_reserve_bytes
    config = load_config(preset=preset, overrides={
        "engine": {"max_rows": 256, "max_step_tokens": _CONTEXT, "prefill_chunk": _CONTEXT},
        "kv": {"memory_bytes": kv_bytes, "prefix_caching": False},
    })  # fmt: skip
    return simulate(config, cluster, model, workload, options, _ROLES.get(preset, _P_AND_D))


def _offline(lab: Lab, preset: str) -> SimReport:
    options = SimOptions(predictor="noisy", predictor_sigma=0.3)
    return lab.run(
        ("offline", preset), lambda: _simulate(preset, _workload("mixed", AllAtOnce(), _OFFLINE_REQUESTS), options)
    )


def _throughput(lab: Lab, preset: str) -> float:
    overall = _offline(lab, preset).overall
    return overall.prompt_tokens_per_s + overall.output_tokens_per_s


def _online(lab: Lab, preset: str, name: str, rate: float) -> SimReport:
    options = SimOptions(
        predictor="noisy", predictor_sigma=0.3, warmup_s=_WARMUP_S, horizon_s=_ONLINE_S,
    )  # fmt: skip
    count = round(rate * _ONLINE_S * 1.2) + 20
    return lab.run(
        ("online", preset, name, rate),
        lambda: _simulate(preset, _workload(name, RandomArrivals(rate), count), options),
    )


def _capacity(lab: Lab, preset: str, name: str) -> float:
    """The highest rate at which 80 % keep their promise."""
    found = find_capacity(
        lambda rate: _online(lab, preset, name, rate), _START_PER_S[name], 0.8, tolerance=0.06,
    )  # fmt: skip
    return found.rate_per_s


def _served(lab: Lab, preset: str, name: str) -> float:
    """Requests a second that leave when more come than any of the systems can serve."""
    rate = _OVERLOAD * _online(lab, "bucketserve", name, 4 * _START_PER_S[name]).overall.requests_per_s
    return _online(lab, preset, name, rate).overall.requests_per_s


def _overhead(lab: Lab) -> float:
    """B11 · measured wall-clock time of everything the manager decides, over the time that is served."""
    report = _offline(lab, "bucketserve")
    return report.measured.manager_events * report.measured.manager_mean_us * 1e-6 / report.duration_s


def _utilisation(lab: Lab) -> float:
    instances = _offline(lab, "bucketserve").instances
    return 100.0 * sum(instance.busy for instance in instances) / len(instances)


def _ratio(figure: str, name: str, workload: str, other: str, metric: str, paper: float, note: str = "") -> Figure:
    def measure(lab: Lab) -> float:
        match metric:
            case "throughput":
                ours, theirs = _throughput(lab, "bucketserve"), _throughput(lab, other)
            case "rate at 80 % attainment":
                ours, theirs = _capacity(lab, "bucketserve", name), _capacity(lab, other, name)
            case _:
                ours, theirs = _served(lab, "bucketserve", name), _served(lab, other, name)
        return ours / theirs if theirs else math.nan

    id_ = f"bucketserve-{figure.lower()}-{name}-{other.removeprefix('baseline-')}"
    return Figure(id_, "bucketserve", f"BucketServe Fig. {figure}", workload, other, metric, "x", paper, measure, note)


_MIXED = "Alpaca + LongBench"

FIGURES: tuple[Figure, ...] = (
    _ratio("5a", "mixed", f"{_MIXED}, offline", "baseline-uellm", "throughput", 3.58, "the paper's best case"),
    _ratio("5a", "mixed", f"{_MIXED}, offline", "baseline-distserve", "throughput", 1.31, "the paper's best case"),
    Figure("bucketserve-5b-utilisation", "bucketserve", "BucketServe Fig. 5b", f"{_MIXED}, offline", "itself",
           "GPU utilisation", "%", 81.66, _utilisation, "ours: share of time in iterations, mean of all four"),
    _ratio("5c", "alpaca", "Alpaca", "baseline-distserve", "rate at 80 % attainment", 1.37),
    _ratio("5d", "mixed", _MIXED, "baseline-distserve", "rate at 80 % attainment", 1.93),
    _ratio("5e", "alpaca", "Alpaca", "baseline-uellm", "server rate", 1.975),
    _ratio("5f", "mixed", _MIXED, "baseline-distserve", "server rate", 1.4),
    _ratio("5f", "mixed", _MIXED, "baseline-uellm", "server rate", 3.47),
    Figure("bucketserve-6a-overhead", "bucketserve", "BucketServe Fig. 6a", f"{_MIXED}, offline", "itself",
           "share of time spent deciding", "%", 1.0, lambda lab: 100.0 * _overhead(lab),
           "paper: less than; ours: everything the manager does"),
)  # fmt: skip
