"""DynaServe §6: Qwen-2.5 of 14B, 32B and 72B on A100-80GB, against colocated chunked prefill and P/D disaggregation.

Workloads, systems and choices that the paper leaves open: `dynaserve_setup`. Goodput is output tokens
a second that came within 100 ms of the one before them, when more comes than can be served: at `_PRESSURE` times the
capacity of the best system there (14B), or of DynaServe (32B, 72B, bursts: two searches less for each). RDMA
connects the instances for the figure about transfers (the paper's two servers). No figure tunes anything but the
baseline's chunk, and that at the rate of the figure. Where hardly a request was split, a number says nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from cohort.common.policies.interface import ClusterView, Placed, Placement, Wait, WaitingRequest
from cohort.common.types import Segment
from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.changes import with_slos
from cohort.common.workloads.generate import Stream, stream
from cohort.common.workloads.items import WorkItem, Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import dynaserve as slo_of
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures.dynaserve_setup import (
    AS_PRINTED,
    COLOCATED,
    DISAGGREGATED,
    DYNASERVE,
    HYBRID,
    SMALL,
    SPLIT,
    Scale,
    System,
    capacity,
    goodput_at,
    highest,
    rate_of,
    run,
    simulated,
    split_share,
    times,
    within_per_s,
)
from cohort.services.simulator.figures.figure import Figure, Kind, Lab, Paper, Standing

_PRESSURE = 1.2
_NAMES: Mapping[str, str] = {
    "azure-code": "Azure Code",
    "burstgpt": "BurstGPT, first rows",
    "arxiv": "arXiv summarisation",
    "reasoning": "Mini Reasoning",
    "hybrid": "BurstGPT, first rows + Azure Code",
}
_DEFAULT = "colocated, chunks of 2,048"
"""Default of vLLM, which §2.4 measures; not tuned."""
_PRINTED = "dynaserve as printed"
_SHORT: Mapping[str, str] = {
    COLOCATED: "colocated",
    DISAGGREGATED: "disaggregated",
    _DEFAULT: "untuned",
    SPLIT: "dynaserve",
}
_LARGE: Mapping[str, Scale] = {"32B": Scale("qwen2.5-32b", 2), "72B": Scale("qwen2.5-72b", 4)}
_LARGE_WORKLOADS = ("azure-code", "burstgpt")
_HOST_BOUND = Scale("qwen2.5-14b", 1, "eager")
_TRACE_CV = 3.92
"""Variation of the gaps in the public rows of BurstGPT."""


def _capacity(lab: Lab, preset: str, name: str, scale: Scale = SMALL) -> float:
    given = {_DEFAULT: System(COLOCATED, 2048), _PRINTED: AS_PRINTED}
    if preset in given:
        return rate_of(name, highest(lab, given[preset], name, scale=scale))
    return capacity(lab, preset, name, scale)


def _goodput(lab: Lab, preset: str, name: str) -> float:
    """Return the goodput at a pressure that is the same for all three; the colocated one with the best chunk there."""
    return goodput_at(lab, preset, name, _pressure(lab, name))


def _pressure(lab: Lab, name: str) -> float:
    return _PRESSURE * max(_capacity(lab, each, name) for each in (COLOCATED, DISAGGREGATED, SPLIT))


def _own_pressure(lab: Lab, name: str, scale: Scale = SMALL) -> float:
    return _PRESSURE * _capacity(lab, SPLIT, name, scale)


_CAPACITY, _GOODPUT = "serving capacity", "goodput"
_FOUR = ("azure-code", "burstgpt", "arxiv", "reasoning")


def _capacity_over(lab: Lab, name: str, other: str, ours: str = SPLIT) -> float:
    return _capacity(lab, ours, name) / max(_capacity(lab, other, name), 1e-9)


def _split_at_capacity(lab: Lab, name: str, ours: str = SPLIT) -> float:
    """Return the percentage of requests that were split at the capacity."""
    system = AS_PRINTED if ours == _PRINTED else DYNASERVE
    return split_share(run(lab, system, name, _capacity(lab, ours, name)))


def _split_under_pressure(lab: Lab, name: str, size: str = "", cv: float = 1.0) -> float:
    """Return the percentage of requests that Fig. 8's own run of DynaServe split; `cv`: or Fig. 10's."""
    scale = _LARGE[size] if size else SMALL
    rate = _own_pressure(lab, name, scale) if size or cv != 1.0 else _pressure(lab, name)
    return split_share(run(lab, DYNASERVE, name, rate, scale, cv))


_row = Paper("dynaserve", "DynaServe").row


def _over(
    id_: str,
    metric: str,
    workload: str,
    other: str,
    measure: Callable[[Lab], float],
    note: str = "",
    paper: float = 1.0,
    standing: Standing = Standing.CLAIM,
    *,
    split: Callable[[Lab], float],
) -> Figure:
    """Make a row of DynaServe over the other; `id_` begins with the figure's number. Of a single workload the paper
    prints no number but who wins: `paper` 1. `split`: percentage of requests that were."""
    id_, metric, kind = f"{id_}-{_SHORT[other]}", f"{metric}, DynaServe over it", Kind.MORE if paper == 1.0 else None
    return _row(id_, workload, other, metric, "x", paper, measure, note, standing, kind, exercised=split)


def _of_four(which: str, other: str, paper: float, ours: str = SPLIT) -> Figure:
    """Compare with Fig. 9's text, which prints the mean, the least and the most of the four workloads."""
    choices: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "least": min, "most": max}

    def measure(lab: Lab) -> float:
        return choices[which]([_capacity_over(lab, name, other, ours) for name in _FOUR])

    def split(lab: Lab) -> float:
        return max(_split_at_capacity(lab, name, ours) for name in _FOUR)

    id_, about = f"9-{'printed-' if ours == _PRINTED else ''}{which}", f"{which} of the four workloads"
    note, standing = (_ALG_1, Standing.READING) if ours == _PRINTED else ("", Standing.CLAIM)
    return _over(id_, _CAPACITY, about, other, measure, note, paper, standing, split=split)


