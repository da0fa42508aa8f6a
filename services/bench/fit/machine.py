"""A machine's constants from what `cohort profile` measured on it: its engine's steps, and what the services add.

    points of the engine ─▶ fit_cpu (efficiencies, mixing) ─┐
    cycles of a live worker ─▶ step_s, row_s, scatter       ├▶ Machine, with the error on what was held out
    processor time of the others ─▶ service_step_s, _row_s ─┤
    slices of workers under load ─▶ contention

One fit and one form: `fit_cpu` for the points, the cost model for both. What mixing prompts and decodes costs
(`mixed_share` of a stack) is fitted where the points hold mixed iterations. Every fourth point and every second
cycle is held out: no constant comes of them, all errors do. Pure.

Contention is how much longer engines take beside each other than the processor time of all says: one memory, threads of
one core. Live workers' recordings say it: `together` finds each iteration that others ran beside, `contention` the
three factors by which the model's times of them, added up, are the measured ones: decodes take more beside prompts
(1.14 to 1.21 times their time alone) than prompts beside decodes (1.03 to 1.10), and most beside each other. Two
engines of one machine share a memory at some seconds and hardly at others, as its host places their processors: a
decode step beside another takes 1.1 times as long as alone for some seconds and 1.6 times for others. So many short
slices of a load are looked at, lone iterations of the same slices say how fast the machine was, and the means count: a
median would choose one of the two states.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork, prefill_pairs
from cohort.services.bench.fit.live_cycles import Cycle, Iteration, Phase, Slice, overlap
from cohort.services.simulator.hardware.hardware import SCATTER_LASTS_STEPS, core_slowdowns

_CONCURRENT = 0.9
"""Minimum share of an iteration's time during which another engine computed."""
_STALLED = 4.0
"""Multiple of the model's time beyond which something else stopped it."""
_Sums = npt.NDArray[np.float64]
_ALONE, _ALONE_MODEL, _SHARED_S, _SHARED_MODEL, _EXPECTED, _OTHERS, _OWN, _READING = range(8)
"""Columns: seconds alone, and the model's; beside others, the model's as if alone, and by processor time; the last
times how many others, that times what it reads itself, and times what both read."""
_DECODES, _PROMPTS, _MIXED_DECODES = range(3)
"""Rows: decodes beside decodes; iterations with prompts; decodes beside such, which are as the first alone."""
_NOTHING: _Sums = np.zeros((_MIXED_DECODES + 1, _READING + 1))


@dataclass(frozen=True, slots=True)
class Contention:
    """`core`, `memory`, `cache`: `Cluster.core_contention`, `.memory_contention` and `.cache_contention`, each at least
    0. `decodes`: how many times as long as alone decode steps took beside decode steps, by all that they share;
    `lowest`, `highest`: two standard errors of it either way, as the slices differ. 0: not measured."""

    core: float = 0.0
    memory: float = 0.0
    cache: float = 0.0
    decodes: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0


def together(runs: Sequence[Sequence[Iteration]]) -> list[list[Iteration]]:
    """Return each iteration of a run that others ran beside, followed by those of the other engines in flight in its
    middle. `runs`: of each engine, by time."""
    starts, found = [[each.planned_s for each in run] for run in runs], []
    for index, run in enumerate(runs):
        others = [(other, starts[at]) for at, other in enumerate(runs) if at != index]
        for iteration in run:
            middle_s = (iteration.planned_s + iteration.ended_s) / 2
            concurrent = [iteration]
            for other, began in others:
                at = bisect_right(began, middle_s) - 1
                if at >= 0 and other[at].ended_s > middle_s and overlap(iteration, other, began) > _CONCURRENT:
                    concurrent.append(other[at])
            if len(concurrent) > 1 and iteration.rows:
                found.append(concurrent)
    return found


def contention(slices: Sequence[Slice], cost: CostModel, cores: int, load: Callable[[int, float], float]) -> Contention:
    """Fit contention by concurrent decodes, and by iterations with prompts and beside such, which read little. `cost`:
    of a lone engine, with all that its worker adds; `load`: `Cluster.service_load`."""
    each = [_sums(one, cost, cores, load) for one in slices]
    whole = np.sum(each, axis=0) if each else _NOTHING
    if not whole[_DECODES, _SHARED_S]:
        return Contention()
    core, memory, cache = _factors(whole)
    ratio = _ratio(whole)
    without = [_ratio(whole - one) for one in each if (whole - one)[_DECODES, _SHARED_S]]
    error = float(np.sqrt((len(without) - 1) * np.var(without))) if len(without) > 1 else 0.0  # jackknife
    return Contention(core, memory, cache, ratio, ratio - 2.0 * error, ratio + 2.0 * error)


