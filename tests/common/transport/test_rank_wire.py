"""Streams to a rank on another host: only the cluster's key opens them, and the end of one end is the end of both."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from cohort.common.errors import ConfigError
from cohort.common.transport import rank_wire
from cohort.common.transport.rank_wire import WireDialer, WireListener, WireLost
from cohort.common.transport.security import CurveKeys, generate_keys

ENDED_S = 2.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> CurveKeys:
    return generate_keys(tmp_path_factory.mktemp("keys") / "cluster.key")


def admit(said: bytes) -> int:
    if not said.isdigit():
        raise ConfigError("it is no rank")
    return int(said)


@contextmanager
def listening(keys: CurveKeys | None, *ranks: int, join_s: float = 30.0) -> Iterator[WireListener]:
    listener = WireListener("tcp://127.0.0.1:*", keys, ranks, admit, join_s=join_s)
    try:
        yield listener
    finally:
        listener.close()


def dial(listener: WireListener, keys: CurveKeys | None, said: bytes = b"1") -> tuple[WireDialer, queue.Queue[str]]:
    ended: queue.Queue[str] = queue.Queue()
    return WireDialer(listener.endpoint, keys, said, join_s=5.0, lost=ended.put), ended


def exactly(stream: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = stream.recv(size - len(found))
        assert data
        found += data
    return found


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_goes_into_a_stream_comes_out_whole_and_only_there(keys: CurveKeys, encrypted: bool):
    own = keys if encrypted else None
    with listening(own, 1, 2) as listener:
        listener.streams[2][0].sendall(b"said before it has come")
        (first, _), (second, _) = dial(listener, own, b"1"), dial(listener, own, b"2")
        assert exactly(second.streams[0], 23) == b"said before it has come"
        large = bytes(range(256)) * (3 << 14)  # more than a message, and than a socket's buffer
        for index in range(rank_wire.STREAMS):
            writer = threading.Thread(target=listener.streams[1][index].sendall, args=(large,))
            writer.start()
            assert exactly(first.streams[index], len(large)) == large
            writer.join()
            second.streams[index].sendall(b"%d" % index)
            assert exactly(listener.streams[2][index], 1) == b"%d" % index


def test_without_the_clusters_key_nobody_is_a_rank(keys: CurveKeys, tmp_path: Path):
    """Nor does one with a key believe a listener that has none."""
    other = generate_keys(tmp_path / "other.key")
    with listening(keys, 1) as listener:
        for wrong in (other, None):
            with pytest.raises(ConfigError, match="another key there, or none"):
                dial(listener, wrong)
        dialer, _ = dial(listener, keys)
        dialer.streams[0].sendall(b"y")
        assert exactly(listener.streams[1][0], 1) == b"y"
    with listening(None, 1) as listener, pytest.raises(ConfigError, match="another key there, or none"):
        dial(listener, keys)


def test_who_is_not_admitted_is_told_why_and_moves_nothing(keys: CurveKeys):
    with listening(keys, 1) as listener:
        with pytest.raises(ConfigError, match="it is no rank"):
            dial(listener, keys, b"anything")
        with pytest.raises(ConfigError, match="no rank 7 is awaited here"):
            dial(listener, keys, b"7")
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:  # a member that does not ask
            stranger.linger = 0
            rank_wire.protect_client(stranger, keys)
            stranger.connect(listener.endpoint)
            stranger.send_multipart([b"0", b"an answer of rank 1"])
            stranger.send_multipart([b"join"])
            stranger.send_multipart([b"join", b"0"])
            assert stranger.poll(2000)
            assert stranger.recv_multipart() == [b"join", b"no rank 0 is awaited here"]
            listener._deadline_s = 0.0
            stranger.send_multipart([b"0", b"so that it looks"])
            listener.streams[1][0].settimeout(3.0)
            assert listener.streams[1][0].recv(1) == b""  # it did not come
        assert "did not come" in listener.why_lost(1) and "no rank 0 is awaited here" in listener.why_lost(1)


def test_a_rank_comes_once(keys: CurveKeys):
    with listening(keys, 1) as listener:
        dialer, _ = dial(listener, keys)
        with pytest.raises(ConfigError, match="rank 1 is there already"):
            dial(listener, keys)
        listener.streams[1][1].sendall(b"x")
        assert exactly(dialer.streams[1], 1) == b"x"


def test_a_rank_that_finds_nobody_says_so_in_time(keys: CurveKeys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(WireLost, match="no rank 0 answers"):
            WireDialer(endpoint, keys, b"1", join_s=0.3, lost=print)


def test_rank_0s_end_is_every_ranks_end(keys: CurveKeys):
    """It is told with its reason before any stream ends: a process ends by the first that it learns."""
    ended: queue.Queue[tuple[str, bytes]] = queue.Queue()
    streams: list[socket.socket] = []

    def lost(reason: str) -> None:
        with pytest.raises(BlockingIOError):
            streams[1].recv(1, socket.MSG_DONTWAIT)
        ended.put((reason, streams[0].recv(9, socket.MSG_PEEK | socket.MSG_DONTWAIT)))

    with listening(keys, 1) as listener:
        dialer = WireDialer(listener.endpoint, keys, b"1", join_s=5.0, lost=lost)
        streams += dialer.streams
        listener.streams[1][0].sendall(b"last")
        listener.close()
        assert ended.get(timeout=ENDED_S) == ("the connection to rank 0 has ended", b"last")
        assert exactly(dialer.streams[0], 4) == b"last"
        assert dialer.streams[0].recv(1) == b""


class _Proxy:
    """Passes bytes on until it is told to swallow them: a host that vanishes closes nothing."""

    def __init__(self, endpoint: str) -> None:
        self._there = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.vanished = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._there))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if not self.vanished.is_set():
                target.sendall(data)


def test_a_host_that_vanishes_is_noticed_by_both_ends(keys: CurveKeys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_wire, "PING_MS", 100)
    monkeypatch.setattr(rank_wire, "SILENCE_MS", 500)
    with listening(keys, 1) as listener:
        lost: queue.Queue[tuple[int, str]] = queue.Queue()
        listener.lost = lambda rank, reason: lost.put((rank, reason))
        proxy = _Proxy(listener.endpoint)
        ended: queue.Queue[str] = queue.Queue()
        dialer = WireDialer(proxy.endpoint, keys, b"1", join_s=5.0, lost=ended.put)
        dialer.streams[0].sendall(b"z")
        assert exactly(listener.streams[1][0], 1) == b"z"
        proxy.vanished.set()
        assert lost.get(timeout=ENDED_S) == (1, "its connection has ended")
        assert ended.get(timeout=ENDED_S) == "the connection to rank 0 has ended"
        assert listener.streams[1][0].recv(1) == b""
