"""How much longer engines take beside each other than the processor time of all says: one memory, threads of one core.

Live workers' recordings say it: `together` finds each iteration that others ran beside, `contention` the three factors
by which the model's times of them, added up, are the measured ones: decodes take more beside prompts (1.14 to 1.21
times their time alone) than prompts beside decodes (1.03 to 1.10), and most beside each other. Two engines of one
machine share a memory at some seconds and hardly at others, as its host places their processors: a decode step beside
another takes 1.1 times as long as alone for some seconds and 1.6 times for others. So many short slices of a
load are looked at, lone iterations of the same slices say how fast the machine was, and the means count: a median would
choose one of the two states. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from cohort.common.policies.cost_model import CostModel
from cohort.services.bench.fit.live_cycles import Iteration, Slice, overlap
from cohort.services.simulator.hardware.hardware import core_slowdowns

_BESIDE = 0.9
"""Of an iteration's time, that another engine computed for at least."""
_STALLED = 4.0
"""So many times the model's: something else stopped it."""
_Sums = npt.NDArray[np.float64]
_ALONE, _ALONE_MODEL, _BESIDE_S, _BESIDE_MODEL, _EXPECTED, _OTHERS, _OWN, _READING = range(8)
"""Columns: seconds alone, and the model's; beside others, the model's as if alone, and by processor time; the last
times how many others, that times what it reads itself, and times what both read."""
_DECODES, _PROMPTS, _BESIDE_PROMPTS = range(3)
"""Rows: decodes beside decodes; iterations with prompts; decodes beside such, which are as the first alone."""
_NOTHING: _Sums = np.zeros((_BESIDE_PROMPTS + 1, _READING + 1))


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
    """Of the iterations of one run: each that others ran beside, and after it those of the other engines that were in
    flight in its middle. `runs`: of each engine, by time."""
    starts, found = [[each.planned_s for each in run] for run in runs], []
    for index, run in enumerate(runs):
        others = [(other, starts[at]) for at, other in enumerate(runs) if at != index]
        for iteration in run:
            middle_s = (iteration.planned_s + iteration.ended_s) / 2
            beside = [iteration]
            for other, began in others:
                at = bisect_right(began, middle_s) - 1
                if at >= 0 and other[at].ended_s > middle_s and overlap(iteration, other, began) > _BESIDE:
                    beside.append(other[at])
            if len(beside) > 1 and iteration.rows:
                found.append(beside)
    return found


def contention(slices: Sequence[Slice], cost: CostModel, cores: int, load: Callable[[int, float], float]) -> Contention:
    """By decodes beside decodes, and by iterations with prompts and beside such, which read little. `cost`: of
    a lone engine, with all that its worker adds; `load`: `Cluster.service_load`."""
    each = [_sums(one, cost, cores, load) for one in slices]
    whole = np.sum(each, axis=0) if each else _NOTHING
    if not whole[_DECODES, _BESIDE_S]:
        return Contention()
    core, memory, cache = _factors(whole)
    ratio = _ratio(whole)
    without = [_ratio(whole - one) for one in each if (whole - one)[_DECODES, _BESIDE_S]]
    error = float(np.sqrt((len(without) - 1) * np.var(without))) if len(without) > 1 else 0.0  # jackknife
    return Contention(core, memory, cache, ratio, ratio - 2.0 * error, ratio + 2.0 * error)


def _sums(under_load: Slice, cost: CostModel, cores: int, load: Callable[[int, float], float]) -> _Sums:
    sums = _NOTHING.copy()
    for iteration in (each for run in under_load.alone for each in run if each.rows):
        work, took_s = iteration.work(), iteration.ended_s - iteration.planned_s
        alone_s = cost.step_s(work)
        if took_s < _STALLED * alone_s:
            sums[_PROMPTS if work.pairs else _DECODES, _ALONE : _ALONE_MODEL + 1] += took_s, alone_s
    for engines in together(under_load.beside):
        works = [each.work() for each in engines]
        prompts = any(work.pairs for work in works)
        kind = _PROMPTS if works[0].pairs else _BESIDE_PROMPTS if prompts else _DECODES
        alone = [cost.step_s(work) for work in works]
        loads = [load(work.rows, seconds) for work, seconds in zip(works, alone, strict=True)]
        expected_s = alone[0] * core_slowdowns(cores, list(zip(alone, loads, strict=True)))[0]
        took_s = engines[0].ended_s - engines[0].planned_s
        if took_s < _STALLED * expected_s:
            own, *others = (cost.memory_share(work) for work in works)
            beside_s = expected_s * min(1.0, cores / len(engines))
            number = len(others)
            row = took_s, alone[0], expected_s, beside_s * number, beside_s * own * number, beside_s * own * sum(others)
            sums[kind, _BESIDE_S:] += row
    return sums


def _level(sums: _Sums) -> _Sums:
    """How many times the model's lone iterations took meanwhile, by row."""
    model = sums[:_BESIDE_PROMPTS, _ALONE_MODEL]
    level = np.divide(sums[:_BESIDE_PROMPTS, _ALONE], model, out=np.ones(_BESIDE_PROMPTS), where=model > 0.0)
    return np.append(level, level[_DECODES])


def _ratio(sums: _Sums) -> float:
    decodes = sums[_DECODES]
    return float(decodes[_BESIDE_S] / (_level(sums)[_DECODES] * decodes[_BESIDE_MODEL]))


def _factors(sums: _Sums) -> tuple[float, float, float]:
    known = sums[:, _OTHERS] > 0.0
    rows, level = sums[known], _level(sums)[known]
    longer = (rows[:, _BESIDE_S] / level - rows[:, _EXPECTED]) / rows[:, _OTHERS]
    shared = rows[:, _OTHERS]
    terms = np.column_stack([np.ones(len(rows)), rows[:, _READING] / shared, rows[:, _OWN] / shared])
    weight = np.sqrt(shared)  # where no factors explain all three, a second of each counts as much
    core, memory, cache = nnls(terms * weight[:, None], longer * weight)[0]
    return float(core), float(memory), float(cache)