_ALG_1 = "Alg. 1 as printed: predicted ends are balanced, a split waits for no load"


def _capacity_ratio(name: str, other: str, note: str = "", standing: Standing = Standing.CLAIM) -> Figure:
    measure, split = partial(_capacity_over, name=name, other=other), partial(_split_at_capacity, name=name)
    return _over(f"9-capacity-{name}", _CAPACITY, _NAMES[name], other, measure, note, standing=standing, split=split)


def _goodput_over(lab: Lab, other: str) -> float:
    """Return the best ratio of the four workloads, 14B."""
    return max(_goodput(lab, SPLIT, name) / max(_goodput(lab, other, name), 1e-9) for name in _FOUR)


def _large_over(lab: Lab, size: str, name: str, other: str) -> float:
    scale = _LARGE[size]
    rate = _own_pressure(lab, name, scale)
    return goodput_at(lab, SPLIT, name, rate, scale) / max(goodput_at(lab, other, name, rate, scale), 1e-9)


def _best_goodput(other: str, paper: float) -> Figure:
    def measure(lab: Lab) -> float:
        large = (_large_over(lab, size, name, other) for size in _LARGE for name in _LARGE_WORKLOADS)
        return max(_goodput_over(lab, other), *large)

    def split(lab: Lab) -> float:
        large = (_split_under_pressure(lab, name, size) for size in _LARGE for name in _LARGE_WORKLOADS)
        return max(_split_most(lab), *large)

    about = "best of all workloads and models"
    return _over("8-best", _GOODPUT, about, other, measure, "paper: up to", paper, split=split)


def _split_most(lab: Lab) -> float:
    return max(_split_under_pressure(lab, name) for name in _FOUR)


def _goodput_ratio(other: str) -> Figure:
    note = f"at {_PRESSURE} x the best capacity, the chunk tuned there"
    workload = "14B, best of four workloads"
    return _over("8-goodput", _GOODPUT, workload, other, lambda lab: _goodput_over(lab, other), note, split=_split_most)


def _large_ratio(size: str, name: str, other: str) -> Figure:
    measure = partial(_large_over, size=size, name=name, other=other)
    split = partial(_split_under_pressure, name=name, size=size)
    note = f"{_LARGE[size].devices} devices an instance, at {_PRESSURE} x DynaServe's capacity"
    id_, workload = f"8-goodput-{size.lower()}-{name}", f"{size}, {_NAMES[name]}"
    return _over(id_, _GOODPUT, workload, other, measure, note, split=split)


