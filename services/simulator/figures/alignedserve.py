"""AlignedServe §4: OPT on H100s, against vLLM, DistServe and FastGen, and with parts switched off.

Choices that the paper leaves open, made here for all systems alike:

    devices     a prefill and a decode worker; against unified instances four devices (the paper has eight): one that
                computes prompts and three that decode, because one keeps up with three
    lengths     synthetic: 95 % short (16 to 999 tokens), 5 % long (1,000 to 8,000), outputs uniform 32 to 512;
                LongBench: its English and code tasks, each with its published mean (`longbench_workload`), prompts cut
                at the context; LongBench-like, uniform: the long ones only; ShareGPT as EcoServe prints it; Azure:
                lognormal with mean and deviation measured on the published 2023 conversation trace, or rows of the
                code trace, whose range is the one that the paper prints
    load        `_DEPTH` of `_OVERLOAD` times what DistServe's decode worker serves when more than that comes
                (`_SATURATING_PER_S`), from second 0; figures count from `_WARMUP_S` to `_END_S`. `_DEPTH` was chosen
                once, for all figures, by the mean TTFTs of Fig. 15, 1.49 and 2.54 s, when DistServe's iterations took
                10 ms of host time. With equal host time requests wait longer (LongBench: 13 s); at 0.6 they wait 3.5 s,
                but that is less than DistServe serves, and no system's throughput could be higher
    throughput  tokens that decode workers produced; tokens of answers that ended would count a batch when it is over
    P99 TPOT    of iterations, which is what the paper says it characterises: of all gaps between two tokens
    starvation  off, as where the paper measures TTFT: no threshold is printed
    kernels     decode attention "unit per row" (a long row can hold the others up) unless the note says "split KV"
                (the KV of all rows is read at the device's bandwidth, as kernels with split KV do) or "unit last" (the
                longest row's units begin when all others are done)
    rows        as many as memory holds: the paper names no other bound
    host        all systems have the device file's host time of a step and a row, which is of a published profile of
                such an engine. What the paper measures between two iterations (Fig. 11: 10 ms for DistServe, 5 ms for
                AlignedServe) is a result of it and no input here. Fig. 13 is of forwards alone: without host time
    the best    "a maximum of 1.98" is over systems and models: ours over DistServe (2.7B, 13B) and FastGen (2.7B)
    transfers   run beside iterations, unless a row says that they block: then the receiver's next iteration takes as
                much longer as the KV took to arrive (the paper's §3.4 describes such pauses)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Literal

import msgspec

from cohort.common.comparison.comparison_spec import part_trace
from cohort.common.config import Config, load_config
from cohort.common.policies.cost_model import CostModel, DecodeAttention, StepWork
from cohort.common.types import Role
from cohort.common.workloads.arrivals import AllAtOnce, RandomArrivals
from cohort.common.workloads.changes import mixture
from cohort.common.workloads.generate import FromTrace, generate
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import longbench_workload, paper_workload
from cohort.common.workloads.traces import read_trace
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.figures.figure import Figure, Kind, Lab, Paper, Standing
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

_WARMUP_S, _END_S = 30.0, 90.0
_CONTEXT = 10_240
_HOST_BYTES = 200_000_000_000
_DEPTH = 0.8
_OVERLOAD = 1.6
_SATURATING_PER_S = {
    "opt-2.7b": {"synthetic": 34.0, "longbench": 7.7, "uniform": 6.0, "sharegpt": 58.0, "azure": 31.0, "code": 40.0},
    "opt-6.7b": {"synthetic": 17.0, "longbench": 4.0, "uniform": 4.0, "sharegpt": 33.0, "azure": 16.0},
    "opt-13b": {"synthetic": 10.0, "longbench": 2.0, "uniform": 2.0, "sharegpt": 15.0, "azure": 9.0, "code": 15.0},
}
_NAMES = {
    "synthetic": "synthetic, 95 % short",
    "longbench": "LongBench by task",
    "uniform": "LongBench-like, uniform",
    "sharegpt": "ShareGPT",
    "azure": "Azure, as conversations",
    "code": "Azure, rows of the code trace",
}
_ATTENTIONS: tuple[DecodeAttention, ...] = ("split_kv", "unit_per_row", "unit_last")
_ROWS = 1024
"""Number of rows that memory does not reach with any of these lengths."""
_R_MIN = 36
"""Value of §4.1. The preset's own is in proportion to the rows of an iteration: 144 of `_ROWS`."""
_UNIFIED = {"baseline-vllm", "baseline-chunked-prefill"}
_ONE_DECODES, _THREE_DECODE = 2, 4
_NEVER_S = 1e6
_FORWARD_MS = 30.0
"""Time of Fig. 13 that more than 90 % of the aligned forwards keep, and less than 10 % of those first come, first
served."""

