"""Ranks of a worker on other hosts: how they come to rank 0, and what it checks before one becomes a rank.

    another host                                        rank 0's host
    `services/rank_host` ── Join ──▶ RanksElsewhere: same code, model, degree, hosts? a rank that is awaited?
                         ◀── "" ───   │ then streams for control, orders and the store, as of a child (`followers`)

A process proves that it has the cluster's key on its connection (`rank_wire`). Rank 0 awaits all of them for
`engine.rank_join_s` and reports which did not come and why the last one was turned away. From then on they are
followers as any others. Decides who may join; nothing about steps.
"""

from __future__ import annotations

import datetime
import fcntl
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

import cohort
from cohort.common.addresses import bind_address
from cohort.common.code_fingerprint import engine_digest, model_digest
from cohort.common.config import Config, LoggingConfig, WorkerGroup
from cohort.common.engine.ranks.rank_messages import RankLost, framed, receive_frame, send
from cohort.common.engine.ranks.rank_orders import OpenLinks
from cohort.common.errors import CohortError, ConfigError, TransferError
from cohort.common.transport.rank_wire import WireDialer, WireListener
from cohort.common.transport.security import load_keys

_TCP = "tcp://"
_SIOCGIFADDR = 0x8915
HashStore: Any = dist.HashStore  # type: ignore[attr-defined]  # torch's stubs leave it out
_MOST_WAIT_S = 300.0


class Join(msgspec.Struct, frozen=True):
    """Facts of a rank. `code`, `model`: digests. `bind`, `advertise`: of its own KV link, "" without TCP."""

    version: str
    code: str
    model: str
    degree: int
    hosts: int
    rank: int
    bind: str
    advertise: str
    keys_file: str


class Place(msgspec.Struct, frozen=True):
    """Data that a process on another host needs to become a rank. `device` and `threads` are its own."""

    leader: str
    keys_file: str
    model_dir: str
    device: str
    threads: int
    interface: str
    join_s: float
    logging: LoggingConfig
    join: Join


_joins = msgspec.msgpack.Decoder(Join)


def group_on_hosts(config: Config) -> WorkerGroup:
    """Return the one group of workers whose ranks are on several hosts. Raises `ConfigError`."""
    found = [group for group in config.workers if group.hosts > 1]
    if len(found) != 1:
        raise ConfigError(f"workers: {len(found)} groups have hosts above 1; a host of ranks needs exactly one")
    return found[0]


def join_of(config: Config, group: WorkerGroup, model: Path, rank: int) -> Join:
    """Return the rank's facts by this configuration, code and model folder. Reads every file of the engine's source."""
    own, host = config.endpoints.worker, config.endpoints.bind_host
    advertise = f"{own.rpartition(':')[0]}:0" if own.startswith(_TCP) else ""
    return Join(
        cohort.__version__,
        engine_digest(),
        model_digest(model),
        group.degree,
        group.hosts,
        rank,
        bind_address(advertise, host) if advertise else "",
        advertise,
        config.security.curve_secret_key_file,
    )


class RemoteRanks:
    """Rank 0's hold on the ranks of other hosts; closed by `Followers`."""

    def __init__(self, config: Config, group: WorkerGroup, model: Path) -> None:
        """Listen from now on. Raises `ConfigError`."""
        self._own = join_of(config, group, model, 0)
        self._first = group.local_degree
        self._joined: dict[int, Join] = {}
        endpoint = config.endpoints.ranks
        self.interface = own_interface(config)
        self._wire = WireListener(
            bind_address(endpoint, config.endpoints.bind_host),
            load_keys(config.security.curve_secret_key_file),
            range(self._first, group.degree),
            self._admit,
            join_s=config.engine.rank_join_s,
        )
        self.streams = self._wire.streams
        """Streams for control, orders and store, by rank."""
        self.endpoint = self._wire.endpoint

    def why_lost(self, rank: int) -> str:
        return self._wire.why_lost(rank)

    def watch(self, lost: Callable[[int, str], None]) -> None:
        """Call `lost` (rank, reason) on another thread for each rank that is lost; at once for one lost already."""
        self._wire.lost = lost
        for rank in self.streams:
            if why := self._wire.why_lost(rank):
                lost(rank, why)

    def own_order(self, rank: int, order: OpenLinks, number: int) -> OpenLinks:
        """Return rank 0's links as this rank opens them: on its own host's address. Raises `TransferError`."""
        joined = self._joined[rank]
        if not (joined.advertise and order.zmq_advertise.startswith(_TCP)):
            raise TransferError(
                "endpoints.worker: the ranks of a worker on several hosts move KV under their own addresses: write "
                "tcp://HOST:0 on every host"
            )
        return msgspec.structs.replace(
            order, order=number, zmq_bind=joined.bind, zmq_advertise=joined.advertise, keys_file=joined.keys_file
        )

    def wait_disconnected(self, timeout_s: float) -> None:
        self._wire.wait_disconnected(timeout_s)

    def close(self) -> None:
        self._wire.close()

    def _admit(self, payload: bytes) -> int:
        try:
            join = _joins.decode(payload)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"it says something else than a rank of Cohort {self._own.version}: {error}") from error
        own = self._own
        if (join.version, join.code) != (own.version, own.code):
            raise ConfigError(
                f"another version: {join.version} ({join.code}), and rank 0 has {own.version} ({own.code}); run the "
                "same image on every host"
            )
        if (join.degree, join.hosts) != (own.degree, own.hosts):
            raise ConfigError(
                f"workers: tensor_parallel {join.degree} on {join.hosts} hosts, and rank 0 has {own.degree} on "
                f"{own.hosts}; give every host the same configuration"
            )
        if join.model != own.model:
            raise ConfigError(
                f"model.path: another model ({join.model or 'no folder'}), and rank 0 has {own.model}: its config.json "
                "or its weights' names and sizes differ"
            )
        if not self._first <= join.rank < own.degree:
            raise ConfigError(
                f"rank {join.rank} of {own.degree} is not one of another host: those begin at {self._first}"
            )
        self._joined[join.rank] = join
        return join.rank


