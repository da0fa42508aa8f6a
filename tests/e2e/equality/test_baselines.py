"""The baselines and Cohort's own scheduler live, with a cache for a fraction of the requests and predictions far too
short: whatever gives way, every token is that of `transformers.generate`.

One pipeline; its worker is replaced by one of the next preset. COHORT_TEST_WIDE=1 takes every preset (otherwise those
that differ most: swapping row by row, recomputing in whole padded batches, by promises), more prompts, and DistServe's
both ways.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.equality.golden import Golden, kv_bytes
from tests.e2e.equality.test_golden import compare_together
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind, nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

WIDE = bool(os.environ.get("COHORT_TEST_WIDE"))
WORKER = "unified-0"
PRESETS = ["baseline-vllm"]
if WIDE or nightly():
    OTHERS = ("uellm", "round-robin", "chunked-prefill", "fastserve", "srtf", "multires", "orca")
    PRESETS += [f"baseline-{name}" for name in OTHERS]
# The one admits only what fits for good; to the other all look equally long here.
NEVER_PREEMPTS = ("baseline-orca", "baseline-srtf")


def overrides(model: Path, preemption: str | None = None) -> dict[str, Any]:
    return {
        "kv": {"memory_bytes": kv_bytes(model, 34), "prefix_caching": False},
        "gateway": {"default_prediction_tokens": 1},
        "predictor": {"learns": False},
        **({"engine": {"preemption": preemption}} if preemption else {}),
    }


@pytest.fixture(scope="module")
def chosen(goldens: list[Golden]) -> list[Golden]:
    """14 that fill the cache of some 500 positions three times over, or all that fit it; shortest first."""
    shortest, longest = (1, 300) if WIDE else (60, 256)
    found = [golden for golden in goldens if shortest <= len(golden.prompt) <= longest]
    return sorted(found, key=lambda golden: len(golden.prompt))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("baselines")
    made = Pipeline(folder, small_model, overrides(small_model), preset="baseline-vllm")
    made.held.add(WORKER)
    with made as running:
        yield running


@pytest.mark.skipif(not (WIDE or nightly()), reason="`unified` preempts so by default: scripts/test --nightly")
@pytest.mark.parametrize("preset", PRESETS)
def test_colocated(pipeline: Pipeline, chosen: list[Golden], preset: str) -> None:
    if pipeline.config.name != preset:
        pipeline.reconfigure(preset)
        pipeline.kill(WORKER)
        pipeline.start(WORKER)
        pipeline.wait_ready()
    compare_together(pipeline, chosen, WORKER)
    if preset not in NEVER_PREEMPTS:
        pipeline.wait_for(WORKER, "preemptions_total", 1)
    pipeline.assert_nothing_left()


@pytest.mark.skipif(not WIDE, reason="COHORT_TEST_WIDE=1 runs it")
@pytest.mark.parametrize("preemption", ["swap", pytest.param("recompute", marks=another_of_its_kind())])
def test_disaggregated(tmp_path: Path, small_model: Path, chosen: list[Golden], preemption: str) -> None:
    made = Pipeline(tmp_path, small_model, overrides(small_model, preemption), preset="baseline-distserve")
    made.held.add("decode-0")
    with made as pipeline:
        compare_together(pipeline, chosen, "decode-0")
        pipeline.wait_for("decode-0", "preemptions_total", 1)
        pipeline.assert_nothing_left()
