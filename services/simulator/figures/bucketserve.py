"""BucketServe §V: Llama-2-13B on four A100-40GB, against UELLM and DistServe.

The paper prints its devices, its data sets and the shape of its mix, and of absolute numbers only GPU utilisation (5b)
and decoding's share of a request's time (6a, "anchors"), which all choices below meet. What is open was chosen by what
serves a baseline best or is its own design, never by a ratio; the other readings have rows of their own:

    placement    tensor parallelism 2, one prefill and one decode instance, for BucketServe and DistServe: the paper
                 takes what DistServe's authors recommend, and DistServe serves 1.6 times as much so as with one prefill
                 and three decode devices. Other placements have rows of their own
    UELLM        one model whose layers lie on the four devices, as its own deployer places it (He et al. 2024, HELR),
                 in static batches: rows that have ended compute on until the batch ends. Other readings have rows
    Mixed        Alpaca with its prompt template and LongBench cut to the model's 4,096 tokens, 9:1: its lengths have a
                 long tail (Fig. 3), and the share is not printed. 1:1 and 3:1 have rows
    offline      400 requests at second 0 (Fig. 5a, b); throughput counts prompt and output tokens
    SLO          none is printed. Alpaca: first token 0.25 s, later ones 0.1 s (DistServe's for a 13B chatbot);
                 mixed: 2.5 s and 0.15 s. Capacity is the highest rate with 80 % of requests keeping both (Fig. 5c, d)
    server rate  requests a second finished when `_OVERLOAD` times what BucketServe can serve is offered (Fig. 5e, f),
                 for five times as long: a static batch runs for most of a minute, and its requests end together
    predictions  of output lengths: normal error of 0.3 tokens for all

BucketServe and DistServe run on the variable-length path, so none of BucketServe's advantage is padding. What padding
costs is in the rows "both padded": buckets against one bucket, batches of `_PADDED_TOKENS`, with the answers of the
workload and, where prefill is what binds, with answers of `_SHORT_ANSWER` tokens at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from cohort.common.config import load_config
from cohort.common.policies.settings import placed
from cohort.common.types import Role
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, RandomArrivals
from cohort.common.workloads.changes import clip, mixture, with_slos
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import per_token
from cohort.services.simulator.core.capacity import Point, find_capacity
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.figures.figure import Figure, Kind, Lab, Paper, Standing
from cohort.services.simulator.hardware.hardware import Cluster, load_cluster, load_model

_OFFLINE_REQUESTS = 400
_CONTEXT = 4096
_PADDED_TOKENS = 4 * _CONTEXT
"""Tokens of a padded forward: with those of one prompt a long one would be alone, and no other padded to it."""
_SHORT_ANSWER = 32
_OVERLOAD = 1.3
_LONGER = 5.0


@dataclass(frozen=True, slots=True)
class _Load:
    """Mix of `long` requests of LongBench for `short` of Alpaca; `answer`: maximum tokens of an answer. Capacity is
    searched from `start_per_s` on, in windows of `online_s` of which the first sixth does not count."""

    short: float
    long: float
    slo_s: tuple[float, float]
    start_per_s: float
    answer: int = _CONTEXT
    online_s: float = 60.0


_LOADS = {
    "alpaca": _Load(1.0, 0.0, (0.25, 0.1), 64.0, online_s=18.0),
    "mixed": _Load(9.0, 1.0, (2.5, 0.15), 4.0),
    "mixed-3-1": _Load(3.0, 1.0, (2.5, 0.15), 2.0),
    "mixed-1-1": _Load(1.0, 1.0, (2.5, 0.15), 1.0),
    "mixed-short-answers": _Load(9.0, 1.0, (2.5, 0.15), 8.0, _SHORT_ANSWER),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """`devices` of each instance; `layers`: one instance, its layers on all four, one of them at work at a time."""

    devices: int
    roles: Mapping[Role, int]
    layers: bool = False


_PAIRS = _Place(2, {Role.PREFILL: 1, Role.DECODE: 1})
_ONE_THREE = _Place(1, {Role.PREFILL: 1, Role.DECODE: 3})
_HALVES = _Place(1, {Role.PREFILL: 2, Role.DECODE: 2})
_FOUR_MODELS = _Place(1, {Role.UNIFIED: 4})
_ONE_MODEL = _Place(4, {Role.UNIFIED: 1})
_LAYERS = _Place(1, {Role.UNIFIED: 1}, layers=True)

Overrides = Mapping[str, Mapping[str, object]]
_PADDED: Overrides = {"policies": {"iteration": "padded_prefill"}, "engine": {"max_step_tokens": _PADDED_TOKENS}}
_ONE_BUCKET: Overrides = {**_PADDED, "experiment": {"bucketserve": {"max_buckets": 1}}}
_STATIC: Overrides = placed({"baselines": {"padded": True, "static_batches": True}})
_RECTANGLES: Overrides = placed({"baselines": {"padded": True, "static_batches": True, "rectangular_kv": True}})


@dataclass(frozen=True, slots=True)
class _System:
    preset: str
    place: _Place = _PAIRS
    over: Overrides | None = None


_SYSTEMS = {
    "bucketserve": _System("bucketserve"),
    "bucketserve-1p3d": _System("bucketserve", _ONE_THREE),
    "bucketserve-2p2d": _System("bucketserve", _HALVES),
    "bucketserve-padded": _System("bucketserve", over=_PADDED),
    "first-come-padded": _System("bucketserve", over=_ONE_BUCKET),
    "distserve": _System("baseline-distserve"),
    "distserve-1p3d": _System("baseline-distserve", _ONE_THREE),
    "distserve-2p2d": _System("baseline-distserve", _HALVES),
    "uellm": _System("baseline-uellm", _LAYERS, _STATIC),
    "uellm-rectangles": _System("baseline-uellm", _LAYERS, _RECTANGLES),
    "uellm-leaving": _System("baseline-uellm", _LAYERS),
    "uellm-four": _System("baseline-uellm", _FOUR_MODELS, _STATIC),
    "uellm-tensor": _System("baseline-uellm", _ONE_MODEL, _STATIC),
}


def _workload(name: str, arrivals: Arrivals, count: int, seed: int) -> Workload:
    load = _LOADS[name]
    alpaca = paper_workload("bucketserve-alpaca", AllAtOnce(), count=count, seed=seed)
    parts = [(load.short, clip(alpaca, max_output=load.answer))]
    if load.long:
        longbench = paper_workload("bucketserve-longbench", AllAtOnce(), count=count, seed=seed)
        parts.append((load.long, clip(longbench, max_output=load.answer, max_total=_CONTEXT)))
    return with_slos(mixture(name, parts, arrivals, count=count, seed=seed), per_token(*load.slo_s))


def _simulate(name: str, workload: Workload, options: SimOptions) -> SimReport:
    system, model = _SYSTEMS[name], load_model("llama-2-13b")
    place = system.place
    count, given = 4 // place.devices, {"stack": "graphs", "tensor_parallel": place.devices}
    cluster = _pooled() if place.layers else load_cluster(f"a100-40:{count}", given)
    # vLLM's rule: nine tenths of the devices hold weights, workspace and KV.
    of_device = int(0.9 * cluster.device.memory_bytes) - cluster.device_reserve_bytes
    overrides: dict[str, Mapping[str, object]] = {
        "engine": {"max_rows": 256, "max_step_tokens": _CONTEXT, "prefill_chunk": _CONTEXT},
        "kv": {"memory_bytes": place.devices * of_device - model.weights_total_bytes, "prefix_caching": False},
    }
    for section, changed in (system.over or {}).items():
        overrides[section] = {**overrides.get(section, {}), **changed}
    config = load_config(preset=system.preset, overrides=overrides)
    return simulate(config, cluster, model, workload, options, place.roles)


def _pooled() -> Cluster:
    """Return four devices that hold one model: the memory of all, the speed of the one whose turn it is. Traffic
    between them (a few kilobytes per row and layer boundary) is left out, in the baseline's favour."""
    cluster = load_cluster("a100-40:1", {"stack": "graphs"})
    memory = 4 * cluster.device.memory_bytes - 3 * cluster.device_reserve_bytes
    return msgspec.structs.replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def _offline(lab: Lab, system: str, name: str) -> SimReport:
    options = lab.options(predictor="noisy", predictor_sigma=0.3)
    return lab.run(
        ("offline", system, name),
        lambda: _simulate(system, _workload(name, AllAtOnce(), _OFFLINE_REQUESTS, lab.seed), options),
    )


