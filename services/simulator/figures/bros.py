"""BROS §7: real-time requests over best-effort ones, against vLLM (FCFS) and round robin.

What the paper prints, and is taken from it: models, devices, tensor parallelism, 600 s, the lengths of Table 2, TTFT
0.4 s and TPOT 0.2 s, best-effort requests in batches, the next when the last is complete, PyTorch's operators under Ray
(`eager`). What it leaves open was chosen once for all of its figures by its own baselines (Fig. 11, "anchors"), never
by a ratio; no anchor depends on what BROS does:

    rates         the pictures end at 15/s; 15 cases of three models are five rates each: `_RATES`
    best effort   `_BATCH` requests at a time, by what vLLM and round robin keep of TTFT; Fig. 11 has other sizes beside
    vLLM          `baseline-vllm`, its scheduler of then: whole prompts first; preemption by swapping
    round robin   `baseline-round-robin`, recomputing, without shared blocks, as the paper's
    BROS          as printed: no request leads an iteration because it starves, which is a rule of ours
    ratios        the mean of the cases' ratios: 11.75 times the 10.55 % that round robin keeps would be 124 %, so the
                  paper's are no ratios of means. Cases in which the other keeps nothing have none
    attainment    of all requests sent: one that is unserved after 600 s has missed both targets
    latency       of finished requests, as the paper says; and with those unserved at the end, as if they ended then
    ablation      without shared blocks the same packing over paged blocks; a request that fails to get one is computed
                  again itself (§7.4.1). Drops of others (R11) are of the management that is off; a reading has them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from cohort.common.config import load_config
from cohort.common.workloads import slos
from cohort.common.workloads.arrivals import AllAtOnce, RandomArrivals
from cohort.common.workloads.changes import with_class, with_slos
from cohort.common.workloads.items import ClosedLoopPart, Workload
from cohort.common.workloads.papers import paper_workload
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.figures.figure import Figure, Kind, Lab, Paper, Standing
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

_RATES = (3.0, 6.0, 9.0, 12.0, 15.0)
_BATCH = 192
_SIZES = (128, 256)
"""Other best-effort batches among which `_BATCH` was chosen."""
_END_S = 600.0
_NEVER_S = 1e9
_KEEPS = 0.005
"""Share of targets below which a system keeps nothing: the first requests meet an empty device."""
_MODELS = {"opt-30b": ("a100-40:1", 4), "llama-3-70b": ("a100-80:1", 8), "opt-13b": ("a100-40:1", 2)}
_SHAPES = {"sharegpt": "bros-sharegpt", "lmsys": "bros-lmsys"}
_HOST_BYTES = 64 << 30
_ONE = "opt-30b"


@dataclass(frozen=True, slots=True)
class _System:
    preset: str
    over: Mapping[str, Mapping[str, object]]


_AS_PRINTED: Mapping[str, Mapping[str, object]] = {"bros": {"rt_starvation_s": _NEVER_S}}
_UNSHARED: Mapping[str, Mapping[str, object]] = {
    **_AS_PRINTED,
    "policies": {"allocation": "paged"},
    "engine": {"preemption": "recompute"},
}
_UNMANAGED: Mapping[str, Mapping[str, object]] = {**_UNSHARED, "experiment": {"bros": {"drops": False}}}
_SYSTEMS = {
    "bros": _System("bros", _AS_PRINTED),
    "bros-unshared": _System("bros", _UNSHARED),
    "bros-unmanaged": _System("bros", _UNMANAGED),
    "vllm": _System("baseline-vllm", {}),
    "rr": _System("baseline-round-robin", {}),
}


@dataclass(frozen=True, slots=True)
class _Case:
    shape: str
    model: str
    rate: float
    batch: int = _BATCH


def _cases(shape: str, models: Iterable[str] = tuple(_MODELS), batch: int = _BATCH) -> list[_Case]:
    return [_Case(shape, model, rate, batch) for model in models for rate in _RATES]


def _workload(case: _Case, seed: int) -> Workload:
    real_time = paper_workload(_SHAPES[case.shape], RandomArrivals(case.rate), duration_s=_END_S, seed=seed)
    drawn = paper_workload("bros-best-effort", AllAtOnce(), count=40 * case.batch, seed=seed)
    users = ClosedLoopPart(case.batch, with_class(drawn, "be").items, until_s=_END_S, in_batches=True)
    return with_slos(replace(real_time, closed_loop=(users,)), slos.bros)


def _run(lab: Lab, name: str, case: _Case) -> SimReport:
    def simulation() -> SimReport:
        system, (cluster, devices) = _SYSTEMS[name], _MODELS[case.model]
        overrides: dict[str, dict[str, object]] = {
            "engine": {"max_rows": 256, "max_step_tokens": 2048, "prefill_chunk": 2048},
            "kv": {"prefix_caching": False, "host_memory_bytes": _HOST_BYTES},
        }
        for section, options in system.over.items():
            overrides[section] = {**overrides.get(section, {}), **options}
        return simulate(
            load_config(preset=system.preset, overrides=overrides),
            load_cluster(cluster, {"tensor_parallel": devices, "stack": "eager"}),
            load_model(case.model),
            _workload(case, lab.seed),
            lab.options(horizon_s=_END_S),
        )

    return lab.run((name, case), simulation)


Metric = Callable[[SimReport], float]


def _finished(report: SimReport) -> float:
    normalised = report.by_class["rt"].normalised_ms
    return normalised.mean if normalised else math.nan


def _latency(report: SimReport) -> float:
    to_end_ms = report.by_class["rt"].normalised_to_end_ms
    return math.nan if to_end_ms is None else to_end_ms


def _best_effort(report: SimReport) -> float:
    return report.by_class["be"].requests_per_s if "be" in report.by_class else 0.0


def _ttft(report: SimReport) -> float:
    slo = report.by_class["rt"].slo
    return slo.ttft * slo.judged / slo.sent if slo else math.nan


def _tpot(report: SimReport) -> float:
    slo = report.by_class["rt"].slo
    return slo.tpot * slo.judged / slo.sent if slo else math.nan


def _change(lab: Lab, metric: Metric, other: str, cases: list[_Case]) -> float:
    """Return by how many percent BROS differs from the other, mean over the cases. NaN: the other serves nothing."""
    pairs = [(metric(_run(lab, "bros", case)), metric(_run(lab, other, case))) for case in cases]
    found = [100.0 * (ours / theirs - 1.0) for ours, theirs in pairs if theirs > 0.0]
    return fmean(found) if found else math.nan


def _times(lab: Lab, metric: Metric, other: str, cases: list[_Case]) -> float:
    """Return the attainment of BROS over the other's, mean over the cases in which the other keeps any; NaN if none."""
    pairs = [(metric(_run(lab, "bros", case)), metric(_run(lab, other, case))) for case in cases]
    found = [ours / theirs for ours, theirs in pairs if theirs >= _KEEPS]
    return fmean(found) if found else math.nan


