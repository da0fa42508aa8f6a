"""Shows a worker to a person who looks at the live page: answers `Look` with a `WorkerView`.

Called by the worker loop for each iteration that took KV from a sequence, and for each `Look`. While nobody looks it
keeps the latest of those decisions and nothing else. Decides nothing.
"""

from __future__ import annotations

import contextlib

from cohort.common.errors import PeerUnreachable
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_view import blocks_of, drafts_of, iteration_of, rows_of
from cohort.common.messages import Look, WorkerView
from cohort.common.policies.interface import IterationPlan
from cohort.common.process.decision_log import DecisionLog
from cohort.common.process.metrics import TransferMetrics
from cohort.common.process.service import MONITOR, ServiceContext
from cohort.common.types import InstanceId


class WorkerShow:
    def __init__(self, context: ServiceContext, machine: WorkerMachine, transfers: TransferMetrics) -> None:
        self._context = context
        self._machine = machine
        self._transfers = transfers
        self._decisions = DecisionLog()

    def ran(self, plan: IterationPlan) -> None:
        """An iteration is over: keep which sequences had to leave the device for it."""
        if not plan.preempted and not plan.evicted:
            return
        now_s, here = self._context.clock.now_s(), (self._context.instance,)
        for preempt in plan.preempted:
            name = preempt.sequence.request_id
            self._decisions.note(now_s, "preempted", name, instances=here, reason=preempt.how)
        for sequence in plan.evicted:
            self._decisions.note(now_s, "evicted", sequence.request_id, instances=here, reason="parked for later")

    def look(self, sender: InstanceId, asked: Look) -> None:
        """The monitor's alone to ask. A view that cannot be sent is not missed: the next one is fresher."""
        if sender != MONITOR:
            return
        with contextlib.suppress(PeerUnreachable):
            self._context.bus.send(MONITOR, self._view(asked.cells))

    def _view(self, cells: int) -> WorkerView:
        machine, now_s = self._machine, self._context.clock.now_s()
        rows = rows_of(machine, now_s)
        sent = received = 0.0
        for labels, amount in self._transfers.bytes.values():
            if labels.get("direction") == "sent":
                sent += amount
            else:
                received += amount
        return WorkerView(
            instance=self._context.instance,
            role=machine.setup.capacity.role.value,
            sequences=len(machine.state.held),
            rows=rows,
            blocks=blocks_of(machine, rows, cells),
            decisions=self._decisions.latest(now_s),
            iteration=iteration_of(machine.state.in_flight),
            kv_sent_bytes=sent,
            kv_received_bytes=received,
            drafts=drafts_of(machine.state.counters),
        )
