"""What is learned of a machine's iterations: the profile table, and how late they come beside what was estimated.

Owned by a scheduler; the host keeps the state over a restart, and reports carry the step times to placements (D4).
"""

from __future__ import annotations

import msgspec

from cohort.common.policies.interface import IterationPlan, Learned, Ran
from cohort.common.policies.step_times.lateness import Lateness
from cohort.common.policies.step_times.profile_table import ProfileTable
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Row, Sequence
from cohort.common.types import KvGeometry, StepTimes

_PERCENTILE = 0.99
"""Percentile of the bound, P99 (§3.1)."""


class _State(msgspec.Struct, tag_field="kind", tag="dynaserve-batching"):
    """Learned state in a file: the exported profile table, and the lateness of iterations."""

    version: int
    table: msgspec.Raw
    lateness: tuple[float, int]


class LearnedTimes(Learned):
    def __init__(self) -> None:
        self.table = ProfileTable()
        self.lateness = Lateness(_PERCENTILE)
        self._observed: frozenset[Sequence] = frozenset()
        """Sequences of the last iteration recorded, if all its rows decoded."""

    def learn(self, ran: Ran, geometry: KvGeometry) -> BatchShape | None:
        """Record an iteration that ran."""
        return self.note(ran.plan, ran.latency_s, geometry)

    def note(self, plan: IterationPlan, latency_s: float, geometry: KvGeometry) -> BatchShape | None:
        """Record an iteration; return its shape, or None if nothing was learned: from decodes with the last ones' rows,
        copies beside rows (which of the two took the time is unknown), drafts, grammars (what a mask takes is up to its
        request)."""
        if plan.drafted or plan.has_grammars:  # drafts are priced by `common/policies/speculation.py`
            return None
        copies, rows = plan.copies, frozenset[Sequence]()
        if copies:
            if any(copy.concurrent for copy in copies):
                return None
            shape = plan_shape(plan, geometry)
            self.table.record(shape, latency_s)
            return shape
        shape = plan_shape(plan)
        if not shape.prefill_rows:
            rows = frozenset([row.sequence for row in plan.rows])
            if rows == self._observed or not rows:
                return None
        self._observed = rows
        if shape.mixed:  # the kind whose size is up to the scheduler
            self.lateness.record(plan.estimated_s, latency_s)
        self.table.record(shape, latency_s)
        return shape

    def knows(self, plan: IterationPlan) -> bool:
        """Return whether running these decode rows once more would teach nothing."""
        return frozenset([row.sequence for row in plan.rows]) == self._observed

    def step_times(self) -> StepTimes | None:
        return self.table.step_times

    def export_state(self) -> bytes:
        if not self.table.suffices:
            return b""
        return msgspec.json.encode(_State(1, msgspec.Raw(self.table.export()), self.lateness.keep()))

    def import_state(self, data: bytes) -> None:
        try:
            state = msgspec.json.decode(data, type=_State)
        except msgspec.ValidationError:
            self.table.load(data)  # a profile, or a table alone
            return
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        lateness = Lateness(_PERCENTILE)
        lateness.resume(state.lateness)
        self.table.load(bytes(state.table))
        self.lateness = lateness


def plan_shape(plan: IterationPlan, geometry: KvGeometry | None = None) -> BatchShape:
    """Return a plan's shape; with its copies if `geometry` is given."""
    starts = [row.start for row in plan.rows if row.count == 1]
    batch = BatchShape.of_decodes(len(starts), sum(starts) + len(starts))
    if len(starts) < len(plan.rows):
        for row in [row for row in plan.rows if row.count > 1]:
            batch = batch.with_prefill(row.start, row.count)
    if not plan.copies or geometry is None:
        return batch
    positions = {"block": geometry.block_size, "slot": 1}
    copied = sum(positions[copy.unit] * len(copy.device) for copy in plan.copies)
    return batch._replace(copied=copied // geometry.num_groups)


def decode_shape(rows: list[Row]) -> BatchShape:
    return BatchShape.of_decodes(len(rows), sum([row.start for row in rows]) + len(rows))
