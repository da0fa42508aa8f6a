"""Two managers, eight clients that send one request after the other: the one that leads is killed, stopped and killed
again; monitor and predictor die together. No request fails, and every answer says what an undisturbed run says."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from tests.chaos.conftest import held, is_of, whole
from tests.chaos.streams import DECODE, bodies, same
from tests.e2e.pipeline import START_TIMEOUT_S, Answer, Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

MANAGERS = ("manager", "manager-1")
CLIENTS = 8
EACH = 6
NEW_TOKENS = 12
LONGEST_GAP_S = 5.0
"""Between two first tokens of whichever requests. A takeover is 0.6 s of silence and a moment: the rest is for machines
that do much else."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pipeline]:
    with held(tmp_path_factory.mktemp("standby"), tiny_model, manager={"standbys": 1}) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> list[Answer]:
    return asyncio.run(load(pipeline, lambda: None))


async def load(
    pipeline: Pipeline, disturb: Callable[[], object], then: Callable[[], object] = lambda: None
) -> list[Answer]:
    """All requests; the disturbance comes when a third of their tokens is said and every client waits for more. What
    comes `then` comes while they go on."""
    asked, answers = bodies(CLIENTS * EACH, NEW_TOKENS), [Answer() for _ in range(CLIENTS * EACH)]

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for index in range(number, len(asked), CLIENTS):
            answers[index] = await pipeline.complete(session, **asked[index])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        with pipeline.hold(DECODE) as go_on:
            clients = [asyncio.create_task(client(session, number)) for number in range(CLIENTS)]
            await asyncio.to_thread(go_on, CLIENTS * EACH * NEW_TOKENS // 3)
            await asyncio.to_thread(disturb)
        await asyncio.to_thread(then)
        await asyncio.gather(*clients)
    return answers


def check(what: str, answers: list[Answer], undisturbed: list[Answer]) -> None:
    same(answers, undisturbed, NEW_TOKENS)
    begun = sorted(answer.arrived_s[1] for answer in answers)
    gap_s = max(later - sooner for sooner, later in pairwise(begun))
    wait_s = max(answer.arrived_s[1] - answer.arrived_s[0] for answer in answers)
    pause_s = max(answer.pause_after_s(answer.arrived_s[1]) for answer in answers)
    print(
        f"{what}: longest gap of new placements {gap_s:.2f} s, wait {wait_s:.2f} s, pause of a stream {pause_s:.2f} s"
    )
    assert gap_s < LONGEST_GAP_S


def leader(pipeline: Pipeline) -> str:
    """As the monitor knows it, once exactly one of those that run says so."""
    deadline_s = time.monotonic() + 10
    while True:
        leads: list[str] = []
        with contextlib.suppress(OSError):  # the monitor is not scheduled
            leads = [
                name
                for name, it in pipeline.state().items()
                if name in MANAGERS and it["stats"].get("leads") and is_of(pipeline, name, it["pid"])
            ]
        if len(leads) == 1:
            return leads[0]
        assert time.monotonic() < deadline_s, f"{leads} lead"
        time.sleep(0.1)


def leads_when_ready(pipeline: Pipeline, name: str) -> bool:
    """Starts it. It may well lead later: where the other one is not scheduled for a while, or the gateway."""
    pipeline.start(name)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):  # the monitor is not scheduled
            it = pipeline.state()[name]
            if it["ready"] and is_of(pipeline, name, it["pid"]):
                return bool(it["stats"].get("leads"))
        assert time.monotonic() < deadline_s, pipeline.log(name)
        time.sleep(0.02)


def test_a_standby_takes_over_from_a_killed_leader_and_back(pipeline: Pipeline, undisturbed: list[Answer]) -> None:
    for _ in range(2):
        killed = leader(pipeline)
        answers = asyncio.run(load(pipeline, lambda killed=killed: pipeline.kill(killed)))
        check(f"{killed} killed", answers, undisturbed)
        assert leader(pipeline) != killed
        assert not leads_when_ready(pipeline, killed), "the one that is back stands by"
        whole(pipeline)
        pipeline.wait_for(killed, "workers", 2, 20.0)
        pipeline.assert_nothing_left()


@another_of_its_kind()
def test_a_leader_that_was_stopped_stands_by_when_it_goes_on(pipeline: Pipeline, undisturbed: list[Answer]) -> None:
    stopped = leader(pipeline)

    def go_on() -> None:
        time.sleep(4.0)
        pipeline.signal(stopped, signal.SIGCONT)

    answers = asyncio.run(load(pipeline, lambda: pipeline.signal(stopped, signal.SIGSTOP), go_on))
    check(f"{stopped} stopped", answers, undisturbed)
    pipeline.wait_told(stopped)  # its heartbeats of before are followed by others
    assert leader(pipeline) != stopped
    pipeline.assert_nothing_left()


def test_monitor_and_predictor_may_die_together(pipeline: Pipeline, undisturbed: list[Answer]) -> None:
    def kill_both() -> None:
        pipeline.kill("monitor")
        pipeline.kill("predictor")

    answers = asyncio.run(load(pipeline, kill_both))
    check("monitor and predictor killed", answers, undisturbed)
    whole(pipeline)
    pipeline.assert_nothing_left()
