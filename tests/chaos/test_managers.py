"""Two managers, eight clients that send one request after the other: the one that leads is killed, stopped and killed
again; monitor and predictor die together. No request fails, and every answer says what an undisturbed run says."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import pytest
import torch

from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.examples import another_of_its_kind
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

CLIENTS = 8
EACH = 24
NEW_TOKENS = 24
VOCABULARY = 400
LONGEST_GAP_S = 5.0
"""Between two first tokens of whichever requests. A takeover is 0.6 s of silence and a moment: the rest is for machines
that do much else."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    torch.manual_seed(7)
    model = tmp_path_factory.mktemp("model") / "tiny"
    save(qwen2(), model)
    byte_level(VOCABULARY).save(str(model / "tokenizer.json"))
    overrides = {"manager": {"standbys": 1}, "kv": {"memory_bytes": 64 << 20, "host_memory_bytes": 0}}
    with Pipeline(tmp_path_factory.mktemp("standby"), model, overrides, preset="disaggregated") as running:
        yield running


def bodies() -> list[dict[str, Any]]:
    """Half greedy, half seeded."""
    random = Random(5)
    return [
        {
            "prompt": [random.randrange(3, VOCABULARY) for _ in range(random.randint(3, 40))],
            "max_tokens": NEW_TOKENS,
            "temperature": 0.8 if index % 2 else 0,
            "seed": index,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        for index in range(CLIENTS * EACH)
    ]


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> list[Answer]:
    return asyncio.run(load(pipeline, lambda: None))


async def load(pipeline: Pipeline, disturb: Callable[[], object]) -> list[Answer]:
    """All requests; the disturbance comes when a third of them is answered."""
    asked, answers = bodies(), [Answer() for _ in range(CLIENTS * EACH)]
    third = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for index in range(number, len(asked), CLIENTS):
            answers[index] = await pipeline.complete(session, **asked[index])
            if index // CLIENTS >= EACH // 3:
                third.set()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(CLIENTS)]
        await third.wait()
        await asyncio.to_thread(disturb)
        await asyncio.gather(*clients)
    return answers


def check(what: str, answers: list[Answer], undisturbed: list[Answer]) -> None:
    assert [answer.error for answer in answers] == [""] * len(undisturbed)
    assert [len(answer.tokens) for answer in answers] == [NEW_TOKENS] * len(undisturbed)
    other = [i for i, (one, two) in enumerate(zip(answers, undisturbed, strict=True)) if one.tokens != two.tokens]
    assert not other, f"{len(other)} answers say something else than undisturbed: {other[:10]}"
    begun = sorted(answer.arrived_s[1] for answer in answers)
    gap_s = max(later - sooner for sooner, later in pairwise(begun))
    wait_s = max(answer.arrived_s[1] - answer.arrived_s[0] for answer in answers)
    pause_s = max(answer.pause_after_s(answer.arrived_s[1]) for answer in answers)
    print(
        f"{what}: longest gap of new placements {gap_s:.2f} s, wait {wait_s:.2f} s, pause of a stream {pause_s:.2f} s"
    )
    assert gap_s < LONGEST_GAP_S


def leader(pipeline: Pipeline) -> str:
    """As the monitor knows it, once exactly one of those that are up says so."""
    deadline_s = time.monotonic() + 10
    while True:
        leads: list[str] = []
        with contextlib.suppress(OSError):  # the monitor is not scheduled
            leads = [name for name in ("manager", "manager-1") if pipeline.stats(name).get("leads")]
        if len(leads) == 1:
            return leads[0]
        assert time.monotonic() < deadline_s, f"{leads} lead"
        time.sleep(0.1)


def test_a_standby_takes_over_from_a_killed_leader_and_back(pipeline: Pipeline, undisturbed: list[Answer]) -> None:
    for round_ in range(2):
        killed = leader(pipeline)
        answers = asyncio.run(load(pipeline, lambda killed=killed: pipeline.kill(killed)))
        check(f"{killed} killed", answers, undisturbed)
        assert leader(pipeline) != killed
        pipeline.start(killed)
        pipeline.wait_ready()
        assert leader(pipeline) != killed, "the one that is back stands by"
        pipeline.wait_for(killed, "workers", 2, 20.0)
        pipeline.assert_nothing_left()
        assert round_ or killed != leader(pipeline)


@another_of_its_kind()
def test_a_leader_that_was_stopped_stands_by_when_it_goes_on(pipeline: Pipeline, undisturbed: list[Answer]) -> None:
    stopped = leader(pipeline)

    def stop_and_go_on() -> None:
        pipeline.signal(stopped, signal.SIGSTOP)
        time.sleep(4.0)
        pipeline.signal(stopped, signal.SIGCONT)

    answers = asyncio.run(load(pipeline, stop_and_go_on))
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
    pipeline.start("monitor")
    pipeline.start("predictor")
    pipeline.wait_ready()
    pipeline.assert_nothing_left()
