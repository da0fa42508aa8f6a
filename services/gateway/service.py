"""The gateway: the only process clients see.

    HTTP ─▶ openai_api ─▶ streams ─▶ Submit, Cancel, Outstanding ─▶ manager
                            ▲  └──▶ PredictLength, ObserveLength ─▶ length predictor
                            └────── TokenBatch ◀─ workers;  Placed, Displaced, Refused, ClusterLoad ◀─ manager

Receives messages, gives them to the ledger (through `streams.py`) or the manager link, and performs what they ask.
Owns every request until its last token: a manager, predictor or worker that dies costs a pause.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import NoReturn

from aiohttp import web

from cohort.common.config import Config
from cohort.common.errors import ConfigError, PeerUnreachable, RequestError
from cohort.common.messages import (
    ClusterLoad,
    Displaced,
    GatewayHello,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Predicted,
    Refused,
    TokenBatch,
)
from cohort.common.metrics import RequestMetrics
from cohort.common.policies import compose
from cohort.common.service import MANAGER, PREDICTOR, ServiceContext, named_host
from cohort.common.types import InstanceId
from cohort.services.gateway.admission import Door
from cohort.services.gateway.batches import Batches
from cohort.services.gateway.ledger import Ledger
from cohort.services.gateway.manager_link import ManagerLink
from cohort.services.gateway.middleware import answer_everything, require_key, resolve_keys
from cohort.services.gateway.model_card import ModelCard, read_model_card
from cohort.services.gateway.openai_api import OpenAiApi
from cohort.services.gateway.probes import Probes
from cohort.services.gateway.streams import Streams
from cohort.services.gateway.tokenizer import Tokenizer

TICK_S = 1.0  # greetings, outstanding attempts, deadlines
KEEP_ALIVE_S = 75.0
BACKLOG = 1024
# Of manager.load_interval_s: silence for so many of them means that the manager is lost.
MISSED_LOADS = 10
LEAST_SILENCE_S = 2.0
STALL_TIMEOUT_S = 600.0  # placed but no token for so long, whatever the queue on its worker: resubmitted
STREAM_END_S = 2.0  # at the end of a drain: for the last error events to reach their clients


class Gateway:
    """One gateway process. `run` serves until `context.stopping` is set, then drains."""

    def __init__(self, context: ServiceContext, card: ModelCard, tokenizer: Tokenizer) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._card = card
        self._keys = resolve_keys(config.gateway.api_keys)
        self._ledger = Ledger(
            stall_timeout_s=STALL_TIMEOUT_S,
            request_timeout_s=config.gateway.request_timeout_s,
            max_attempts=config.gateway.max_attempts,
        )
        self._link = ManagerLink(
            GatewayHello(context.instance, context.incarnation, context.bus.endpoint),
            silence_s=max(LEAST_SILENCE_S, MISSED_LOADS * config.manager.load_interval_s),
        )
        self._metrics = RequestMetrics(context.metrics)
        self.streams = Streams(
            self._ledger,
            to_manager=lambda message: context.bus.send(MANAGER, message),
            to_worker=context.bus.send,
            to_predictor=lambda message: context.bus.send(PREDICTOR, message),
            clock=context.clock,
            metrics=self._metrics,
            log=context.log,
            predictor_wait_s=config.gateway.predictor_wait_s,
            default_prediction_tokens=config.gateway.default_prediction_tokens,
        )
        door = Door(
            compose.admission(config),
            self._ledger,
            lambda: self._link.load,
            context.clock,
            expected_output=float(config.gateway.default_prediction_tokens),
        )
        self._api = OpenAiApi(
            config=config.gateway,
            card=card,
            tokenizer=tokenizer,
            streams=self.streams,
            door=door,
            clock=context.clock,
            metrics=self._metrics,
            log=context.log,
            instance=context.instance,
            draining=context.stopping.is_set,
            max_model_len=self._max_model_len,
        )
        self._probes = Probes(
            card=card,
            preset=config.name,
            created=int(context.clock.wall_s()),
            registry=context.registry,
            not_ready_because=self._not_ready_because,
            max_model_len=self._max_model_len,
        )
        context.figures = self._figures

    def application(self, batches: Batches) -> web.Application:
        application = web.Application(
            middlewares=[answer_everything(self._context.log), require_key(self._keys)],
            client_max_size=self._config.gateway.max_body_bytes,
        )
        application.add_routes([*self._api.routes(), *batches.routes(), *self._probes.routes()])
        return application

    async def run(self) -> None:
        async with Batches.opened(
            self._config,
            answer=self._api.answer_line,
            online_waiting=lambda: self._ledger.waiting_online,
            clock=self._context.clock,
            metrics=self._context.metrics,
            log=self._context.log,
        ) as batches:
            self.streams.on_online_placed = batches.online_placed
            await self._serve(batches)

    async def _serve(self, batches: Batches) -> None:
        context = self._context
        runner = web.AppRunner(
            self.application(batches),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=STREAM_END_S,
        )
        await runner.setup()
        try:
            await self._listen(runner)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._receive(), name="receive"),
                    tasks.create_task(self._tick(), name="tick"),
                ]
                working_off = tasks.create_task(batches.run(), name="batches")
                background.append(working_off)
                try:
                    await context.stopping.wait()
                    working_off.cancel()  # what is in work is answered again after the next start
                    await self._drain()
                finally:
                    for task in background:
                        task.cancel()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        host, port = self._config.gateway.host, self._config.gateway.port
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"gateway.port: cannot listen on {host}:{port}: {error.strerror}") from error
        addresses = runner.addresses
        self.port: int = addresses[0][1]
        named = named_host(host)
        self._context.metrics_url = f"http://{named}:{self.port}/metrics"
        self._context.log.info(
            "listening",
            url=f"http://{named}:{self.port}",
            model=self._card.name,
            max_model_len=self._card.max_model_len,
            api_keys=len(self._keys),
        )

    async def _receive(self) -> NoReturn:
        while True:
            sender, message = await self._context.bus.receive()
            try:
                self._handle(sender, message)
            except Exception:
                # A defect in the handling of one message must not end everybody's streams.
                self._context.log.exception("message failed", sender=sender, type=type(message).__name__)

    def _handle(self, sender: InstanceId, message: Message) -> None:
        now_s = self._context.clock.now_s()
        if sender == MANAGER:
            self._link.heard(now_s)
        match message:
            case TokenBatch():
                self.streams.on_tokens(sender, message)
            case Placed():
                self.streams.perform(self._ledger.placed(now_s, message))
            case Displaced(attempts, reason):
                self.streams.perform(self._ledger.displaced(now_s, attempts, reason))
            case Refused(attempt, status, reason):
                self.streams.perform(self._ledger.refused(attempt, status, reason))
            case Predicted():
                self.streams.predictor.on_predicted(message)
            case ClusterLoad():
                self._link.on_load(now_s, message)
            case ManagerHello():
                if self._link.on_hello(now_s, message):
                    self._context.log.info(
                        "manager is there", manager_incarnation=message.incarnation, outstanding=len(self._ledger)
                    )
                    self._name_outstanding()
                self.streams.resubmit_unsent()
            case _:
                self._context.log.warning("unexpected message", sender=sender, type=type(message).__name__)
        self._context.ready = self._not_ready_because() is None

    async def _tick(self) -> NoReturn:
        self._context.bus.connect(MANAGER, self._context.endpoint_of("manager"))
        self._context.bus.connect(PREDICTOR, self._context.endpoint_of("predictor"))
        while True:
            now_s = self._context.clock.now_s()
            self.streams.perform(self._ledger.tick(now_s))
            greeting = self._link.greeting(now_s)
            if greeting is not None:
                self._tell_manager(greeting)
            else:
                self.streams.resubmit_unsent()
                self._name_outstanding()
            self._context.ready = self._not_ready_because() is None
            await asyncio.sleep(TICK_S)

    async def _drain(self) -> None:
        """Running requests finish; what is left at the deadline ends with an error its client can read."""
        self._context.ready = False
        try:
            async with asyncio.timeout(self._config.gateway.drain_s):
                await self.streams.drained()
        except TimeoutError:
            left = len(self.streams)
            self._context.log.warning("drain time is over, failing what is left", requests=left)
            self.streams.perform(
                self._ledger.fail_all(
                    RequestError(
                        "This server shut down before the answer was complete.",
                        status=503,
                        type_="service_unavailable_error",
                        retry_after_s=1.0,
                    )
                )
            )

    def _name_outstanding(self) -> None:
        held = self._ledger.outstanding()
        if held:
            self._tell_manager(Outstanding(held))

    def _tell_manager(self, message: Message) -> None:
        try:
            self._context.bus.send(MANAGER, message)
        except PeerUnreachable as error:
            self._context.log.debug("manager unreachable", reason=str(error))

    def _not_ready_because(self) -> str | None:
        if self._context.stopping.is_set():
            return "this gateway is shutting down"
        return self._link.not_ready_because(self._context.clock.now_s())

    def _max_model_len(self) -> int:
        """The model's, or less where the workers hold less."""
        load = self._link.load
        return (
            min(self._card.max_model_len, load.max_model_len)
            if load and load.max_model_len
            else (self._card.max_model_len)
        )

    def _figures(self) -> dict[str, float]:
        waiting = self._ledger.waiting_requests
        return {
            **self.streams.recent.figures(),
            "requests_waiting": waiting,
            "requests_running": len(self._ledger) - waiting,
            "open_streams": len(self.streams),
            "resubmitted_total": self._ledger.resubmitted_total,
            "asyncio_tasks": len(asyncio.all_tasks()),
        }


def load_model(config: Config) -> tuple[ModelCard, Tokenizer]:
    """Raises `ModelError` that says what is missing."""
    card = read_model_card(config.model)
    return card, Tokenizer(card.path)


async def build(context: ServiceContext) -> None:
    """The gateway process: load the tokenizer, serve, drain."""
    compose.check_names(context.config)
    began_s = time.perf_counter()
    card, tokenizer = await asyncio.to_thread(load_model, context.config)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at in every collection
    context.log.debug("tokenizer loaded", seconds=round(time.perf_counter() - began_s, 3))
    await Gateway(context, card, tokenizer).run()
