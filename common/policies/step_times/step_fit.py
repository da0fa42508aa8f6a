"""The constants of an iteration from measured ones: damped least squares on relative errors, robust to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cohort.common.policies.step_times.step_cost import CORNER, BatchShape
from cohort.common.types import StepTimes

_ROUNDS = 40
_OUTLIER = 0.2
"""Errors beyond this share count linearly, not squared (Huber)."""
_PRIOR = 0.02
"""Pull of each constant towards its starting value: decides only what the points leave open."""
_MIXED_PRIOR = 0.2
"""Pull of the price of mixing towards none: where no prompt ever runs alone, tokens are dear, not mixing."""
_DEAREST_MIXING = 1.1
"""Max logarithm of the price: mixing at most triples an iteration, or saves two thirds of one."""

_Array = npt.NDArray[np.float64]
_MIXED, _COPY = 6, 7
"""Indices of the constants that are no plain times: the first is the logarithm of 1 + the price of mixing."""


def fit_step_times(
    shapes: Sequence[BatchShape], seconds: Sequence[float], weights: Sequence[float], start: StepTimes | None = None
) -> StepTimes:
    """Fit the constants, in logarithms; few points leave the rest near `start` (or a guess). Raises `ValueError`."""
    if not shapes:
        raise ValueError("no measured iterations to fit")
    points = _Points.of(shapes, seconds)
    weight = np.array(weights, dtype=np.float64)
    weight = weight / weight.max()
    first = _logs(start or points.guess(), points)
    pulled = np.where(np.arange(len(first)) == _MIXED, _MIXED_PRIOR, _PRIOR) ** 2
    towards = first * (np.arange(len(first)) != _MIXED)
    theta, damping = first.copy(), 1e-2
    residual, jacobian = _errors(theta, points)
    loss = _loss(residual, weight, pulled, theta - towards)
    for _ in range(_ROUNDS):
        pull = weight * np.where(np.abs(residual) <= _OUTLIER, 1.0, _OUTLIER / np.maximum(np.abs(residual), 1e-12))
        normal = (jacobian.T * pull) @ jacobian + np.diag(pulled)
        gradient = (jacobian.T * pull) @ residual + pulled * (theta - towards)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        # A constant changes by e at most in one round, or one bad round could lose it for good.
        candidate = theta - np.clip(step, -1.0, 1.0)
        candidate[_MIXED] = np.clip(candidate[_MIXED], -_DEAREST_MIXING, _DEAREST_MIXING)
        residual_, jacobian_ = _errors(candidate, points)
        loss_ = _loss(residual_, weight, pulled, candidate - towards)
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
    constants = [float(value) for value in np.exp(theta)]
    constants[_MIXED] -= 1.0
    if not points.copied.any():
        constants[_COPY] = start.copy_s if start is not None else 0.0  # nothing was learned of it
    return StepTimes(*constants)


@dataclass(frozen=True, slots=True)
class _Points:
    """Measured iterations, by column; `runs`, `mixed`: 1 where rows ran at all, where prompts and decodes did."""

    tokens: _Array
    rows: _Array
    pairs: _Array
    context: _Array
    copied: _Array
    runs: _Array
    mixed: _Array
    log_s: _Array

    @staticmethod
    def of(shapes: Sequence[BatchShape], seconds: Sequence[float]) -> _Points:
        prefill, prefill_rows, pairs, decodes, context, copied = np.array(shapes, dtype=np.float64).T
        rows = prefill_rows + decodes
        return _Points(
            prefill + decodes,
            rows,
            pairs,
            context,
            copied,
            (rows > 0).astype(np.float64),
            ((prefill > 0) & (decodes > 0)).astype(np.float64),
            np.log(np.maximum(np.array(seconds, dtype=np.float64), 1e-9)),
        )

    def guess(self) -> StepTimes:
        ran = self.runs > 0
        if not ran.any():
            return StepTimes(1e-3, 1e-4, 1e-4, 1e-3, 1e-9, 1e-8)
        seconds = np.exp(self.log_s[ran])
        fastest = float(seconds.min())
        token_s = float((seconds / np.maximum(self.tokens[ran], 1.0)).min())
        return StepTimes(0.1 * fastest, 0.01 * fastest, 0.8 * token_s, 0.8 * fastest, token_s * 1e-4, fastest * 1e-5)


def _logs(times: StepTimes, points: _Points) -> _Array:
    copy_s = times.copy_s
    if copy_s <= 0.0 and points.copied.any():  # the first copies ever seen
        some = points.copied > 0
        copy_s = 0.1 * float((np.exp(points.log_s[some]) / points.copied[some]).min())
    values = (times.step_s, times.row_s, times.token_s, times.floor_s, times.pair_s, times.position_s)
    logs: _Array = np.log(np.maximum(np.array([*values, 1.0 + times.mixed_share, copy_s]), 1e-12))
    return logs


def _errors(theta: _Array, points: _Points) -> tuple[_Array, _Array]:
    """log(model) − log(measured), and its derivatives by the constants' logarithms."""
    step_s, row_s, token_s, floor_s, pair_s, position_s, mixed, copy_s = np.exp(theta)
    compute = (token_s * points.tokens) ** CORNER
    memory = floor_s**CORNER
    linear = (compute + memory) ** (1.0 / CORNER)
    # Rows cost what they cost alone, times the price of mixing.
    scale = points.runs * np.where(points.mixed > 0.0, mixed, 1.0)
    parts = np.stack(
        [
            step_s * scale,
            row_s * points.rows * scale,
            linear * compute / (compute + memory) * scale,
            linear * memory / (compute + memory) * scale,
            pair_s * points.pairs * scale,
            position_s * points.context * scale,
        ],
        axis=1,
    )
    rows_s = parts.sum(axis=1)
    copies_s = copy_s * points.copied
    model = np.maximum(rows_s + copies_s, 1e-12)
    derivatives = np.column_stack([parts, rows_s * points.mixed, copies_s]) / model[:, None]
    return np.log(model) - points.log_s, derivatives


def _loss(residual: _Array, weight: _Array, pulled: _Array, moved: _Array) -> float:
    size = np.abs(residual)
    huber = np.where(size <= _OUTLIER, 0.5 * residual**2, _OUTLIER * (size - 0.5 * _OUTLIER))
    return float((weight * huber).sum() + 0.5 * (pulled * moved**2).sum())
