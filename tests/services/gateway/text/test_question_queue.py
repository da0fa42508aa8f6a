"""Questions, here grammars, that wait for their process: whose turn it is, how many may wait, and who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import RequestError
from cohort.services.gateway import bounds
from cohort.services.gateway.text.bounded_process import Answer, Answers, Ended, QuestionQueue

AGE = 1024


class Compiler:
    """A compiler whose answers the test gives: one grammar at a time."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.running: asyncio.Future[Answers] | None = None
        self.queue = QuestionQueue(self._ask, "grammars", lambda: bounds.BOUNDS.grammars_waiting)

    def _ask(self, questions: Sequence[bytes]) -> asyncio.Future[Answers]:
        assert self.running is None, "two at a time"
        self.asked += questions
        self.running = asyncio.get_running_loop().create_future()
        return self.running

    async def end(self, error: Exception | None = None) -> None:
        running, self.running = self.running, None
        assert running is not None
        if error is None:
            running.set_result([(b"T", self.asked[-1])])
        else:
            running.set_exception(error)
        await settle()

    async def end_all(self) -> None:
        while self.running is not None:
            await self.end()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def arrive(compiler: Compiler, owner: str, question: bytes) -> asyncio.Task[Answer]:
    task = asyncio.create_task(compiler.queue.ask(owner, question))
    await settle()
    return task


def text(index: int, size: int) -> bytes:
    return b"%d:" % index + b"x" * (size - 3)


Arrivals = st.lists(st.tuples(st.sampled_from("abc"), st.integers(10, 20_000)), min_size=1, max_size=40)


@given(Arrivals)
def test_turns_are_fair_and_nobody_starves(arrivals: list[tuple[str, int]]) -> None:
    """All wait behind one that runs: then each key has had as many bytes as any other that still waits, but for one
    grammar; and within a key one goes before an earlier one only if it is smaller by its later arrival."""

    async def run() -> None:
        compiler = Compiler()
        tasks = [await arrive(compiler, "first", b"0")]
        questions = {text(i, size): (owner, i, size) for i, (owner, size) in enumerate(arrivals, 10)}
        tasks += [await arrive(compiler, owner, question) for question, (owner, _, _) in questions.items()]
        await compiler.end_all()
        assert [await task for task in tasks] and not len(compiler.queue)
        went = [questions[question] for question in compiler.asked[1:]]
        assert sorted(went) == sorted(questions.values())
        left, served = [owner for owner, _, _ in went], dict.fromkeys("abc", 0)
        for place, (owner, index, size) in enumerate(went):
            served[owner] += size
            left.remove(owner)
            for other in set(left) - {owner}:
                assert served[owner] - served[other] <= 20_000
            for later_owner, later_index, later_size in went[place + 1 :]:
                if later_owner == owner and later_index < index:
                    assert size + AGE * (index - later_index) <= later_size

    asyncio.run(run())


async def test_a_small_grammar_passes_a_large_one_a_bounded_number_of_times() -> None:
    compiler = Compiler()
    await arrive(compiler, "", b"runs")
    large = await arrive(compiler, "", b"l" * 65_536)
    turns = 0
    while not large.done():
        await arrive(compiler, "", b"s%d" % turns)
        await compiler.end()
        turns += 1
    assert 60 <= turns <= 66
    await compiler.end_all()


async def test_another_key_waits_for_one_grammar_at_most() -> None:
    compiler = Compiler()
    for index in range(100):
        await arrive(compiler, "alice", text(100 + index, 30_000))
    await arrive(compiler, "bob", b"b")
    await compiler.end()
    await compiler.end()
    assert b"b" in compiler.asked[:3]
    await compiler.end_all()
    assert len(compiler.asked) == 101


async def test_a_key_beyond_its_bound_has_a_429_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BOUNDS", bounds.Bounds(grammars_waiting=2))
    compiler = Compiler()
    for index in range(3):  # one runs
        await arrive(compiler, "alice", b"%d" % index)
    with pytest.raises(RequestError, match="at most 2") as refused:
        await compiler.queue.ask("alice", b"3")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
    same, bobs = await arrive(compiler, "alice", b"2"), await arrive(compiler, "bob", b"3")
    await compiler.end_all()
    assert compiler.asked.count(b"2") == 1 and (await same, await bobs) == ((b"T", b"2"), (b"T", b"3"))


async def test_who_leaves_frees_its_place_unless_others_share_it() -> None:
    compiler = Compiler()
    running = await arrive(compiler, "", b"0")
    one, two, other = [await arrive(compiler, "", each) for each in (b"1", b"1", b"2")]
    assert len(compiler.queue) == 2
    other.cancel()
    one.cancel()
    await settle()
    assert len(compiler.queue) == 1
    running.cancel()  # what is compiled is not taken back
    await settle()
    assert compiler.running is not None and compiler.asked == [b"0"]
    await compiler.end(ValueError("nobody's"))
    await compiler.end(ValueError("two's"))
    with pytest.raises(ValueError, match="two's"):
        await two
    assert compiler.asked == [b"0", b"1"] and compiler.running is None


async def test_a_wait_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BOUNDS", bounds.Bounds(turn_wait_s=0.001))
    compiler = Compiler()
    tasks = [asyncio.create_task(compiler.queue.ask("", each)) for each in (b"0", b"1")]
    for task in tasks:
        with pytest.raises(RequestError, match=r"within 0\.001 s") as late:
            await task
        assert late.value.status == 429
    assert not len(compiler.queue)
    await compiler.end()
    assert compiler.asked == [b"0"]


class Together:
    """Questions asked together, up to three; the test says what came of them."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.queue = QuestionQueue(self._ask, "chats", lambda: 3, together=3)

    def _ask(self, questions: Sequence[bytes]) -> asyncio.Future[Answers]:
        self.asked.append(list(questions))
        self._running: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        return self._running

    async def end(self, *answers: Ended | None) -> None:
        """Answer the first questions, then these."""
        answered = self.asked[-1][: len(self.asked[-1]) - len(answers)]
        self._running.set_result([*((b"T", each) for each in answered), *answers])
        await settle()

    async def arrive(self, owner: str, *questions: bytes) -> list[asyncio.Task[Answer]]:
        tasks = [asyncio.create_task(self.queue.ask(owner, each)) for each in questions]
        await settle()
        return tasks


async def test_what_the_process_has_not_begun_waits_again_in_its_place() -> None:
    chats = Together()
    tasks = await chats.arrive("alice", b"0", b"1", b"2", b"3")
    await chats.end()
    assert chats.asked == [[b"0"], [b"1", b"2", b"3"]]
    tasks += await chats.arrive("bob", b"4")
    await chats.end(None, None)
    assert chats.asked[2] == [b"4", b"2", b"3"], "one that is slow delays another key by itself alone"
    await chats.end()
    assert [await each for each in tasks] == [(b"T", b"%d" % each) for each in range(5)] and not len(chats.queue)


async def test_who_ends_the_process_has_the_error_and_whose_client_left_does_not_come_back() -> None:
    chats = Together()
    first, culprit, leaves, stays = await chats.arrive("", b"0", b"1", b"2", b"3")
    await chats.end()
    leaves.cancel()
    await settle()
    await chats.end(ended := Ended(-9), None, None)
    with pytest.raises(Ended) as raised:
        await culprit
    assert raised.value is ended and await first == (b"T", b"0") and chats.asked[2:] == [[b"3"]]
    again = await chats.arrive("", b"2")
    await chats.end()
    await chats.end()
    assert await stays == (b"T", b"3") and await again[0] == (b"T", b"2") and not len(chats.queue)