def _figure(number: int, shape: str, what: str = "") -> str:
    return f"Fig. {number}{what}, {_NAMES_OF_SETS[shape]}"


_row = Paper("bros", "BROS").row
_NAMES_OF_SETS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
_WORKLOADS = {"sharegpt": "ShareGPT + batches", "lmsys": "LMSYS-Chat-1M + batches"}
_BASELINES = {"vllm": "baseline-vllm", "rr": "baseline-round-robin"}
_NAMES = {"bros": "itself", **_BASELINES}

_HEADLINES: dict[tuple[str, str], tuple[float, float, float, float]] = {
    # (shape, other): change of normalised latency and of best-effort throughput in %, TTFT and TPOT attainment ratio
    ("sharegpt", "vllm"): (-74.20, -11.29, 36.38, 1.73),
    ("sharegpt", "rr"): (-54.31, -8.80, 11.75, 1.47),
    ("lmsys", "vllm"): (-69.61, -17.67, 21.42, 2.62),
    ("lmsys", "rr"): (-25.77, -15.18, 14.23, 2.28),
}
_LATENCY, _SERVED = "normalised latency, change", "best-effort requests/s, change"
_TO_END = "with requests unserved after 600 s"
_CASES_RATIO = "mean of the cases in which the other keeps 0.5 % at least"