def _sums(under_load: Slice, cost: CostModel, cores: int, load: Callable[[int, float], float]) -> _Sums:
    sums = _NOTHING.copy()
    for iteration in (each for run in under_load.alone for each in run if each.rows):
        work, took_s = iteration.work(), iteration.ended_s - iteration.planned_s
        alone_s = cost.step_s(work)
        if took_s < _STALLED * alone_s:
            sums[_PROMPTS if work.pairs else _DECODES, _ALONE : _ALONE_MODEL + 1] += took_s, alone_s
    for engines in together(under_load.runs):
        works = [each.work() for each in engines]
        prompts = any(work.pairs for work in works)
        kind = _PROMPTS if works[0].pairs else _MIXED_DECODES if prompts else _DECODES
        alone = [cost.step_s(work) for work in works]
        loads = [load(work.rows, seconds) for work, seconds in zip(works, alone, strict=True)]
        expected_s = alone[0] * core_slowdowns(cores, list(zip(alone, loads, strict=True)))[0]
        took_s = engines[0].ended_s - engines[0].planned_s
        if took_s < _STALLED * expected_s:
            own, *others = (cost.memory_share(work) for work in works)
            shared_s = expected_s * min(1.0, cores / len(engines))
            number = len(others)
            row = took_s, alone[0], expected_s, shared_s * number, shared_s * own * number, shared_s * own * sum(others)
            sums[kind, _SHARED_S:] += row
    return sums


def _level(sums: _Sums) -> _Sums:
    """Return the ratio of lone iterations to the model's time meanwhile, by row."""
    model = sums[:_MIXED_DECODES, _ALONE_MODEL]
    level = np.divide(sums[:_MIXED_DECODES, _ALONE], model, out=np.ones(_MIXED_DECODES), where=model > 0.0)
    return np.append(level, level[_DECODES])


def _ratio(sums: _Sums) -> float:
    decodes = sums[_DECODES]
    return float(decodes[_SHARED_S] / (_level(sums)[_DECODES] * decodes[_SHARED_MODEL]))


def _factors(sums: _Sums) -> tuple[float, float, float]:
    known = sums[:, _OTHERS] > 0.0
    rows, level = sums[known], _level(sums)[known]
    longer = (rows[:, _SHARED_S] / level - rows[:, _EXPECTED]) / rows[:, _OTHERS]
    shared = rows[:, _OTHERS]
    terms = np.column_stack([np.ones(len(rows)), rows[:, _READING] / shared, rows[:, _OWN] / shared])
    weight = np.sqrt(shared)  # where no factors explain all three, a second of each counts as much
    core, memory, cache = nnls(terms * weight[:, None], longer * weight)[0]
    return float(core), float(memory), float(cache)


Errors = dict[str, tuple[float, float, float, str]]
"""Kind → median, 90th percentile and worst relative error, and where the worst is."""


@dataclass(frozen=True)
class Point:
    """One measured iteration (the median of its repetitions)."""

    kind: str
    label: str
    work: StepWork
    seconds: float


