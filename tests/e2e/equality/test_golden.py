"""Whatever way a request takes through the pipeline, its tokens are those of `transformers.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import NEW_TOKENS, make_prompts
from tests.e2e.equality.golden import Golden, golden_outputs, kv_bytes, near_ties, outgrowing
from tests.e2e.pipeline import CONTEXT_LIMIT, Answer, Pipeline
from tests.examples import another_of_its_kind, nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SHORT_SIGHTED = {"gateway": {"default_prediction_tokens": 1}, "predictor": {"learns": False}}
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


def test_disaggregated_with_prefix_cache_and_long_prompts(standard: Pipeline, default_model: Path) -> None:
    """The default model itself; the longest prompt goes up to the last position of the context."""
    prompts = make_prompts(Tokenizer.from_file(str(default_model / "tokenizer.json")))
    if not nightly():
        prompts = [*prompts[3:24:10], *prompts[27:29], prompts[45]]
    goldens = golden_outputs(default_model, prompts, NEW_TOKENS)
    random = Random(21)
    longest = [random.randrange(3, 49_000) for _ in range(CONTEXT_LIMIT - 4)]
    longest_golden = golden_outputs(default_model, [longest], 4)
    before = standard.heard("decode-0").get("transfers_total", 0.0)
    failed = standard.heard("decode-0").get("transfer_failures_total", 0.0)
    compare(goldens, standard.complete_all([ask(g) for g in goldens]))
    compare(longest_golden, standard.complete_all([ask(g) for g in longest_golden]))
    again = [g for g in goldens if len(g.prompt) > 48]
    answers = standard.complete_all([ask(g) for g in again])
    compare(again, answers)
    assert sum(answer.cached_tokens > 0 for answer in answers) >= len(again) // 2
    standard.wait_for("decode-0", "transfers_total", before + len(goldens))
    assert standard.heard("decode-0")["transfer_failures_total"] == failed
    standard.assert_nothing_left()


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
