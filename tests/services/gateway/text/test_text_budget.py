"""Text in work: never beyond the budget, in turn of the keys, nothing lost when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import RequestError
from cohort.services.gateway.text import text_budget
from cohort.services.gateway.text.text_budget import INLINE_BYTES, MOST_BYTES, MOST_WAITING, THREAD_BYTES, TextBudget
from tests.examples import examples


class Threads:
    """Threads of which the test decides what they begin and end."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        self.jobs.append((Future(), work))
        return self.jobs[-1][0]

    def unfinished(self) -> list[tuple[Future[Any], Callable[[], Any]]]:
        return [(job, work) for job, work in self.jobs if not job.done()]

    def finish_first(self) -> None:
        for job, work in self.unfinished()[:1]:
            if not job.running():
                job.set_running_or_notify_cancel()
            try:
                job.set_result(work())
            except ValueError as error:
                job.set_exception(error)


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    trims: list[int] = []
    monkeypatch.setattr(text_budget, "_trim", lambda: trims.append(1))
    return trims


def budget_with_threads(most_running: int = 1) -> tuple[TextBudget, Threads]:
    budget, threads = TextBudget(), Threads()
    budget._threads, budget._most_running = threads, most_running  # type: ignore[assignment]
    return budget, threads


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


SIZES = st.sampled_from([THREAD_BYTES + 1, 1 << 20, 3 << 20, MOST_BYTES, 9 * MOST_BYTES])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["alice", "bob", "carol"]), SIZES),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("begin"), st.just(0)),
    st.tuples(st.just("finish"), st.just(0)),
    st.tuples(st.just("finish, leave"), st.just(0)),  # admitted and gone in the same turn of the loop
)


@settings(max_examples=examples(10))
@given(st.lists(STEPS, min_size=8, max_size=40), st.integers(1, 3))
def test_bytes_in_work_stay_within_the_budget_whoever_leaves(steps: list[tuple[str, int]], most: int) -> None:
    async def play() -> None:
        budget, threads = budget_with_threads(most)
        tasks: list[asyncio.Task[int]] = []
        sizes: dict[int, int] = {}
        owners: dict[int, str] = {}

        def come(owner: str, size: int) -> None:
            def work() -> int:
                if number % 3 == 2:
                    raise ValueError(number)
                return number

            number = len(tasks)
            sizes[number], owners[number] = min(size, MOST_BYTES), owner
            tasks.append(asyncio.create_task(budget.run(size, work, owner)))
            work.number = number  # type: ignore[attr-defined]

        def check() -> None:
            begun = [work.number for _, work in threads.unfinished() if hasattr(work, "number")]  # not trims
            assert budget.in_work == sum(sizes[number] for number in begun) <= MOST_BYTES and len(begun) <= most
            order = [work.number for _, work in threads.jobs if hasattr(work, "number")]
            waiting = [n for n, task in enumerate(tasks) if not task.done() and n not in order]
            for owner in set(owners.values()):
                own = [number for number in order if owners[number] == owner]
                assert own == sorted(own)
                bytes_of_owner = sum(sizes[number] for number in waiting if owners[number] == owner)
                assert budget.waiting_of[owner] == bytes_of_owner <= MOST_WAITING
            if waiting and len(begun) < most:  # nobody waits in vain
                assert budget._head is not None
                assert budget.in_work + budget._line[budget._head].size > MOST_BYTES

        for what, number in steps:
            line = len(budget._line)
            unfinished = [task for task in tasks if not task.done()]
            unfinished = unfinished[-line:] if line else unfinished
            if what in ("alice", "bob", "carol"):
                come(what, number)
            if what == "begin":
                for job, _ in [each for each in threads.unfinished() if not each[0].running()][:1]:
                    job.set_running_or_notify_cancel()
            if what.startswith("finish"):
                threads.finish_first()
                if what != "finish":
                    await asyncio.sleep(0)  # freed and granted; the one whose turn it is has not run
            if "leave" in what and len(unfinished) > number:
                unfinished[number].cancel()
            await settle()
            check()
        while threads.unfinished():
            threads.finish_first()
            await settle()
            check()
        assert (budget.in_work, budget.waiting_of) == (0, {})
        for number, task in enumerate(tasks):
            error = None if task.cancelled() else task.exception()
            if not task.cancelled() and error is None:
                assert task.result() == number
            assert error is None or isinstance(error, ValueError) or getattr(error, "status", 0) == 429

    asyncio.run(play())


async def test_a_key_waits_for_one_text_of_each_other_key(trims: list[int]) -> None:
    budget, threads = budget_with_threads()
    began: list[str] = []

    async def come(owner: str, size: int, count: int = 1) -> None:
        tasks.extend(asyncio.create_task(budget.run(size, lambda: began.append(owner), owner)) for _ in range(count))
        await settle()

    tasks: list[asyncio.Task[None]] = []
    await come("alice", 1 << 20, 16)
    await come("bob", 1 << 20, 2)
    await come("carol", THREAD_BYTES + 1, 2)
    with pytest.raises(RequestError, match="this client's"):
        await budget.run(2 << 20, lambda: None, "alice")
    assert budget.waiting_of["alice"] == 15 << 20
    while threads.unfinished():
        threads.finish_first()
        await settle()
    assert began[:6] == ["alice", "bob", "carol", "carol", "alice", "bob"]
    await asyncio.gather(*tasks)


async def test_beyond_the_line_a_text_is_refused(trims: list[int]) -> None:
    budget, threads = budget_with_threads()
    tasks = [asyncio.create_task(budget.run(MOST_BYTES, lambda: 1)) for _ in range(5)]
    await settle()
    with pytest.raises(RequestError, match=f"{MOST_WAITING} bytes") as caught:
        await budget.run(THREAD_BYTES + 1, lambda: 1)
    assert (caught.value.status, caught.value.retry_after_s) == (429, text_budget.RETRY_S)
    assert await budget.run(INLINE_BYTES, lambda: 2) == await budget.run(THREAD_BYTES, lambda: 2) == 2  # as always
    while threads.unfinished():
        threads.finish_first()
        await settle()
        assert budget.in_work <= MOST_BYTES
    assert await asyncio.gather(*tasks) == [1] * 5 and trims == [1]


async def test_a_thread_that_works_for_a_client_that_left_holds_its_bytes(trims: list[int]) -> None:
    budget, threads = budget_with_threads()
    first, second = (asyncio.create_task(budget.run(MOST_BYTES, lambda: 1)) for _ in range(2))
    await settle()
    threads.jobs[0][0].set_running_or_notify_cancel()
    first.cancel()
    await settle()
    assert first.cancelled() and budget.in_work == budget.waiting_of[""] == MOST_BYTES
    threads.finish_first()
    await settle()
    assert not budget.waiting_of and len(threads.jobs) == 2  # the second's turn
    second.cancel()
    await settle()
    assert budget.in_work == 0  # it had not begun
    assert not trims and threads.unfinished()  # memory is trimmed in a thread, too