def _throughput(lab: Lab, system: str, name: str) -> float:
    overall = _offline(lab, system, name).overall
    return overall.prompt_tokens_per_s + overall.output_tokens_per_s


def _online(lab: Lab, system: str, name: str, rate: float, longer: float = 1.0) -> SimReport:
    window_s = longer * _LOADS[name].online_s
    options = lab.options(predictor="noisy", predictor_sigma=0.3, warmup_s=window_s / 6.0, horizon_s=window_s)
    count = round(rate * window_s * 1.2) + 20
    return lab.run(
        ("online", system, name, rate, longer),
        lambda: _simulate(system, _workload(name, RandomArrivals(rate), count, lab.seed), options),
    )


def _capacity(lab: Lab, system: str, name: str) -> float:
    """Find the highest rate at which 80 % keep their SLO."""

    def at_rate(rate: float) -> Point:
        slo = _online(lab, system, name, rate).overall.slo
        return Point(rate, slo.kept_of_sent if slo else 0.0)

    return find_capacity(at_rate, _LOADS[name].start_per_s, 0.8, tolerance=0.06).rate_per_s


def _served(lab: Lab, system: str, name: str) -> float:
    """Return the requests a second that leave when more come than any of the systems can serve."""
    rate = _OVERLOAD * _online(lab, "bucketserve", name, 4 * _LOADS[name].start_per_s).overall.requests_per_s
    return _online(lab, system, name, rate, _LONGER).overall.requests_per_s


