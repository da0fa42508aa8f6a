"""Drops of BROS (R11): which requests lose their blocks when another one needs blocks and there are none.

Called by `slack_packing.py`, which drops them. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cohort.common.policies.bros.batch import Batch
from cohort.common.policies.bros.request_queues import BestEffortQueues, RealTimeQueues
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt


class Drops:
    def __init__(
        self,
        real_time: RealTimeQueues,
        best_effort: BestEffortQueues,
        groups: TokenGroups,
        known_before: Mapping[Attempt, int],
        others: bool,
    ) -> None:
        """`known_before`: tokens known of a sequence when it started here, or came back to the device. `others`: the
        setting `drops`; off, only deadlocks make others give way."""
        self._rt, self._be, self._groups = real_time, best_effort, groups
        self._known_before, self._others = known_before, others

    def drops_itself(self, sequence: Sequence) -> bool:
        """Return whether a request that found no blocks loses its own and is computed again."""
        return not self._others and sequence.phase is Phase.RUNNING and not sequence.pinned

    def victims(
        self,
        sequence: Sequence,
        kv: KvAllocator,
        batch: Batch,
        sharing: BlockSharing | None,
        *,
        real_time: bool,
        desperate: bool,
    ) -> Iterator[Sequence]:
        """Yield requests to drop when no block is free (R11, §5.2): best-effort ones, latest first; then, for a
        feasible request, the real-time one with most time left. A request without a sampled token since it came in is
        spared unless `desperate`, so every drop is paid for by progress. Before all of them come best-effort requests
        whose slots it must overwrite while host memory has no place for them. Evaluated only when blocks are missing.
        `sharing`: the allocator's, if real-time requests take best-effort blocks without a drop (R8)."""
        if not (desperate or self._others):
            return
        protected = () if desperate else {other.key for other in batch.guaranteed}

        def may_go(other: Sequence) -> bool:
            sampled = other.uncomputed <= 1 and other.known > self._known_before.get(other.key, 0)
            holds = other.phase is Phase.RUNNING and not other.pinned and (desperate or sampled)
            return holds and other is not sequence and other.key not in batch.safe and other.key not in protected

        own_class, headroom = sequence.request.traffic_class, kv.free_blocks + kv.cached_blocks
        from_best_effort = True
        if own_class == "rt" and sharing is not None:
            crowding = sharing.crowding(sequence)
            yield from [other for other in self._be.pending() if other.key in crowding and other.key not in batch.safe]
            # Best-effort blocks are shared without a drop, unless host memory is full.
            headroom += sharing.lendable_blocks
            wanted = kv.geometry.blocks_for(sequence.target) - kv.held(sequence.key)
            from_best_effort = desperate or kv.host_free_blocks <= wanted
        victims: list[Sequence] = []
        if from_best_effort:
            be = (s for s in self._be.pending() if own_class == "rt" or s.arrived_s >= sequence.arrived_s)
            victims = sorted(filter(may_go, be), key=lambda s: (-s.arrived_s, s.key))
        if own_class == "rt" and real_time and (desperate or sequence.phase is Phase.RUNNING):
            own = (self._groups.due_s(sequence), sequence.key)
            rt = [(self._groups.due_s(s), s.key, s) for s in self._rt.pending() if may_go(s)]
            victims += [s for due_s, key, s in sorted(rt, reverse=True) if (due_s, key) > own]
        if victims:
            held = kv.owners()
            wanted = kv.geometry.blocks_for(sequence.target) - held.get(sequence.key, 0)
            if headroom + sum(held.get(s.key, 0) for s in victims) >= wanted:
                yield from victims
