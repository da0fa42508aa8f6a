"""Tenants: each request of an API key within the key's limits, and counted.

    headers ─▶ lease ─▶ body, tokens ─▶ reserve ─▶ answer ─▶ end: settled, counted
                 │ 429                    │ 429, 400

`middleware` follows `require_key` and refuses by headers alone, before a body is read. The class is the header's, else
the default; a body that names another moves the request to its limits. `generator.py` reserves the lease's tokens and
reports those used; `lines` does so for batches. Nothing waits, and requests without a key pass. Gateways that share a
port grant a key's limits together (`key_shared.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cohort.common.addresses import GATEWAY
from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import RequestError
from cohort.common.keys.key_usage import RETENTION_DAYS, Amounts, UsageRow, usage_file
from cohort.common.process.metrics import MetricFactory
from cohort.common.types import TrafficClass
from cohort.services.gateway.apis.token_api import DETOKENIZE_PATH, TOKENIZE_PATH
from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.gateway.batches.batch_lines import AnswerLine, LineAnswer
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.http.service_headers import CLASS_HEADER
from cohort.services.gateway.keys.key_budget import KeyBudget, KeyLimited
from cohort.services.gateway.keys.key_lease import LEASE, Lease
from cohort.services.gateway.keys.key_shared import SharedKeyBudget
from cohort.services.gateway.keys.key_table import KeyTable
from cohort.services.gateway.keys.keyring import FILED, Key, Keyring
from cohort.services.gateway.keys.middleware import KEY
from cohort.services.gateway.keys.usage import UsageBook

USAGE_PATH = "/v1/usage"
_NO_GENERATION = ("/v1/files", "/v1/batches")
"""Paths that generate nothing by themselves."""
_STORES = ("/v1/responses", "/v1/streams", *_NO_GENERATION)
"""Paths below which requests read, end or delete what others left: they count in the key's minute."""
_DEFAULT_DAYS = 30
SLO_KEYS = 100
"""Keys with series of their own in cohort_key_slo_requests_total: each has up to twelve."""
OTHER_KEYS = "other"
"""Label of the keys without series of their own."""
_encode = msgspec.json.Encoder().encode


class UsageList(msgspec.Struct, frozen=True):
    data: list[UsageRow]
    object: Literal["list"] = "list"


class KeyMetrics:
    """Metrics by the key's name; SLOs, which have several series each, for `SLO_KEYS` keys at most."""

    def __init__(self, make: MetricFactory) -> None:
        by_key = ("key",)
        self.requests = make.counter("key_requests", "Requests of an API key that were admitted", by_key)
        self.refused = make.counter("key_refused", "Requests refused for a limit of their API key", by_key)
        self.prompt_tokens = make.counter("key_prompt_tokens", "Prompt tokens that an API key used", by_key)
        self.completion_tokens = make.counter("key_completion_tokens", "Tokens generated for an API key", by_key)
        self.open = make.gauge("key_open_requests", "Requests of an API key that are open now", by_key)
        self._slo_names: set[str] = set()
        self._slo = make.counter(
            "key_slo_requests",
            "Finished requests of an API key by objective (ttft, tpot, deadline) and outcome (met, missed)",
            ("key", "class", "objective", "outcome"),
        )

    def judged(self, name: str, traffic_class: TrafficClass, outcomes: Mapping[str, bool]) -> None:
        """Count SLO outcomes. The first keys that come have series of their own, the others share `other`."""
        if len(self._slo_names) < SLO_KEYS:
            self._slo_names.add(name)
        label = name if name in self._slo_names else OTHER_KEYS
        for objective, met in outcomes.items():
            self._slo(label, traffic_class, objective, "met" if met else "missed").inc()