def joined(place: Place, lost: Callable[[str], None]) -> WireDialer:
    """Join rank 0. Raises `ConfigError`, `WireLost`."""
    payload = msgspec.msgpack.encode(place.join)
    return WireDialer(place.leader, load_keys(place.keys_file), payload, join_s=place.join_s, lost=lost)


def own_interface(config: Config) -> str:
    """Return the network interface over which this host's ranks exchange: `engine.rank_interface`, else the one with
    the address of `endpoints.worker`, else the one that reaches `endpoints.ranks`. Raises `ConfigError`."""
    if config.engine.rank_interface:
        return config.engine.rank_interface
    endpoints = config.endpoints
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if endpoints.worker.startswith(_TCP):
                own = socket.gethostbyname(_host(endpoints.worker))
            else:
                probe.connect((_host(endpoints.ranks), 9))  # sends nothing
                own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address(probe, name) == own:
                    return name
    except OSError as error:
        raise ConfigError(f"engine.rank_interface: this host's own address is not known ({error}); name it") from error
    if own.startswith("127."):
        return "lo"
    raise ConfigError(f"engine.rank_interface: no interface of this host has the address {own}; name one")


def _host(endpoint: str) -> str:
    return endpoint.removeprefix(_TCP).rpartition(":")[0]


def _address(probe: socket.socket, interface: str) -> str:
    try:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(found[20:24])


class StoreRequest(msgspec.Struct, frozen=True):
    """Call of a method of torch's `Store`; `name`: the method's."""

    name: str
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = _MOST_WAIT_S


class StoreReply(msgspec.Struct, frozen=True):
    value: bytes = b""
    number: int = 0
    error: str = ""


_requests = msgspec.msgpack.Decoder(StoreRequest)
_replies = msgspec.msgpack.Decoder(StoreReply)


class StoreFailed(CohortError):
    """Failure to get a key in time, or end of rank 0."""


class StoreOfRankZero(dist.Store):  # type: ignore[misc, name-defined]  # torch's bindings are untyped
    """Rank 0's store on another rank, by which ranks of several hosts meet. Usable on any thread. Raises `StoreFailed`.
    torch's own store for several hosts answers whoever connects, and who writes addresses there becomes a rank. This
    one has no port: each call goes over the stream that the rank has already, and `answer` looks it up. Used by
    `torch.distributed` while a group begins; nothing of a step goes this way."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._call(StoreRequest("set", [key], _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._call(StoreRequest("get", [key])).value

    def add(self, key: str, amount: int) -> int:
        return self._call(StoreRequest("add", [key], amount=amount)).number

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return self._call(StoreRequest("compare_set", [key], _bytes(value), _bytes(expected))).value

    def check(self, keys: list[str]) -> bool:
        return bool(self._call(StoreRequest("check", list(keys))).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._call(StoreRequest("delete_key", [key])).number)

    def num_keys(self) -> int:
        return self._call(StoreRequest("num_keys", [])).number

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        wait_s = _MOST_WAIT_S if timeout is None else timeout.total_seconds()
        self._call(StoreRequest("wait", list(keys), timeout_s=wait_s))

    def _call(self, request: StoreRequest) -> StoreReply:
        with self._lock:
            try:
                send(self._stream, framed(msgspec.msgpack.encode(request)))
                reply = _replies.decode(receive_frame(self._stream))
            except RankLost as error:
                raise StoreFailed(f"rank 0 does not answer: {error}") from error
        if reply.error:
            raise StoreFailed(reply.error)
        return reply


def answer(stream: socket.socket, store: Any) -> None:
    """Answer one rank's calls until it has ended, on a thread of its own. `store`: a `HashStore` of all of them."""
    try:
        while True:
            request = _requests.decode(receive_frame(stream))
            try:
                reply = _looked_up(store, request)
            except Exception as error:  # torch raises its own kinds, and the rank must report which
                reply = StoreReply(error=f"{type(error).__name__}: {error}")
            send(stream, framed(msgspec.msgpack.encode(reply)))
    except (RankLost, msgspec.MsgspecError):
        return


def _looked_up(store: Any, request: StoreRequest) -> StoreReply:
    match request.name:
        case "set":
            store.set(request.keys[0], request.value)
            return StoreReply()
        case "get":
            return StoreReply(store.get(request.keys[0]))
        case "add":
            return StoreReply(number=store.add(request.keys[0], request.amount))
        case "compare_set":
            return StoreReply(store.compare_set(request.keys[0], request.expected, request.value))
        case "check":
            return StoreReply(number=int(store.check(request.keys)))
        case "delete_key":
            return StoreReply(number=int(store.delete_key(request.keys[0])))
        case "num_keys":
            return StoreReply(number=store.num_keys())
        case "wait":
            store.wait(request.keys, datetime.timedelta(seconds=request.timeout_s))
            return StoreReply()
        case other:
            return StoreReply(error=f"no question {other!r}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
