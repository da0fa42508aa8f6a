"""echo with logprobs through the real pipeline: what transformers says of the prompt, cut, cached and handed over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import SENTENCES
from tests.e2e.pipeline import Pipeline
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LENGTHS = (1, 2, 17, 40, 90)
TOLERANCE = 1e-4
ROUNDINGS = 2.0
"""Random ids lead the model to places where float32 is coarse: there the reference itself lies further than the
tolerance from its own float64 answer. How coarse a position is shows in the worst of the whole vocabulary: the error of
one token is near zero by chance, and another order of the same sums has another such token."""


def test_scores_are_those_of_the_reference(tmp_path: Path, small_model: Path) -> None:
    """Chunks of 24 tokens on a prefill worker, the rest of the answer on a decode worker; asked twice, so that the
    second time a prefix cache could answer, which it must not."""
    random = Random(11)
    noise = [[random.randrange(3, 49_000) for _ in range(length)] for length in LENGTHS]
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    prompts = [*noise, *(tokenizer.encode(text).ids for text in (SENTENCES if nightly() else SENTENCES[:6]))]
    with Pipeline(tmp_path, small_model, {"engine": {"prefill_chunk": 24}}) as pipeline:
        answers = asyncio.run(ask(pipeline, prompts * 2))
        pipeline.assert_nothing_left()
    single, double = (
        AutoModelForCausalLM.from_pretrained(small_model, dtype=dtype).eval()
        for dtype in (torch.float32, torch.float64)
    )
    worst = dict.fromkeys(("sentences", "noise"), 0.0)
    for index, (prompt, first, second) in enumerate(
        zip(prompts, answers[: len(prompts)], answers[len(prompts) :], strict=True)
    ):
        kind = "noise" if index < len(noise) else "sentences"
        with torch.inference_mode():
            truth = single(torch.tensor([prompt])).logits[0].log_softmax(-1)
            exact = double(torch.tensor([prompt])).logits[0].log_softmax(-1)
            coarse = (truth - exact).abs().amax(-1)
        for answer in (first, second):
            scores = answer["choices"][0]["logprobs"]
            sampled = answer["cohort"]["requests"][0]["token_ids"]
            assert len(scores["tokens"]) == len(prompt) + len(sampled)
            assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            for position, token in enumerate([*prompt, sampled[0]][1:]):
                reference = float(truth[position, token])
                rounding = float(coarse[position]) if kind == "noise" else 0.0
                difference = abs(scores["token_logprobs"][position + 1] - reference)
                worst[kind] = max(worst[kind], difference)
                assert difference <= TOLERANCE + ROUNDINGS * rounding, (kind, index, position)
                likeliest = scores["top_logprobs"][position + 1]
                assert len(likeliest) >= 3 and scores["token_logprobs"][position + 1] in likeliest.values()
    print(f"largest difference: {worst}")


async def ask(pipeline: Pipeline, prompts: list[list[int]]) -> list[Any]:
    """All at once, the later half after the first: then every block of a prompt has been computed before."""
    async with aiohttp.ClientSession() as session:

        async def one(index: int, prompt: list[int]) -> Any:
            body = {
                "prompt": prompt,
                "echo": True,
                "logprobs": 3,
                "max_tokens": 1 + index % 3,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with session.post(f"{pipeline.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        half = len(prompts) // 2
        before = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts[:half])))
        return [*before, *await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts[half:])))]
