from __future__ import annotations

import asyncio
import sys

import pytest
import structlog

from cohort.common.errors import ConfigError, TransferError
from cohort.common.transport.open_links import open_links

BIND = "tcp://127.0.0.1:0"


async def test_best_first() -> None:
    pytest.importorskip("ucxx")
    links = open_links(("ucx", "zmq"), zmq_bind=BIND)
    assert [link.name for link in links] == ["ucx", "zmq"]
    for link in links:
        await link.close()


async def test_without_ucxx_there_is_one_warning_and_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ucxx"] + ["ucxx"]:
        monkeypatch.setitem(sys.modules, name, None)
    with structlog.testing.capture_logs() as events:
        links = open_links(("ucx", "zmq"), zmq_bind=BIND)
    assert [link.name for link in links] == ["zmq"]
    (event,) = [event for event in events if event["log_level"] == "warning"]
    assert event["link"] == "ucx" and "ucxx is not installed" in event["reason"]
    with pytest.raises(ConfigError, match=r"transfer\.links"):
        open_links(("ucx",), zmq_bind=BIND)
    for link in links:
        await link.close()


async def test_advertised_address_and_unknown_names() -> None:
    (link,) = open_links(("zmq",), zmq_bind=BIND, zmq_advertise="tcp://localhost:0")
    assert link.address().startswith(b"tcp://localhost:") and not link.address().endswith(b":0")
    await link.close()
    with pytest.raises(ConfigError, match="no link named"):
        open_links(("carrier pigeon",), zmq_bind=BIND)


@pytest.mark.parametrize("name", ["ucx", "zmq"])
async def test_closed_links_and_wrong_addresses(name: str) -> None:
    if name == "ucx":
        pytest.importorskip("ucxx")
    (link,) = open_links((name,), zmq_bind=BIND)
    for wrong in (b"", b"\xff\xfe", b"nonsense" * 20):
        with pytest.raises(TransferError):
            await link.send(wrong, 1, b"abc", timeout_s=0.2)
        link.forget(wrong)
    own = link.address()
    place = bytearray(3)
    sending = link.send(own, 1, b"abc", timeout_s=5.0)  # to itself, as a unified worker may
    receiving = link.receive(1, place, timeout_s=5.0)
    await asyncio.gather(sending, receiving)
    assert place == b"abc"
    await link.close()
    await link.close()
    with pytest.raises(TransferError, match="closed"):
        await link.send(own, 1, b"abc", timeout_s=0.2)
    with pytest.raises(TransferError, match="closed"):
        await link.receive(1, place, timeout_s=0.2)
