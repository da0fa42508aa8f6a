"""Live: a model with sliding windows in some layers, on two workers and on one, in a cache that is too small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.equality.golden import compute
from tests.e2e.equality.test_golden import SHORT_SIGHTED, ask, compare, compare_together
from tests.e2e.pipeline import Pipeline
from tests.e2e.tiny_models import gemma3, gpt_oss, qwen2_windows, save_of_bytes
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, another_of_its_kind()]

BLOCK_BYTES = 2 * 2 * 16 * 4 * 16
"""Of one layer: float32, 16 tokens."""
NEW_TOKENS = 40
RANKS = [{"role": "prefill"}, {"role": "decode", "tensor_parallel": 2}]


@pytest.mark.parametrize(
    ("made", "preset", "blocks", "options", "evidence"),
    [
        (gemma3, "disaggregated", 200, {}, "transfers_total"),
        (gemma3, "unified", 90, {"engine": {"preemption": "swap"}}, "preemptions_total"),
        (gemma3, "cohort", 120, {"speculation": {"mode": "lookup"}}, "window_blocks_total"),
        (gemma3, "alignedserve", 200, {}, "transfers_total"),
        (qwen2_windows, "disaggregated", 200, {"workers": RANKS, "engine": {"threads": 1}}, "transfers_total"),
        (gpt_oss, "disaggregated", 200, {"workers": RANKS, "engine": {"threads": 1}}, "transfers_total"),
    ],
)
def test_answers_are_golden(
    tmp_path: Path,
    made: Callable[[], PreTrainedModel],
    preset: str,
    blocks: int,
    options: dict[str, Any],
    evidence: str,
) -> None:
    torch.manual_seed(7)
    model = save_of_bytes(made(), tmp_path / "m")
    random = Random(4)
    shared = [random.randrange(3, 400) for _ in range(128)]
    prompts = [[random.randrange(3, 400) for _ in range(length)] for length in (1, 15, 40, 100, 130, 200, 64, 70, 33)]
    prompts += [[*shared, *(random.randrange(3, 400) for _ in range(length))] for length in (3, 9, 30, 50)]
    goldens = compute(model, prompts, NEW_TOKENS)
    overrides = {
        "model": {"dtype": "float32"},
        "kv": {"memory_bytes": blocks * BLOCK_BYTES, "host_memory_bytes": 120 * BLOCK_BYTES},
        **SHORT_SIGHTED,
        **options,
    }
    pipeline = Pipeline(tmp_path, model, overrides, preset=preset)
    worker = list(pipeline.config.instance_roles)[-1]
    pipeline.held.add(worker)
    with pipeline:
        compare_together(pipeline, goldens, worker)
        pipeline.wait_for(worker, evidence, 1)
        long = [golden for golden in goldens if len(golden.prompt) > 128]
        again = pipeline.complete_all([ask(golden) for golden in long])
        compare(long, again)
        assert any(answer.cached_tokens > 0 for answer in again)
        given_back = [pipeline.heard(name).get("window_blocks_total", 0.0) for name in pipeline.config.instance_roles]
        assert sum(given_back) > 0
        pipeline.assert_nothing_left()
