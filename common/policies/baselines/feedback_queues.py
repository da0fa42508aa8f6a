"""FastServe's skip-join multi-level feedback queue (Wu et al., 2023): a baseline of EcoServe, with five queues there.

Queue i serves for a quantum of base · 2^i seconds; a sequence that used it up moves one queue down. A newcomer joins
the first queue whose quantum covers its prefill (skip-join), since its first iteration cannot be cut short. A sequence
unserved for `starvation_s` is moved to the top for one quantum of the last queue, so nothing starves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.baselines.ranked_batching import Ranking
from cohort.common.policies.interface import Ran
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt

QUANTUM_RATIO = 2.0
LEVELS = 5
"""Number of queues in EcoServe's runs (§2.1)."""


@dataclass(slots=True)
class _Standing:
    level: int
    entered_s: float
    """Time of entry into this level: within it first come, first served."""
    used_s: float
    served_s: float
    """Time at which it last ran, or came."""
    promoted: bool = False


class SkipJoinQueues(Ranking):
    """FastServe's ranking. `quantum_s` 0: the base quantum is the mean time of an iteration without prefill.

    Differs from FastServe: the prefill time of a newcomer comes from measured iterations instead of an offline profile,
    so the first requests after a start join at the top; a preempted request goes to host memory when its blocks are
    needed, not ahead of that; and the starving get the last queue's quantum at the top, not the first one's: in a long
    backlog every sequence starves, and places would be swapped for one token each. Even so `starvation_s` must be long
    beside a swap: with ten seconds an overloaded large model does little else.
    """

    def __init__(self, *, starvation_s: float, levels: int = LEVELS, quantum_s: float = 0.0) -> None:
        self._levels = levels
        self._quantum_s = quantum_s
        self._starvation_s = starvation_s
        self._standing: dict[Attempt, _Standing] = {}
        self._iteration_s = 0.0
        self._prefill_token_s = 0.0
        self._promotions = 0

    def key(self, sequence: Sequence) -> RankKey:
        standing = self._standing[sequence.key]
        return (sequence.request.priority, standing.level, standing.entered_s, sequence.arrived_s, sequence.key)

    def added(self, now_s: float, sequence: Sequence) -> None:
        prefill_s = sequence.uncomputed * self._prefill_token_s if sequence.uncomputed > 1 else 0.0
        level = next((i for i in range(self._levels) if self._quantum(i) >= prefill_s), self._levels - 1)
        self._standing[sequence.key] = _Standing(level, now_s, 0.0, now_s)

    def removed(self, sequence: Sequence) -> None:
        self._standing.pop(sequence.key, None)

    def begin(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            standing = self._standing[sequence.key]
            if standing.level > 0 and now_s - standing.served_s > self._starvation_s:
                self._promotions += 1
                self._standing[sequence.key] = _Standing(0, standing.entered_s, 0.0, now_s, promoted=True)

    def observe(self, ran: Ran) -> None:
        plan, now_s, latency_s = ran.plan, ran.ended_s, ran.latency_s
        prefill = sum(row.count for row in plan.rows if row.count > 1)
        if prefill:
            self._prefill_token_s = _mix(self._prefill_token_s, latency_s / prefill)
        else:
            self._iteration_s = _mix(self._iteration_s, latency_s)
        for row in plan.rows:
            standing = self._standing.get(row.sequence.key)
            if standing is None:
                continue
            standing.served_s = now_s
            standing.used_s += sum(ran.times_s)
            last = self._levels - 1
            quantum_s = self._quantum(last if standing.promoted else standing.level)
            if standing.level < last and standing.used_s >= quantum_s:
                standing.level = last if standing.promoted else standing.level + 1
                standing.entered_s = now_s
                standing.used_s = 0.0
                standing.promoted = False

    def _quantum(self, level: int) -> float:
        return float((self._quantum_s or self._iteration_s) * QUANTUM_RATIO**level)

    def metrics(self) -> dict[str, float]:
        counts = [0] * self._levels
        for standing in self._standing.values():
            counts[standing.level] += 1
        return {
            "starvation_promotions_total": float(self._promotions),
            **{f"queue_{level}": float(count) for level, count in enumerate(counts)},
        }


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else 0.9 * old + 0.1 * new
