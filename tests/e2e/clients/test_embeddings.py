"""Embeddings through the real pipeline: transformers' last hidden states, pooled; cut, cached and handed over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from tests.e2e.conftest import SENTENCES
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LENGTHS = (1, 2, 17, 48, 90, 130)
TOLERANCE = 1e-5


def with_modules(model: Path, folder: Path, pooling: str) -> Path:
    """The model with the files of sentence-transformers."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{step}"} for path, step in steps]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    switches = {f"pooling_mode_{each}": each == pooling for each in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches), encoding="utf-8")
    return folder


def reference(model: Path, prompts: list[list[int]], pooling: str) -> list[np.ndarray[Any, Any]]:
    decoder, found = AutoModel.from_pretrained(model, dtype=torch.float32).eval(), []
    for prompt in prompts:
        with torch.inference_mode():
            states = decoder(torch.tensor([prompt])).last_hidden_state[0]
        state = states.mean(dim=0) if pooling == "mean_tokens" else states[-1]
        found.append((state / state.norm()).numpy())
    return found


async def embed(pipeline: Pipeline, inputs: list[list[int]]) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{pipeline.url}/v1/embeddings", json={"input": inputs}) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.parametrize(
    ("preset", "pooling"),
    [
        pytest.param("cohort", "lasttoken", marks=another_of_its_kind()),
        pytest.param("unified", "mean_tokens", marks=another_of_its_kind()),
        ("disaggregated", "mean_tokens"),
        pytest.param("cohort", "mean_tokens", marks=another_of_its_kind()),
        pytest.param("unified", "lasttoken", marks=another_of_its_kind()),
        pytest.param("disaggregated", "lasttoken", marks=another_of_its_kind()),
        pytest.param("dynaserve", "mean_tokens", marks=another_of_its_kind()),
    ],
)
def test_embeddings_are_those_of_the_reference(tmp_path: Path, small_model: Path, preset: str, pooling: str) -> None:
    """In chunks of 24 tokens; twice, so that a prefix cache can answer, which a mean must not take."""
    random = Random(17)
    noise = [[random.randrange(3, 49_000) for _ in range(length)] for length in LENGTHS]
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    prompts = [*noise, *(tokenizer.encode(text).ids for text in SENTENCES[:4])]
    truth = reference(small_model, prompts, pooling)
    model = with_modules(small_model, tmp_path / "embeds", pooling)
    engine = {"prefill_chunk": 24, "max_step_tokens": 64}
    with Pipeline(tmp_path, model, {"engine": engine}, preset=preset) as pipeline:
        answers = [asyncio.run(embed(pipeline, prompts)) for _ in range(2)]
        pipeline.assert_nothing_left()
    worst = 0.0
    for answer in answers:
        assert [each["index"] for each in answer["data"]] == list(range(len(prompts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        for ours, expected in zip(answer["data"], truth, strict=True):
            worst = max(worst, float(np.abs(np.array(ours["embedding"]) - expected).max()))
    print(f"{len(prompts)} embeddings, twice: within {worst:.1e} of the reference")
    assert worst <= TOLERANCE
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0 and (cached[1] > 0) == (pooling == "lasttoken"), "a mean needs every position's state"
