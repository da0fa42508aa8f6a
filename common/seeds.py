"""Several hosts without a list of them: a process that is told one address learns the others' from there.

    manager, monitor: listen on the seed's port ◀── "I am there, at …; who else?" ── every process
                              └── addresses, of each name the newest ──▶ addresses.json ──▶ each dials what is new

A seed is an address under which one or more of monitor and managers answer: of a host, or a DNS name with several, such
as a headless service has. On a host that has several of them one listens; another takes the port over when that one
ends. A seed keeps nothing that its askers do not know: it may be restarted or replaced. Of two processes with one name
the one that was started later counts: its incarnation is higher.

Called by `service.py`; does nothing where `endpoints.seeds` names none. Its sockets are its own ones, encrypted as all
others are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import structlog

from cohort.common.address_book import AddressBook, located, with_standbys, write_book
from cohort.common.addresses import ENDPOINTS, MANAGER, MONITOR, PREDICTOR, STANDBY_MANAGERS, manager_names, own_host
from cohort.common.config import Config, EndpointsConfig
from cohort.common.errors import ConfigError, PeerUnreachable
from cohort.common.http.ports import port_problem
from cohort.common.messages import Address, Addresses
from cohort.common.transport.security import CurveKeys, load_keys
from cohort.common.transport.zmq_bus import ZmqBus

log = structlog.get_logger(__name__)

_SEEDS_VARIABLE_PREFIX = "env:"
_TCP = "tcp://"
_SEED = "seed"
_NAMED = (MANAGER, PREDICTOR, MONITOR, *STANDBY_MANAGERS)
_ANSWERING_ROLES = ("bucketing_manager", "global_monitor")
SEEK_S = 60.0
"""The longest that a process waits at its start for addresses that it needs."""
_QUERY_S = 0.2
"""Time between two questions while an address is missing."""
_AGAIN_S = 2.0
"""Time between two questions afterwards. A seed reports a change at once."""
_PORT_S = 1.0
"""Time between two checks whether the seed's port is free."""
_ASKERS_S = 3 * _AGAIN_S
"""Time for which a process that asked gets changes."""


class KnownAddresses:
    """Newest address of each name."""

    def __init__(self) -> None:
        self._known: dict[str, Address] = {}

    def merge(self, addresses: Iterable[Address]) -> bool:
        """Add addresses, but for names that nobody dials. Return whether one is new."""
        new = False
        for address in addresses:
            known = self._known.get(address.name)
            if address.name in _NAMED and (known is None or known.incarnation < address.incarnation):
                self._known[address.name] = address
                new = True
        return new

    def all(self) -> list[Address]:
        return [self._known[name] for name in sorted(self._known)]

    def lacks(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._known]

    @property
    def book(self) -> AddressBook:
        book = AddressBook()
        for address in self.all():
            book = book.entered(address.name, address.endpoint)
        return book


