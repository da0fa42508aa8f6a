"""Which waiting prompts are computed in time, where not all can be: as many as possible, short ones first.

    prompts with due time and seconds of work ─▶ the most that can be kept (Moore, Hodgson 1968): by due time, and
                                                 where one would be late, the longest so far is left out; one of many
                                                 choices is as long as all of them
                                              ─▶ their order (Smith 1956): last the longest that is in time at the end,
                                                 before it the longest that is in time then, and so on

Where none would be late that is the shortest first. Where prompts wait for rows, not for time, all take equally long:
as many as possible by due time, without what would hold its row for longest (`cheapest_in_time`). Pure functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items

Job = tuple[float, float]
"""Due time, and seconds of work (`cheapest_in_time`: cost)."""


def most_in_time(jobs: Items[Job], start_s: float, sizes: Items[float] = ()) -> tuple[list[int], list[int]]:
    """Choose jobs to be done in time from `start_s` on. Return indices of those kept, in order, and of the others.
    `sizes`: by which the largest is left out, in place of the work; then more may be left out than have to."""
    sizes = sizes or [work_s for _, work_s in jobs]
    by_due = sorted(range(len(jobs)), key=lambda index: jobs[index][0])
    at_s = start_s
    accepted: list[tuple[float, int]] = []
    excluded: list[int] = []
    for index in by_due:
        due_s, work_s = jobs[index]
        at_s += work_s
        heapq.heappush(accepted, (-sizes[index], index))
        while at_s > due_s and accepted:
            _, largest = heapq.heappop(accepted)
            at_s -= jobs[largest][1]
            excluded.append(largest)
    chosen = {index for _, index in accepted}
    return _shortest_in_time(jobs, [index for index in by_due if index in chosen], at_s), excluded


def cheapest_in_time(jobs: Items[Job], each_s: float, start_s: float) -> tuple[list[int], list[int]]:
    """Choose among jobs that take `each_s` each and have a cost afterwards. Return the indices of the cheapest set of
    as many as can be in time, by due time; and of the others, cheapest first."""
    at_s = start_s
    accepted: list[tuple[float, int]] = []
    excluded: list[int] = []
    for index in sorted(range(len(jobs)), key=lambda index: jobs[index][0]):
        due_s, cost = jobs[index]
        heapq.heappush(accepted, (-cost, index))
        if at_s + each_s > due_s:
            excluded.append(heapq.heappop(accepted)[1])
        else:
            at_s += each_s
    excluded.sort(key=lambda index: jobs[index][1])
    return sorted([index for _, index in accepted], key=lambda index: jobs[index][0]), excluded


def _shortest_in_time(jobs: Items[Job], by_due: list[int], end_s: float) -> list[int]:
    """Order jobs for least total waiting, none late, from the end. `by_due`: feasible, done at `end_s`."""
    order: list[int] = []
    may_be_last: list[tuple[float, int]] = []
    for _ in range(len(by_due)):
        while by_due and jobs[by_due[-1]][0] >= end_s:
            index = by_due.pop()
            heapq.heappush(may_be_last, (-jobs[index][1], -index))
        if not may_be_last:  # sums differ by the order of additions
            index = by_due.pop()
            heapq.heappush(may_be_last, (-jobs[index][1], -index))
        longest_s, negative = heapq.heappop(may_be_last)
        end_s += longest_s
        order.append(-negative)
    order.reverse()
    return order
