"""Operators of a device, fitted to measured cells, and their errors on others.

Curves go through least absolute deviations of logarithms: a median's relative error counts, however long the call is.
The host's times of the stack `eager` are fitted to whole iterations, with the operators as they are. Called by
`operators_command.py`; needs SciPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from cohort.common.policies.cost_model import CostModel, DeviceShape, StackShape, StepWork, prefill_pairs
from cohort.common.policies.operators import Between, Curve, Decodes, Matrices, Prompts, exchange_s
from cohort.services.bench.fit.operator_cells import FITTED, HEAD_DIM, ITERATIONS, LONGEST, Cell, held_out
from cohort.services.simulator.hardware.hardware import load_model

_Array = np.ndarray[Any, Any]
_TOKENS = (1, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
_WEIGHT_BYTES = (4e6, 16e6, 64e6, 256e6)
_SIZES = (5e5, 1e6, 4e6, 16e6, 67e6)
"""Knots, in whose number the fit has no choice."""
_LEAST = 0.01
"""Residual that has its full weight: a smaller one is as good as none."""


def predicted_s(cell: Cell, device: DeviceShape, curves: dict[str, dict[int, Curve]], stack: StackShape) -> float:
    """Return the seconds that the cost model has for a cell. `curves`: all-reduces by kind of link."""
    operators, bandwidth = device.operators, device.memory_bytes_per_s
    assert operators is not None
    a, b, c, d = cell.a, cell.b, cell.c, cell.d
    match cell.operator:
        case "matrices":
            roofline_s = max(2.0 * a * b * c / device.flops_per_s, 2.0 * b * c / bandwidth)
            return roofline_s / operators.matrices.attained(a, 2.0 * b * c)
        case "between":
            return operators.between.seconds(2.0 * a * (10 * b + 2 * c + 3 * d), bandwidth)
        case "prompts":
            pair_s = 4.0 * c * HEAD_DIM / device.flops_per_s
            return operators.prompts.seconds(a, prefill_pairs(0, a), a * b, pair_s)
        case "decodes":
            return operators.decodes.floor_s + _kv_bytes(cell) / (bandwidth * operators.decodes.efficiency)
        case "exchange":
            return exchange_s(curves[cell.device][cell.devices], a)
        case _:
            cost = CostModel(load_model(cell.model), device, stack, tensor_parallel=cell.devices)
            return cost.step_s(work_of(cell))


def work_of(cell: Cell) -> StepWork:
    """Return the work of a whole iteration."""
    tokens, rows = cell.a, cell.b
    if cell.operator == "prefill":
        return StepWork(rows * tokens, rows, rows, rows * prefill_pairs(0, tokens), rows * tokens)
    context = tokens + 64
    return StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)


def whole(cell: Cell, device: DeviceShape) -> bool:
    """Return whether an iteration can have been one: some are stated to be faster than the device's peak."""
    cost = CostModel(load_model(cell.model), device, StackShape("", 0.0, 0.0, 0.0), tensor_parallel=cell.devices)
    return cost.flops(work_of(cell)) / cost.peak_flops_per_s < cell.seconds


def fit_operators(cells: Sequence[Cell], device: DeviceShape) -> dict[str, msgspec.Struct]:
    """Fit the parts of a device's operators that cells not held out measure."""
    fits: dict[str, Callable[[list[Cell], DeviceShape], msgspec.Struct]] = {
        "matrices": _matrices,
        "between": _between,
        "prompts": _prompts,
        "decodes": _decodes,
    }
    found = {}
    for name, fit in fits.items():
        some = [cell for cell in cells if cell[:2] == (device.name, name) and not held_out(cell)]
        if some:
            found[name] = fit(some, device)
    return found


def fit_exchange(cells: Sequence[Cell], link: str) -> dict[int, Curve]:
    """Fit all-reduces over a link by number of devices. Small ones scatter widely: more bytes never take less."""
    found: dict[int, Curve] = {}
    own = [cell for cell in cells if cell[:2] == (link, "exchange") and not held_out(cell)]
    for devices in sorted({cell.devices for cell in own}):
        sizes, seconds = np.array([(cell.a, cell.seconds) for cell in own if cell.devices == devices]).T
        shares = _hats(np.log(sizes), np.log(_SIZES))
        logs = _least_absolute(shares, np.log(seconds), 1e-3 * np.eye(len(_SIZES)))
        ascending = np.exp(np.maximum.accumulate(logs))
        found[devices] = tuple((size, _short(float(each))) for size, each in zip(_SIZES, ascending, strict=True))
    return found


