"""Lines start in turn, and hardly any while somebody waits."""

from __future__ import annotations

import asyncio

from cohort.services.gateway.batches.batch_turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_limit_and_first_come() -> None:
    turns = Turns(2, 1, lambda: 0, asyncio.Event())
    order: list[str] = []

    async def take(name: str) -> None:
        await turns.take()
        order.append(name)

    tasks = [asyncio.create_task(take(name)) for name in "abcd"]
    await settle()
    assert order == ["a", "b"]
    turns.give_back()
    await settle()
    assert order == ["a", "b", "c"] and turns.taken == 2
    tasks[3].cancel()
    turns.give_back()
    await settle()
    assert order == ["a", "b", "c"] and turns.taken == 1


async def test_nothing_new_starts_while_an_online_request_waits() -> None:
    waiting = 1
    changed = asyncio.Event()
    turns = Turns(10, 1, lambda: waiting, changed)
    await turns.take()
    second = asyncio.create_task(turns.take())
    await settle()
    assert not second.done(), "one line goes on, so that a batch is never stuck"
    waiting = 0
    await settle()
    assert not second.done()
    changed.set()
    await settle()
    assert second.done() and turns.taken == 2


async def test_the_busy_limit_never_exceeds_the_limit() -> None:
    turns = Turns(1, 5, lambda: 1, asyncio.Event())
    await turns.take()
    second = asyncio.create_task(turns.take())
    await settle()
    assert not second.done()
    turns.give_back()
    await settle()
    assert second.done()


async def test_a_cancelled_wait_lets_the_next_one_in() -> None:
    turns = Turns(1, 1, lambda: 0, asyncio.Event())
    await turns.take()
    first, second = asyncio.create_task(turns.take()), asyncio.create_task(turns.take())
    await settle()
    first.cancel()
    await settle()
    turns.give_back()
    await settle()
    assert second.done() and turns.taken == 1


async def test_a_line_that_waits_for_its_keys_limits_lends_its_turn_and_keeps_its_siblings_back() -> None:
    turns = Turns(1, 1, lambda: 0, asyncio.Event())
    await turns.take()
    with turns.waiting("one"):
        await turns.take()  # another key's line
        sibling = asyncio.create_task(turns.free("one"))
        await asyncio.wait_for(turns.free("another"), 1)
        await settle()
        assert not sibling.done() and turns.taken == 1
    await settle()
    assert sibling.done() and turns.taken == 2  # for as long as both need them
    third = asyncio.create_task(turns.take())
    for taken in (1, 1):
        turns.give_back()
        await settle()
        assert turns.taken == taken
    assert third.done()
