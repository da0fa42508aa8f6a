"""Live pipelines, replayed: fed what the live processes were told, the same machines with the same policies answer
exactly as they did live. Gateway, manager and every worker, for every paper and what they are compared with.

One tiny model; the monitor and the length predictor stay, all other processes are another preset's for each case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from cohort.common.machines.replayer import Replayed, replay
from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.examples import nightly
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

OTHERS = [
    "dynaserve",
    "ecoserve",
    "alignedserve",
    "bros",
    "unified",
    *(f"baseline-{name}" for name in ("distserve", "vllm", "fastserve")),
]
PRESETS = ["bucketserve", "cohort", *(OTHERS if nightly() else [])]
"""By default one whose KV moves, and what serves where nothing else is asked for; `tests/cluster` replays every one."""
BLOCK_BYTES = 12_288
"""Of the tiny model: 16 positions, 3 layers, 2 heads of 16, float32."""
CACHE_BLOCKS = 36
"""One request of the longest kind and little more: all requests together need three times as many."""
QUESTIONS = 14
"""Beside them: one that a stop string ends, one that scores its prompt, one whose client leaves."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> Iterator[Pipeline]:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("pipeline")
    model = folder / "model"
    save(qwen2(), model)
    byte_level(400).save(str(model / "tokenizer.json"))
    overrides = {
        "engine": {"prefill_chunk": 64},
        "kv": {"memory_bytes": CACHE_BLOCKS * BLOCK_BYTES, "host_memory_bytes": 200 * BLOCK_BYTES},
        "recording": {"folder": str(recordings)},
    }
    with Pipeline(folder, model, overrides, preset=PRESETS[0]) as running:
        yield running


@contextlib.contextmanager
def serving(pipeline: Pipeline, recordings: Path, preset: str) -> Iterator[Pipeline]:
    """The pipeline with this preset's gateway, manager and workers, whose recordings alone are in the folder."""
    if "gateway" not in pipeline.processes or pipeline.config.name != preset:
        stop(pipeline)
        for path in recordings.glob("*"):
            path.unlink()
        pipeline.reconfigure(preset)
        for name in ["manager", "gateway", *pipeline.config.instance_roles]:
            pipeline.start(name)
        pipeline.wait_ready()
    try:
        yield pipeline
    finally:
        stop(pipeline)


def stop(pipeline: Pipeline) -> None:
    """All processes but those that every preset uses as they are."""
    for name in pipeline.processes.keys() - {"monitor", "predictor"}:
        pipeline.kill(name)


def question(number: int) -> dict[str, Any]:
    return {
        "prompt": [(number * j) % 390 + 5 for j in range(1, 20 + 13 * number)],
        "max_tokens": 20 + 5 * (number % 7),
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "cohort": {"class": ("rt", "be")[number % 2]},
    }


async def walk_away(pipeline: Pipeline) -> None:
    """A client that leaves after the first tokens of a long answer."""
    body = {"prompt": [7] * 30, "max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{pipeline.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        await response.content.readany()


async def ask_all(pipeline: Pipeline) -> list[Answer]:
    stopped = question(3) | {"stop": list("aeinorst"), "max_tokens": 100}
    scored = question(4) | {"echo": True, "logprobs": 1}
    bodies = [*(question(number) for number in range(QUESTIONS)), stopped, scored]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        answers = [pipeline.complete(session, **body) for body in bodies]
        *found, _ = await asyncio.gather(*answers, walk_away(pipeline))
    return [answer for answer in found if isinstance(answer, Answer)]


def effects_of(path: Path) -> Counter[str]:
    """How often each was asked for; a `Send` by its message's type."""
    counts: Counter[str] = Counter()
    for line in path.read_bytes().splitlines()[1:]:
        for effect in json.loads(line)["effects"]:
            name, _, rest = effect.partition(" ")
            counts[json.loads(rest)["message"]["type"] if name == "Send" else name.partition("(")[0]] += 1
    return counts


@pytest.mark.parametrize("preset", PRESETS)
def test_every_recorded_process_replays_to_the_same_decisions(
    pipeline: Pipeline, recordings: Path, preset: str
) -> None:
    with serving(pipeline, recordings, preset):
        *answers, stopped, scored = asyncio.run(ask_all(pipeline))
        assert [answer.error for answer in [*answers, stopped, scored]] == [""] * (QUESTIONS + 2)
        assert [len(answer.tokens) for answer in answers] == [
            question(number)["max_tokens"] for number in range(QUESTIONS)
        ]
        assert stopped.finish == "stop"
        pipeline.assert_nothing_left()
        workers = list(pipeline.config.instance_roles)
        for name in ["gateway", *workers, "manager"]:
            assert pipeline.terminate(name) == 0, pipeline.log(name)

    paths = {path.name.rpartition("-")[0]: path for path in recordings.glob("*.jsonl")}
    assert sorted(paths) == sorted(["gateway", "manager", *workers])
    found = {name: replay(path) for name, path in paths.items()}
    for name, it in found.items():
        assert it.difference == "", f"{name}: {it.difference}"
    check_counts(paths, found, workers, {"prefill-0"} if pipeline.config.gathers else set())


def check_counts(paths: dict[str, Path], found: dict[str, Replayed], workers: list[str], standby: set[str]) -> None:
    """What was replayed is all that was asked."""
    asked = QUESTIONS + 3
    gateway, manager = effects_of(paths["gateway"]), effects_of(paths["manager"])
    told = paths["gateway"].read_bytes()
    assert (found["gateway"].machine, found["manager"].machine) == ("gateway", "manager")
    assert (gateway["Admitted"], gateway["Ended"]) == (2 * asked, asked)  # an estimate, then the offer
    assert gateway["Submit"] >= asked
    assert b'"finish":"cancelled"' in told and b'"finish":"stop"' in told
    assert gateway["Deliver"] > 100
    assert manager["Placed"] >= asked and manager["StartSegment"] >= asked
    assert all(found[name].machine == "worker" for name in workers)
    computing = [name for name in workers if found[name].plans]
    assert computing == workers or standby == set(workers) - set(computing)
    for name in computing:
        assert found[name].plans > 2 and found[name].rows >= asked
    assert sum(found[name].plans for name in workers) >= 50
    assert any(b'"scores":[[' in paths[name].read_bytes() for name in workers)
