"""Live: the planner adds a worker under load, drains it when the load is gone, takes that back when the load returns,
and changes roles; running requests move to the workers that stay. No request fails by any of it."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cohort.common.paths import default_model_dir
from cohort.common.planning.orders import Done, DrainWorker, socket_of
from tests.e2e.equality.test_seeds import tiny_model
from tests.e2e.pipeline import Answer, complete
from tests.examples import nightly
from tests.services.launcher.test_serve import Serve

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="load, and its end, take two minutes: scripts/test --nightly"),
]

OPTIONS = {
    "model.dtype": "float32",
    "speculation.mode": "off",  # answers of random weights repeat themselves, which no simulation foresees
    "engine.threads": 1,
    "engine.max_rows": 2,  # so that requests wait, however fast the machine is
    "drain_s": 20,
    "gateway.rt_ttft_slo_s": 0.5,
    "gateway.rt_tpot_slo_s": 1,
    "planner.mode": "act",
    "planner.max_workers": 2,
    "planner.shapes": "[colocated]",
    "experiment.planner.interval_s": 1,
    "experiment.planner.window_s": 12,
    "planner.settle_s": 6,
    "experiment.planner.max_requests": 150,
    "planner.cpu_share": 1,
    "experiment.planner.confirmations": 1,
    "planner.worker_cost": 0.05,
}
TOKENS, OVERLOAD, DUE = 300, 1.6, 4.0
SUDDEN = 2.0
"""What comes back must be too much within seconds: a change that is judged before stands."""
SLIGHT = 1.3
"""Where two workers take turns at what was one's before: beside each other they are less than twice as fast."""
DEADLINE_S = 75.0
STEERED_S, STEER = 10.0, 1.06
"""The load was set by what two requests took, and the machine may be faster or slower since. So from here on it grows,
or shrinks, by this factor a second while the planner measures that all, or hardly any, are in time."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    (tmp_path / "cache").mkdir()
    made = Serve(tmp_path / "cache", tiny_model(tmp_path))
    yield made
    made("--stop")


@pytest.fixture
def drained(tmp_path: Path) -> Iterator[Serve]:
    """Of the default model: a small one's answers are over before a worker can drain."""
    model = Path(os.environ.get("COHORT_TEST_MODEL") or default_model_dir())
    if not (model / "config.json").exists():
        pytest.skip(f"no model in {model}: run scripts/setup, or set COHORT_TEST_MODEL")
    made = Serve(tmp_path, model)
    yield made
    made("--stop")


def state_of(serve: Serve) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/api/state", timeout=10) as answer:
        return dict(json.loads(answer.read()))


def ready_workers(state: dict[str, Any]) -> set[str]:
    return {p["instance"] for p in state["processes"] if p["role"].endswith("_worker") and p["ready"]}


Planned = Callable[[dict[str, Any]], bool]


async def under_load(
    serve: Serve, done: Planned, *, by_deadline: bool = False, overload: float = OVERLOAD, pair_s: float = 0.0
) -> tuple[list[Answer], float]:
    """More than one worker can serve and less than two can, until the monitor's state is as wanted and a moment longer.
    All answers, and what two beside each other took. `by_deadline`: of each its last token is due within a few times
    what it takes alone. Behind a prefill worker the first one comes in time however long decode workers are waited for.
    `pair_s`: what two took, where that is known: the load is there at once."""
    url = f"http://127.0.0.1:{serve.port}"
    timeout = aiohttp.ClientTimeout(total=150)
    headers = {"Authorization": f"Bearer {serve.key}"} if serve.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        due: dict[str, Any] = {}

        async def ask(number: int) -> Answer:
            body = {
                "model": "served",
                # Of unlike lengths, as steps of one size teach a worker nothing of others.
                "prompt": [number % 300 + 5] * (8 << number % 5),
                "max_tokens": TOKENS - 60 + 40 * (number % 4),
                "ignore_eos": True,
                **due,
            }
            return await complete(session, url, temperature=0, **body)

        pair_s = pair_s or await asyncio.wait_for(pair_time(ask), 60)
        pause_s = pair_s / 2 / overload
        if by_deadline:
            due["cohort"] = {"deadline_ms": round(1000 * DUE * pair_s)}
        asked: list[asyncio.Task[Answer]] = []
        made = len(decisions(await asyncio.to_thread(state_of, serve)))
        steered_s = time.monotonic() + STEERED_S
        deadline_s = time.monotonic() + DEADLINE_S
        grown_s = float("inf")
        while time.monotonic() < grown_s + 2.0:
            asked.append(asyncio.create_task(ask(len(asked))))
            await asyncio.sleep(pause_s)
            if grown_s == float("inf"):
                state = await asyncio.to_thread(state_of, serve)
                if done(state):
                    grown_s = time.monotonic()
                if time.monotonic() >= steered_s and len(decisions(state)) == made:
                    steered_s = time.monotonic() + 1.0
                    pause_s *= steer(state["planner"]["measured"])
            assert time.monotonic() < deadline_s, await asyncio.to_thread(why, serve)
        return await asyncio.gather(*asked), pair_s