Part = Literal["prefetch", "aligned", "fill_memory"]


@dataclass(frozen=True, slots=True)
class _Run:
    """One simulation. `without`: parts that are off. `host`: iterations take host time; `blocks`: they wait for KV."""

    workload: str
    preset: str = "alignedserve"
    model: str = "opt-2.7b"
    attention: DecodeAttention = "unit_per_row"
    without: tuple[Part, ...] = ()
    devices: int = _ONE_DECODES
    host: bool = True
    blocks: bool = False
    starvation_s: float = _NEVER_S
    saturated: bool = False
    """Whether as much comes as `_SATURATING_PER_S` says; else the load that the figures have."""

    def report(self, lab: Lab) -> SimReport:
        return lab.run(self, lambda: self._simulate(lab))

    def config(self, kv_bytes: int) -> Config:
        return load_config(
            preset=self.preset,
            overrides={
                "engine": {"max_rows": _ROWS, "max_step_tokens": 8192, "prefill_chunk": 8192},
                "kv": {"memory_bytes": kv_bytes, "prefix_caching": False},
                "model": {"max_model_len": _CONTEXT},
                "alignedserve": {"starvation_s": self.starvation_s},
                "experiment": {"alignedserve": {"least_requests": _R_MIN, **dict.fromkeys(self.without, False)}},
            },
        )

    def _simulate(self, lab: Lab) -> SimReport:
        given = {"stack": "graphs", "decode_attention": self.attention, "host_memory_bytes": _HOST_BYTES}
        cluster, model = load_cluster(f"h100-80:{self.devices}", given), load_model(self.model)
        if not self.host:
            stack = replace(cluster.stack, step_s=0.0, row_s=0.0)
            cluster = msgspec.structs.replace(cluster, stack=stack)
        kv_bytes = int(0.9 * cluster.device.memory_bytes) - model.weights_total_bytes - cluster.device_reserve_bytes
        config = self.config(kv_bytes)
        roles = {Role.PREFILL: 1, Role.DECODE: self.devices - 1}
        if self.preset in _UNIFIED:
            roles = {Role.UNIFIED: self.devices}
        options = lab.options(horizon_s=_END_S, warmup_s=_WARMUP_S, blocking_transfers=self.blocks)
        return simulate(config, cluster, model, self.workload_at(self.rate_per_s(lab), lab.seed), options, roles)

    def rate_per_s(self, lab: Lab) -> float:
        """Return the requests that come in a second: the same for all systems of a workload and model."""
        saturating = _SATURATING_PER_S[self.model][self.workload]
        if self.saturated:
            return saturating
        alone = _Run(self.workload, _DISTSERVE, self.model, saturated=True)
        answer = fmean(item.output_tokens for item in alone.workload_at(saturating, lab.seed).items)
        served = _throughput(alone.report(lab)) / answer
        return _DEPTH * _OVERLOAD * served * (self.devices - 1)

    def workload_at(self, rate: float, seed: int) -> Workload:
        arrivals, count = RandomArrivals(rate), int(rate * _END_S)
        shapes = {"sharegpt": "ecoserve-sharegpt", "azure": "alignedserve-azure", "uniform": "alignedserve-long"}
        if self.workload in shapes:
            return paper_workload(shapes[self.workload], arrivals, count=count, seed=seed)
        if self.workload == "code":
            path = part_trace("azure2023_code")
            rows = FromTrace(read_trace(path, sort=True), path.name, resample=True)
            return generate(self.workload, rows, arrivals, count=count, seed=seed)
        if self.workload == "longbench":
            return longbench_workload(arrivals, count=count, longest=_CONTEXT - 600, seed=seed)
        short = paper_workload("alignedserve-short", AllAtOnce(), count=count, seed=seed)
        long = paper_workload("alignedserve-long", AllAtOnce(), count=count, seed=seed)
        return mixture("mixed", [(0.95, short), (0.05, long)], arrivals, count=count, seed=seed)