def _replay(other: str) -> Figure:
    """Compare with Fig. 10. Its 42 minutes of BurstGPT are not at hand: gamma arrivals are as bursty as known rows."""

    def measure(lab: Lab) -> float:
        rate = _own_pressure(lab, "burstgpt")
        mine = goodput_at(lab, SPLIT, "burstgpt", rate, cv=_TRACE_CV)
        return mine / max(goodput_at(lab, other, "burstgpt", rate, cv=_TRACE_CV), 1e-9)

    note = f"gaps vary as the trace's; at {_PRESSURE} x DynaServe's capacity"
    split = partial(_split_under_pressure, name="burstgpt", cv=_TRACE_CV)
    return _over("10-replay", _GOODPUT, "BurstGPT, first rows, bursts", other, measure, note, split=split)


def _splits(name: str, size: str = "") -> Figure:
    """Count the requests that Fig. 8's own run of DynaServe split."""
    measure = partial(_split_under_pressure, name=name, size=size)
    id_, workload = f"splits-8-{size.lower() + '-' if size else ''}{name}", f"{size or '14B'}, {_NAMES[name]}"
    note = "of the requests placed; the paper prints no number"
    standing = Standing.UNCOMPARED
    return _row(id_, workload, "itself", "requests split", "%", math.nan, measure, note, standing, where="Fig. 8")


# -- §6.6 ------------------------------------------------------------------------------------------------------------


def _within(lab: Lab, aware: bool) -> float:
    """Return the percentage of tokens within the bound on the hybrid workload at DynaServe's capacity."""
    rate = _capacity(lab, SPLIT, "hybrid")
    unaware = (("policies", "iteration", "continuous_batching"), ("policies", "prefill_order", "fcfs"))
    system = DYNASERVE if aware else System(SPLIT, settings=unaware)
    slo = run(lab, system, "hybrid", rate).overall.slo
    return 100.0 * slo.tbt if slo else 0.0


def _decision_ms(lab: Lab) -> float:
    """Return the measured wall-clock time of the manager for one request: everything it does, reports included."""
    report = run(lab, DYNASERVE, "burstgpt", 10.0)
    _, end_s = times("burstgpt")
    return report.measured.manager_events * report.measured.manager_mean_us * 1e-3 / (10.0 * end_s)


# -- §4.1, §6.6 and Table 4: search of the split, transfers in chunks, wrong predictions -------------------------------


def _varied(sigma: float, seed: int) -> Workload:
    """Make Table 4's requests: prompts of 219, outputs normal around 1,467; 3 a second, close to saturation here."""
    count = 900
    drawn = stream(seed, Stream.OUTPUT_LENGTHS).normal(1467.0, max(sigma, 1e-9), count)
    outputs = np.clip(np.rint(drawn), 1, 4000).astype(int)
    base = paper_workload("dynaserve-reasoning", RandomArrivals(3.0), count=count, seed=seed)
    items = tuple(WorkItem(item.arrival_s, 219, int(output)) for item, output in zip(base.items, outputs, strict=True))
    return with_slos(Workload(f"sigma {sigma:g}", items, base.facts), slo_of)


def _varied_run(lab: Lab, sigma: float) -> SimReport:
    def of_sigma() -> SimReport:
        system = System(SPLIT, settings=(("gateway", "default_prediction_tokens", 1467),))
        return simulated(
            system, _varied(sigma, lab.seed), lab.options(predictor="none", warmup_s=100.0, horizon_s=220.0)
        )

    return lab.run(("varied", sigma), of_sigma)


def _goodput_kept(lab: Lab, sigma: float) -> float:
    """Return the percentage of the goodput without errors that is left with them."""
    return 100.0 * within_per_s(_varied_run(lab, sigma)) / within_per_s(_varied_run(lab, 0.0))


class _AtShare(Placement):
    """Splits every request at the same share of its tokens, first segment on either instance in turn, or (`one_way`)
    on the same one.

    With this, an offline search over shares knows the whole future of a workload of equal requests.
    """

    def __init__(self, share: float, output: int, *, one_way: bool = False) -> None:
        self._share, self._output, self._one_way, self._turn = share, output, one_way, int(one_way)

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None
    ) -> Placed | Wait:
        names = sorted(cluster.instances)
        self._turn += 0 if self._one_way else 1
        first, second = (names if self._turn % 2 else reversed(names)) if len(names) == 2 else (names[0], names[0])
        total = len(waiting.request.tokens) + self._output
        position = round(self._share * total)
        if first == second or not 0 < position < total:
            return Placed((Segment(0, None, first),), "whole")
        return Placed((Segment(0, position, first), Segment(position, None, second)), "at a fixed share")


