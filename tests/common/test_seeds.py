"""Processes that know one address find one another, through its ends and moves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common import seeds
from cohort.common.address_book import follow_book, read_book
from cohort.common.config import Config, EndpointsConfig, ManagerConfig, SecurityConfig
from cohort.common.errors import ConfigError
from cohort.common.http.ports import free_port
from cohort.common.messages import Address
from cohort.common.seeds import KnownAddresses, discover, seeds_of, wanted_by, with_own_inbox
from cohort.common.transport.security import generate_keys, load_keys
from cohort.common.transport.zmq_bus import ZmqBus

NAMES = ("manager", "manager-1", "monitor", "predictor")
_addresses = st.lists(
    st.builds(
        Address, st.sampled_from((*NAMES, "decode-0")), st.sampled_from(("tcp://a:1", "tcp://b:1")), st.integers(1, 5)
    ),
    max_size=12,
)


@given(_addresses)
def test_of_each_name_the_latest_start_is_known_in_whatever_order_it_is_told(told: list[Address]) -> None:
    known = KnownAddresses()
    for one in told:
        known.merge([one])
    latest = {name: max((a.incarnation for a in told if a.name == name), default=0) for name in NAMES}
    assert {a.name: a.incarnation for a in known.all()} == {name: at for name, at in latest.items() if at}
    assert not known.merge(told), "nothing new"
    assert set(known.book.named()) == {name for name, at in latest.items() if at}


def test_seeds_are_hosts_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDS", "tcp://a:1, tcp://[::1]:2")
    assert seeds_of(EndpointsConfig(seeds=("env:SEEDS", "tcp://c:3"))) == [("a", 1), ("::1", 2), ("c", 3)]
    for wrong in ("a:1", "tcp://a", "tcp://a:0", "env:NOT_SET"):
        with pytest.raises(ConfigError, match=r"endpoints\.seeds"):
            seeds_of(EndpointsConfig(seeds=(wrong,)))


def test_what_the_configuration_says_is_not_sought() -> None:
    config = Config(manager=ManagerConfig(standbys=1), endpoints=EndpointsConfig(monitor="tcp://m:1"))
    assert wanted_by(config, "gateway", "gateway") == ["manager", "manager-1", "predictor"]
    assert wanted_by(config, "bucketing_manager", "manager-1") == []
    assert wanted_by(config, "global_monitor", "monitor") == ["manager", "manager-1"]


class Process:
    """The part of one that seeks: its inbox, and where it would dial the others."""

    def __init__(self, config: Config, role: str, instance: str, folder: Path) -> None:
        self.config, self.role, self.instance = config, role, instance
        self.run_dir = folder / instance
        self.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.heard: dict[str, str] = {}
        self.endpoint = ""

    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[Config]:
        config = await with_own_inbox(self.config, self.role, self.instance, self.run_dir)
        keys = load_keys(config.security.curve_secret_key_file)
        bind = f"tcp://{config.endpoints.bind_host}:0"
        bus = ZmqBus(self.instance, bind, keys, advertise="tcp://127.0.0.1:0")
        self.endpoint = bus.endpoint
        try:
            async with discover(config, self.role, self.run_dir, bus) as located:
                following = asyncio.create_task(follow_book(self.run_dir, self._dial))
                yield located
                following.cancel()
        finally:
            await bus.close()

    def _dial(self, name: str, endpoint: str) -> None:
        self.heard[name] = endpoint

    async def until_heard(self, name: str, endpoint: str) -> None:
        async with asyncio.timeout(15):
            while self.heard.get(name) != endpoint:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_they_find_one_another_and_who_moves_is_found_again(tmp_path: Path) -> None:
    generate_keys(tmp_path / "key")
    config = Config(
        endpoints=EndpointsConfig(seeds=(f"tcp://localhost:{free_port()}",)),
        security=SecurityConfig(curve_secret_key_file=str(tmp_path / "key")),
    )
    gateway = Process(config, "gateway", "gateway", tmp_path)
    predictor = Process(config, "length_predictor", "predictor", tmp_path)
    monitor = Process(config, "global_monitor", "monitor", tmp_path)
    manager = Process(config, "bucketing_manager", "manager", tmp_path)
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as seed:
        order = (gateway, predictor, monitor)  # who needs the others starts before them
        starting = [asyncio.create_task(stack.enter_async_context(each.there())) for each in order]
        await seed.enter_async_context(manager.there())
        found, _, _ = await asyncio.gather(*starting)
        assert found.endpoints.manager == manager.endpoint
        assert (found.endpoints.monitor, found.endpoints.predictor) == (monitor.endpoint, predictor.endpoint)
        former = manager.endpoint
        await seed.aclose()  # if it was the one that answered, the monitor takes its place
        # Its port is taken meanwhile: the system might give it to the next one, too.
        with socket.create_server(("127.0.0.1", int(former.rpartition(":")[2]))):
            await seed.enter_async_context(manager.there())
        async with seed:
            assert manager.endpoint != former
            for each in (gateway, predictor, monitor):
                await each.until_heard("manager", manager.endpoint)
            book = read_book(gateway.run_dir)
            assert book is not None and book.manager == manager.endpoint


async def test_a_stranger_without_the_key_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_keys(tmp_path / "key")
    endpoints = EndpointsConfig(seeds=(f"tcp://127.0.0.1:{free_port()}",))
    config = Config(endpoints=endpoints, security=SecurityConfig(curve_secret_key_file=str(tmp_path / "key")))
    monitor = Process(config, "global_monitor", "monitor", tmp_path)
    manager = Process(config, "bucketing_manager", "manager", tmp_path)
    stranger = Process(Config(endpoints=endpoints), "bucketing_manager", "manager", tmp_path / "..")
    stranger.run_dir = tmp_path / "stranger"
    stranger.run_dir.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        both = (stack.enter_async_context(each.there()) for each in (monitor, manager))
        await asyncio.gather(*both)
        monkeypatch.setattr(seeds, "SEEK_S", 0.7)
        with pytest.raises(ConfigError, match="did not name monitor"):
            async with stranger.there():
                pass
        book = read_book(monitor.run_dir)
        assert book is not None and book.manager == manager.endpoint