def profile_points(path: Path) -> list[Point]:
    """Read the points of a file that `cohort profile` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    points = []
    for entry in data["points"]:
        shape = entry["shape"]
        rows, count, context = shape["rows"], shape["tokens_per_row"], shape["context"]
        label, kind = f"{rows} x {count} at {context}", "prefill"
        if count == 1:
            kind, work = "decode", StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
        else:
            decodes, at = shape.get("decodes", 0), shape.get("decode_context", 0)
            pairs, together = rows * prefill_pairs(context - count, count), rows + decodes
            tokens = rows * count + decodes
            work = StepWork(tokens, together, together, pairs, rows * context, decodes, decodes * at, at)
            if decodes:
                kind, label = "mixed", f"{label}, {decodes} at {at}"
        points.append(Point(kind, label, work, entry["median_s"]))
    return points


def errors(points: Sequence[Point], predict: Callable[[Point], float]) -> Errors:
    """Return the median, 90th percentile and worst relative error, and where the worst is; by kind."""
    table = {}
    for kind in ("prefill", "decode", "mixed"):
        some = [point for point in points if point.kind == kind]
        if not some:
            continue
        off = np.array([abs(predict(point) / point.seconds - 1) for point in some])
        worst = int(off.argmax())
        table[kind] = (float(np.median(off)), float(np.quantile(off, 0.9)), float(off[worst]), some[worst].label)
    return table


def fit_cpu(points: Sequence[Point], model: ModelShape, device: DeviceShape) -> tuple[DeviceShape, StackShape]:
    """Fit the efficiencies of one device, and what its stack adds, to the points of one model on it alone."""
    mixes = any(point.kind == "mixed" for point in points)

    def unpack(x: np.ndarray[Any, Any]) -> tuple[DeviceShape, StackShape]:
        fitted = replace(
            device,
            compute_efficiency=x[0],
            memory_efficiency=x[1],
            attention_efficiency=x[2],
            layer_s=x[3] * 1e-5,
            kv_efficiency=x[6],
        )
        return fitted, StackShape("fit", 0.0, x[4] * 1e-4, x[5] * 1e-5, mixed_share=x[7] if mixes else 0.0)

    def residuals(x: np.ndarray[Any, Any]) -> list[float]:
        cost = CostModel(model, *unpack(x))
        return [float(np.log(cost.step_s(point.work) / point.seconds)) for point in points]

    start = np.array([0.6, 0.6, 0.3, 2.0, 5.0, 2.0, 0.4, 0.05])
    low = np.array([*[1e-3] * 7, -0.5])
    high = np.array([0.9, 0.9, 0.9, 100.0, 500.0, 500.0, 0.9, 2.0])
    result = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return unpack(result.x)


_HELD_OUT = 4
_FEWEST = 8
"""Cycles of a kind, below which their scatter says nothing."""
_APART = 10
"""Cycles between two that are compared: what stops one of them has ended, what lasts has not."""
_WILD = 3.0
"""A cycle that took so many times the usual was stopped by something else."""
_NO_PRICE = 0.03
"""A share below this is within what measuring scatters: mixing has no price."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`scatter`: coefficient of variation of a decode cycle about the model's; `scatter_lasting`: the share of its
    variance that neighbouring cycles have in common; `scatter_prompts`: of a cycle with prompts that takes a second,
    None: too few to tell. `engine_errors`: of the engine alone on points held out; `live_errors`: of
    cycles of a live worker, held out as well; {} where none was measured."""

    device: DeviceShape
    stack: StackShape
    scatter: float
    service_step_s: float
    service_row_s: float
    engine_errors: Errors
    live_errors: Errors
    contention: Contention = field(default_factory=Contention)
    scatter_lasting: float = 0.0
    scatter_prompts: float | None = None


def fit_machine(
    points: Sequence[Point],
    model: ModelShape,
    template: DeviceShape,
    phases: Sequence[Phase],
    slices: Sequence[Slice] = (),
    cores: int = 0,
) -> Machine:
    """Fit a machine. `template`: the device's facts, whatever its rates. `slices`: of workers that share `cores` cores.
    Without phases what the services add is unknown: the stack holds the engine's own part, and nothing scatters. Raises
    `ConfigError` for too few points."""
    fitted, held = split(points)
    if not {"prefill", "decode"} <= {point.kind for point in fitted}:
        raise ConfigError("too few points of prefill and decode to fit a machine")
    device, stack = fit_cpu(fitted, model, nominal(template, points, model))
    alone = CostModel(model, device, stack)
    engine = errors(held, lambda point: alone.step_s(point.work))
    stack = replace(stack, name="cohort", mixed_share=stack.mixed_share if stack.mixed_share > _NO_PRICE else 0.0)
    if not phases:
        return Machine(device, stack, 0.0, 0.0, 0.0, engine, {})
    cycles = [cycle for phase in phases for cycle in phase.cycles]
    stack = around(cycles[::2], model, device, stack)
    cost = CostModel(model, device, stack)
    service_step_s, service_row_s = services(phases)
    live = errors([_point(cycle) for cycle in cycles[1::2]], lambda point: cost.step_s(point.work))
    contended = contention(slices, cost, cores, lambda rows, s: (service_step_s + service_row_s * rows) / s)
    varying, lasting, prompts = scatter(phases, cost)
    return Machine(device, stack, varying, service_step_s, service_row_s, engine, live, contended, lasting, prompts)


def split(points: Iterable[Point]) -> tuple[list[Point], list[Point]]:
    """Split into points to fit, and held out: every fourth of each kind, never the first of it."""
    fitted: list[Point] = []
    held: list[Point] = []
    seen: dict[str, int] = defaultdict(int)
    for point in points:
        seen[point.kind] += 1
        (fitted if seen[point.kind] % _HELD_OUT else held).append(point)
    return fitted, held


def nominal(device: DeviceShape, points: Sequence[Point], model: ModelShape) -> DeviceShape:
    """Return peaks that no data sheet has: twice the best that a step reached, so that efficiencies are about a
    half."""
    flops = CostModel(model, device, StackShape("", 0.0, 0.0, 0.0)).flops
    rates = [model.read_bytes(point.work.tokens) / point.seconds for point in points if point.kind == "decode"]
    return replace(
        device,
        flops_per_s=_rounded(2.0 * max(flops(point.work) / point.seconds for point in points)),
        memory_bytes_per_s=_rounded(2.0 * max(rates)),
    )


def around(cycles: Sequence[Cycle], model: ModelShape, device: DeviceShape, stack: StackShape) -> StackShape:
    """Return the stack with the fixed and per-row time of live cycles in place of the engine's own: means by the number
    of rows, a straight line through them. Means, because iterations are simulated to scatter about them; what took
    `_WILD` times the model's counts as that."""
    bare = CostModel(model, device, replace(stack, step_s=0.0, row_s=0.0))
    beyond: dict[int, list[float]] = defaultdict(list)
    for cycle in cycles:
        work = cycle.iteration.work()
        if work.pairs == 0:  # prompts are long: a small error of theirs would be all of a fixed time
            alone_s = bare.step_s(work)
            beyond[work.rows].append(min(cycle.seconds, _WILD * alone_s) - alone_s)
    if not beyond:
        return stack
    step_s, row_s = _line([(rows, fmean(times), len(times)) for rows, times in beyond.items()])
    return replace(stack, step_s=step_s, row_s=row_s)