def _throughput(report: SimReport) -> float:
    return sum(each.decode_tokens for each in report.instances) / (_END_S - _WARMUP_S)


def _p99_tpot(report: SimReport) -> float:
    """Return the P99 of gaps between tokens: the paper's is of iterations. Requests' means include the pool."""
    return report.overall.tbt_ms.p99 if report.overall.tbt_ms is not None else math.nan


def _note(run: _Run) -> str:
    """Name what differs from the plain run."""
    kernels = "" if run.attention == "unit_per_row" else run.attention.replace("_", " ").replace("kv", "KV")
    blocked = "transfers block" if run.blocks else ""
    bound = f"no request waits beyond {run.starvation_s:g} s" if run.starvation_s < _NEVER_S else ""
    held = "joining up to B_max only" if "fill_memory" in run.without else ""
    return "; ".join(part for part in (kernels, blocked, held, bound) if part)


def _of(other: str, run: _Run) -> _Run:
    """Return the other system's run for ours."""
    return replace(run, preset=other, without=(), starvation_s=_NEVER_S)


def _over(lab: Lab, other: str, run: _Run, *, latency: bool = False) -> float:
    """Return our throughput over the other's, or the other's P99 TPOT over ours: more is better."""
    ours, theirs = run.report(lab), _of(other, run).report(lab)
    return _p99_tpot(theirs) / _p99_tpot(ours) if latency else _throughput(ours) / _throughput(theirs)


_row = Paper("alignedserve", "AlignedServe").row


def _gain(
    figure: str,
    other: str,
    paper: float,
    run: _Run,
    *,
    latency: bool = False,
    note: str = "",
    standing: Standing = Standing.READING,
) -> Figure:
    measure = partial(_over, other=other, run=run, latency=latency)

    kernels = {"unit_per_row": "unit", "split_kv": "split", "unit_last": "last"}[run.attention]
    changed = {"blocks": run.blocks, "held": bool(run.without), "bounded": run.starvation_s < _NEVER_S}
    marks = "".join(f"-{mark}" for mark, on in changed.items() if on)
    against = f"{other.removeprefix('baseline-')}-{'tpot' if latency else 'rate'}"
    id_ = f"{figure}-{run.workload}-{against}-{kernels}-{run.model}{marks}"
    note = "; ".join(part for part in (_note(run), note) if part)
    kind = Kind.MORE if paper == 1.0 else None
    workload, metric = f"{_NAMES[run.workload]}, {run.model}", _TIMES_LOWER if latency else _DECODED
    return _row(id_, workload, other, metric, "x", paper, measure, note, standing, kind)


def _best(workload: str, paper: float) -> Figure:
    """Compare with Fig. 8's text, which prints the largest factor of each data set."""
    runs = [
        (_DISTSERVE, _Run(workload)),
        (_DISTSERVE, _Run(workload, model="opt-13b")),
        (_FASTGEN, _Run(workload, devices=_THREE_DECODE)),
    ]

    def measure(lab: Lab) -> float:
        return max(_over(lab, other, run) for other, run in runs)

    note = "of DistServe (opt-2.7b, opt-13b) and FastGen (opt-2.7b)"
    others = "the others, the largest factor"
    return _row(f"8-{workload}-best", _NAMES[workload], others, _DECODED, "x", paper, measure, note)


