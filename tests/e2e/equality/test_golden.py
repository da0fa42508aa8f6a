"""Whatever way a request takes through the pipeline, its tokens are those of `transformers.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.equality.golden import Golden, kv_bytes, near_ties, outgrowing
from tests.e2e.pipeline import Answer, Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SHORT_SIGHTED = {"gateway": {"default_prediction_tokens": 1}}
"""Every response is expected to end at once: more are admitted than the cache will hold."""


def ask(golden: Golden) -> dict[str, Any]:
    return {
        "prompt": list(golden.prompt),
        "max_tokens": len(golden.output),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def compare(goldens: list[Golden], answers: list[Answer]) -> int:
    """Number of near-ties met; anything else unequal fails."""
    for answer in answers:
        assert not answer.error, answer.error
    ties = sum(near_ties(golden, answer.tokens) for golden, answer in zip(goldens, answers, strict=True))
    print(f"{len(goldens)} answers, {ties} parted at a near-tie")
    assert ties <= len(goldens) // 10, "near-ties are rare; so many are a defect"
    return ties


def compare_together(pipeline: Pipeline, goldens: list[Golden], worker: str) -> None:
    """These, and then what outgrows a cache that is too small for them."""
    for together in (goldens, outgrowing(Path(pipeline.config.model.path))):
        compare(together, pipeline.complete_together([ask(golden) for golden in together], worker))


@pytest.mark.parametrize(
    ("preset", "overrides", "blocks", "evidence"),
    [
        pytest.param(
            "unified",
            {"engine": {"prefill_chunk": 48, "preemption": "swap"}, "kv": {}},
            51,
            "preemptions_total",
            id="colocated, chunks of 48, swapped",
        ),
        pytest.param(
            "unified",
            {"engine": {"prefill_chunk": 500, "preemption": "recompute"}, "kv": {"prefix_caching": False}},
            77,
            "preemptions_total",
            id="colocated, chunks of 500, recomputed",
            marks=another_of_its_kind(),
        ),
        pytest.param(
            "disaggregated",
            {"engine": {"max_step_tokens": 32, "preemption": "swap"}, "transfer": {"links": ["zmq"]}, "kv": {}},
            113,
            "transfers_total",
            id="disaggregated, chunks of 32, over the fallback link",
            marks=another_of_its_kind(),
        ),
    ],
)
def test_chunked_preempted_transferred(
    tmp_path: Path,
    small_model: Path,
    goldens: list[Golden],
    preset: str,
    overrides: Mapping[str, Any],
    blocks: int,
    evidence: str,
) -> None:
    sized = {**overrides, "kv": {"memory_bytes": kv_bytes(small_model, blocks), **overrides["kv"]}}
    made = Pipeline(tmp_path, small_model, sized, preset=preset)
    worker = list(made.config.instance_roles)[-1]
    made.held.add(worker)
    with made as pipeline:
        compare_together(pipeline, goldens, worker)
        pipeline.wait_for(worker, evidence, 1)
        pipeline.assert_nothing_left()


def test_real_time_and_best_effort_in_the_same_blocks(tmp_path: Path, small_model: Path, goldens: list[Golden]) -> None:
    """BROS with a cache for a third of them: best-effort requests fill it, real-time ones move into their blocks."""
    chosen = [golden for golden in goldens if 60 <= len(golden.prompt) <= 300]
    best_effort, real_time = chosen[::2], chosen[1::2]
    overrides = {"kv": {"memory_bytes": kv_bytes(small_model, 56)}}
    made = Pipeline(tmp_path, small_model, overrides, preset="bros")
    made.held.add("unified-0")
    with made as pipeline, ThreadPoolExecutor(2) as other:
        batch = [{**ask(golden), "cohort": {"class": "be"}} for golden in best_effort]
        with pipeline.hold("unified-0") as go_on:
            first = other.submit(pipeline.complete_all, batch)
            go_on(3, 3)
            then = other.submit(pipeline.complete_all, [ask(golden) for golden in real_time])
            pipeline.wait_behind_the_gateway(min(16, len(batch)) + 1)
        compare(real_time, then.result())
        compare(best_effort, first.result())
        pipeline.wait_for("unified-0", "shared_blocks_total", 1)
        pipeline.wait_for("unified-0", "checkpointed_slots_total", 1)
        pipeline.assert_nothing_left()