def _line(lab: Lab, name: str) -> float:
    """Return the requests served over those offered, at the rate at which DistServe is full."""
    rate = _served(lab, "distserve", name)
    return _online(lab, "bucketserve", name, rate, _LONGER).overall.requests_per_s / rate


def _overhead(lab: Lab) -> float:
    """B11 · Return the measured wall-clock time of everything the manager decides, over the time that is served."""
    report = _offline(lab, "bucketserve", "mixed")
    return report.measured.manager_events * report.measured.manager_mean_us * 1e-6 / report.duration_s


def _utilisation(lab: Lab, name: str) -> float:
    instances = _offline(lab, "bucketserve", name).instances
    return 100.0 * sum(instance.busy for instance in instances) / len(instances)


def _decoding(lab: Lab, name: str) -> float:
    """Return the share of a request's time after its first token, at half of the rate served at most."""
    rate = 0.5 * _online(lab, "bucketserve", name, 4 * _LOADS[name].start_per_s).overall.requests_per_s
    overall = _online(lab, "bucketserve", name, rate).overall
    if overall.ttft_ms is None or overall.jct_ms is None:
        return math.nan
    return 100.0 * (1.0 - overall.ttft_ms.mean / overall.jct_ms.mean)


_THROUGHPUT, _RATE, _SERVER = "throughput", "rate at 80 % attainment", "server rate"


_row = Paper("bucketserve", "BucketServe").row


def _ratio(
    figure: str,
    name: str,
    other: str,
    metric: str,
    paper: float,
    note: str = "",
    ours: str = "bucketserve",
    standing: Standing = Standing.READING,
) -> Figure:
    of = {_THROUGHPUT: _throughput, _RATE: _capacity, _SERVER: _served}[metric]

    def measure(lab: Lab) -> float:
        found, theirs = (of(lab, system, name) for system in (ours, other))
        return found / theirs if theirs else math.nan

    id_ = f"{figure}-{name}-{other}"
    if ours != "bucketserve":
        id_ += f"-by-{ours.removeprefix('bucketserve-')}"
    workload = _WORKLOADS[name] + (", offline" if metric == _THROUGHPUT else "")
    return _row(id_, workload, other, metric, "x", paper, measure, note, standing)


_WORKLOADS = {
    "alpaca": "Alpaca",
    "mixed": "Alpaca + LongBench 9:1",
    "mixed-3-1": "Alpaca + LongBench 3:1",
    "mixed-1-1": "Alpaca + LongBench 1:1",
    "mixed-short-answers": f"Alpaca + LongBench 9:1, answers of {_SHORT_ANSWER} at most",
}
_MIXES = ("mixed-3-1", "mixed-1-1")
_HELR = "one model over four devices, one at work at a time, in static batches, as UELLM"
_UNPAGED = "the same, its cache one rectangle a batch"
_LEAVING = "the same without static batches: ended rows leave"
_FOUR = "four models, one a device, static batches"
_TENSOR = "one model, tensor parallelism 4, static batches"
_BOTH_PADDED = "both padded: buckets against one bucket"
_CLAIM = Standing.CLAIM
_OTHER_UELLM = (
    ("uellm-rectangles", _UNPAGED),
    ("uellm-leaving", _LEAVING),
    ("uellm-four", _FOUR),
    ("uellm-tensor", _TENSOR),
)


