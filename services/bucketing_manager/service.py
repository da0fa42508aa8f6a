"""Bucketing manager: requests from gateways, reports from workers, demand from the monitor → `ManagerMachine` →
segments to workers, lost attempts and load to gateways.

The machine decides through the policies of the configuration. This host feeds it messages and the time,
performs its effects in their order, and turns its decisions into log lines and metrics. `classes_of` is the queue as a
person sees it, asked only while one looks (`Look`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import assert_never

from cohort.common.addresses import MONITOR, manager_names
from cohort.common.errors import ConfigError, PeerUnreachable
from cohort.common.machines.effects import ManagerEffect, Send, Wake
from cohort.common.machines.events import ManagerEvent, PeerLost, Received, Tick, Undelivered
from cohort.common.machines.machine import Machine
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.recorder import ManagerHeader, config_text
from cohort.common.messages import (
    AttemptsLost,
    BindSegment,
    ClusterStats,
    Look,
    ManagerView,
    Message,
    Placed,
    Refused,
    StartSegment,
    ToManager,
    WorkerReport,
)
from cohort.common.policies import compose
from cohort.common.policies.interface import WaitingRequest
from cohort.common.process import garbage
from cohort.common.process.decision_log import DecisionLog
from cohort.common.process.guard import guarded
from cohort.common.process.metrics import SchedulerMetrics
from cohort.common.process.recording import recorded
from cohort.common.process.service import ServiceContext
from cohort.common.tracing.manager import ManagerSpans
from cohort.common.tracing.observed import traced
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.types import InstanceId, Segment, TrafficClass
from cohort.common.views import MOST_BUCKETS, QueueClass
from cohort.services.bucketing_manager.measured import MeasuredOrder

_PERIODIC = WorkerReport | ClusterStats
"""Messages that also come while there is nothing to do."""
_TICK_S = 0.05
_LEAST_S = 0.001  # between two ticks
_MOST_EVENTS = 256
"""Messages of one `handle` call at most: the other tasks of the process get their turn."""


def make_machine(
    context: ServiceContext, order: MeasuredOrder
) -> tuple[ManagerMachine, Machine[ManagerEvent, ManagerEffect]]:
    """Return the machine to look at, and the receiver of its events: itself, or its recorder."""
    config, now_s = context.config, context.clock.now_s()
    names = manager_names(config)
    if context.instance not in names:
        raise ConfigError(f"--instance {context.instance}: manager.standbys means {', '.join(names)}")
    settings = ManagerSettings.of(config, names.index(context.instance), len(names))
    machine = ManagerMachine(
        context.instance,
        context.incarnation,
        settings,
        order,
        compose.placement(config),
        compose.late_binding(config),
        now_s,
    )
    handler = recorded(
        context,
        machine,
        lambda: ManagerHeader(context.instance, context.incarnation, settings, now_s, config_text(config)),
    )
    return machine, traced(context, guarded(context, handler), ManagerSpans)


class ManagerService:
    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._warn_unexpected = RepeatedWarning(context.log, "message not for the manager")
        self._metrics = SchedulerMetrics(context.metrics)
        self._order = MeasuredOrder(compose.prefill_order(context.config), self._metrics)
        self.machine, self._handler = make_machine(context, self._order)
        self._decisions = DecisionLog()
        self._split: tuple[Segment, ...] = ()
        """The segments of the request that is being placed, where there are several."""
        self._undelivered: list[Undelivered] = []
        self._leads: bool | None = None
        self._activity = context.activity
        self._wake_s = 0.0
        self._wake_moved = asyncio.Event()

    async def run(self) -> None:
        context = self._context
        context.stats = self.machine.stats
        context.bus.watch(self._lost)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._receive(), name="receive"), tasks.create_task(self._tick(), name="tick")]
            await context.stopping.wait()
            for task in running:
                task.cancel()

    async def _receive(self) -> None:
        """Receive messages. All that have arrived reach the machine together: it decides once after the last."""
        bus = self._context.bus
        while True:
            arrived = [await bus.receive()]
            while len(arrived) < _MOST_EVENTS and (more := bus.take()) is not None:
                arrived.append(more)
            events = [Received(sender, message) for sender, message in arrived if self._is_ours(sender, message)]
            self._handle(*events)
            if any([not isinstance(event.message, _PERIODIC) for event in events]):
                self._worked()

    def _lost(self, peer: InstanceId) -> None:
        self._context.log.info("peer lost", peer=peer)
        self._handle(PeerLost(peer))
        self._worked()

    def _worked(self) -> None:
        if not self._activity.work.is_set():
            self._activity.work.set()
            self._wake_moved.set()

    def _is_ours(self, sender: InstanceId, message: Message) -> bool:
        if isinstance(message, ToManager):
            return True
        if isinstance(message, Look):
            self._show(sender)
            return False
        self._warn_unexpected(sender=sender, type=type(message).__name__)
        return False

    async def _tick(self) -> None:
        """Tick every `_TICK_S`, or earlier if the machine asked for it; seldom while quiet."""
        clock, activity = self._context.clock, self._activity
        while True:
            if self.machine.live:
                activity.work.set()
            self._handle(Tick(activity.quiet_s()))
            self._context.ready = self.machine.workers > 0
            self._metrics.buckets().set(self.machine.stats().get("buckets", 0.0))
            self._metrics.requests_waiting("all").set(self.machine.waiting)
            ticked_s = clock.now_s()
            # A wake in the past must not turn this into a busy loop.
            while (
                due_s := min(ticked_s + _TICK_S + activity.quiet_s(), max(ticked_s + _LEAST_S, self._wake_s))
            ) > clock.now_s():
                self._wake_moved.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(due_s - clock.now_s()):
                        await self._wake_moved.wait()

    def _handle(self, *events: ManagerEvent) -> None:
        """Handle events, then together the messages that were undeliverable, until there is none."""
        while events:
            for effect in self._handler.handle(self._context.clock.now_s(), *events):
                self._perform(effect)
            events, self._undelivered = tuple(self._undelivered), []
        if self.machine.leads is not self._leads:
            self._leads = self.machine.leads
            self._metrics.leads().set(self._leads)
            self._context.log.info("leads from now on" if self._leads else "stands by from now on")

    def _perform(self, effect: ManagerEffect) -> None:
        match effect:
            case Send(peer=peer, message=message):
                self._note(message)
                self._send(peer, message)
            case Wake(at_s=at_s):
                self._wake_s = at_s
                self._wake_moved.set()
            case _:
                assert_never(effect)

    def _send(self, peer: InstanceId, message: Message) -> None:
        try:
            self._context.bus.send(peer, message)
        except PeerUnreachable as error:
            self._context.log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            self._undelivered.append(Undelivered(peer, message))

    def _show(self, looker: InstanceId) -> None:
        """Send a view to the live page. A manager that stands by has nothing to show."""
        if looker != MONITOR or not self.machine.leads:
            return
        context, now_s = self._context, self._context.clock.now_s()
        view = ManagerView(
            context.instance,
            context.config.policies.prefill_order,
            classes_of(self.machine.queued(), now_s),
            list(self._order.buckets()[:MOST_BUCKETS]),
            self._decisions.latest(now_s),
        )
        with contextlib.suppress(PeerUnreachable):
            context.bus.send(MONITOR, view)

    def _note(self, message: Message) -> None:
        """Turn decisions into metrics and log lines."""
        log, now_s = self._context.log, self._context.clock.now_s()
        match message:
            case StartSegment(segments=segments) if message.index == 0:  # its `Placed` follows
                self._split = tuple(segments) if len(segments) > 1 else ()
            case BindSegment(attempt=attempt, segment=segment):
                where = (segment.instance,) if segment.instance else ()
                self._decisions.note(now_s, "bound", attempt.request_id, instances=where)
            case Refused(attempt=attempt):
                self._decisions.note(
                    now_s,
                    "refused",
                    attempt.request_id,
                    reason=message.cause,
                    what=message.reason,
                    forecast_s=message.forecast_s,
                )
            case Placed():
                self._placed(now_s, message)
                self._metrics.placements(message.reason).inc()
                self._metrics.queue_seconds("all").observe(message.queued_s)
                log.info(
                    "placed",
                    request_id=message.attempt.request_id,
                    attempt=message.attempt.number,
                    instances=message.instances,
                    reason=message.reason,
                )
            case AttemptsLost(attempts=attempts, reason=reason, counted=True):
                log.info("attempts given back", count=len(attempts), reason=reason)
            case AttemptsLost(attempts=attempts, reason=reason):
                self._decisions.note(
                    now_s, "lost", attempts[0].request_id if attempts else "", reason=reason, count=len(attempts)
                )
                self._metrics.attempts_lost(reason.partition(":")[2].strip() or reason).inc(len(attempts))
                log.warning(
                    "attempts lost",
                    requests=[attempt.request_id for attempt in attempts][:8],
                    count=len(attempts),
                    reason=reason,
                )
            case _:
                pass

    def _placed(self, now_s: float, message: Placed) -> None:
        segments, self._split = self._split, ()
        # Prefill and decode on workers of their own is the usual placement of some presets, not a decision to split.
        split = len(segments) > 1 and message.reason.startswith("split")
        self._decisions.note(
            now_s,
            "demoted" if message.best_effort else "split" if split else "placed",
            message.attempt.request_id,
            instances=tuple(message.instances),
            reason=message.reason,
            what=", ".join(
                f"{part.start}–{'' if part.end is None else part.end} {part.instance or 'later'}" for part in segments
            ),
            forecast_s=message.forecast_s,
        )


async def serve(context: ServiceContext) -> None:
    compose.check_names(context.config)
    service = ManagerService(context)
    garbage.freeze_heap()
    await service.run()


def classes_of(waiting: Iterable[WaitingRequest], now_s: float) -> list[QueueClass]:
    """Return the queue by class: real-time before best-effort, online before batch work."""
    found: dict[tuple[bool, bool], list[float]] = {}
    for item in waiting:
        request = item.request
        sums = found.setdefault((request.traffic_class == "be", not request.online), [0.0, 0.0, now_s])
        sums[0] += 1
        sums[1] += len(request.tokens)
        sums[2] = min(sums[2], item.since_s)
    classes: tuple[TrafficClass, TrafficClass] = ("rt", "be")
    return [
        QueueClass(classes[best_effort], not offline, int(count), int(tokens), round(max(0.0, now_s - since_s), 3))
        for (best_effort, offline), (count, tokens, since_s) in sorted(found.items())
    ]
