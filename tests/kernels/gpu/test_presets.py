"""Greedy responses under presets whose rows lie differently in the cache: those of transformers in float32.

In the precision that is served, too, which alone reaches flash prefill: until the first close decision, and by how far
log-probabilities are off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cohort.common.config import load_config
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.models import lean_llama
from cohort.common.engine.step.batch import SamplingRow
from cohort.common.engine.worker.worker_process import load_runner
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from tests.common.engine.driver import (
    Driver,
    count_near_ties,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    save_random_model,
)
from tests.kernels.gpu.conftest import DEVICE, REAL

VOCABULARY = 1000
SIZES: dict[str, Any] = (
    {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 512}
    if REAL
    else {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96}
)
LENGTHS, OUTPUTS = ((5, 17, 33, 64, 200, 411), 48) if REAL else ((5, 17, 33), 8)
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.3}
SMALL_MARGIN = LARGEST_ERROR = 0.1
"""In standard deviations of a position's logits: the two best no further apart may change places, and log-probabilities
of the likeliest tokens may be off by so much."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose weights bfloat16 holds exactly."""
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=1024, rope_theta=500000.0
    )
    folder = tmp_path_factory.mktemp("presets")
    rounded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        save_random_model(config, folder / "float32"), dtype=torch.bfloat16
    )
    rounded.float().save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("unified", "float32"),
        ("unified", "bfloat16"),
        ("bros", "float32"),  # blocks filled from both ends
        ("ecoserve", "float32"),  # lent inside each other, moved to the host and back
        ("baseline-chunked-prefill", "float32"),  # chunks beside decodes
    ],
)
def test_a_preset_gives_transformers_tokens(model: Path, preset: str, dtype: str) -> None:
    """Prompts join one after the other, so that steps mix prompts and decodes."""
    prompts = random_prompts(LENGTHS, vocab=VOCABULARY)
    expected = reference_generate(model, prompts, OUTPUTS)
    config = load_config(
        preset=preset,
        overrides={
            "model": {"path": str(model), "dtype": dtype},
            "engine": {"device": str(DEVICE), "max_rows": 16, "prefill_chunk": 48, "max_step_tokens": 160},
            "kv": {"memory_bytes": 64 << 20, "host_memory_bytes": 8 << 20},
        },
    )
    runner = load_runner(config, 0)
    runner.warm_up()
    engine = InProcessEngine(config, runner)
    responses: list[list[int]] = [[] for _ in prompts]
    for step in range(20_000):
        if step % 3 == 0 and step // 3 < len(prompts):
            engine.submit(str(step // 3), prompts[step // 3], OUTPUTS)
        for sequence in engine.step():
            responses[int(sequence.request_id)] = list(sequence.tokens[sequence.request.prompt_tokens :])
        if all(len(each) >= OUTPUTS for each in responses):
            break
    pairs = zip(expected, responses, strict=True)
    ties = sum(count_near_ties(one, tokens, NEAR_TIE[dtype]) for one, tokens in pairs)
    assert ties <= 1 or dtype == "bfloat16"
    assert runner.oom_retries == 0, "a step was cut in halves"


def agreement(
    folder: Path, reference: Path | None = None, *, vocabulary: int = VOCABULARY
) -> tuple[float, int, list[str]]:
    """In bfloat16 against `reference` (the same folder by default) in float32: the largest error of a log-probability,
    in standard deviations of its position's logits, over the positions before a response leaves the reference; how many
    decisions were clear, and which of them were others."""
    prompts = random_prompts((9, 40, 150) if REAL else (5, 1, 33, 40), seed=5, vocab=vocabulary)
    outputs = 24 if REAL else 16
    exact: Any = transformers.AutoModelForCausalLM.from_pretrained(
        reference or folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    runner = make_runner(
        folder,
        dtype="bfloat16",
        device=str(DEVICE),
        block_size=16,
        device_steps=True,
        share=DeviceShare(graphs=1 << 30),
    )
    runner.warm_up()
    driver = Driver(runner, reverse=True)
    logprobs: dict[str, list[Any]] = {}
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, SamplingRow(seed=0, position=0, temperature=0.0, logprobs=5))
        logprobs[str(index)] = []

    def noted(plan: list[tuple[str, int]]) -> Any:
        rows = sorted(plan, key=lambda entry: entry[1] == 1)
        told = [name for name, count in rows if count == driver.remaining(name)]
        output = step(plan)
        for name, said in zip(told, output.logprobs, strict=True):
            logprobs[name].append(said)
        return output

    step, driver.step = driver.step, noted  # type: ignore[method-assign, assignment]
    run_chunked(20)(driver, list(logprobs), outputs)
    error, clear, wrong = 0.0, 0, []
    for index, prompt in enumerate(prompts):
        tokens = driver.requests[str(index)].tokens
        with torch.inference_mode():
            logits = exact(input_ids=torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        for position, (row, said) in enumerate(zip(logits, logprobs[str(index)], strict=True)):
            spread, best = float(row.std()), row.topk(2).values
            truth = row.log_softmax(dim=-1)[list(said.top_ids)]
            error = max(error, float((truth - torch.tensor(said.top_logprobs)).abs().max()) / spread)
            if float(best[0] - best[1]) < SMALL_MARGIN * spread:
                continue
            clear += 1
            if int(row.argmax()) != tokens[len(prompt) + position]:
                wrong.append(f"response {index}, token {position}")
    return error, clear, wrong


def test_log_probabilities_in_bfloat16(model: Path) -> None:
    """Behind a cached prefix, too; every other block is filled right to left."""
    error, clear, wrong = agreement(model)
    assert 0.0 < error < LARGEST_ERROR and clear >= 6 and not wrong, (error, clear, wrong)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="faults of the processor's form of the model")
@pytest.mark.parametrize("fault", ["scale", "directions", "last key"])
def test_a_wrong_kernel_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right: Callable[..., None] = lean_llama.paged_attention

    def wrong(query: Any, kv: Any, layer: int, meta: Any, scale: float, out: Any, *, sliding_window: int = 0) -> None:
        if fault == "scale":
            scale *= 1.5
        elif fault == "directions":
            meta = dataclasses.replace(meta, block_tables=meta.separate()[0])
        elif meta.max_query_len == 1:
            meta = dataclasses.replace(meta, context_lens=meta.context_lens - (meta.context_lens > 1).int())
        right(query, kv, layer, meta, scale, out, sliding_window=sliding_window)

    monkeypatch.setattr(lean_llama, "paged_attention", wrong)
    monkeypatch.setattr(lean_llama.LeanLlama, "_layer_stack", lambda self: None)
    error, clear, others = agreement(model)
    assert error > LARGEST_ERROR or clear == 0 or others