def _headlines(shape: str, other: str) -> list[Figure]:
    latency, best_effort, ttft, tpot = _HEADLINES[shape, other]
    name, about, cases = f"{shape}-{other}", (_WORKLOADS[shape], _BASELINES[other]), _cases(shape)
    ten, eleven = (partial(_row, where=_figure(number, shape)) for number in (10, 11))
    changed, times = partial(_change, other=other, cases=cases), partial(_times, other=other, cases=cases)
    finished, to_end = partial(changed, metric=_finished), partial(changed, metric=_latency)
    return [
        ten(f"10-latency-{name}", *about, _LATENCY, "%", latency, finished, "finished requests, as the paper's"),
        ten(f"10-latency-to-end-{name}", *about, _LATENCY, "%", latency, to_end, _TO_END, Standing.READING),
        ten(f"10-be-{name}", *about, _SERVED, "%", best_effort, partial(changed, metric=_best_effort)),
        eleven(f"11-ttft-{name}", *about, "TTFT attainment", "x", ttft, partial(times, metric=_ttft), _CASES_RATIO),
        eleven(f"11-tpot-{name}", *about, "TPOT attainment", "x", tpot, partial(times, metric=_tpot), _CASES_RATIO),
    ]


_ANCHORS: tuple[tuple[str, str, str, float], ...] = (
    # What the paper prints of the systems alone: metric, system, shape, mean over its 15 cases in %
    ("ttft", "vllm", "sharegpt", 1.28),
    ("ttft", "rr", "sharegpt", 10.55),
    ("tpot", "rr", "sharegpt", 47.34),
    ("tpot", "bros", "sharegpt", 65.49),
    ("tpot", "rr", "lmsys", 42.81),
    ("tpot", "bros", "lmsys", 75.38),
)
_METRICS: Mapping[str, Metric] = {"ttft": _ttft, "tpot": _tpot}


def _anchor(metric: str, system: str, shape: str, paper: float, batch: int = 0) -> Figure:
    """Make a row of what the paper prints of one system. `batch`: another size than the chosen one. What vLLM keeps,
    and round robin on ShareGPT, chose it."""
    cases = _cases(shape, batch=batch or _BATCH)

    def measure(lab: Lab) -> float:
        return 100.0 * fmean(_METRICS[metric](_run(lab, system, case)) for case in cases)

    id_ = f"11-kept-{metric}-{system}-{shape}" + (f"-{batch}" if batch else "")
    figure = _figure(11, shape, ", anchors by batch size" if batch else ", anchors")
    note = f"{batch} best-effort requests at a time" if batch else ""
    chose = system != "bros" and shape == "sharegpt"
    standing = Standing.READING if batch else Standing.ANCHOR if chose else Standing.CLAIM
    about = (_WORKLOADS[shape], _NAMES[system], f"{metric.upper()} kept of all sent")
    return _row(id_, *about, "%", paper, measure, note, standing, where=figure)


def _of_model(shape: str, other: str, model: str) -> list[Figure]:
    """Make the rows of one model, of which the paper prints no number but that latency falls."""
    name, mean = f"{shape}-{other}-{model}", _HEADLINES[shape, other][1]
    about = (f"{_WORKLOADS[shape]}, {model}", _BASELINES[other])
    row = partial(_row, where=_figure(10, shape, " by model"))
    changed = partial(_change, other=other, cases=_cases(shape, (model,)))
    latency, served = partial(changed, metric=_finished), partial(changed, metric=_best_effort)
    note = "paper: its mean of all models"
    return [
        row(f"10-model-latency-{name}", *about, _LATENCY, "%", 0.0, latency, kind=Kind.LESS),
        row(f"10-model-be-{name}", *about, _SERVED, "%", mean, served, note, Standing.UNCOMPARED),
    ]


