"""Where ranks of several hosts find each other: rank 0's store, asked by the others over their authenticated streams.

torch's own store for several hosts answers whoever connects, and who writes addresses there becomes a rank. This one
has no port: `StoreOfRankZero` sends each question over the stream that the rank has already, `answer` looks it up. Used
by `torch.distributed` while a group begins; nothing of a step goes this way.
"""

from __future__ import annotations

import datetime
import socket
import threading
from typing import Any

import msgspec
import torch.distributed as dist

from cohort.common.engine.ranks.rank_messages import RankLost, framed, receive_frame, send
from cohort.common.errors import CohortError

HashStore: Any = dist.HashStore  # type: ignore[attr-defined]  # torch's stubs leave it out
_MOST_WAIT_S = 300.0


class Ask(msgspec.Struct, frozen=True):
    """`name` of a method of torch's `Store`."""

    name: str
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = _MOST_WAIT_S


class Told(msgspec.Struct, frozen=True):
    value: bytes = b""
    number: int = 0
    error: str = ""


_asks = msgspec.msgpack.Decoder(Ask)
_tells = msgspec.msgpack.Decoder(Told)


class StoreFailed(CohortError):
    """Rank 0 has no such key in time, or has ended."""


class StoreOfRankZero(dist.Store):  # type: ignore[misc, name-defined]  # torch's bindings are untyped
    """As torch's stores; on any thread. Raises `StoreFailed`."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Ask("set", [key], _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(Ask("get", [key])).value

    def add(self, key: str, amount: int) -> int:
        return self._ask(Ask("add", [key], amount=amount)).number

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return self._ask(Ask("compare_set", [key], _bytes(value), _bytes(expected))).value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Ask("check", list(keys))).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Ask("delete_key", [key])).number)

    def num_keys(self) -> int:
        return self._ask(Ask("num_keys", [])).number

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        wait_s = _MOST_WAIT_S if timeout is None else timeout.total_seconds()
        self._ask(Ask("wait", list(keys), timeout_s=wait_s))

    def _ask(self, ask: Ask) -> Told:
        with self._lock:
            try:
                send(self._stream, framed(msgspec.msgpack.encode(ask)))
                told = _tells.decode(receive_frame(self._stream))
            except RankLost as error:
                raise StoreFailed(f"rank 0 does not answer: {error}") from error
        if told.error:
            raise StoreFailed(told.error)
        return told


def answer(stream: socket.socket, store: Any) -> None:
    """A thread of rank 0's for each other rank: until that rank has ended. `store`: a `HashStore` of all of them."""
    try:
        while True:
            ask = _asks.decode(receive_frame(stream))
            try:
                told = _looked_up(store, ask)
            except Exception as error:  # torch raises its own kinds, and the rank is to say which
                told = Told(error=f"{type(error).__name__}: {error}")
            send(stream, framed(msgspec.msgpack.encode(told)))
    except (RankLost, msgspec.MsgspecError):
        return


def _looked_up(store: Any, ask: Ask) -> Told:
    match ask.name:
        case "set":
            store.set(ask.keys[0], ask.value)
            return Told()
        case "get":
            return Told(store.get(ask.keys[0]))
        case "add":
            return Told(number=store.add(ask.keys[0], ask.amount))
        case "compare_set":
            return Told(store.compare_set(ask.keys[0], ask.expected, ask.value))
        case "check":
            return Told(number=int(store.check(ask.keys)))
        case "delete_key":
            return Told(number=int(store.delete_key(ask.keys[0])))
        case "num_keys":
            return Told(number=store.num_keys())
        case "wait":
            store.wait(ask.keys, datetime.timedelta(seconds=ask.timeout_s))
            return Told()
        case other:
            return Told(error=f"no question {other!r}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
