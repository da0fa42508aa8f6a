"""The gateway: the only process clients see.

    HTTP ─▶ generator ──▶ streams ─▶ GatewayMachine ─▶ streams ─▶ Submit, Cancel, Outstanding ─▶ manager
                                          ▲              └──▶ PredictLength, ObserveLength ─▶ length predictor
                                       └── TokenBatch ◀─ workers;  Placed, AttemptsLost, Refused, ClusterLoad ◀─ manager

Makes the machine and its host (`streams.py`), gives it every message and serves HTTP beside. The machine owns every
request until its last token: a manager, predictor or worker that dies costs a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from cohort.common import paths
from cohort.common.addresses import MANAGER, MONITOR, PREDICTOR, advertised_host, manager_names, named_host
from cohort.common.config import Config
from cohort.common.errors import ConfigError, PeerUnreachable
from cohort.common.http import exposure
from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.http_server import AcceptingSite, name_server, raise_descriptor_limit
from cohort.common.http.listeners import inherited
from cohort.common.http.tls import ServerTls, TlsFiles
from cohort.common.machines.events import DrainEnded, DrainStarted, PeerLost, Received, Tick
from cohort.common.machines.gateway.gateway import GatewayMachine, GatewaySettings
from cohort.common.machines.recorder import GatewayHeader, config_text
from cohort.common.messages import Look, Message, RequestTraffic, ToGateway, TokenBatch
from cohort.common.policies import compose
from cohort.common.process import garbage
from cohort.common.process.guard import guarded
from cohort.common.process.metrics import RequestMetrics
from cohort.common.process.recording import recorded
from cohort.common.process.service import ServiceContext
from cohort.common.tracing.spans import Tracing
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.types import InstanceId
from cohort.services.gateway.apis.adapters_api import AdaptersApi
from cohort.services.gateway.apis.embeddings_api import EmbeddingsApi
from cohort.services.gateway.apis.messages_api import MessagesApi
from cohort.services.gateway.apis.openai_api import OpenAiApi
from cohort.services.gateway.apis.probes import Probes
from cohort.services.gateway.apis.responses_api import ResponsesApi
from cohort.services.gateway.apis.responses_archive import ResponseArchive
from cohort.services.gateway.apis.tenants import Tenants
from cohort.services.gateway.apis.token_api import TokenApi
from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.gateway.batches.batch_lines import AnswerLine
from cohort.services.gateway.batches.batches import Batches
from cohort.services.gateway.front_page import ChatPage, FrontPage
from cohort.services.gateway.generation import request_trace
from cohort.services.gateway.generation.generator import GatewayContext, Generator
from cohort.services.gateway.generation.streams import Streams
from cohort.services.gateway.generation.traffic_report import REPORT_EVERY_S, TrafficReport
from cohort.services.gateway.http.connections import Handover, SlowReaders
from cohort.services.gateway.http.request_bodies import expecting_later, refuse_other_bodies, send_continue
from cohort.services.gateway.keys.keyring import Keyring
from cohort.services.gateway.keys.middleware import answer_everything, refuse_foreign_pages, require_key, resolve_keys
from cohort.services.gateway.keys.owners import Owners
from cohort.services.gateway.openapi import ApiPages
from cohort.services.gateway.requests.added_adapters import AdapterTable
from cohort.services.gateway.requests.formats import answer_format
from cohort.services.gateway.requests.model_card import ModelCard, Served, read_model_card
from cohort.services.gateway.resume.resumption import Resumption
from cohort.services.gateway.show import GatewayShow
from cohort.services.gateway.text.template_process import TemplateLimits
from cohort.services.gateway.text.tokenizer import Tokenizer
from cohort.services.gateway.vllm_names import VllmNames

KEEP_ALIVE_S = 75.0
BACKLOG = 1024
_MOST_UPDATES = 256
"""Token updates handled together: some ten milliseconds, for which the manager's notices, heartbeats and new
connections wait. Workers of many sequences send a hundred in a message."""
STREAM_END_S = 2.0  # at the end of a drain: for the last error events to reach their clients


class Gateway:
    def __init__(self, context: ServiceContext, card: ModelCard, tokenizer: Tokenizer) -> None:
        config = context.config
        self._context = context
        self._config = config
        adapters = AdapterTable(
            card.adapters,
            model=card.path,
            names=frozenset((card.name, str(card.path))),
            file=folder_of(config, context.instance) / "adapters.json",
            log=context.log,
            refused="workers of several ranks serve none" if any(group.degree > 1 for group in config.workers) else "",
        )
        self._card = card = replace(card, adapters=adapters)
        keys = resolve_keys(config.gateway.api_keys)
        self._keyring = Keyring(config, keys, context.clock, context.log)
        self._tenants = Tenants(config, self._keyring, context.clock, context.private_metrics, context.log)
        now_s = context.clock.now_s()
        self._warn_unexpected = RepeatedWarning(context.log, "unexpected message")
        self._machine = GatewayMachine(
            context.instance,
            context.incarnation,
            context.bus.endpoint,
            GatewaySettings.of(config),
            compose.admission(config),
            now_s,
            manager=MANAGER,
            predictor=PREDICTOR,
            standbys=manager_names(config)[1:],
        )
        self._owners = Owners(config, keys, self._tenants.weight_of)
        self._metrics = RequestMetrics(context.metrics)
        self.streams = Streams(
            self._machine,
            guarded(context, recorded(context, self._machine, lambda: _header(context, now_s))),
            send=context.bus.send,
            clock=context.clock,
            metrics=self._metrics,
            log=context.log,
            activity=context.activity,
        )
        if config.planner.mode != "off":
            self.streams.stats.traffic = TrafficReport(context.clock)
        written = answer_format(tokenizer.template_source, tokenizer.added_token, config.model.tool_format)
        served = Served(card, tokenizer, written, self._max_model_len)
        host = GatewayContext(context.instance, context.clock, self._metrics, context.log)
        self.generator = Generator(config.gateway, served, host, self.streams, self._owners)
        self._api = OpenAiApi(self.generator)
        self._embeddings = EmbeddingsApi(self.generator)
        self._messages = MessagesApi(self.generator)
        self._archive = ResponseArchive(config, owner_share=self._owners.share, clock=context.clock)
        self._responses = ResponsesApi(self.generator, self._archive)
        endpoints = (*self._api.endpoints, self._responses, self._messages)
        self._resumption = Resumption(
            self.generator, endpoints, self._tenants.lease_of, paths.state_dir(config.state.folder) / "streams.sqlite3"
        )
        if config.gateway.resume_s:
            self.generator.resumable = self._resumption
        self._adapters = AdaptersApi(config.gateway, adapters, self.generator.bodies, context.log)
        self._tokens = TokenApi(config.gateway, served, self.generator.bodies, self._owners)
        gave_up = context.metrics.counter("clients_given_up", "Connections aborted because nothing was read from them")
        self._accepts_failed = context.metrics.counter("accepts_failed", "Connections that could not be accepted")
        self._slow_readers = SlowReaders(
            still_s=config.gateway.write_timeout_s,
            whole_s=config.gateway.request_timeout_s,
            aborted=lambda: gave_up().inc(),
            log=context.log,
        )
        self._probes = Probes(
            card=card,
            preset=config.name,
            created=int(context.clock.wall_s()),
            exposition=context.exposition,
            not_ready_because=self._not_ready_because,
            max_model_len=self._max_model_len,
            engines=lambda: self._machine.link.load.engines if self._machine.link.load else (),
        )
        self._front = FrontPage(config, card)
        self._chat = ChatPage()
        self._show = GatewayShow(context, self.streams, self._metrics)
        self._tracing = Tracing.opened(context)
        self._handover = Handover(context.stopping)
        files = TlsFiles.of(config.gateway.tls_cert, config.gateway.tls_key)
        self._tls = tls = ServerTls(files, context.log) if files else None
        if tls is not None:
            ends = context.metrics.gauge("tls_certificate_expires_seconds", "When it does, Unix time; 0 = it has")
            ends().set_function(lambda: tls.loaded.expires_s)
        context.stats, context.counts = self._stats, self.streams.stats.counts
        names = VllmNames(self._metrics, self.streams.stats, self._machine, config, context.clock, context.model_name)
        context.renamed_registry.register(names)

    def application(self, batches: Batches) -> web.Application:
        gateway = self._config.gateway
        guard = BrowserGuard(gateway.host, gateway.allowed_hosts, option="gateway.allowed_hosts")
        traces = [request_trace.middleware(self._tracing, self._context.clock)] if self._tracing else []
        limits = [self._tenants.middleware()] if self._keyring.required else []
        application = web.Application(
            middlewares=[
                self._handover.middleware(),
                self._slow_readers.middleware(),
                *traces,
                answer_everything(self._context.log),
                self.generator.ignored_fields.middleware(),
                refuse_foreign_pages(guard),
                require_key(self._keyring),
                *limits,
                refuse_other_bodies,
                send_continue,
            ],
            client_max_size=gateway.max_body_bytes,
        )
        if self._keyring.required:
            application.on_response_prepare.append(self._tenants.name_limits)
        application.on_response_prepare.append(self._handover.end_connection)
        application.on_response_prepare.append(self.generator.ignored_fields.name)
        pages = ApiPages(keys=self._keyring.required, model=self._card.name)
        of_openai = (self._api, self._embeddings, self._responses)
        apis = (*of_openai, self._resumption, self._messages, batches, self._tokens, self._adapters, self._tenants)
        for part in (*apis, self._probes, self._front, self._chat, pages):
            application.add_routes([expecting_later(route) for route in part.routes()])
        return application

    async def run(self) -> None:
        answer: AnswerLine = self._tenants.lines(self._api.answer_line)
        if self._tracing is not None:
            answer = request_trace.lines(self._tracing, self._context.clock, answer)
        async with (
            self._tenants.opened(),
            Batches.opened(
                self._config,
                answer=answer,
                instance=self._context.instance,
                owner_share=self._owners.share,
                online_waiting=lambda: self._machine.ledger.waiting_online,
                online_placed=self.streams.online_placed,
                clock=self._context.clock,
                metrics=self._context.metrics,
                log=self._context.log,
            ) as batches,
            self._archive.opened(self._database(), self._context.log),
            aclosing(self._resumption),
        ):
            await self._serve(batches)

    def _database(self) -> Path:
        """Return the database's path, in the folder of batches, which gateways of another port do not use."""
        return folder_of(self._config, self._context.instance) / "responses.sqlite"

    async def _serve(self, batches: Batches) -> None:
        context = self._context
        runner = web.AppRunner(
            self.application(batches),
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # compressed bodies are refused; they must not grow before that
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=STREAM_END_S,
        )
        await runner.setup()
        try:
            self._handover.listen()
            await self._listen(runner)
            async with asyncio.TaskGroup() as tasks:
                self._begin()
                working_off = tasks.create_task(batches.run(), name="batches")
                background: list[asyncio.Task[None]] = [
                    tasks.create_task(self._receive(), name="receive"),
                    tasks.create_task(self._resumption.run(), name="streams"),
                    working_off,
                ]
                if self.streams.stats.traffic is not None:
                    background.append(tasks.create_task(self._send_traffic(self.streams.stats.traffic), name="traffic"))
                if self._tls is not None:
                    background.append(tasks.create_task(self._tls.watch(), name="certificate"))
                try:
                    await context.stopping.wait()
                    working_off.cancel()  # lines in work are answered again after the next start
                    await self._drain()
                finally:
                    for task in background:
                        task.cancel()
        finally:
            self.streams.end()
            self._slow_readers.end()
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        host, port = self._config.gateway.host, self._config.gateway.port
        name_server()
        site = AcceptingSite(
            runner,
            host,
            port,
            backlog=BACKLOG,
            failed=lambda: self._accepts_failed().inc(),
            log=self._context.log,
            tls=self._tls,
            shared=self._config.gateway.processes > 1,
            held=inherited(port),
        )
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"gateway.port: cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = site.addresses[0][1]
        scheme = "https" if self._tls else "http"
        base = f"{scheme}://{named_host(host)}:{self.port}"
        self._site = site
        if not self._context.metrics_url:  # of several gateways each has one elsewhere: a request here finds any
            self._context.metrics_url = f"{scheme}://{advertised_host(self._config, host)}:{self.port}/metrics"
        self._context.log.info(
            "listening",
            url=base,
            model=self._card.name,
            max_model_len=self._card.max_model_len,
            api_keys=len(self._keyring),
        )

    def _begin(self) -> None:
        """Connect to the peers and greet them; from then on the machine's `Wake` effects set the timer."""
        for manager, endpoint in self._context.manager_endpoints.items():
            self._context.bus.connect(manager, endpoint)
        self._context.bus.connect(PREDICTOR, self._context.endpoint_of("predictor"))
        self.streams.on_events = self._note_ready
        self._context.connection_ended = lambda peer: self.streams.feed(PeerLost(peer))
        self.streams.feed(Tick())

    async def _send_traffic(self, traffic: TrafficReport) -> NoReturn:
        """Report traffic to the monitor, which the heartbeat has dialled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if records := traffic.take():
                with contextlib.suppress(PeerUnreachable):
                    message = RequestTraffic(self._context.instance, self._context.incarnation, records)
                    self._context.bus.send(MONITOR, message)

    async def _receive(self) -> NoReturn:
        bus, log = self._context.bus, self._context.log
        while True:
            arrived: tuple[InstanceId, Message] | None = await bus.receive()
            events: list[Received] = []
            updates = 0
            while arrived is not None:
                sender, message = arrived
                if isinstance(message, TokenBatch):
                    updates += len(message.updates)
                if isinstance(message, ToGateway):
                    events.append(Received(sender, message))
                elif isinstance(message, Look):
                    self._show.show(sender, message)
                else:
                    self._warn_unexpected(sender=sender, type=type(message).__name__)
                arrived = bus.take() if updates < _MOST_UPDATES else None
            try:
                self.streams.feed(*events)
            except Exception:
                # A defect in the handling of one message must not end all streams. An unhandled message counts as lost
                # on the way; effects decided before it are performed.
                log.exception("messages failed", types=[type(event.message).__name__ for event in events])
                self.streams.feed()
            if updates >= _MOST_UPDATES:
                await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Wait for running requests; at the deadline they end with an error that clients can read. Where another
        process takes over, requests on open connections are served first."""
        until_s = asyncio.get_running_loop().time() + self._config.drain_s
        if self._handover.requested or self._config.gateway.processes > 1:
            self._site.leave()
        if self._handover.requested:
            await self._handover.wait_idle(self._config.drain_s)
        self.streams.feed(DrainStarted())
        try:
            async with asyncio.timeout_at(until_s):
                await self.streams.drained()
        except TimeoutError:
            self._context.log.warning("drain time is over, failing what is left", requests=len(self.streams))
            self.streams.feed(DrainEnded())

    def _note_ready(self) -> None:
        self._context.ready = self._not_ready_because() is None

    def _not_ready_because(self) -> str | None:
        return self._machine.not_ready_because(self._context.clock.now_s())

    def _max_model_len(self) -> int:
        """Return the model's limit, or the workers' if that is less."""
        load = self._machine.link.load
        own = self._card.max_model_len
        return min(own, load.max_model_len) if load and load.max_model_len else own

    def _stats(self) -> dict[str, float]:
        ledger = self._machine.ledger
        waiting = ledger.waiting_requests
        return {
            **self.streams.stats.recorded,
            "requests_waiting": waiting,
            "requests_running": len(ledger) - waiting,
            "open_streams": len(self.streams),
            "resubmitted_total": ledger.resubmitted_total,
            "misnamed_total": self._machine.misnamed_total,
            "fenced_total": self._machine.fenced_total,
            "asyncio_tasks": len(asyncio.all_tasks()),
        }


