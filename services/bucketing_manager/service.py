"""Bucketing manager: requests from gateways, reports from workers, figures from the monitor → `ManagerMachine` →
segments to workers, displacements and load to gateways.

The machine decides through the policies of the configuration; this file moves its messages.
"""

from __future__ import annotations

import asyncio
import gc

from cohort.common.errors import PeerUnreachable
from cohort.common.machines.effects import Dial, Send
from cohort.common.machines.manager import ManagerMachine, ManagerSettings
from cohort.common.messages import Displaced, Message, Placed
from cohort.common.metrics import SchedulerMetrics
from cohort.common.policies import compose
from cohort.common.service import ServiceContext
from cohort.services.bucketing_manager.measured import MeasuredOrder

_TICK_S = 0.05


class ManagerService:
    def __init__(self, context: ServiceContext) -> None:
        config = context.config
        self._context = context
        self._metrics = SchedulerMetrics(context.metrics)
        self.machine = ManagerMachine(
            context.instance,
            context.incarnation,
            ManagerSettings.of(config),
            MeasuredOrder(compose.prefill_order(config), self._metrics),
            compose.placement(config),
            compose.late_binding(config),
            context.clock.now_s(),
        )

    async def run(self) -> None:
        context = self._context
        context.figures = self.machine.figures
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._receive(), name="receive"), tasks.create_task(self._tick(), name="tick")]
            await context.stopping.wait()
            for task in running:
                task.cancel()

    async def _receive(self) -> None:
        context = self._context
        while True:
            sender, message = await context.bus.receive()
            if not self.machine.on_message(context.clock.now_s(), sender, message):
                context.log.warning("message not for the manager", sender=sender, type=type(message).__name__)
            self._perform()

    async def _tick(self) -> None:
        while True:
            now_s = self._context.clock.now_s()
            self.machine.tick(now_s)
            self._perform()
            self._context.ready = self.machine.workers > 0
            self._metrics.buckets().set(self.machine.figures().get("buckets", 0.0))
            self._metrics.requests_waiting("all").set(self.machine.waiting)
            wait_s = self.machine.next_wake_s(now_s) - self._context.clock.now_s()
            await asyncio.sleep(min(_TICK_S, max(0.001, wait_s)))

    def _perform(self) -> None:
        for effect in self.machine.take_effects():
            match effect:
                case Send(peer=peer, message=message):
                    self._note(message)
                    self._send(peer, message)
                case Dial(peer=peer, endpoint=endpoint):
                    self._context.bus.connect(peer, endpoint)
                case _:
                    raise TypeError(f"the manager moves no KV: {effect}")

    def _send(self, peer: str, message: Message) -> None:
        try:
            self._context.bus.send(peer, message)
        except PeerUnreachable as error:
            self._context.log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            # After this round of effects: the machine must not change while they are performed.
            asyncio.get_running_loop().call_soon(self._unreachable, peer)

    def _unreachable(self, peer: str) -> None:
        self.machine.peer_unreachable(self._context.clock.now_s(), peer)
        self._perform()

    def _note(self, message: Message) -> None:
        """Decisions become metrics and log lines."""
        log = self._context.log
        match message:
            case Placed():
                self._metrics.placements(message.reason).inc()
                self._metrics.queue_seconds("all").observe(message.queued_s)
                log.info(
                    "placed",
                    request_id=message.attempt.request_id,
                    attempt=message.attempt.number,
                    instances=message.instances,
                    reason=message.reason,
                )
            case Displaced(attempts=attempts, reason=reason):
                self._metrics.displaced(reason.partition(":")[2].strip() or reason).inc(len(attempts))
                log.warning(
                    "displaced",
                    requests=[attempt.request_id for attempt in attempts][:8],
                    count=len(attempts),
                    reason=reason,
                )
            case _:
                pass


async def serve(context: ServiceContext) -> None:
    compose.check_names(context.config)
    service = ManagerService(context)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at in every collection
    await service.run()
