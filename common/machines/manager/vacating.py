"""The manager's part in the drain of a worker: what runs there goes on at another one, with its KV.

    WorkerReport(draining) ─▶ each request that is on that worker alone ─┬▶ StartSegment to the worker that takes it
                                                                         └▶ BindSegment to the one that drains

Called by `ManagerMachine` for each report. A request that no other worker has the blocks for stays, is looked at again
with the next report, and at the end of the drain is placed anew like that of any lost worker. A request whose next
segment is elsewhere goes there by itself. Where placements move no KV there are no links, and all stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from cohort.common.machines.manager.roster import Managed, Roster
from cohort.common.messages import BindSegment, Message
from cohort.common.policies.interface import InstanceView, WaitingRequest
from cohort.common.types import InstanceId, Segment


class Vacating:
    def __init__(
        self,
        roster: Roster,
        send: Callable[[InstanceId, Message], None],
        start: Callable[[float, Managed, WaitingRequest, int, int], None],
        *,
        moves_kv: bool,
    ) -> None:
        """`start` sends a segment to its worker, by its index and batch."""
        self._roster = roster
        self._send = send
        self._start = start
        self._moves_kv = moves_kv

    def reported(self, now_s: float, instance: InstanceId) -> None:
        """Of this worker a report has come."""
        worker = self._roster.workers.get(instance)
        if worker is None or not worker.view.draining or not self._moves_kv:
            return
        others = self._roster.serving()
        for managed in list(worker.live.values()):
            # One that is parked goes on where late binding says.
            if managed.item is None or managed.parked_at or list(managed.live) != [instance]:
                continue
            target = _target(managed.item, others)
            if target is not None:
                self._move(now_s, managed, managed.item, instance, target)

    def _move(
        self, now_s: float, managed: Managed, item: WaitingRequest, holder: InstanceId, target: InstanceId
    ) -> None:
        """Where exactly it goes on the holder knows; until its offer comes, the tokens that were submitted stand for
        it."""
        assert target != holder and holder in managed.live, f"{managed.attempt} goes from {holder} to {target}"
        last = managed.segments[-1]
        at = max(last.start, len(item.request.tokens))
        here, following = msgspec.structs.replace(last, end=at, instance=holder), Segment(at, None, target)
        managed.segments = (*managed.segments[:-1], here, following)
        self._start(now_s, managed, item, len(managed.segments) - 1, 0)
        self._send(holder, BindSegment(managed.attempt, following, self._roster.workers[target].endpoint))


def _target(item: WaitingRequest, others: Mapping[InstanceId, InstanceView]) -> InstanceId | None:
    """The least busy worker that has blocks for all of it; one that decodes by its role before one that does not."""
    need = len(item.request.tokens) + item.expected_output(0.0)
    able = [
        view
        for view in others.values()
        if view.capacity.geometry.positions(view.free_blocks) - view.assigned_context_tokens >= need
        and item.request.max_positions <= view.capacity.max_model_len
    ]
    best = min(able, key=lambda view: (not view.role.decodes, _busy(view), view.instance), default=None)
    return None if best is None else best.instance


def _busy(view: InstanceView) -> int:
    return view.stats.running + view.stats.waiting + view.stats.awaiting_kv + view.assigned_requests