def _header(context: ServiceContext, now_s: float) -> GatewayHeader:
    return GatewayHeader(
        context.instance,
        context.incarnation,
        context.bus.endpoint,
        GatewaySettings.of(context.config),
        now_s,
        MANAGER,
        PREDICTOR,
        config_text(context.config),
        manager_names(context.config)[1:],
    )


def load_model(config: Config) -> tuple[ModelCard, Tokenizer]:
    """Load the model card and the tokenizer. Raises `ModelError` that names the missing part."""
    card = read_model_card(config.model)
    return card, Tokenizer(card.path, TemplateLimits())


async def build(context: ServiceContext) -> None:
    """Run the gateway process: load the tokenizer, serve, drain."""
    compose.check_names(context.config)
    exposure.check_api(context.config)
    if exposure.unused_key(context.config, os.environ):
        context.log.warning(
            f"{exposure.KEY_VARIABLE} is set, but no request is asked for it: gateway.api_keys is empty; "
            f"set gateway.api_keys=[env:{exposure.KEY_VARIABLE}]"
        )
    soft, hard = raise_descriptor_limit()
    context.log.debug("descriptor limit", before=soft, now=hard)
    began_s = time.perf_counter()
    card, tokenizer = await asyncio.to_thread(load_model, context.config)
    await asyncio.to_thread(tokenizer.warm)
    garbage.freeze_heap()
    context.log.debug("tokenizer loaded", seconds=round(time.perf_counter() - began_s, 3))
    await Gateway(context, card, tokenizer).run()