class Tenants:
    def __init__(
        self, config: Config, keyring: Keyring, clock: Clock, metrics: MetricFactory, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._keyring = keyring
        self._clock = clock
        self._default_class: TrafficClass = config.gateway.default_class
        self._metrics = KeyMetrics(metrics)
        self._usage = UsageBook(usage_file(config.state.folder), clock, log)
        self._budgets: dict[tuple[str, TrafficClass], KeyBudget] = {}
        self._log = log
        self._table: KeyTable | None = None
        if keyring.required and config.gateway.processes > 1:
            self._table = KeyTable(folder_of(config, GATEWAY) / "limits")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the database of usage and the shared table; neither where no keys are required. Raises `ConfigError`."""
        if self._keyring.required:
            await self._usage.open()
        try:
            if self._table is not None:
                await asyncio.to_thread(self._table.open)
            yield
        finally:
            if self._table is not None:
                self._table.close()
            await self._usage.close()

    def weight_of(self, owner: str) -> float:
        key = self._keyring.of_owner(owner)
        return 1.0 if key is None else key.weight

    def budget(self, key: Key, traffic_class: TrafficClass) -> KeyBudget:
        """Return the key's budget, with the limits that it has now."""
        place, now_s = (key.id, traffic_class), self._clock.now_s()
        limits = key.limits(traffic_class)
        known = self._budgets.get(place)
        if known is None:
            used = self._usage.tokens_before(key, traffic_class)
            known = self._budgets[place] = self._new_budget(key, traffic_class, now_s, used)
        elif known.limits != limits:
            known.relimit(limits, now_s)
        return known

    def _new_budget(self, key: Key, traffic_class: TrafficClass, now_s: float, used_today: int) -> KeyBudget:
        limits, wall_s = key.limits(traffic_class), self._clock.wall_s()
        if self._table is not None:
            try:
                return SharedKeyBudget(self._table, key.id, key.name, traffic_class, limits, now_s, wall_s, used_today)
            except OSError as error:
                self._log.error("limits of a key hold for this gateway alone", key=key.name, reason=str(error))
        return KeyBudget(key.name, traffic_class, limits, now_s, wall_s, used_today)

    def middleware(self) -> Middleware:
        """Return the middleware, to follow `require_key` and precede all that reads a body."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            key = request.get(KEY)
            if key is None or not _counts(request):
                if key is not None and _uses_store(request):
                    self._count_use(key, self._class_of(request))
                return await handler(request)
            lease = request[LEASE] = self._lease(key, self._class_of(request))
            error: BaseException | None = None
            try:
                return await handler(request)
            except BaseException as raised:
                error = raised
                raise
            finally:
                lease.on_release(lambda: self._end(key, lease, error))

        return middleware

    async def name_limits(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the limits' headers to an answer, before its headers are sent."""
        key = request.get(KEY)
        if key is not None:
            lease = request.get(LEASE)
            budget = self.budget(key, self._class_of(request)) if lease is None else lease.budget
            response.headers.update(budget.headers(self._clock.now_s(), self._clock.wall_s()))

    def lines(self, answer: AnswerLine) -> AnswerLine:
        """Wrap `answer` for lines of batches, within their key's best-effort limits. Raises `KeyLimited` too, and 401
        for a line whose key of the file is no longer valid."""

        async def answered(data: bytes, caller: Caller, *, chat: bool) -> LineAnswer:
            key = self._keyring.of_owner(caller.owner)
            if key is None:
                if caller.owner.startswith(FILED):
                    raise RequestError("The API key of this batch was revoked.", status=401)
                return await answer(data, caller, chat=chat)
            lease = self._lease(key, "be", refusals=False)
            error: BaseException | None = None
            try:
                return await answer(data, replace(caller, lease=lease), chat=chat)
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._end(key, lease, error, refusals=False)

        return answered

    def lease_of(self, owner: str, traffic_class: TrafficClass) -> Lease | None:
        """Return a held lease for a resumed request; None if its owner has no key. Raises `KeyLimited`."""
        key = self._keyring.of_owner(owner)
        if key is None:
            return None
        self.budget(key, traffic_class).read(self._clock.now_s(), -1)  # the lease counts it again
        lease = self._lease(key, traffic_class)
        lease.keep_open()
        lease.on_release(lambda: self._end(key, lease, None))
        return lease

    def _class_of(self, request: web.Request) -> TrafficClass:
        match request.headers.get(CLASS_HEADER, "").strip().lower():
            case "rt":
                return "rt"
            case "be":
                return "be"
            case _:
                return self._default_class  # a wrong word is refused when the body is read

    def _lease(self, key: Key, traffic_class: TrafficClass, *, refusals: bool = True) -> Lease:
        """Return a new lease. A refusal is not counted with `refusals` False: the request retries by itself."""
        try:
            lease = Lease(lambda each: self.budget(key, each), traffic_class, self._clock)
        except KeyLimited:
            if refusals:
                self._count(key, traffic_class, Amounts(refused=1))
            raise
        self._metrics.open(key.name).inc()
        lease.on_slo_result = lambda each, outcomes: self._judge(key, each, outcomes)
        return lease

    def _count_use(self, key: Key, traffic_class: TrafficClass) -> None:
        try:
            self.budget(key, traffic_class).read(self._clock.now_s())
        except KeyLimited:
            self._count(key, traffic_class, Amounts(refused=1))
            raise

    def _judge(self, key: Key, traffic_class: TrafficClass, outcomes: Mapping[str, bool]) -> None:
        self._metrics.judged(key.name, traffic_class, outcomes)
        self._usage.add(key, traffic_class, Amounts(slo_requests=1, slo_met=int(all(outcomes.values()))))

    def _end(self, key: Key, lease: Lease, error: BaseException | None, *, refusals: bool = True) -> None:
        self._metrics.open(key.name).dec()
        amounts = lease.end(error)
        if not refusals:
            amounts.refused = 0
        self._count(key, lease.traffic_class, amounts)

    def _count(self, key: Key, traffic_class: TrafficClass, amounts: Amounts) -> None:
        if amounts == Amounts():
            return
        self._usage.add(key, traffic_class, amounts)
        metrics = self._metrics
        for counter, count in (
            (metrics.requests, amounts.requests),
            (metrics.refused, amounts.refused),
            (metrics.prompt_tokens, amounts.prompt_tokens),
            (metrics.completion_tokens, amounts.completion_tokens),
        ):
            counter(key.name).inc(count)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(USAGE_PATH, self.usage)]

    async def usage(self, request: web.Request) -> web.Response:
        """Return usage by day: `days` (30) counts today and those before; `keys=all` covers every key, for admins."""
        key = request.get(KEY)
        if key is None:
            raise RequestError("This server asks for no API keys: there is no usage of any.", status=404)
        given = request.query.get("days", str(_DEFAULT_DAYS))
        if not (given.isascii() and given.isdecimal() and len(given) < 8 and int(given) <= RETENTION_DAYS):
            raise RequestError(f"days: a number from 0 to {RETENTION_DAYS}.", param="days")
        whose = request.query.get("keys", "own")
        if whose not in ("own", "all"):
            raise RequestError("keys: own or all.", param="keys")
        if whose == "all" and not key.admin:
            raise RequestError(
                "keys=all: this API key is no admin's (cohort keys add --admin).",
                status=403,
                type_="permission_error",
                param="keys",
            )
        rows = await self._usage.rows(int(given), None if whose == "all" else key.id)
        return web.Response(body=_encode(UsageList(rows)), content_type="application/json")


def _counts(request: web.Request) -> bool:
    """Return whether a request generates or tokenises: POST, except files and batches, whose lines count one by one."""
    path = request.path
    return (
        request.method == "POST"
        and (path.startswith("/v1/") or path in (TOKENIZE_PATH, DETOKENIZE_PATH))
        and request.match_info.http_exception is None
        and not _is_below(path, _NO_GENERATION)
    )


def _uses_store(request: web.Request) -> bool:
    """Return whether a request reads, ends or deletes what is stored: all below the stores but a new file or batch."""
    is_new = request.method == "POST" and request.path in _NO_GENERATION
    return not is_new and request.match_info.http_exception is None and _is_below(request.path, _STORES)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in roots)
