"""The time of the next iteration (R3): linear in what it computes, or in what comes back beside it if that is more.

    T_exec = decode(rows, context) + prefill(tokens)         T_swap = slots · seconds per slot
    T_iter = max(T_exec, T_swap)

Called several hundred times per decision by the packing, and with every measured iteration. Starts from profiled points
(`import_state`), or from nothing: everything costs 0 until the first iterations were measured. Differs from the paper:
prefill and decode share one constant, because one forward reads the weights once; and the fit goes on while serving
(recursive least squares that slowly forgets).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cohort.common.policies.interface import Learned
from cohort.common.sequence import Row

_Vector = npt.NDArray[np.float64]

_SCALE = np.array([1.0, 1.0, 1e-3, 1e-2, 1e-5])
"""Features near 1: constant, prefill at all, prefill tokens, decode rows, context positions."""
_NOT_NEGATIVE = (0, 2, 3, 4)
"""Indexes of all coefficients but "prefill at all": either prompts or rows may cost more."""
_FORGET = 0.998
_UNSURE = 100.0
"""Variance of a coefficient without observations; forgetting never makes it larger."""
_SURE = 1e-12
"""Least variance that is divided by: of two coefficients that only occur together, one fixes the other."""
_SMOOTH = 0.05


class BatchLoad(msgspec.Struct, frozen=True, gc=False):
    """Table 1's lengths of a batch: prompt tokens, rows of one token, and the KV positions that all rows read."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    context: int = 0

    def plus(self, start: int, count: int) -> BatchLoad:
        """Add a row of positions [start, start + count)."""
        if count == 1:
            return BatchLoad(self.prefill_tokens, self.decode_rows + 1, self.context + start + 1)
        return BatchLoad(self.prefill_tokens + count, self.decode_rows, self.context + start)

    def minus(self, start: int, count: int) -> BatchLoad:
        if count == 1:
            return BatchLoad(self.prefill_tokens, self.decode_rows - 1, self.context - start - 1)
        return BatchLoad(self.prefill_tokens - count, self.decode_rows, self.context - start)


def load_of(rows: Iterable[Row]) -> BatchLoad:
    tokens = decode = context = 0
    for row in rows:
        if row.count == 1:
            decode += 1
            context += row.start + 1
        else:
            tokens += row.count
            context += row.start
    return BatchLoad(tokens, decode, context)


