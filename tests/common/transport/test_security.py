"""Who has the cluster's key file talks; nobody else does."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import zmq

from cohort.common.errors import ConfigError, TransferError
from cohort.common.messages import Registered
from cohort.common.transport.security import CurveKeys, generate_keys, load_keys
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.transport.zmq_link import ZmqLink


async def hears(receiver: ZmqBus, sender: ZmqBus, within_s: float) -> bool:
    sender.connect("receiver", receiver.endpoint)
    sender.send("receiver", Registered(1))
    try:
        await asyncio.wait_for(receiver.receive(), within_s)
    except TimeoutError:
        return False
    return True


async def test_only_the_cluster_key_is_heard(tmp_path: Path) -> None:
    keys, others = generate_keys(tmp_path / "cluster.key"), generate_keys(tmp_path / "others.key")
    receiver = ZmqBus("receiver", "tcp://127.0.0.1:0", keys)
    friend, plain, stranger = ZmqBus("friend", curve=keys), ZmqBus("plain"), ZmqBus("stranger", curve=others)
    assert await hears(receiver, friend, 5.0)
    receiver.send("friend", Registered(2))
    assert await asyncio.wait_for(friend.receive(), 5.0) == ("receiver", Registered(2))
    assert not await hears(receiver, plain, 0.5)
    assert not await hears(receiver, stranger, 0.5)
    for bus in (receiver, friend, plain, stranger):
        await bus.close()


async def test_knowing_the_public_key_is_not_enough(tmp_path: Path) -> None:
    """An own pair, but the cluster's key as server key: the handshake works, the authenticator refuses."""
    keys = generate_keys(tmp_path / "cluster.key")
    receiver = ZmqBus("receiver", "tcp://127.0.0.1:0", keys)
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"intruder")
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, keys.public
    socket.connect(receiver.endpoint)
    socket.send(b"\x82\xa4type\xaaRegistered\xabincarnation\x01")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receiver.receive(), 0.7)
    assert receiver.counters.malformed == 0  # it did not even arrive
    socket.close(linger=0)
    context.term()
    await receiver.close()


async def test_encrypted_bus_does_not_talk_to_a_plain_one(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path / "cluster.key")
    plain, friend = ZmqBus("plain", "tcp://127.0.0.1:0"), ZmqBus("friend", curve=keys)
    assert not await hears(plain, friend, 0.5)
    await plain.close()
    await friend.close()


async def test_kv_link_is_protected_too(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path / "cluster.key")
    receiver, friend = ZmqLink("tcp://127.0.0.1:0", keys), ZmqLink("tcp://127.0.0.1:0", keys)
    plain = ZmqLink("tcp://127.0.0.1:0")
    data, place = bytes(range(256)) * 64, bytearray(256 * 64)
    await asyncio.gather(
        friend.send(receiver.address(), 1, data, timeout_s=5.0), receiver.receive(1, place, timeout_s=5.0)
    )
    assert place == data
    with pytest.raises(TransferError):
        await plain.send(receiver.address(), 2, data, timeout_s=0.5)
    for link in (receiver, friend, plain):
        await link.close()


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cluster.key"
    keys = generate_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(path) == load_keys(str(path)) == keys
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists already"):
        generate_keys(path)
    assert load_keys(path) == keys
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["cluster.key"]


def test_unusable_key_files_are_named(tmp_path: Path) -> None:
    assert load_keys("") is None
    with pytest.raises(ConfigError, match="curve_secret_key_file"):
        load_keys(tmp_path / "absent")
    (tmp_path / "nonsense").write_text("nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        load_keys(tmp_path / "nonsense")
    public, _ = zmq.curve_keypair()
    (tmp_path / "public").write_text(f'curve\n    public-key = "{public.decode()}"\n')
    with pytest.raises(ConfigError, match="no secret key"):
        load_keys(tmp_path / "public")


def test_keys_compare_by_value() -> None:
    assert CurveKeys(b"a", b"b") == CurveKeys(b"a", b"b")


async def test_a_port_that_is_taken_is_said_so_with_keys_too(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path / "cluster.key")
    first = ZmqBus("first", "tcp://127.0.0.1:0", keys)
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqBus("second", first.endpoint, keys)
    await first.close()
