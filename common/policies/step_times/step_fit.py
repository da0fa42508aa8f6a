"""Six constants from measured iterations: damped least squares on relative errors that single wild points cannot move.

Called by `profile_table` now and then; pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cohort.common.policies.step_times.step_cost import CORNER, BatchShape
from cohort.common.types import StepTimes

_ROUNDS = 40
_OUTLIER = 0.2
"""Errors beyond this share count linearly, not squared (Huber)."""
_PRIOR = 0.02
"""Pull of each constant towards its starting value: decides only what the points leave open."""

_Array = npt.NDArray[np.float64]


def fit_step_times(
    shapes: Sequence[BatchShape], seconds: Sequence[float], weights: Sequence[float], start: StepTimes | None = None
) -> StepTimes:
    """The constants that explain the measured iterations best, in logarithms.

    Raises `ValueError` without points. With few of them the rest of the constants stays near `start` (or a guess).
    """
    if not shapes:
        raise ValueError("no measured iterations to fit")
    data = np.array(shapes, dtype=np.float64)
    tokens = data[:, 0] + data[:, 3]
    rows = data[:, 1] + data[:, 3]
    pairs, context = data[:, 2], data[:, 4]
    measured = np.log(np.maximum(np.array(seconds, dtype=np.float64), 1e-9))
    weight = np.array(weights, dtype=np.float64)
    weight = weight / weight.max()
    first = _logs(start or _guess(tokens, np.exp(measured)))
    theta, damping = first.copy(), 1e-2
    residual, jacobian = _errors(theta, tokens, rows, pairs, context, measured)
    loss = _loss(residual, weight, theta - first)
    for _ in range(_ROUNDS):
        pull = weight * np.where(np.abs(residual) <= _OUTLIER, 1.0, _OUTLIER / np.maximum(np.abs(residual), 1e-12))
        normal = (jacobian.T * pull) @ jacobian + _PRIOR**2 * np.eye(6)
        gradient = (jacobian.T * pull) @ residual + _PRIOR**2 * (theta - first)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        # A constant changes by e at most in one round, or one bad round could lose it for good.
        candidate = theta - np.clip(step, -1.0, 1.0)
        residual_, jacobian_ = _errors(candidate, tokens, rows, pairs, context, measured)
        loss_ = _loss(residual_, weight, candidate - first)
        if loss_ < loss:
            done = loss - loss_ < 1e-6 * loss
            theta, residual, jacobian, loss = candidate, residual_, jacobian_, loss_
            damping = max(damping / 4, 1e-6)
            if done:
                break
        else:
            damping *= 8
            if damping > 1e6:
                break
    return StepTimes(*(float(value) for value in np.exp(theta)))


def _guess(tokens: _Array, seconds: _Array) -> StepTimes:
    fastest = float(seconds.min())
    token_s = float((seconds / np.maximum(tokens, 1.0)).min())
    return StepTimes(0.1 * fastest, 0.01 * fastest, 0.8 * token_s, 0.8 * fastest, token_s * 1e-4, fastest * 1e-5)


def _logs(times: StepTimes) -> _Array:
    values = (times.step_s, times.row_s, times.token_s, times.floor_s, times.pair_s, times.position_s)
    logs: _Array = np.log(np.maximum(np.array(values), 1e-12))
    return logs


def _errors(
    theta: _Array, tokens: _Array, rows: _Array, pairs: _Array, context: _Array, measured: _Array
) -> tuple[_Array, _Array]:
    """log(model) − log(measured), and its derivatives by the constants' logarithms."""
    step_s, row_s, token_s, floor_s, pair_s, position_s = np.exp(theta)
    compute = (token_s * tokens) ** CORNER
    memory = floor_s**CORNER
    linear = (compute + memory) ** (1.0 / CORNER)
    parts = np.stack(
        [
            np.full_like(tokens, step_s),
            row_s * rows,
            linear * compute / (compute + memory),
            linear * memory / (compute + memory),
            pair_s * pairs,
            position_s * context,
        ],
        axis=1,
    )
    model = parts.sum(axis=1)
    return np.log(model) - measured, parts / model[:, None]


def _loss(residual: _Array, weight: _Array, moved: _Array) -> float:
    size = np.abs(residual)
    huber = np.where(size <= _OUTLIER, 0.5 * residual**2, _OUTLIER * (size - 0.5 * _OUTLIER))
    return float((weight * huber).sum() + 0.5 * _PRIOR**2 * (moved**2).sum())
