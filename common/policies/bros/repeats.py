"""Whether the packing of BROS could only take the same rows again (R4): asked while an iteration runs.

All requests of the worker decode and have a row in it. Each samples a token when it ends, so at that moment every
real-time one of them has its whole TPOT target left, and time itself decides nothing. Called by `slack_packing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.bros.batch import NO_DEADLINE_S
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.sequence import Row

_MARGIN = 0.95
"""Between what an iteration takes and a target: the iteration in flight is still to be learned from (R3)."""


def goes_on(
    rows: Seq[Row], groups: TokenGroups, cost: IterationCost, limits: IterationLimits, *, best_effort_rows: int
) -> bool:
    """`rows` are of one token each, one position on; the worker has no other request. `best_effort_rows`: with more
    rows best-effort ones would wait (R6). True where every real-time row is on time, best-effort ones beside them; or
    where there are only real-time rows and every one is late, as none of them can wait for another then."""
    if not groups.single or len(rows) > min(limits.max_rows, limits.max_tokens):
        return False
    context = best_effort = 0
    strictest_s, loosest_s = NO_DEADLINE_S, 0.0
    for row in rows:
        context += row.start + 1
        if row.sequence.request.traffic_class == "rt":
            tpot_s = groups.tpot_s(row.sequence)
            strictest_s, loosest_s = min(strictest_s, tpot_s), max(loosest_s, tpot_s)
        else:
            best_effort += 1
    takes_s = cost.exec_of(0, len(rows), context)
    if best_effort and len(rows) > best_effort_rows:
        return False
    return takes_s <= _MARGIN * strictest_s or (not best_effort and _MARGIN * takes_s >= loosest_s)
