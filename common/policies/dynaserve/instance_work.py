"""The work of an instance, as the manager knows it: the last report, and requests sent there since (D4).

Owned by the placement, one per instance. Converts reported progress into a timeline, and work into seconds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cohort.common.policies.dynaserve.timeline import PassLimits, SegmentWork, Timeline
from cohort.common.policies.interface import InstanceView
from cohort.common.policies.step_times.reported_times import reported_times
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import InstanceId, RequestId, StepTimes, WorkerCapacity, WorkerStats

Balance = Literal["work", "end"]

NOTHING = SegmentWork(0, 0, 0)

_UNSEEN_S = 2.0
"""Time after which a sent request that is in no report has ended between two of them."""


class InstanceWork:
    """D4 · Work estimated from the worker's progress: every report replaces what was known of it.

    `pass_s`: the time that iterations there aim at; `least_prefill`: prompt tokens in each of them at least; `balance`:
    what `until_done` returns; `margin_tokens`: least tokens that any response is expected to have left (D8).
    """

    def __init__(
        self, instance: InstanceId, *, pass_s: float, least_prefill: int, balance: Balance, margin_tokens: int
    ) -> None:
        self.instance = instance
        self.pass_s = pass_s
        self._margin_tokens, self._balance, self._least_prefill = margin_tokens, balance, least_prefill
        self._limits = PassLimits(pass_s, 1, 1, least_prefill)
        self.unified = False
        self._stats: WorkerStats | None = None
        self._assigned: dict[RequestId, tuple[float, SegmentWork]] = {}
        self._timeline: Timeline | None = None
        self._times: StepTimes | None = None
        self._reported = np.empty((3, 0))
        self._decoding = (0, 0)
        self._prefill = 0
        self._capacity: WorkerCapacity | None = None
        self._reported_s = 0.0
        self._load_s: float | None = None

    def refresh(self, now_s: float, view: InstanceView, fallback: StepTimes) -> None:
        self.unified = view.role.prefills and view.role.decodes
        stats = view.stats
        if stats is self._stats:
            return
        self._stats = stats
        capacity = view.capacity
        self._capacity = capacity
        self._limits = PassLimits(self.pass_s, capacity.max_step_tokens, capacity.max_rows, self._least_prefill)
        self._timeline = self._load_s = None
        times = self._times = reported_times(stats, fallback)
        # As arrays: half of many instances may have reported since the last request.
        queue = stats.queue
        flat = [w.prefill_left for w in queue] + [w.context for w in queue] + [w.decode_left for w in queue]
        prefill, context, decode = work = np.array(flat, dtype=np.float64).reshape(3, -1)
        np.maximum(decode, self._margin_tokens, out=decode, where=decode > 0)
        self._reported = work
        prefill_tokens, decode_tokens = float(prefill.sum()), float(decode.sum())
        decodes = (prefill == 0) & (decode > 0)
        self._decoding = int(np.count_nonzero(decodes)), int(context @ decodes)
        self._prefill = int(prefill_tokens)
        self._reported_s = (
            times.token_s * (prefill_tokens + decode_tokens)
            + times.row_s * decode_tokens
            + times.pair_s * float(prefill @ (context + 0.5 * prefill + 0.5))
            + times.position_s * float(decode @ (context + prefill + 0.5 * decode))
        )
        if self._assigned:
            reported = {work.request_id for work in stats.queue}
            self._assigned = {
                request_id: (since_s, segment_work)
                for request_id, (since_s, segment_work) in self._assigned.items()
                if request_id not in reported and now_s - since_s < _UNSEEN_S
            }

    def assign(self, now_s: float, request_id: RequestId, segment_work: SegmentWork) -> None:
        self._assigned[request_id] = (now_s, segment_work)
        self._timeline = self._load_s = None

    def forget(self, request_id: RequestId) -> None:
        if self._assigned.pop(request_id, None) is not None:
            self._timeline = self._load_s = None

    @property
    def times(self) -> StepTimes:
        if self._times is None:
            raise ValueError(f"{self.instance} was never refreshed")
        return self._times

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            assigned = [segment_work for _, segment_work in self._assigned.values()]
            queued_work = np.concatenate((self._reported.T, assigned)) if assigned else self._reported.T
            self._timeline = Timeline(queued_work, self.times, self._limits)
        return self._timeline

    @property
    def load_s(self) -> float:
        """Seconds that its work takes (`work_seconds`)."""
        if self._load_s is None:
            assigned_s = sum(work_seconds(self.times, segment_work) for _, segment_work in self._assigned.values())
            self._load_s = self._reported_s + assigned_s
        return self._load_s

    def until_done(self, extra: SegmentWork = NOTHING) -> float:
        """Return T_α or T_β of Alg. 1 with `extra` work.

        `balance` "end": the predicted end of everything there, as in the paper. "work": the seconds of work there,
        every row's own share only. The end is that of the longest response, however few rows run beside it, so
        prompts balanced by it pile up there.
        """
        if self._balance == "end":
            return self.timeline.end_with(extra)
        return self.load_s + work_seconds(self.times, extra)

    def decode_pass_s(self, more_rows: int = 0, more_context: int = 0) -> float:
        """Return the seconds of an iteration of all decodes that are there, and of some more."""
        rows, context = self._decoding
        return step_seconds(self.times, BatchShape.of_decodes(rows + more_rows, context + more_context))

    @property
    def decodes(self) -> int:
        """Number of rows that decode there, or will once the requests sent since the report decode."""
        return self._decoding[0] + sum(work.decode > 0 for _, work in self._assigned.values())

    @property
    def free_rows(self) -> int:
        """Rows of an iteration that no request takes, those on their way included."""
        return self._limits.max_rows - len(self._reported.T) - len(self._assigned)

    @property
    def free_tokens(self) -> int:
        """Positions in free blocks, less those of requests sent there since the report."""
        stats, capacity = self._stats, self._capacity
        if stats is None or capacity is None:
            return 0
        sent = sum(work.context + work.prefill + work.decode for _, work in self._assigned.values())
        return capacity.geometry.positions(stats.free_blocks) - sent

    @property
    def prefill_backlog_s(self) -> float:
        return self.times.token_s * (self._prefill + sum(work.prefill for _, work in self._assigned.values()))


def work_seconds(times: StepTimes, segment_work: SegmentWork) -> float:
    """Return the seconds of a segment's work on an instance that is busy anyway: its tokens, its row and what that row
    reads, but no share of reading the weights."""
    context = segment_work.context + segment_work.prefill
    decode_s = segment_work.decode * (
        times.row_s + times.token_s + times.position_s * (context + 0.5 * segment_work.decode)
    )
    return times.token_s * segment_work.prefill + times.pair_s * segment_work.pairs + decode_s
