"""An instance's future: when everything that is assigned to it will be done, in virtual passes (D4).

Computed for the placement once per state of an instance, then extended once per probe by one more micro-request. In a
pass every decode advances one token and the prompts share a budget, first come first served, so a request's passes
follow from counting alone; the lengths of the passes give seconds. Pure arithmetic on arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cohort.common.policies.step_times.step_cost import CORNER, BatchShape, linear_seconds, step_seconds, tokens_within
from cohort.common.types import StepTimes

_Array = npt.NDArray[np.float64]


class SegmentWork(NamedTuple):
    """Work of one micro-request: tokens to prefill from position `context` on, then output tokens to decode."""

    prefill: int
    context: int
    decode: int

    @property
    def pairs(self) -> float:
        return self.prefill * (self.context + 0.5 * (self.prefill + 1))


@dataclass(frozen=True, slots=True)
class PassLimits:
    """`pass_s`: the length of iteration that the instance's scheduler aims at (D5); `max_tokens`, `max_rows`: its
    bounds; `least_prefill`: tokens of waiting prompts in every pass."""

    pass_s: float
    max_tokens: int
    max_rows: int
    least_prefill: int


class Timeline:
    """D4 · DynaServe §4.1: virtual passes with a token budget and a request limit.

    `queued_work` in the order of the instance's queue. `end_s`: seconds from now until all is done.

    Differs from the paper: passes between two events (a prompt is done, a response ends) are computed at once; the
    budget of a pass follows from learned times and the bound instead of a batching history; when rows run out, late
    requests start as early ones end. A probe adds its segment's passes to the timeline instead of simulating anew.
    """

    def __init__(self, queued_work: Sequence[SegmentWork] | _Array, times: StepTimes, limits: PassLimits) -> None:
        self._times, self._limits = times, limits
        data = np.array(queued_work, dtype=np.float64).reshape(-1, 3)
        prefill, context, decode = data[:, 0], data[:, 1], data[:, 2]
        decoding = prefill == 0
        # Average rows and context beside the prompts: current decodes, and half of the requests with prompts.
        decode_rows = float(decoding.sum()) + 0.5 * float((~decoding).sum() - 1 if len(data) else 0)
        positions = float(context[decoding].sum()) + 0.5 * float((context + prefill)[~decoding].sum())
        total = float(prefill.sum())
        pairs = float((prefill * (context + 0.5 * (prefill + 1.0))).sum())
        self._pairs_per_token = pairs / total if total else 0.0
        self._budget = self._prefill_budget(max(0.0, decode_rows), positions, self._pairs_per_token)
        starts = np.where(decoding, 0.0, np.cumsum(prefill) / self._budget)
        self.prefill_passes = total / self._budget
        ends = starts + decode
        rows = len(data)
        if rows > limits.max_rows:
            # A request without a row starts when, in order of time, another ends.
            order = np.argsort(starts, kind="stable")
            late = order[limits.max_rows :]
            starts[late] = np.maximum(starts[late], np.sort(ends[order])[: len(late)])
            ends = starts + decode
        self._edges, self._elapsed = self._walk(starts, ends, context + prefill)

    @property
    def end_s(self) -> float:
        return self._elapsed[-1]

    def end_with(self, segment_work: SegmentWork) -> float:
        """Return `end_s` with this segment queued last: a probe of Alg. 1, in a few microseconds."""
        return self.end_s + self._added(segment_work, self.prefill_passes if segment_work.prefill else 0.0)[0]

    def finish_of(self, segment_work: SegmentWork, earliest_s: float = 0.0) -> float:
        """Return the seconds until the segment itself would be done, if it may not start before `earliest_s`."""
        first_pass = self.prefill_passes if segment_work.prefill else 0.0
        if earliest_s > 0.0:
            first_pass = max(first_pass, self._pass_at(earliest_s))
        added_s, end_pass = self._added(segment_work, first_pass)
        # Passes that only this segment has are in `_added`, and `_time_at` goes on beyond the last edge as well.
        alone = max(0.0, end_pass - max(self._edges[-1], first_pass))
        return max(self._time_at(end_pass) + added_s - alone * self._tail_s, earliest_s)

    # -- passes ------------------------------------------------------------------------------------------------

    def _walk(self, starts: _Array, ends: _Array, context: _Array) -> tuple[list[float], list[float]]:
        """Return the edges in passes, and the seconds elapsed at each."""
        at = np.concatenate((starts, ends, [0.0, self.prefill_passes]))
        count = len(starts)
        order = np.argsort(at, kind="stable")
        edges = at[order]
        joining = np.zeros(len(at))
        joining[:count], joining[count : 2 * count] = 1.0, -1.0
        base = np.zeros(len(at))  # a row that started at pass f reads context + (k − f) positions in pass k
        base[:count] = context - starts
        base[count : 2 * count] = -base[:count]
        rows = np.cumsum(joining[order])[:-1]
        offset = np.cumsum(base[order])[:-1]
        length = np.diff(edges)
        middle = edges[:-1] + 0.5 * length
        self._rows, self._offset = rows, offset
        prefilling = (middle < self.prefill_passes) & (length > 0)
        seconds = self._pass_seconds(rows, offset + rows * middle, prefilling)
        elapsed = np.concatenate(([0.0], np.cumsum(seconds * length)))
        return edges.tolist(), elapsed.tolist()

    def _pass_seconds(self, rows: _Array, context: _Array, prefilling: npt.NDArray[np.bool_]) -> _Array:
        times = self._times
        prefill = np.where(prefilling, self._budget, 0.0)
        all_rows = rows + prefilling
        linear = ((times.token_s * (rows + prefill)) ** CORNER + times.floor_s**CORNER) ** (1.0 / CORNER)
        seconds = (
            times.step_s
            + times.row_s * all_rows
            + linear
            + times.pair_s * self._pairs_per_token * prefill
            + times.position_s * context
        )
        seconds = np.where(prefilling & (rows > 0.5), (1.0 + times.mixed_share) * seconds, seconds)
        return np.where(all_rows > 0.5, seconds, 0.0)

    def _prefill_budget(self, rows: float, context: float, pairs_per_token: float) -> float:
        """Return the prompt tokens of a pass that stays within `pass_s`."""
        times, limits = self._times, self._limits
        pass_s = limits.pass_s / (1.0 + times.mixed_share) if rows else limits.pass_s
        remaining_s = pass_s - times.step_s - times.row_s * (rows + 1) - times.position_s * context
        tokens = tokens_within(times, remaining_s) - rows
        if pairs_per_token and tokens > 0:
            for _ in range(2):  # the chunk's own attention takes its share
                tokens = tokens_within(times, remaining_s - times.pair_s * pairs_per_token * max(tokens, 0.0)) - rows
                tokens = max(tokens, 1.0)
        least = float(min(limits.least_prefill, limits.max_tokens))
        return min(max(tokens, least), max(1.0, limits.max_tokens - rows))

    # -- one more segment ----------------------------------------------------------------------------------------

    def _added(self, segment_work: SegmentWork, start: float) -> tuple[float, float]:
        """Return the seconds that the segment adds if it starts in pass `start`, and the pass in which it ends."""
        times = self._times
        last = self._edges[-1]
        added_s = 0.0
        if segment_work.prefill:
            passes = segment_work.prefill / self._budget
            rows = self._rows_at(start)
            inside = max(0.0, min(start + passes, last) - start)
            pairs = round(self._budget * segment_work.pairs / segment_work.prefill)
            chunk = BatchShape(round(self._budget), 1, pairs, 0, 0)
            if inside:
                # Beside the decodes that run anyway: the chunk's own tokens, not another reading of the weights.
                mixed = linear_seconds(times, rows + self._budget) - linear_seconds(times, rows)
                added_s += inside * (1.0 + times.mixed_share) * (mixed + times.row_s + times.pair_s * pairs)
            if passes > inside:
                added_s += (passes - inside) * step_seconds(times, chunk)
            start += passes
        end = start + segment_work.decode
        if segment_work.decode:
            context = segment_work.context + segment_work.prefill
            added_s += segment_work.decode * times.row_s
            added_s += times.position_s * segment_work.decode * (context + 0.5 * segment_work.decode)
            added_s += max(0.0, end - max(last, start)) * self._tail_s
        return added_s, end

    @property
    def _tail_s(self) -> float:
        return self._times.step_s + linear_seconds(self._times, 1)

    def _rows_at(self, at: float) -> float:
        index = bisect_right(self._edges, at) - 1
        return float(self._rows[index]) if index < len(self._rows) else 0.0

    def _time_at(self, at: float) -> float:
        last = self._edges[-1]
        if at >= last:
            return self._elapsed[-1] + (at - last) * self._tail_s
        return float(np.interp(at, self._edges, self._elapsed))

    def _pass_at(self, seconds: float) -> float:
        if seconds >= self._elapsed[-1]:
            return self._edges[-1] + (seconds - self._elapsed[-1]) / self._tail_s
        return float(np.interp(seconds, self._elapsed, self._edges))
