"""AlignedServe live: KV that waited in the host pool, was prefetched or sent straight from the host, and still every
token is that of `transformers.generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.equality.golden import Golden, kv_bytes
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Answer, Pipeline
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

ROWS = 2
"""Of an iteration: so many requests decode, all others wait in the pool."""


async def ask_while_rows_are_taken(pipeline: Pipeline, chosen: list[Golden]) -> list[Answer]:
    """Requests that are given up later take every row of the decode worker, which stands still, until half of the
    chosen ones are in host memory. They are longer than any of those: no chosen request matches their batch, and only
    candidate batches follow."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        with pipeline.hold("decode-0") as go_on:
            taken = [
                asyncio.create_task(pipeline.complete(session, prompt=[7 + row] * 500, max_tokens=400, ignore_eos=True))
                for row in range(ROWS)
            ]
            await asyncio.to_thread(go_on, 0, ROWS)
            asked = [asyncio.create_task(pipeline.complete(session, **ask(golden))) for golden in chosen]
            await asyncio.to_thread(pipeline.wait_for, "prefill-0", "pool_offloads_total", len(chosen) // 2, 60.0)
            for task in taken:
                task.cancel()
        return await asyncio.gather(*asked)


@pytest.mark.parametrize(
    "prefetch",
    [
        pytest.param(True, id="prefetched"),
        pytest.param(
            False,
            id="straight from the host",
            marks=pytest.mark.skipif(not nightly(), reason="the other half of the pool: scripts/test --nightly"),
        ),
    ],
)
def test_through_the_pool(tmp_path: Path, small_model: Path, goldens: list[Golden], prefetch: bool) -> None:
    chosen = [golden for golden in goldens if len(golden.prompt) <= 300]
    overrides = {
        "engine": {"max_rows": ROWS},
        "kv": {"memory_bytes": kv_bytes(small_model, 182), "host_memory_bytes": kv_bytes(small_model, 364)},
        "alignedserve": {"starvation_s": 2.0},
        "experiment": {"alignedserve": {"least_requests": 2, "leaf_tokens": 16, "prefetch": prefetch}},
    }
    made = Pipeline(tmp_path, small_model, overrides, preset="alignedserve")
    made.held.add("decode-0")
    with made as pipeline:
        compare(chosen, asyncio.run(ask_while_rows_are_taken(pipeline, chosen)))
        stat = "pool_prefetches_total" if prefetch else "pool_direct_transfers_total"
        pipeline.wait_for("prefill-0", stat, len(chosen) // 4)
        pipeline.wait_for("decode-0", "transfers_total", len(chosen) + ROWS)
        pipeline.assert_nothing_left()