def _decoding_figure(name: str) -> Figure:
    standing = Standing.READING if name in _MIXES else Standing.CLAIM
    note = "paper: about; ours: at half of the rate served at most"
    id_, metric, where = f"6a-decoding-{name}", "decoding over a request's time", "Fig. 6a, anchors"
    measure = partial(_decoding, name=name)
    return _row(id_, _WORKLOADS[name], "itself", metric, "%", 90.0, measure, note, standing, where=where)


FIGURES: tuple[Figure, ...] = (
    _ratio("5a", "mixed", "uellm", _THROUGHPUT, 3.58, _HELR, standing=_CLAIM),
    *(_ratio("5a", "mixed", other, _THROUGHPUT, 3.58, note) for other, note in _OTHER_UELLM),
    *(_ratio("5a", mix, "uellm", _THROUGHPUT, 3.58, _HELR) for mix in _MIXES),
    _ratio("5a", "mixed", "distserve", _THROUGHPUT, 1.31, "the paper's best case", standing=_CLAIM),
    *(_ratio("5a", mix, "distserve", _THROUGHPUT, 1.31) for mix in _MIXES),
    _ratio("5a", "mixed", "distserve-1p3d", _THROUGHPUT, 1.31, "one and three", "bucketserve-1p3d"),
    _ratio("5a", "mixed-1-1", "distserve-1p3d", _THROUGHPUT, 1.31, "one and three", "bucketserve-1p3d"),
    _ratio("5a", "mixed", "distserve-2p2d", _THROUGHPUT, 1.31, "two and two", "bucketserve-2p2d"),
    _ratio("5a", "mixed", "first-come-padded", _THROUGHPUT, 1.31, _BOTH_PADDED, "bucketserve-padded"),
    _ratio("5a", "mixed-short-answers", "first-come-padded", _THROUGHPUT, 1.31, _BOTH_PADDED, "bucketserve-padded"),
    _row(
        "5b-utilisation",
        f"{_WORKLOADS['mixed']}, offline",
        "itself",
        "GPU utilisation",
        "%",
        81.66,
        lambda lab: _utilisation(lab, "mixed"),
        "ours: share of time in iterations, mean of all instances",
    ),
    _ratio("5c", "alpaca", "distserve", _RATE, 1.37, standing=_CLAIM),
    _ratio("5c", "alpaca", "first-come-padded", _RATE, 1.37, _BOTH_PADDED, "bucketserve-padded"),
    _ratio("5d", "mixed", "distserve", _RATE, 1.93, standing=_CLAIM),
    *(_ratio("5d", mix, "distserve", _RATE, 1.93) for mix in _MIXES),
    _ratio("5d", "mixed-1-1", "distserve-1p3d", _RATE, 1.93, "one and three", "bucketserve-1p3d"),
    _ratio("5d", "mixed", "first-come-padded", _RATE, 1.93, _BOTH_PADDED, "bucketserve-padded"),
    _ratio("5d", "mixed-short-answers", "first-come-padded", _RATE, 1.93, _BOTH_PADDED, "bucketserve-padded"),
    _ratio("5e", "alpaca", "uellm", _SERVER, 1.975, _HELR, standing=_CLAIM),
    *(_ratio("5e", "alpaca", other, _SERVER, 1.975, note) for other, note in _OTHER_UELLM),
    _ratio("5f", "mixed", "distserve", _SERVER, 1.4, standing=_CLAIM),
    _ratio("5f", "mixed-short-answers", "first-come-padded", _SERVER, 1.4, _BOTH_PADDED, "bucketserve-padded"),
    _ratio("5f", "mixed", "uellm", _SERVER, 3.47, _HELR, standing=_CLAIM),
    *(_ratio("5f", "mixed", other, _SERVER, 3.47, note) for other, note in _OTHER_UELLM),
    *(_ratio("5f", mix, "uellm", _SERVER, 3.47, _HELR) for mix in _MIXES),
    _row(
        "5f-mixed-line",
        _WORKLOADS["mixed"],
        "itself",
        "served over offered",
        "x",
        1.0,
        lambda lab: _line(lab, "mixed"),
        "on y = x where DistServe is full; ours: a window of 250 s",
        kind=Kind.VALUE,
    ),
    *(_decoding_figure(name) for name in ("alpaca", "mixed", *_MIXES)),
    _row(
        "6a-overhead",
        f"{_WORKLOADS['mixed']}, offline",
        "itself",
        "share of time spent deciding",
        "%",
        1.0,
        lambda lab: 100.0 * _overhead(lab),
        "ours: everything the manager does, wall time of the machine that simulated",
        kind=Kind.AT_MOST,
    ),
)
