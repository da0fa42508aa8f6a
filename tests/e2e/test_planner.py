"""Live: under load the planner adds a worker, and drains it when the load is gone; no request fails by it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers

from tests.e2e.pipeline import Answer, complete
from tests.engine_models import VOCAB, save_random_model
from tests.examples import nightly
from tests.services.gateway.tiny_model import byte_level, write_model
from tests.services.launcher.test_serve import Serve

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="load, and its end, take two minutes: scripts/test --nightly"),
]

OPTIONS = {
    "model.dtype": "float32",
    "engine.threads": 1,
    "engine.max_rows": 2,  # so that requests wait, however fast the machine is
    "engine.drain_s": 20,
    "gateway.rt_ttft_slo_s": 0.5,
    "gateway.rt_tpot_slo_s": 1,
    "planner.mode": "act",
    "planner.max_workers": 2,
    "planner.shapes": "[colocated]",
    "planner.interval_s": 1,
    "planner.window_s": 12,
    "planner.settle_s": 6,
    "planner.max_requests": 150,
    "planner.cpu_share": 1,
    "planner.confirmations": 1,
    "planner.worker_cost": 0.05,
}
TOKENS, OVERLOAD = 300, 1.6
DEADLINE_S = 75.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    tokenizer = byte_level()
    shape = transformers.LlamaConfig(
        vocab_size=max(VOCAB, tokenizer.get_vocab_size()),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = save_random_model(shape, tmp_path / "model")
    outside = write_model(tmp_path / "outside", tokenizer)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((outside / file).read_bytes())
    (tmp_path / "cache").mkdir()
    made = Serve(tmp_path / "cache", model)
    yield made
    made("--stop")


def state_of(serve: Serve) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/api/state", timeout=10) as answer:
        return dict(json.loads(answer.read()))


def ready_workers(state: dict[str, Any]) -> set[str]:
    return {p["instance"] for p in state["processes"] if p["role"].endswith("_worker") and p["ready"]}


async def under_load(serve: Serve, wanted: int) -> list[Answer]:
    """More than one worker can serve and less than two can, until so many serve, and a moment longer. All answers."""
    url = f"http://127.0.0.1:{serve.port}"
    timeout = aiohttp.ClientTimeout(total=150)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(number: int) -> Answer:
            body = {"model": "served", "prompt": [number % 300 + 5] * 24, "max_tokens": TOKENS, "ignore_eos": True}
            return await complete(session, url, temperature=0, **body)

        for number in range(2):  # its kernels are warm
            await ask(number)
        began_s = time.monotonic()
        await asyncio.gather(ask(2), ask(3))
        pause_s = (time.monotonic() - began_s) / 2 / OVERLOAD
        asked: list[asyncio.Task[Answer]] = []
        deadline_s = time.monotonic() + DEADLINE_S
        grown_s = float("inf")
        while time.monotonic() < grown_s + 2.0:
            asked.append(asyncio.create_task(ask(len(asked))))
            await asyncio.sleep(pause_s)
            if grown_s == float("inf") and len(ready_workers(await asyncio.to_thread(state_of, serve))) >= wanted:
                grown_s = time.monotonic()
            assert time.monotonic() < deadline_s, await asyncio.to_thread(why, serve)
        return await asyncio.gather(*asked)


def why(serve: Serve) -> str:
    log = (serve.files.folder / "logs" / "monitor.log").read_text(errors="replace")
    return json.dumps(state_of(serve)["planner"], indent=1) + "\n" + "\n".join(log.splitlines()[-15:])


def test_a_worker_comes_with_the_load_and_goes_with_it(serve: Serve) -> None:
    chosen = [word for name, value in OPTIONS.items() for word in ("--set", f"{name}={value}")]
    started = serve("--detach", "--preset", "unified", "--served-name", "served", *chosen)
    assert started.returncode == 0, started.stdout + started.stderr
    answers = asyncio.run(under_load(serve, 2))
    assert [answer.error for answer in answers if answer.error] == []
    assert all(answer.finish == "length" for answer in answers)
    assert len(answers) >= 8

    grown = state_of(serve)["planner"]["decisions"][-1]
    assert (grown["action"], grown["before"], grown["after"]) == ("changed", *shapes(1, 2))
    assert grown["predicted"] > grown["predicted_before"]

    deadline_s = time.monotonic() + DEADLINE_S
    while ready_workers(state_of(serve)) != {"unified-0"}:
        assert time.monotonic() < deadline_s, why(serve)
        time.sleep(0.5)
    answer = serve.answer(prompt=[7] * 24, max_tokens=8, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"

    last = state_of(serve)["planner"]["decisions"][0]
    assert (last["before"], last["after"]) == shapes(2, 1)
    log = (serve.files.folder / "logs" / "monitor.log").read_text()
    assert "planner_changed" in log and "planner_judged" in log
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/metrics", timeout=10) as metrics:
        exposed = metrics.read().decode()
    assert "cohort_planner_decisions_total" in exposed and "cohort_planner_cpu_seconds_total" in exposed
    assert serve("--stop").returncode == 0


def shapes(before: int, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    one, other = ({"groups": [["unified", 1, count]]} for count in (before, after))
    return one, other
