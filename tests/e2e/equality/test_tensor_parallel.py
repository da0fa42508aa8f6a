"""Workers of several ranks: the tokens of `transformers.generate`, whatever the degrees between which KV moves."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.e2e.equality.golden import Golden, golden_outputs
from tests.e2e.equality.test_golden import SHORT_SIGHTED, ask, compare, compare_together
from tests.e2e.pipeline import Pipeline
from tests.e2e.tiny_models import deepseek, llama, save_of_bytes
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

NEW_TOKENS = 24
BLOCK_BYTES = 3 * 2 * 4 * 8 * 4 * 16
"""Layers, K and V, KV heads, head size, float32, tokens: of a block over all ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    return save_of_bytes(llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def goldens(model: Path) -> list[Golden]:
    random = Random(4)
    shared = [random.randrange(3, 400) for _ in range(64)]
    lengths = [1, 15, 16, 17, 40, 100, 130, 200, 64, 70, 33, 90]
    prompts = [[random.randrange(3, 400) for _ in range(length)] for length in lengths]
    prompts += [[*shared, *(random.randrange(3, 400) for _ in range(length))] for length in (3, 9, 30, 50)]
    return golden_outputs(model, prompts, NEW_TOKENS)


def options(blocks: int, workers: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {
        "workers": workers,
        "engine": {"threads": 1, **engine},
        "kv": {"memory_bytes": blocks * BLOCK_BYTES, "host_memory_bytes": 60 * BLOCK_BYTES},
        **SHORT_SIGHTED,
    }


LONGER = pytest.mark.skipif(not nightly(), reason="scripts/test --nightly")


@pytest.mark.parametrize(
    "degrees",
    [
        (2, 1),  # `tests/chaos/test_ranks.py` has 1 to 2
        pytest.param((4, 2), marks=LONGER),
        pytest.param((1, 2), marks=LONGER),
        pytest.param((2, 2), marks=LONGER),
        pytest.param((2, 4), marks=LONGER),
    ],
    ids=lambda degrees: "to".join(map(str, degrees)),
)
def test_kv_moves_between_workers_of_any_degrees(
    tmp_path: Path, model: Path, goldens: list[Golden], degrees: tuple[int, int]
) -> None:
    """And what a prompt begins with is found in the caches of all ranks when it comes again."""
    prefill, decode = degrees
    goldens = goldens if nightly() else goldens[::3]
    workers = [{"role": "prefill", "tensor_parallel": prefill}, {"role": "decode", "tensor_parallel": decode}]
    with Pipeline(tmp_path, model, options(400, workers), preset="disaggregated") as pipeline:
        compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))
        pipeline.wait_for("decode-0", "transfers_total", len(goldens))
        assert pipeline.heard("decode-0")["transfer_failures_total"] == 0
        long = [golden for golden in goldens if len(golden.prompt) > 48]
        again = pipeline.complete_all([ask(golden) for golden in long])
        compare(long, again)
        assert all(answer.cached_tokens > 0 for answer in again)
        pipeline.assert_nothing_left()


@LONGER
@pytest.mark.parametrize("degrees", [(1, 2), (4, 2), (2, 4)], ids=lambda degrees: "to".join(map(str, degrees)))
def test_latents_move_between_workers_of_any_degrees(tmp_path: Path, degrees: tuple[int, int]) -> None:
    """To every rank of the receiver all of them; a prefix that comes again is found in the caches of all ranks."""
    torch.manual_seed(7)
    folder, random = save_of_bytes(deepseek(), tmp_path / "deepseek"), Random(5)
    lengths = (1, 17, 60, 90, 33, 70)
    asked = golden_outputs(
        folder, [[random.randrange(3, 400) for _ in range(length)] for length in lengths], NEW_TOKENS
    )
    workers = [{"role": role, "tensor_parallel": n} for role, n in zip(("prefill", "decode"), degrees, strict=True)]
    with Pipeline(tmp_path, folder, options(200, workers), preset="disaggregated") as pipeline:
        compare(asked, pipeline.complete_all([ask(golden) for golden in asked]))
        pipeline.wait_for("decode-0", "transfers_total", len(asked))
        assert pipeline.heard("decode-0")["transfer_failures_total"] == 0
        long = [golden for golden in asked if len(golden.prompt) > 48]
        again = pipeline.complete_all([ask(golden) for golden in long])
        compare(long, again)
        assert all(answer.cached_tokens > 0 for answer in again)
        pipeline.assert_nothing_left()


@LONGER
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_requests_go_on(tmp_path: Path, model: Path, goldens: list[Golden], preemption: str) -> None:
    workers = [{"role": "unified", "tensor_parallel": 2}]
    overrides = options(40, workers, preemption=preemption, prefill_chunk=48)
    made = Pipeline(tmp_path, model, overrides, preset="unified")
    made.held.add("unified-0")
    with made as pipeline:
        compare_together(pipeline, goldens, "unified-0")
        pipeline.wait_for("unified-0", "preemptions_total", 1)  # reports come some time after the answers
        pipeline.assert_nothing_left()
