"""An adapter added to a running pipeline: its answers are transformers' with that adapter merged; what began with it
ends with it, and workers that start again have it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch

from cohort.common.keys.key_file import editing, new_key
from tests.e2e.equality.golden import compute, near_ties
from tests.e2e.equality.test_golden import ask
from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.lora_adapters import save_adapter, save_merged
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LONG = 120


def test_added_replaced_and_removed_under_requests(tmp_path: Path) -> None:
    torch.manual_seed(11)
    base, random = tmp_path / "base", Random(3)
    save(qwen2(), base)
    byte_level(400).save(str(base / "tokenizer.json"))
    adapters = [save_adapter(base, tmp_path / f"v{seed}", seed=seed, rank=8, strength=2.0) for seed in (1, 2)]
    prompt = [random.randrange(5, 390) for _ in range(40)]
    truth = [
        compute(save_merged(base, adapter, tmp_path / f"merged-{adapter.name}"), [prompt], LONG)[0]
        for adapter in adapters
    ]
    assert truth[0].output != truth[1].output, "or equality would prove nothing"
    with editing(tmp_path / "keys.json") as held:
        held[0], _, secret = new_key(held[0], "operator", 1, admin=True)
    overrides = {"keys": {"file": str(tmp_path / "keys.json")}, "policies": {"placement": "disaggregated"}}
    headers = {"Authorization": f"Bearer {secret}"}

    def check(answer: Answer, version: int) -> None:
        assert not answer.error, answer.error
        assert near_ties(truth[version], answer.tokens) <= 1

    with Pipeline(tmp_path, base, overrides) as pipeline:

        async def operate() -> None:
            async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=120)) as session:

                async def order(verb: str, **body: Any) -> None:
                    async with session.post(f"{pipeline.url}/v1/{verb}_lora_adapter", json=body) as response:
                        assert response.status == 200, await response.text()

                def asked() -> asyncio.Task[Answer]:
                    return asyncio.create_task(pipeline.complete(session, **ask(truth[0]), model="sql"))

                assert "does not exist" in (await asked()).error
                await order("load", lora_name="sql", lora_path=str(adapters[0]))
                check(await asked(), 0)
                begun = asked()
                await asyncio.sleep(0.05)
                await order("load", lora_name="sql", lora_path=str(adapters[1]), load_inplace=True)
                after = asked()
                check(await begun, 0)
                check(await after, 1)
                pipeline.kill("decode-0")
                pipeline.start("decode-0")
                pipeline.wait_ready()
                check(await asked(), 1)
                await order("unload", lora_name="sql")
                assert "does not exist" in (await asked()).error

        asyncio.run(operate())
        pipeline.assert_nothing_left()