def _tpot_range(id_: str, choose: Callable[[list[float]], float], paper: float) -> Figure:
    """Compare with Fig. 9's text, which prints the least and the most over systems and models."""
    runs = [
        (_DISTSERVE, _SYNTHETIC),
        (_DISTSERVE, replace(_SYNTHETIC, model="opt-13b")),
        (_VLLM, replace(_SYNTHETIC, devices=_THREE_DECODE)),
        (_FASTGEN, replace(_SYNTHETIC, devices=_THREE_DECODE)),
    ]

    def measure(lab: Lab) -> float:
        return choose([_over(lab, other, run, latency=True) for other, run in runs])

    note = "of DistServe (opt-2.7b, opt-13b), vLLM and FastGen (opt-2.7b)"
    id_, others = f"9-synthetic-{id_}", f"the others, the {id_}"
    return _row(id_, _NAMES["synthetic"], others, _TIMES_LOWER, "x", paper, measure, note)


def _ablation(
    id_: str, without: str, before: _Run, after: _Run, paper: float, standing: Standing = Standing.READING
) -> Figure:
    """Compare how the throughput changes without a part, in percent."""

    def measure(lab: Lab) -> float:
        return 100.0 * (_throughput(after.report(lab)) / _throughput(before.report(lab)) - 1.0)

    workload, change = _NAMES[before.workload], "decode throughput, change"
    return _row(f"14-{id_}", workload, f"without {without}", change, "%", paper, measure, _note(before), standing)


def _forward(id_: str, run: _Run, note: str, standing: Standing = Standing.READING) -> Figure:
    """Compare with Fig. 13: more than 90 % of aligned forwards take 30 ms at most, less than 10 % of those first come,
    first served. Ours is the time that so many of the gaps between tokens keep, where iterations take no host time."""
    aligned, alone = "aligned" not in run.without, replace(run, host=False)

    def measure(lab: Lab) -> float:
        found = alone.report(lab).overall.tbt_ms
        return math.nan if found is None else found.p90 if aligned else found.p10

    workload, metric = f"{_NAMES[run.workload]}, {run.model}", f"forward of an iteration, {'P90' if aligned else 'P10'}"
    kind = Kind.AT_MOST if aligned else Kind.AT_LEAST
    return _row(f"13-{id_}", workload, "itself", metric, "ms", _FORWARD_MS, measure, note, standing, kind)


def _mixed_figure(name: str, paper: float) -> Figure:
    def measure(lab: Lab) -> float:
        reports = [each for each in _Run(name, model="opt-6.7b").report(lab).instances if each.decode_steps]
        return 100.0 * sum(each.mixed_steps for each in reports) / sum(each.decode_steps for each in reports)

    note = "ours: answers end at different times, the last keep a batch alive"
    workload, metric = f"{_NAMES[name]}, opt-6.7b", "iterations that hold more than one batch"
    return _row(f"mixed-{name}", workload, "itself", metric, "%", paper, measure, note, kind=Kind.AT_MOST, where="§4.4")


def _ttft_figure(name: str, paper: float, *, second: bool = False) -> Figure:
    """Compare the mean TTFT. The paper's includes the wait in the pool; our first token leaves before that."""

    def measure(lab: Lab) -> float:
        overall = _Run(name).report(lab).overall
        found = overall.second_ms if second else overall.ttft_ms
        return found.mean / 1000.0 if found is not None else math.nan

    if not second:
        note = "ours leaves before the wait"
        return _row(f"15-{name}", _NAMES[name], "itself", "mean TTFT", "s", paper, measure, note, Standing.READING)
    note, metric = "paper: mean TTFT; ours waits in the pool between the two", "mean time to the second token"
    # `_DEPTH` was chosen by them.
    return _row(f"15-{name}-second", _NAMES[name], "itself", metric, "s", paper, measure, note, Standing.ANCHOR)


