"""Two LoRA adapters and their base at once through a real pipeline: every answer is transformers' with that adapter
merged, over KV transfers, prefixes found again, one slot an engine, and the death of a worker."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch

from tests.e2e.equality.golden import Golden, compute, near_ties
from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.lora_adapters import save_adapter, save_merged
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

NEW_TOKENS = 12
ADAPTERS: dict[str, dict[str, Any]] = {
    "team/sql-v1.2": {"seed": 1, "rank": 8, "strength": 2.0},
    "poems": {"seed": 2, "targets": ["q_proj", "v_proj", "down_proj"], "rank": 4, "strength": 2.0},
}


@dataclass
class Served:
    pipeline: Pipeline
    truth: dict[str, list[Golden]]
    """By the name of the model that is asked."""

    def asked(self, new_tokens: int = NEW_TOKENS) -> list[tuple[dict[str, Any], Golden]]:
        """Every prompt of every model, the models in turn."""
        rounds = zip(*self.truth.values(), strict=True)
        pairs = [pair for goldens in rounds for pair in zip(self.truth, goldens, strict=True)]
        return [
            (
                {
                    "model": model,
                    "prompt": list(golden.prompt),
                    "max_tokens": new_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
                golden,
            )
            for model, golden in pairs
        ]

    def check(self, answers: list[Answer]) -> None:
        ties = 0
        for answer, (body, golden) in zip(answers, self.asked(), strict=True):
            assert not answer.error, (body["model"], answer.error)
            ties += near_ties(golden, answer.tokens)
        assert ties <= 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.manual_seed(11)
    folder, random = tmp_path_factory.mktemp("adapters"), Random(3)
    base = folder / "base"
    save(qwen2(), base)
    byte_level(400).save(str(base / "tokenizer.json"))
    prompts = [[random.randrange(5, 390) for _ in range(length)] for length in (3, 20, 40, 70)]
    truth, paths = {"base": compute(base, prompts, NEW_TOKENS)}, {}
    for index, (name, made) in enumerate(ADAPTERS.items()):
        paths[name] = str(save_adapter(base, folder / f"adapter-{index}", **made))
        truth[name] = compute(save_merged(base, Path(paths[name]), folder / f"merged-{index}"), prompts, NEW_TOKENS)
    overrides = {
        "model": {"lora": paths},
        "engine": {"max_loras": 1},
        "policies": {"placement": "disaggregated"},
        "kv": {"memory_bytes": 96 * 12_288, "host_memory_bytes": 0},
    }
    with Pipeline(folder, base, overrides) as running:
        yield Served(running, truth)


def test_adapters_and_base_at_once_equal_transformers(served: Served) -> None:
    outputs = {tuple(golden.output for golden in goldens) for goldens in served.truth.values()}
    assert len(outputs) == 3, "or equality would prove nothing"
    pipeline = served.pipeline
    bodies = [body for body, _ in served.asked()]
    served.check(pipeline.complete_all(bodies))
    again = pipeline.complete_all(bodies)
    served.check(again)
    assert any(answer.cached_tokens for answer in again)
    pipeline.wait_for("decode-0", "transfers_total", 1)
    pipeline.wait_for("decode-0", "lora_loads_total", 2)
    assert pipeline.heard("decode-0")["loras_held"] <= 1
    pipeline.assert_nothing_left()


def test_the_list_of_models_and_an_unknown_one(served: Served) -> None:
    url = served.pipeline.url
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        listed = json.load(answer)["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("base", None),
        ("team/sql-v1.2", "base"),
        ("poems", "base"),
    ]
    body = json.dumps({"model": "prose", "prompt": "x"}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    assert refused.value.code == 404
    assert "serves base, team/sql-v1.2, poems" in json.load(refused.value)["error"]["message"]


def test_a_killed_worker_costs_no_token_of_any_adapter(served: Served) -> None:
    pipeline = served.pipeline

    async def disturbed() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            tasks = [asyncio.create_task(pipeline.complete(session, **body)) for body, _ in served.asked()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            pipeline.kill("decode-0")
            answers = await asyncio.gather(*tasks)
            pipeline.start("decode-0")
            return answers

    served.check(asyncio.run(disturbed()))
    pipeline.wait_ready()
    pipeline.assert_nothing_left()


def test_a_file_that_changed_fails_its_own_requests(served: Served) -> None:
    pipeline, asked = served.pipeline, served.asked()
    by_model = {str(body["model"]): (body, golden) for body, golden in asked}
    [answer] = pipeline.complete_all([by_model["team/sql-v1.2"][0]])  # the one slot of every worker is its own now
    assert not answer.error
    (Path(pipeline.config.model.lora["poems"]) / "adapter_model.safetensors").touch()
    answers = dict(zip(by_model, pipeline.complete_all([body for body, _ in by_model.values()]), strict=True))
    assert "LoRA adapter poems" in answers["poems"].error and "has changed since the start" in answers["poems"].error
    for model in ("base", "team/sql-v1.2"):
        assert near_ties(by_model[model][1], answers[model].tokens) <= 1
    pipeline.assert_nothing_left()