_SHARED = ("ShareGPT + batches, OPT-30B, 10/s", "without shared blocks")


def _ablation(name: str, paper: float, of: Metric, *, drops: bool = False) -> Figure:
    """Make a row of Fig. 13. `drops`: unshared, best-effort requests lose theirs to real-time ones (R11)."""

    def measure(lab: Lab) -> float:
        case, other = _Case("sharegpt", _ONE, 10.0), "bros-unshared" if drops else "bros-unmanaged"
        with_, without = (of(_run(lab, each, case)) for each in ("bros", other))
        return with_ / without if without else math.inf

    id_, attained = f"13-{name}{'-drops' if drops else ''}", f"{name.upper()} attainment"
    note = "without them best-effort requests are dropped for real-time ones" if drops else "paper: 10/s"
    return _row(id_, *_SHARED, attained, "x", paper, measure, note, Standing.READING if drops else Standing.CLAIM)


def _recomputed(lab: Lab) -> float:
    """Return the percentage of recomputed requests among those that ended."""
    report = _run(lab, "bros-unmanaged", _Case("sharegpt", _ONE, 10.0))
    return 100.0 * sum(each.preemptions for each in report.instances) / max(1, report.overall.finished)


def _overhead(model: str, paper: float) -> Figure:
    """Compare the measured time of a decision with the mean iteration it decides on."""

    def measure(lab: Lab) -> float:
        report = _run(lab, "bros", _Case("sharegpt", model, 9.0))
        instance = report.instances[0]
        iteration_s = instance.busy * report.duration_s / max(1, instance.steps)
        return 100.0 * report.measured.worker_mean_us * 1e-6 / iteration_s

    id_, note = f"14-overhead-{model}", "wall time of the machine that simulated"
    head = (f"ShareGPT + batches, {model}, 9/s", "itself", "decision over iteration", "%")
    return _row(id_, *head, paper, measure, note, kind=Kind.AT_MOST)


def _of_shape(shape: str) -> list[Figure]:
    """Return the rows by model, so that an interrupted run has whole models."""
    headlines = [row for name, other in _HEADLINES if name == shape for row in _headlines(shape, other)]
    return [
        *(row for model in _MODELS for other in _BASELINES for row in _of_model(shape, other, model)),
        *sorted(headlines, key=lambda figure: figure.figure),
        *(_anchor(*anchor) for anchor in _ANCHORS if anchor[2] == shape),
    ]


FIGURES: tuple[Figure, ...] = (
    *_of_shape("sharegpt"),
    _row(
        "11-none-vllm",
        _WORKLOADS["sharegpt"],
        "baseline-vllm",
        "cases of 15 without TTFT attainment",
        "cases",
        8.0,
        lambda lab: sum(_ttft(_run(lab, "vllm", case)) < _KEEPS for case in _cases("sharegpt")),
        "ours: below 0.5 %",
        Standing.ANCHOR,
        where=_figure(11, "sharegpt", ", anchors"),
    ),
    *(
        _ablation(name, paper, of, drops=drops)
        for drops in (False, True)
        for name, paper, of in (("ttft", 1.23, _ttft), ("tpot", 1.63, _tpot))
    ),
    _row(
        "13-recomputed",
        *_SHARED,
        "requests computed again, of those that ended",
        "%",
        math.nan,
        _recomputed,
        "the paper prints none",
        Standing.UNCOMPARED,
    ),
    _overhead("opt-13b", 9.52),
    _overhead("opt-30b", 8.42),
    *_of_shape("lmsys"),
    *(
        _anchor(metric, system, shape, paper, batch)
        for batch in _SIZES
        for metric, system, shape, paper in _ANCHORS
        if shape == "sharegpt" and system != "bros"
    ),
)