def _deciding() -> Figure:
    def measure(lab: Lab) -> float:
        return _Run("synthetic").report(lab).measured.manager_mean_us / 1000.0

    note = "paper: to schedule an iteration, KV included, 5 ms in 95 %; ours: wall time that no iteration waits for"
    workload, metric = _NAMES["synthetic"], "deciding about batches, an event at the manager"
    return _row("11-deciding", workload, "itself", metric, "ms", 5.0, measure, note, Standing.UNCOMPARED)


# -- what alignment could gain ---------------------------------------------------------------------------------------

# A1 · Full iterations of each kind of batch, by the cost model alone: no policy, no queue, no KV transfer, memory full,
# batches of the synthetic mix drawn at random. `served alike`: short and long requests are decoded in batches of their
# own, in the shares in which they come. `short ones first`: the long ones wait for ever, as they do in the density
# first search while short ones keep coming and starvation is not handled.
_FILLED, _BATCHES, _SHORT = 0.97, 20, 0.95


def _prefixes(name: str) -> list[int]:
    """Draw prefix lengths of rows in the middle of their decoding: a random part of the answer is there."""
    random = Random(0)
    items = paper_workload(name, AllAtOnce(), count=2000).items
    return [item.prompt_tokens + random.randrange(item.output_tokens) for item in items]


def _batch(random: Random, kinds: list[tuple[float, list[int]]], most_positions: float) -> list[int]:
    """Draw rows at random until an iteration or the memory is full."""
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
    """Return the decode throughput of aligned full batches over that of mixed ones."""
    cluster, model = load_cluster("h100-80", {"stack": "graphs"}), load_model(model_name)
    cost = CostModel(model, cluster.device, cluster.stack, decode_attention=attention)
    free_bytes = 0.9 * cluster.device.memory_bytes - model.weights_total_bytes - cluster.device_reserve_bytes
    positions = _FILLED * free_bytes / model.kv_geometry(1).token_bytes
    short, long = _prefixes("alignedserve-short"), _prefixes("alignedserve-long")
    mixed = _tokens_per_s(cost, [(_SHORT, short), (1.0 - _SHORT, long)], positions)
    of_short = _tokens_per_s(cost, [(1.0, short)], positions)
    if not fair:
        return of_short / mixed
    return 1.0 / (_SHORT / of_short + (1.0 - _SHORT) / _tokens_per_s(cost, [(1.0, long)], positions)) / mixed


def _ceiling(model: str, attention: DecodeAttention, *, fair: bool) -> Figure:
    note = f"{attention.replace('_', ' ').replace('kv', 'KV')}, {'served alike' if fair else 'short ones first'}"
    id_, workload = f"ceiling-{model}-{attention}-{'alike' if fair else 'short'}", f"synthetic, 95 % short, {model}"
    metric, where = "decode throughput of full aligned batches", "Fig. 7, ceiling by the cost model"

    def measure(lab: Lab) -> float:
        return ceiling(model, attention, fair=fair)

    return _row(id_, workload, "mixed batches", metric, "x", 1.35, measure, note, Standing.UNCOMPARED, where=where)


_DECODED, _TIMES_LOWER = "decode throughput", "P99 time between tokens, times lower"
_VLLM, _DISTSERVE, _FASTGEN = "baseline-vllm", "baseline-distserve", "baseline-chunked-prefill"
_BEST = "the paper's best case"
_SYNTHETIC, _AZURE = _Run("synthetic"), _Run("azure")
_AZURE_13B = _Run("azure", model="opt-13b")
_FOUR = replace(_SYNTHETIC, devices=_THREE_DECODE)
_HELD = _Run("synthetic", model="opt-13b", without=("fill_memory",))
_SPREAD = "paper: 1.74 to 3.05 over all systems and models"

_CLAIM = Standing.CLAIM
_BLOCKED = replace(_AZURE_13B, blocks=True)