def fit_host(cells: Sequence[Cell], device: DeviceShape, stack: StackShape) -> StackShape:
    """Fit launches and rows of a stack to `FITTED`, whole milliseconds of a step as they are, by trying all."""
    own = [cell for cell in cells if cell.device == device.name and cell.operator in ITERATIONS]
    decodes, prefills = (
        [cell for cell in own if cell.operator == name and (cell.model, cell.devices) == FITTED]
        for name in ("decode", "prefill")
    )

    def off(stack: StackShape, some: list[Cell]) -> float:
        cost = CostModel(load_model(FITTED[0]), device, stack, tensor_parallel=FITTED[1])
        return sum(abs(float(np.log(cost.step_s(work_of(cell)) / cell.seconds))) for cell in some)

    tried = [
        replace(stack, launch_s=float(launch), prompt_launch_s=0.0, row_s=float(row))
        for launch, row in product(np.arange(2e-4, 6e-4, 1e-5), np.arange(0.0, 6e-4, 2e-5))
    ]
    best = min(tried, key=lambda each: off(each, decodes))
    short = [cell for cell in prefills if cell.a * cell.b <= LONGEST]
    launches = [replace(best, prompt_launch_s=float(launch)) for launch in np.arange(best.launch_s, 1.2e-3, 1e-5)]
    return min(launches, key=lambda each: off(each, short))


def _matrices(cells: list[Cell], device: DeviceShape) -> Matrices:
    tokens, rows, columns, seconds = (
        np.array([getattr(cell, name) for cell in cells], dtype=float) for name in ("a", "b", "c", "seconds")
    )
    weights = 2.0 * rows * columns
    roofline_s = np.maximum(tokens * weights / device.flops_per_s, weights / device.memory_bytes_per_s)
    along, across = _hats(np.log(tokens), np.log(_TOKENS)), _hats(np.log(weights), np.log(_WEIGHT_BYTES))
    shares = np.einsum("ij,ik->ijk", along, across).reshape(len(cells), -1)
    one = np.eye(shares.shape[1]).reshape(len(_TOKENS), len(_WEIGHT_BYTES), -1)
    bends = (one[:, 2:] - 2 * one[:, 1:-1] + one[:, :-2]).reshape(-1, shares.shape[1])
    steps = (one[1:] - one[:-1]).reshape(-1, shares.shape[1])
    logs = _least_absolute(shares, np.log(roofline_s / seconds), np.vstack([0.3 * bends, 0.05 * steps]))
    table = np.exp(logs).reshape(len(_TOKENS), len(_WEIGHT_BYTES))
    efficiency = tuple(tuple(round(float(each), 3) for each in row) for row in table)
    return Matrices(_TOKENS, _WEIGHT_BYTES, efficiency)


def _between(cells: list[Cell], device: DeviceShape) -> Between:
    moved = [2.0 * cell.a * (10 * cell.b + 2 * cell.c + 3 * cell.d) for cell in cells]

    def made(x: _Array) -> Between:
        return Between(_short(x[0] * 1e-6), round(float(x[1]), 3))

    def seconds(x: _Array) -> list[float]:
        return [Between(x[0] * 1e-6, x[1]).seconds(each, device.memory_bytes_per_s) for each in moved]

    return made(_robust(seconds, [20.0, 0.5], cells))


def _prompts(cells: list[Cell], device: DeviceShape) -> Prompts:
    def made(x: _Array) -> Prompts:
        return Prompts(_short(x[0] * 1e-6), round(float(x[1] * 100)), round(float(x[2]), 3), round(float(x[3]), 3))

    def seconds(x: _Array) -> list[float]:
        parts = Prompts(x[0] * 1e-6, x[1] * 100, x[2], x[3])
        pair_s = 4.0 * HEAD_DIM / device.flops_per_s
        return [parts.seconds(each.a, prefill_pairs(0, each.a), each.a * each.b, each.c * pair_s) for each in cells]

    return made(_robust(seconds, [15.0, 3.0, 0.2, 0.5], cells))


def _decodes(cells: list[Cell], device: DeviceShape) -> Decodes:
    read = np.array([_kv_bytes(cell) for cell in cells]) / device.memory_bytes_per_s
    x = _robust(lambda x: x[0] * 1e-6 + read / x[1], [15.0, 0.7], cells)
    return Decodes(_short(x[0] * 1e-6), round(float(x[1]), 3))


def _kv_bytes(cell: Cell) -> float:
    return 4.0 * cell.a * cell.b * cell.c * HEAD_DIM


def _robust(seconds: Callable[[_Array], Any], start: list[float], cells: Sequence[Cell]) -> _Array:
    measured = np.array([cell.seconds for cell in cells])
    result = least_squares(
        lambda x: np.log(np.asarray(seconds(x)) / measured), start, bounds=(1e-3, np.inf), loss="soft_l1", f_scale=0.1
    )
    return np.asarray(result.x)


def _hats(at: _Array, knots: _Array) -> _Array:
    """Return the shares that knots have in values between them, one row a value."""
    at = np.clip(at, knots[0], knots[-1])
    below = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    share = (at - knots[below]) / (knots[below + 1] - knots[below])
    found = np.zeros((len(at), len(knots)))
    rows = np.arange(len(at))
    found[rows, below], found[rows, below + 1] = 1 - share, share
    return found


def _least_absolute(shares: _Array, values: _Array, smooth: _Array) -> _Array:
    weights, found = np.ones(len(values)), np.zeros(shares.shape[1])
    for _ in range(30):
        system = np.vstack([shares * weights[:, None], smooth])
        found = np.linalg.lstsq(system, np.concatenate([values * weights, np.zeros(len(smooth))]), rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(values - shares @ found), _LEAST))
    return found


def _short(value: float) -> float:
    return float(f"{value:.3g}")