async def pair_time(ask: Callable[[int], Awaitable[Answer]]) -> float:
    """Seconds that two requests take beside each other, when nothing else keeps the machine."""
    for number in range(2):  # its kernels are warm
        await ask(number)
    times_s = []
    for _ in range(3):
        began_s = time.monotonic()
        await asyncio.gather(ask(2), ask(3))
        times_s.append(time.monotonic() - began_s)
    return min(times_s)


def steer(measured: float | None) -> float:
    """By what the time between requests changes; `measured`: the share of requests in time."""
    if measured is None or 0.3 < measured < 0.9:
        return 1.0
    return 1 / STEER if measured >= 0.9 else STEER


def why(serve: Serve) -> str:
    log = (serve.files.folder / "logs" / "monitor.log").read_text(errors="replace")
    return json.dumps(state_of(serve)["planner"], indent=1) + "\n" + "\n".join(log.splitlines()[-15:])


def started(serve: Serve, preset: str, *words: str, **options: object) -> None:
    chosen = [word for name, value in {**OPTIONS, **options}.items() for word in ("--set", f"{name}={value}")]
    done = serve("--detach", "--preset", preset, "--served-name", "served", *words, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr


def all_served(answers: list[Answer]) -> None:
    assert [answer.error for answer in answers if answer.error] == []
    assert all(answer.finish == "length" for answer in answers)
    assert len(answers) >= 8


def decisions(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The first one first."""
    return list(reversed(state["planner"]["decisions"]))


def counted(serve: Serve) -> dict[str, float]:
    """Decisions and verdicts by name, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/metrics", timeout=10) as metrics:
        families = text_string_to_metric_families(metrics.read().decode())
        samples = [sample for family in families for sample in family.samples]
    assert [sample for sample in samples if sample.name == "cohort_planner_cpu_seconds_total" and sample.value > 0]
    return {s.labels["what"]: s.value for s in samples if s.name == "cohort_planner_decisions_total"}


def live_rows(serve: Serve) -> list[str]:
    """What the live page lists of the planner."""
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/api/live", timeout=10) as feed:
        line = next(line for line in feed if line.startswith(b"data: "))
    rows = json.loads(line.removeprefix(b"data: "))["decisions"]
    return [row["decision"]["what"] for row in rows if row["by"] == "planner"]


def test_a_worker_comes_with_the_load_goes_with_it_and_comes_back_when_that_was_a_mistake(serve: Serve) -> None:
    started(serve, "unified")
    answers, pair_s = asyncio.run(under_load(serve, lambda state: len(ready_workers(state)) >= 2))
    all_served(answers)
    grown = decisions(state_of(serve))[0]
    assert (grown["action"], grown["before"], grown["after"]) == ("changed", *shapes(1, 2))
    assert grown["predicted"] > grown["predicted_before"]

    deadline_s = time.monotonic() + DEADLINE_S
    while ready_workers(state_of(serve)) != {"unified-0"}:
        assert time.monotonic() < deadline_s, why(serve)
        time.sleep(0.2)
    # The load is back before the change is judged: one worker was too few for what came, two would have done.
    back = under_load(serve, lambda state: "undone" in state["planner"]["counts"], overload=SUDDEN, pair_s=pair_s)
    all_served(asyncio.run(back)[0])
    made = decisions(state_of(serve))
    undone = next(each for each in made if each["action"] == "undone")
    assert (undone["before"], undone["after"]) == shapes(1, 2)
    judged = next(each for each in made if each["verdict"] == "undone")
    assert (judged["before"], judged["after"]) == shapes(2, 1) and judged["number"] < undone["number"]

    log = (serve.files.folder / "logs" / "monitor.log").read_text()
    assert all(word in log for word in ("planner_changed", "planner_judged", "planner_undone", "planner_drains"))
    counts = counted(serve)
    assert counts["changed"] >= 2 and counts["undone"] >= 1 and counts["verdict_undone"] >= 1
    assert len(live_rows(serve)) >= 3
    assert serve("--stop").returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_on_ray_a_worker_comes_with_the_load_and_goes_with_it(serve: Serve) -> None:
    started(serve, "unified", "--on", "ray=local")
    all_served(asyncio.run(under_load(serve, lambda state: len(ready_workers(state)) >= 2))[0])
    assert serve("--status").stdout.count("unified-1") == 1 and "unified-1" in serve.state.nodes
    deadline_s = time.monotonic() + DEADLINE_S
    while ready_workers(state_of(serve)) != {"unified-0"} or len(decisions(state_of(serve))) < 2:
        assert time.monotonic() < deadline_s, why(serve)
        time.sleep(0.2)
    grown, shrunk = decisions(state_of(serve))[:2]
    assert (grown["action"], grown["before"], grown["after"]) == ("changed", *shapes(1, 2))
    assert (shrunk["action"], shrunk["before"], shrunk["after"]) == ("changed", *shapes(2, 1))
    assert "unified-1" not in serve("--status").stdout
    assert serve("--stop").returncode == 0


def test_roles_change_where_the_traffic_wants_others(serve: Serve) -> None:
    """Two workers in any case. Of answers that are long one decode worker is not enough, two that do both are."""
    workers = "[{role: prefill, count: 1, threads: 1}, {role: decode, count: 1, threads: 1}]"
    options = {"planner.shapes": "[colocated, split]", "planner.min_workers": 2, "workers": workers}
    started(serve, "disaggregated", **options)
    assert ready_workers(state_of(serve)) == {"prefill-0", "decode-0"}
    wanted = {"unified-0", "unified-1"}
    there = under_load(serve, lambda state: ready_workers(state) == wanted, by_deadline=True, overload=SLIGHT)
    all_served(asyncio.run(there)[0])
    changed = decisions(state_of(serve))[0]
    assert changed["before"] == {"groups": [["decode", 1, 1], ["prefill", 1, 1]]}
    assert changed["after"] == {"groups": [["unified", 1, 2]]}
    log = (serve.files.folder / "logs" / "monitor.log").read_text()
    assert log.count("planner_drains") >= 2 and "planner_changed" in log
    assert counted(serve)["changed"] >= 1 and live_rows(serve)
    assert serve("--stop").returncode == 0


STREAMS, STREAMED = 8, 160


def test_a_drain_moves_running_requests_with_their_kv(drained: Serve, record_property: Callable[..., None]) -> None:
    """Texts are those of an undisturbed run; the longest pause of a stream is told, with that of an undisturbed one."""
    serve = drained
    workers = "[{role: unified, count: 2, threads: 1}]"
    started(serve, "cohort", **{"workers": workers, "experiment.planner.interval_s": 3600, "engine.max_rows": 64})
    calm = asyncio.run(streams(serve, drain=""))
    moved = asyncio.run(streams(serve, drain="unified-1"))
    assert [answer.error for answer in (*calm, *moved)] == [""] * 2 * STREAMS
    assert [answer.text for answer in moved] == [answer.text for answer in calm]
    assert ready_workers(state_of(serve)) == {"unified-0"}
    stats = {p["instance"]: p["stats"] for p in state_of(serve)["processes"]}
    assert stats["unified-0"]["kv_transfers_in_total"] >= 1, "not computed again"
    pauses = {name: max(map(between_tokens_s, answers)) for name, answers in (("calm", calm), ("drain", moved))}
    record_property("longest_pause_s", pauses)
    print(f"longest pause of {STREAMS} streams: {pauses}")
    assert serve("--stop").returncode == 0


def between_tokens_s(answer: Answer) -> float:
    """The longest pause after the first token."""
    times = answer.arrived_s[1:]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


async def streams(serve: Serve, drain: str) -> list[Answer]:
    """Some at once; once each has a quarter of its tokens, the worker of this name is drained."""
    url = f"http://127.0.0.1:{serve.port}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=150)) as session:
        bodies = [{"prompt": f"Chapter {number}. The", "max_tokens": STREAMED} for number in range(STREAMS)]
        asked = [
            asyncio.create_task(complete(session, url, model="served", temperature=0, ignore_eos=True, **body))
            for body in bodies
        ]
        if drain:
            await until_generated(serve, STREAMS * STREAMED // 4)
            reader, writer = await asyncio.open_unix_connection(socket_of(serve.files.folder))
            writer.write(msgspec.json.encode(DrainWorker(drain)) + b"\n")
            done = msgspec.json.decode(await asyncio.wait_for(reader.readline(), 60), type=Done)
            assert (done.instance, done.failure) == (drain, "")
            writer.close()
        return await asyncio.gather(*asked)


async def until_generated(serve: Serve, tokens: int) -> None:
    def generated() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{serve.port}/metrics", timeout=10) as metrics:
            families = text_string_to_metric_families(metrics.read().decode())
            return sum(s.value for f in families for s in f.samples if s.name == "cohort_generation_tokens_total")

    first = await asyncio.to_thread(generated)
    async with asyncio.timeout(60):
        while await asyncio.to_thread(generated) < first + tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def shapes(before: int, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    one, other = ({"groups": [["unified", 1, count]]} for count in (before, after))
    return one, other
