from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cohort.common.address_book import BOOK, AddressBook, follow_book, located, read_book, write_book
from cohort.common.config import Config, EndpointsConfig
from cohort.common.errors import ConfigError
from cohort.common.messages import Farewell
from cohort.common.transport.zmq_bus import ZmqBus


def test_what_the_book_says_wins_over_the_configuration(tmp_path: Path) -> None:
    config = Config(endpoints=EndpointsConfig(manager="tcp://a:1", monitor="tcp://a:2", worker="tcp://a:0"))
    assert located(config, tmp_path) is config, "no book"
    write_book(tmp_path, AddressBook(manager="tcp://b:7"))
    assert located(config, tmp_path).endpoints == EndpointsConfig("tcp://b:7", "", "tcp://a:2", "", "tcp://a:0")


def test_managers_that_stand_by_are_in_the_book_by_name(tmp_path: Path) -> None:
    book = AddressBook().entered("manager", "tcp://a:1").entered("manager-2", "tcp://c:1")
    assert book.named() == {"manager": "tcp://a:1", "manager-2": "tcp://c:1"}
    write_book(tmp_path, book)
    assert read_book(tmp_path) == book
    endpoints = located(Config(endpoints=EndpointsConfig(standby_managers=("tcp://b:1",))), tmp_path).endpoints
    assert (endpoints.manager, endpoints.standby_managers) == ("tcp://a:1", ("tcp://b:1", "tcp://c:1"))


def test_a_file_that_is_no_book_is_named(tmp_path: Path) -> None:
    (tmp_path / BOOK).write_text('{"manager": 7}')
    with pytest.raises(ConfigError, match=BOOK):
        read_book(tmp_path)


async def test_a_book_is_followed_as_it_changes_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    dialled: list[tuple[str, str]] = []
    await follow_book(tmp_path, lambda *told: dialled.append(told))
    assert dialled == [], "without a book there is nothing to follow"
    write_book(tmp_path, AddressBook(manager="tcp://a:1"))
    following = asyncio.create_task(follow_book(tmp_path, lambda *told: dialled.append(told)))

    async def until(told: tuple[str, str]) -> None:
        async with asyncio.timeout(10):
            while told not in dialled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    try:
        await until(("manager", "tcp://a:1"))
        (tmp_path / BOOK).write_text("half")
        dialled.clear()
        await until(("manager", "tcp://a:1"))
        write_book(tmp_path, AddressBook(manager="tcp://b:1", monitor="tcp://b:2"))
        await until(("manager", "tcp://b:1"))
        await until(("monitor", "tcp://b:2"))
    finally:
        following.cancel()


async def test_a_moved_peer_is_dialled_where_it_is_now() -> None:
    old, new = ZmqBus("manager", "tcp://127.0.0.1:0"), ZmqBus("manager", "tcp://127.0.0.1:0")
    worker = ZmqBus("decode-0", "")
    try:
        worker.redial("manager", new.endpoint)
        worker.connect("manager", old.endpoint)
        worker.send("manager", Farewell("decode-0", 1))
        async with asyncio.timeout(10):
            assert (await old.receive())[1] == Farewell("decode-0", 1)
        worker.redial("manager", new.endpoint)
        worker.send("manager", Farewell("decode-0", 2))
        async with asyncio.timeout(10):
            assert (await new.receive())[1] == Farewell("decode-0", 2)
    finally:
        for bus in (old, new, worker):
            await bus.close()
