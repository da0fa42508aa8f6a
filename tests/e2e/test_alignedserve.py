"""AlignedServe live: KV that waited in the host pool, was prefetched or handed over straight from the host, and still
every token is that of `transformers.generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.golden import Golden
from tests.e2e.pipeline import Pipeline
from tests.e2e.test_golden import MEBIBYTE, ask, compare

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetched", "straight from the host"])
def test_through_the_pool(tmp_path: Path, default_model: Path, goldens: list[Golden], prefetch: bool) -> None:
    chosen = [golden for golden in goldens if len(golden.prompt) <= 300]
    overrides = {
        "kv": {"memory_bytes": 32 * MEBIBYTE, "host_memory_bytes": 256 * MEBIBYTE},
        "alignedserve": {
            "least_requests": 2,
            "leaf_tokens": 16,
            "starvation_s": 2.0,
            "ablation": {"prefetch": prefetch},
        },
    }
    with Pipeline(tmp_path, default_model, overrides, preset="alignedserve") as pipeline:
        compare(chosen, pipeline.complete_all([ask(golden) for golden in chosen], concurrency=32))
        pipeline.wait_for("prefill-0", "pool_offloads_total", 3)
        pipeline.wait_for("prefill-0", "pool_direct_transfers_total", 1)
        if prefetch:
            pipeline.wait_for("prefill-0", "pool_prefetches_total", 1)
        pipeline.wait_for("decode-0", "transfers_total", len(chosen) // 2)
        pipeline.assert_nothing_left()
