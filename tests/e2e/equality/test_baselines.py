"""The baselines live, with a cache for a fraction of the requests and predictions far too short: whatever gives way,
every token is that of `transformers.generate`. One pipeline; its worker is replaced by one of the next preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.equality.golden import Golden, kv_bytes
from tests.e2e.equality.test_golden import compare_together
from tests.e2e.pipeline import Pipeline
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

WORKER = "unified-0"
PRESETS = ("vllm", "uellm", "round-robin", "chunked-prefill", "fastserve", "srtf", "multires", "orca")
# The one admits only what fits for good; to the other all look equally long here.
NEVER_PREEMPTS = ("orca", "srtf")


def overrides(model: Path) -> dict[str, Any]:
    return {
        "kv": {"memory_bytes": kv_bytes(model, 34), "prefix_caching": False},
        "gateway": {"default_prediction_tokens": 1},
    }


@pytest.fixture(scope="module")
def chosen(goldens: list[Golden]) -> list[Golden]:
    """14 that fill the cache of some 500 positions three times over; shortest first."""
    return sorted((each for each in goldens if 60 <= len(each.prompt) <= 256), key=lambda each: len(each.prompt))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("baselines")
    made = Pipeline(folder, small_model, overrides(small_model), preset="baseline-vllm")
    made.held.add(WORKER)
    with made as running:
        yield running


@pytest.mark.skipif(not nightly(), reason="`unified` preempts so by default: scripts/test --nightly")
@pytest.mark.parametrize("preset", PRESETS)
def test_colocated(pipeline: Pipeline, chosen: list[Golden], preset: str) -> None:
    if pipeline.config.name != f"baseline-{preset}":
        pipeline.reconfigure(f"baseline-{preset}")
        pipeline.kill(WORKER)
        pipeline.start(WORKER)
        pipeline.wait_ready()
    compare_together(pipeline, chosen, WORKER)
    if preset not in NEVER_PREEMPTS:
        pipeline.wait_for(WORKER, "preemptions_total", 1)
    pipeline.assert_nothing_left()