def seeds_of(endpoints: EndpointsConfig) -> list[tuple[str, int]]:
    """(host, port) of each. Raises `ConfigError` for what is no TCP endpoint, and for a variable that is not set."""
    found = []
    for entry in endpoints.seeds:
        if entry.startswith(_SEEDS_VARIABLE_PREFIX):
            name = entry.removeprefix(_SEEDS_VARIABLE_PREFIX)
            named = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
            if not named:
                raise ConfigError(f"endpoints.seeds: the environment variable {name} is not set")
        else:
            named = [entry]
        for endpoint in named:
            host, colon, port = endpoint.removeprefix(_TCP).rpartition(":")
            if not (endpoint.startswith(_TCP) and host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise ConfigError(f"endpoints.seeds: {endpoint!r} is no endpoint; write tcp://HOST:PORT")
            found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return found


async def with_own_inbox(config: Config, role: str, instance: str, run_dir: Path) -> Config:
    """Return the configuration with an inbox on any port for this process, if it has none; without seeds, with the
    address book's endpoints. Raises `ConfigError` if no seed has an address within `SEEK_S`."""
    if not config.endpoints.seeds:
        return located(config, run_dir)
    host = await _own_host(config)
    anywhere = f"{_TCP}{f'[{host}]' if ':' in host else host}:0"
    endpoints = config.endpoints
    if role == "bucketing_manager" and instance in STANDBY_MANAGERS:
        configured, index = endpoints.standby_managers, STANDBY_MANAGERS.index(instance)
        if not any(configured[index : index + 1]):
            standbys = with_standbys(configured, {instance: anywhere})
            endpoints = msgspec.structs.replace(endpoints, standby_managers=standbys)
    elif not getattr(endpoints, field := ENDPOINTS.get(role, "worker")):
        endpoints = msgspec.structs.replace(endpoints, **{field: anywhere})
    return msgspec.structs.replace(config, endpoints=endpoints)


def wanted_by(config: Config, role: str, instance: str) -> list[str]:
    """Return the names that this process dials and that have no configured endpoint."""
    managers = manager_names(config)
    dialled = {
        "bucketing_manager": {MONITOR},
        "global_monitor": {*managers},
        "length_predictor": {MONITOR},
        "gateway": {*managers, MONITOR, PREDICTOR},
    }
    endpoints = config.endpoints
    configured = {name for name in (MANAGER, PREDICTOR, MONITOR) if getattr(endpoints, name)}
    configured |= {name for name, where in zip(STANDBY_MANAGERS, endpoints.standby_managers, strict=False) if where}
    return sorted(dialled.get(role, {*managers, MONITOR}) - configured - {instance})


async def _own_host(config: Config) -> str:
    """Return the host under which others dial this process: `endpoints.host`, the variable COHORT_HOST, or the address
    from which this machine reaches a seed."""
    named = own_host(config)
    deadline_s = asyncio.get_running_loop().time() + SEEK_S
    while not named:
        for address in await _resolved(seeds_of(config.endpoints)):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(address)  # sends nothing: the kernel chooses the way
                return str(probe.getsockname()[0])
        if asyncio.get_running_loop().time() > deadline_s:
            raise ConfigError(f"endpoints.seeds: {', '.join(config.endpoints.seeds)} has no address")
        await asyncio.sleep(_QUERY_S)
    return named


async def _resolved(seeds: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return every address of every seed; names without any are left out."""
    loop, found = asyncio.get_running_loop(), dict[tuple[str, int], None]()
    for host, port in seeds:
        with contextlib.suppress(OSError):
            for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found[str(address[0]), port] = None
    return list(found)


@contextlib.asynccontextmanager
async def discover(config: Config, role: str, run_dir: Path, bus: ZmqBus) -> AsyncIterator[Config]:
    """Yield a configuration with the addresses of all that this process dials, and update the run folder's address book
    inside the block. `bus`: its inbox. Raises `ConfigError` if no seed has them within `SEEK_S`."""
    if not config.endpoints.seeds:
        yield config
        return
    keys = load_keys(config.security.curve_secret_key_file)
    incarnation = time.time_ns() // 1_000_000
    seeker = _Discovery(config, role, run_dir, keys, bus, incarnation)
    seeking = asyncio.create_task(seeker.run(), name="seeds")
    try:
        await seeker.found(seeking)
        yield located(config, run_dir)
    finally:
        seeking.cancel()
        await asyncio.gather(seeking, return_exceptions=True)


class _Discovery:
    """One process's search. `run` does it, until cancelled; `found` waits for what is needed to start."""

    def __init__(
        self, config: Config, role: str, run_dir: Path, keys: CurveKeys | None, bus: ZmqBus, incarnation: int
    ) -> None:
        self._endpoints = config.endpoints
        self._seeds = seeds_of(config.endpoints)
        self._instance, self._run_dir, self._keys = bus.identity, run_dir, keys
        self._wanted = wanted_by(config, role, bus.identity)
        self._answers = role in _ANSWERING_ROLES
        self._known = KnownAddresses()
        self._known.merge([Address(bus.identity, bus.endpoint, incarnation)])
        self._complete = asyncio.Event()
        self._last_query_s: dict[str, float] = {}
        self._answering: ZmqBus | None = None

    async def found(self, running: asyncio.Task[None]) -> None:
        """Wait for the wanted addresses. `running`: the task of `run`, whose error is raised here."""
        complete = asyncio.create_task(self._complete.wait())
        try:
            await asyncio.wait({complete, running}, timeout=SEEK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            complete.cancel()
        if running.done():
            running.result()
        if not self._complete.is_set():
            lacking = ", ".join(self._known.lacks(self._wanted))
            seeds = ", ".join(f"{host}:{port}" for host, port in self._seeds)
            raise ConfigError(f"endpoints.seeds: {seeds} did not name {lacking} within {SEEK_S:g} s")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._answers:
                tasks.create_task(self._answer(), name="seed")
            tasks.create_task(self._query_seeds(), name="seek")
            self._learned([])

    async def _query_seeds(self) -> None:
        bus = ZmqBus(self._instance, curve=self._keys)
        hears = asyncio.create_task(self._receive(bus), name="seek-hear")
        dialled = set[str]()
        try:
            while True:
                seeds = {f"{_SEED}-{host}-{port}": (host, port) for host, port in await _resolved(self._seeds)}
                for peer in dialled - seeds.keys():
                    bus.disconnect(peer)
                for peer, (host, port) in seeds.items():
                    with contextlib.suppress(PeerUnreachable):  # asked again
                        bus.connect(peer, f"{_TCP}{f'[{host}]' if ':' in host else host}:{port}", high_water_messages=2)
                        bus.send(peer, Addresses(self._known.all()))
                dialled = set(seeds)
                if self._complete.is_set():
                    await asyncio.sleep(_AGAIN_S)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._complete.wait(), _QUERY_S)
        finally:
            hears.cancel()
            await asyncio.gather(hears, return_exceptions=True)
            await bus.close()

    async def _receive(self, bus: ZmqBus) -> None:
        while True:
            _, message = await bus.receive()
            if isinstance(message, Addresses):
                self._learned(message.known)

    def _learned(self, addresses: Iterable[Address]) -> None:
        if self._known.merge(addresses):
            log.info("addresses", **{each.name.replace("-", "_"): each.endpoint for each in self._known.all()})
            self._notify_askers()
        if self._known.lacks(self._wanted):
            return
        write_book(self._run_dir, self._known.book)
        self._complete.set()

    async def _answer(self) -> None:
        """Answer at the seed's port whenever no other process of this machine has it."""
        while True:
            port = next((port for _, port in self._seeds if not port_problem(self._endpoints.bind_host, port)), 0)
            if port:
                with contextlib.suppress(ConfigError):  # taken meanwhile
                    await self._answer_on(port)
            await asyncio.sleep(_PORT_S)

    async def _answer_on(self, port: int) -> None:
        bus = ZmqBus(_SEED, f"{_TCP}{self._endpoints.bind_host}:{port}", self._keys)
        log.info("tells addresses", port=port)
        self._answering = bus
        loop = asyncio.get_running_loop()
        try:
            while True:
                peer, message = await bus.receive()
                if not isinstance(message, Addresses):
                    continue
                self._last_query_s[peer] = loop.time()
                self._learned(message.known)
                with contextlib.suppress(PeerUnreachable):  # gone: it asks again
                    bus.send(peer, Addresses(self._known.all()))
        finally:
            self._answering = None
            await bus.close()

    def _notify_askers(self) -> None:
        """Send all addresses to every process that asked lately."""
        bus, now_s = self._answering, asyncio.get_running_loop().time()
        if bus is None:
            return
        self._last_query_s = {peer: at_s for peer, at_s in self._last_query_s.items() if now_s - at_s <= _ASKERS_S}
        for peer in self._last_query_s:
            with contextlib.suppress(PeerUnreachable):
                bus.send(peer, Addresses(self._known.all()))