def services(phases: Sequence[Phase]) -> tuple[float, float]:
    """Return the processor time of the other processes for an iteration, and for each of its rows."""
    known = [
        (fmean(len(cycle.iteration.rows) for cycle in phase.cycles), phase.service_s, len(phase.cycles))
        for phase in phases
        if phase.service_s is not None
    ]
    return _line(known) if known else (0.0, 0.0)


def scatter(phases: Sequence[Phase], cost: CostModel) -> tuple[float, float, float | None]:
    """Return what `StepScatter` takes: standard deviation over mean of decode cycles, about the usual of their number
    of rows; the share of that variance which lasts: by what cycles `_APART` from each other have in common; and the
    same coefficient of cycles with prompts, times the root of the seconds that the model says of each."""
    raw = [[_timed(cycle, cost) for cycle in phase.cycles] for phase in phases]
    usual = _usual(chain.from_iterable(raw))
    runs = [[(each, min(each.ratio / usual[each.group], _WILD)) for each in run if each.group in usual] for run in raw]
    of_decodes = [[ratio for each, ratio in run if not each.prompts] for run in runs]
    of_prompts = [(ratio - 1.0) ** 2 * each.seconds for run in runs for each, ratio in run if each.prompts]
    prompts = math.sqrt(fmean(of_prompts)) if len(of_prompts) >= _FEWEST else None
    ratios = list(chain.from_iterable(of_decodes))
    if not ratios or not (deviation := pstdev(ratios)):
        return 0.0, 0.0, prompts
    mean = fmean(ratios)
    together = [(a - mean) * (b - mean) for run in of_decodes for a, b in zip(run, run[_APART:], strict=False)]
    common = fmean(together) / deviation**2 if len(together) >= _FEWEST * _APART else 0.0
    return deviation / mean, min(1.0, max(0.0, common * math.exp(_APART / SCATTER_LASTS_STEPS))), prompts


def _usual(timed: Iterable[_TimedCycle]) -> dict[tuple[bool, int], float]:
    """Return the usual multiple of the model's time for each kind with enough cycles."""
    groups: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for each in timed:
        groups[each.group].append(each.ratio)
    return {group: median(ratios) for group, ratios in groups.items() if len(ratios) >= _FEWEST}


@dataclass(frozen=True, slots=True)
class _TimedCycle:
    """A cycle: `seconds` by the model, and how many times that it took."""

    prompts: bool
    rows: int
    seconds: float
    ratio: float

    @property
    def group(self) -> tuple[bool, int]:
        return self.prompts, self.rows


def _timed(cycle: Cycle, cost: CostModel) -> _TimedCycle:
    work = cycle.iteration.work()
    seconds = cost.step_s(work)
    return _TimedCycle(work.pairs > 0, work.rows, seconds, cycle.seconds / seconds)


def _point(cycle: Cycle) -> Point:
    work = cycle.iteration.work()
    kind = "decode" if not work.pairs else "mixed" if work.decode_rows else "prefill"
    return Point(kind, f"{work.rows} rows, {work.tokens} tokens", work, cycle.seconds)


def _line(known: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """Fit a line through (x, y, weight): y at 0 and slope, neither below 0."""
    x, y, weight = (np.array(column, dtype=np.float64) for column in zip(*known, strict=True))
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float((weight * (x - mean_x) ** 2).sum())
    slope = max(0.0, float((weight * (x - mean_x) * (y - mean_y)).sum()) / spread) if spread else 0.0
    if mean_y - slope * mean_x < 0.0:  # all of it goes with the rows
        return 0.0, max(0.0, float((weight * x * y).sum() / (weight * x * x).sum()))
    return float(mean_y - slope * mean_x), slope


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