class IterationCost(Learned):
    def __init__(self) -> None:
        self._weights: _Vector = np.zeros(len(_SCALE))
        self._covariance = np.eye(len(_SCALE)) * _UNSURE
        self._slot_s = 0.0
        self._known = False
        """Whether anything was learned."""
        self._seen = self._tracked = 0
        self._error = self._bias = 0.0
        self._set()

    # -- asking ------------------------------------------------------------------------------------------------

    def exec_s(self, load: BatchLoad) -> float:
        """Return T_exec; 0 for an iteration without rows."""
        return self.exec_of(load.prefill_tokens, load.decode_rows, load.context)

    def exec_of(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        """Return `exec_s` of plain numbers, for calls per request."""
        seconds = self._base_s + self._row_s * decode_rows + self._position_s * context
        if prefill_tokens:
            prefill_s = self._prefill_s + self._token_s * prefill_tokens
            return seconds + prefill_s if prefill_s > 0.0 else seconds
        return seconds if decode_rows else 0.0

    def swap_s(self, slots: int) -> float:
        return self._slot_s * slots

    @property
    def knows_slots(self) -> bool:
        """Whether copies have been timed."""
        return self._slot_s > 0.0

    def iteration_s(self, load: BatchLoad, slots: int = 0) -> float:
        return max(self.exec_s(load), self._slot_s * slots)

    @property
    def least_s(self) -> float:
        """Least time of an iteration."""
        return self._base_s + self._row_s

    def tokens_within(self, load: BatchLoad, seconds: float) -> int:
        """Return how many prompt tokens can be added to a batch so that it stays within `seconds`."""
        headroom = seconds - self._base_s - self._row_s * load.decode_rows - self._position_s * load.context
        if headroom <= 0.0:
            return 0
        if self._token_s <= 0.0:
            return 1_000_000_000 if self._prefill_s <= headroom else 0
        # The first tokens may be free (`_prefill_s` < 0): rows of decodes leave the device's arithmetic idle.
        return max(0, int(min((headroom - self._prefill_s) / self._token_s, 1e9)) - load.prefill_tokens)

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, load: BatchLoad, slots: int, latency_s: float, *, slots_before: int = 0) -> None:
        """Learn from an iteration with `slots` copied beside its rows and `slots_before` ahead of them. Time that
        copies add sets the cost of a slot, the rest that of rows."""
        if slots_before:
            if self._known and latency_s > self.exec_s(load):
                self._note_slot((latency_s - self.exec_s(load)) / slots_before)
            return
        idle = load.prefill_tokens == 0 and load.decode_rows == 0
        if slots and (idle or self.swap_s(slots) > self.exec_s(load)):
            self._note_slot(latency_s / slots)
            return
        if idle:
            return
        if self._known:
            off = self.exec_s(load) / max(latency_s, 1e-9) - 1.0
            self._tracked += 1
            share = max(_SMOOTH, 1.0 / self._tracked)
            self._error += share * (abs(off) - self._error)
            self._bias += share * (off - self._bias)
        self._seen += 1
        self._learn(load, latency_s, _FORGET)

    def _note_slot(self, slot_s: float) -> None:
        self._slot_s = slot_s if self._slot_s == 0.0 else 0.9 * self._slot_s + 0.1 * slot_s

    def _learn(self, load: BatchLoad, latency_s: float, forget: float) -> None:
        prefill = load.prefill_tokens
        x = _SCALE * np.array([1.0, float(prefill > 0), prefill, load.decode_rows, load.context])
        spread = self._covariance @ x
        gain = spread / (forget + float(x @ spread))
        self._known = True
        self._weights = self._weights + gain * (latency_s - float(x @ self._weights))
        # Joseph's form of P − gain · spread: a sum of squares, so that rounding never makes a variance negative.
        shrink = np.eye(len(_SCALE)) - np.outer(gain, x)
        self._covariance = shrink @ self._covariance @ shrink.T + forget * np.outer(gain, gain)
        if float(np.trace(self._covariance)) / forget <= _UNSURE * len(_SCALE):
            self._covariance /= forget
        self._set()

    def _set(self) -> None:
        """Set the coefficients in use: more work never takes less time. One that comes out negative is set to zero, and
        the others are fitted given that: rows and positions grow together, so a row seems costly where a position seems
        to save time."""
        weights, covariance = self._weights, self._covariance
        fixed: list[int] = []
        while negative := [i for i in _NOT_NEGATIVE if weights[i] < 0.0 and i not in fixed]:
            most = min(negative, key=lambda i: float(weights[i]) / math.sqrt(max(float(covariance[i, i]), _SURE)))
            share = covariance[:, most] / max(covariance[most, most], _SURE)
            weights = weights - share * weights[most]
            covariance = covariance - np.outer(share, covariance[most])
            fixed.append(most)
        weights[fixed] = 0.0
        scaled: list[float] = (weights * _SCALE).tolist()
        self._base_s, self._prefill_s, self._token_s, self._row_s, self._position_s = scaled

    # -- keeping -----------------------------------------------------------------------------------------------

    def export_state(self) -> bytes:
        """Return the state; empty before the first measured iteration: a profile is read again."""
        if not self._seen:
            return b""
        weights, covariance = self._weights.tolist(), self._covariance.tolist()
        state = {"weights": weights, "covariance": covariance, "slot_s": self._slot_s, "observations": self._seen}
        return json.dumps(state).encode()

    def import_state(self, data: bytes) -> None:
        """Import an exported state, or the file of `cohort profile`. Raises `ValueError`."""
        state: Any = json.loads(data)
        try:
            if "points" in state:
                self._fit(state["points"])
                return
            weights = np.array(state["weights"], dtype=np.float64)
            covariance = np.array(state["covariance"], dtype=np.float64)
            slot_s, seen = float(state["slot_s"]), int(state["observations"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"neither a state of this cost model nor a profile: {error}") from error
        finite = bool(np.isfinite(weights).all() and np.isfinite(covariance).all())
        if weights.shape != _SCALE.shape or covariance.shape != (len(_SCALE),) * 2 or not finite:
            raise ValueError("a state of another cost model")
        if not np.allclose(covariance, covariance.T) or float(np.linalg.eigvalsh(covariance)[0]) < -_SURE * _UNSURE:
            raise ValueError("a state whose covariance is none")
        self._weights, self._covariance, self._slot_s = weights, covariance, slot_s
        self._seen, self._known = seen, True
        self._set()

    def _fit(self, points: list[dict[str, Any]]) -> None:
        """R3 · Fit offline: every profiled shape once, none forgotten."""
        for point in points:
            shape = point["shape"]
            rows, count, context = shape["rows"], shape["tokens_per_row"], shape["context"]
            if count == 1:
                load = BatchLoad(0, rows, rows * context)
            else:
                load = BatchLoad(rows * count, 0, rows * (context - count))
            self._learn(load, float(point["median_s"]), 1.0)

    def metrics(self) -> dict[str, float]:
        """Return metrics: `cost_error`, the relative error of forecasts (moving average since this process started);
        `cost_bias`, the same with its sign; observations, those of the imported state included."""
        return {"cost_error": self._error, "cost_bias": self._bias, "cost_observations_total": float(self._seen)}