def _at_share(lab: Lab, share: float | None) -> SimReport:
    """Simulate equal requests, saturated: all split at this share of their tokens, or as the preset does."""
    rate, end_s = 3.6, 120.0
    placement = None if share is None else _AtShare(share, 512)
    return lab.run(
        ("oracle", share),
        lambda: simulated(
            DYNASERVE,
            with_slos(paper_workload("dynaserve-balanced", RandomArrivals(rate), count=700, seed=lab.seed), slo_of),
            lab.options(warmup_s=50.0, horizon_s=end_s),
            placement,
        ),
    )


def _against_oracle(lab: Lab) -> float:
    """Return the throughput on equal requests over the best of all fixed splits, both saturated, in percent."""
    best = max(within_per_s(_at_share(lab, share)) for share in (0.0, 0.6, 0.8, 0.9))
    return 100.0 * within_per_s(_at_share(lab, None)) / best


_POSITIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the answer that the first device decodes, of which Fig. 5's best is one."""


def _best_position(lab: Lab) -> float:
    """Return the share of the answer on the first of two devices with which most tokens are decoded: requests of
    1,024 + 1,024 tokens, all with their prompt on the first, more of them than can be served."""
    rate, warmup_s, end_s = 4.0, 150.0, 270.0

    def decoded(share: float) -> int:
        def simulation() -> SimReport:
            drawn = paper_workload("dynaserve-balanced", RandomArrivals(rate), count=round(rate * end_s), seed=lab.seed)
            items = tuple(replace(item, prompt_tokens=1024, output_tokens=1024) for item in drawn.items)
            found = with_slos(replace(drawn, items=items), slo_of)
            placement = _AtShare(0.5 + 0.5 * share, 1024, one_way=True)
            return simulated(DYNASERVE, found, lab.options(warmup_s=warmup_s, horizon_s=end_s), placement)

        return sum(each.decode_tokens for each in lab.run(("position", share), simulation).instances)

    return max(_POSITIONS, key=decoded)


def _exposed_less(lab: Lab) -> float:
    """Return the percentage of exposed transfer time per KV transfer that pushing chunks removes; every request is
    handed over in the middle of its answer."""

    def per_kv_transfer(chunked: bool) -> float:
        system = System(SPLIT, settings=(("experiment.transfer", "chunked", chunked),))
        report = lab.run(
            ("exposed", chunked),
            lambda: simulated(
                system,
                with_slos(paper_workload("dynaserve-reasoning", RandomArrivals(1.5), count=150, seed=lab.seed), slo_of),
                lab.options(horizon_s=120.0),
                _AtShare(0.5, 1467),
                across=True,
            ),
        )
        handed = sum(instance.kv_transfers for instance in report.instances)
        return sum(instance.exposed_transfer_s for instance in report.instances) / max(handed, 1)

    return 100.0 * (1.0 - per_kv_transfer(True) / per_kv_transfer(False))


# -- rows ------------------------------------------------------------------------------------------------------------


def _hybrid(preset: str, per_s: float, goodput: float) -> list[Figure]:
    head = (_NAMES["hybrid"], preset)
    capacity_, rates, tokens = "serving capacity", "requests/s", "tokens/s"
    anchored, traced_ = "the paper's answers: its goodput over its capacity", "answers of the traces, twice as long"
    of = _SHORT[preset]

    def goodput_at_capacity(lab: Lab) -> float:  # at its own capacity, as the paper's two numbers go together
        return goodput_at(lab, preset, HYBRID, _capacity(lab, preset, HYBRID))

    def row(
        id_: str, metric: str, unit: str, paper: float, measure: Callable[[Lab], float], note: str, claim: bool = False
    ) -> Figure:
        standing = Standing.CLAIM if claim else Standing.READING
        id_, split = (
            f"table2-{id_}-{of}",
            partial(_split_at_capacity, name=HYBRID) if claim and preset == SPLIT else None,
        )
        return _row(id_, *head, metric, unit, paper, measure, note, standing, where="Table 2", exercised=split)

    return [
        row("requests", capacity_, rates, per_s, lambda lab: _capacity(lab, preset, HYBRID), anchored, True),
        row("tokens", "goodput", tokens, goodput, goodput_at_capacity, anchored, True),
        row("capacity", capacity_, rates, per_s, lambda lab: _capacity(lab, preset, "hybrid"), traced_),
        row(
            "capacity-eager",
            capacity_,
            rates,
            per_s,
            lambda lab: _capacity(lab, preset, "hybrid", _HOST_BOUND),
            f"{traced_}; stack `eager`: the host's time a row 3.5 x",
        ),
        row(
            "goodput",
            "goodput",
            tokens,
            goodput,
            lambda lab: _goodput(lab, preset, "hybrid"),
            f"{traced_}; at {_PRESSURE} x the best capacity",
        ),
    ]