FIGURES: tuple[Figure, ...] = (
    _gain("7", _VLLM, 1.32, _FOUR, note="four devices, three of ours decode", standing=_CLAIM),
    _gain("7", _FASTGEN, 1.85, _FOUR, note="four devices, three of ours decode", standing=_CLAIM),
    _gain("7", _DISTSERVE, 1.35, _SYNTHETIC, standing=_CLAIM),
    _gain("7", _DISTSERVE, 1.35, replace(_SYNTHETIC, attention="split_kv")),
    _gain("7", _DISTSERVE, 1.35, replace(_SYNTHETIC, attention="unit_last")),
    _gain("7", _DISTSERVE, 1.35, replace(_SYNTHETIC, blocks=True)),
    _gain("7", _DISTSERVE, 1.35, replace(_SYNTHETIC, model="opt-13b"), note="paper: on OPT-2.7B"),
    *(
        _ceiling(model, attention, fair=fair)
        for model in ("opt-2.7b", "opt-13b")
        for attention in _ATTENTIONS
        for fair in (True, False)
    ),
    *(_best(workload, paper) for workload, paper in (("longbench", 1.98), ("sharegpt", 1.35), ("azure", 1.98))),
    _gain("8", _DISTSERVE, 1.98, _Run("longbench"), note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _Run("longbench", model="opt-13b"), note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _Run("uniform"), note=_BEST),
    _gain("8", _DISTSERVE, 1.35, _Run("sharegpt"), note=_BEST),
    _gain("8", _DISTSERVE, 1.35, _Run("sharegpt", model="opt-13b"), note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _AZURE, note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _AZURE_13B, note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _Run("code"), note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _Run("code", model="opt-13b"), note=_BEST),
    _gain("8", _DISTSERVE, 1.98, _BLOCKED, note=_BEST),
    _gain("8", _DISTSERVE, 1.98, replace(_AZURE_13B, starvation_s=10.0), note=_BEST),
    _tpot_range("least", min, 1.74),
    _tpot_range("most", max, 3.05),
    _gain("9", _DISTSERVE, 1.74, replace(_SYNTHETIC, model="opt-13b"), latency=True, note=_SPREAD),
    _gain("9", _DISTSERVE, 1.74, _HELD, latency=True, note=_SPREAD),
    _gain("9", _FASTGEN, 1.74, _FOUR, latency=True, note=_SPREAD),
    _gain("9", _DISTSERVE, 1.35, _HELD, note="what the shorter iterations above cost"),
    *(
        _gain("10", _DISTSERVE, 1.0, _Run(workload, model="opt-13b"), latency=True, standing=_CLAIM)
        for workload in ("longbench", "sharegpt", "azure")
    ),
    _deciding(),
    *(
        row
        for run in (_Run("longbench", model="opt-13b"), _Run("sharegpt", model="opt-13b"))
        for row in (
            _forward(f"{run.workload}-aligned", run, "more than 90 % of iterations within it", _CLAIM),
            _forward(
                f"{run.workload}-fcfs",
                replace(run, without=("aligned",)),
                "first come, first served; under 10 % of iterations within it",
                _CLAIM,
            ),
        )
    ),
    _forward("held", _HELD, "joining up to B_max only"),
    _forward("held-fcfs", replace(_HELD, without=("aligned",)), "first come, first served, memory full"),
    _ablation("prefetch-blocks", "prefetch", _BLOCKED, replace(_BLOCKED, without=("prefetch",)), -14.73, _CLAIM),
    _ablation(
        "alignment-blocks",
        "alignment, too",
        replace(_BLOCKED, without=("prefetch",)),
        replace(_BLOCKED, without=("prefetch", "aligned")),
        -28.51,
        _CLAIM,
    ),
    _ablation("prefetch", "prefetch", _AZURE, replace(_AZURE, without=("prefetch",)), -14.73),
    _ablation(
        "alignment",
        "alignment, too",
        replace(_AZURE, without=("prefetch",)),
        replace(_AZURE, without=("prefetch", "aligned")),
        -28.51,
    ),
    _mixed_figure("sharegpt", 8.61),
    _mixed_figure("longbench", 12.37),
    _ttft_figure("sharegpt", 1.49),
    _ttft_figure("longbench", 2.54),
    _ttft_figure("sharegpt", 1.49, second=True),
    _ttft_figure("longbench", 2.54, second=True),
)