FIGURES: tuple[Figure, ...] = (
    _of_four("mean", COLOCATED, 2.37),
    _of_four("least", COLOCATED, 1.15),
    _of_four("most", COLOCATED, 3.07),
    _of_four("mean", DISAGGREGATED, 1.37),
    _of_four("least", DISAGGREGATED, 1.09),
    _of_four("most", DISAGGREGATED, 1.67),
    _of_four("mean", COLOCATED, 2.37, _PRINTED),
    _of_four("least", COLOCATED, 1.15, _PRINTED),
    _of_four("most", COLOCATED, 3.07, _PRINTED),
    _of_four("mean", DISAGGREGATED, 1.37, _PRINTED),
    _of_four("least", DISAGGREGATED, 1.09, _PRINTED),
    _of_four("most", DISAGGREGATED, 1.67, _PRINTED),
    *(_capacity_ratio(name, COLOCATED, "its chunk tuned for each workload") for name in _FOUR),
    *(_capacity_ratio(name, DISAGGREGATED) for name in _FOUR),
    _capacity_ratio("azure-code", _DEFAULT, standing=Standing.READING),
    _best_goodput(COLOCATED, 1.91),
    _best_goodput(DISAGGREGATED, 1.61),
    _goodput_ratio(COLOCATED),
    _goodput_ratio(DISAGGREGATED),
    *(
        _large_ratio(size, name, other)
        for size in _LARGE
        for name in _LARGE_WORKLOADS
        for other in (COLOCATED, DISAGGREGATED)
    ),
    *(_splits(name) for name in _FOUR),
    *(_splits(name, size) for size in _LARGE for name in _LARGE_WORKLOADS),
    _replay(COLOCATED),
    _replay(DISAGGREGATED),
    *_hybrid(COLOCATED, 4.6, 316.32),
    *_hybrid(DISAGGREGATED, 5.9, 399.31),
    *_hybrid(SPLIT, 7.4, 473.84),
    *(
        _row(
            f"11-{name}",
            _NAMES["hybrid"],
            batches,
            "tokens within 100 ms",
            "%",
            paper,
            lambda lab, aware=name == "aware": _within(lab, aware),  # type: ignore[misc]
            note,
        )
        for name, batches, paper, note in (
            ("aware", "SLO-aware batches", 99.0, "at the capacity of DynaServe"),
            ("unaware", "chunks of 2,048", 52.0, "the same rate and placement"),
        )
    ),
    *(
        _row(
            f"table4-sigma-{sigma}",
            f"219 + N(1467, {sigma})",
            "itself",
            "goodput against sigma 0",
            "%",
            paper,
            partial(_goodput_kept, sigma=float(sigma)),
            "prediction: always 1,467",
            where="Table 4",
            exercised=lambda lab, s=float(sigma): split_share(_varied_run(lab, s)),  # type: ignore[misc]
        )
        for sigma, paper in ((10, 99.56), (50, 98.83), (100, 97.09))
    ),
    _row(
        "transfer",
        _NAMES["reasoning"],
        "without chunked transfer",
        "exposed transfer time removed",
        "%",
        94.0,
        _exposed_less,
        "over RDMA, every request handed over; control messages not counted",
        where="§6.6",
    ),
    _row(
        "oracle",
        "prompt 2048, output 512",
        "offline search of the split",
        "goodput of its",
        "%",
        99.0,
        _against_oracle,
        "paper: within 1 %; ours: the best of four fixed shares",
        where="§4.1",
        exercised=lambda lab: split_share(_at_share(lab, None)),
    ),
    _row(
        "5-position",
        "prompt 1024, output 1024",
        "itself",
        "share of the answer on the first device, the best",
        "of it",
        0.3,
        _best_position,
        f"of {', '.join(f'{share:g}' for share in _POSITIONS)}; Qwen-2.5-14B, more comes than can be served",
    ),
    _row(
        "table3-overhead",
        "BurstGPT, first rows, at 10/s",
        "itself",
        "scheduling of a request",
        "ms",
        14.40,
        _decision_ms,
        "wall time of the machine that simulated, all of the manager's; paper: 13.7 to 17.5, below 20",
        kind=Kind.AT_MOST,
        where="Table 3",
    ),
)

CONDITIONS: tuple[str, ...] = ("Lengths: rows of the public traces.",)
"""Conditions of the measurement that the code does not show."""
