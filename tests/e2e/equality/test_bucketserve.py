"""BucketServe live: buckets, memory-safe batches, padded prefill, a manager and a worker that die with requests in
their buckets; every token is that of `transformers.generate`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.equality.golden import Golden, kv_bytes
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

CACHE_BLOCKS = 77
"""For about a tenth of the requests: more wait than a batch may hold, so that buckets split."""


@another_of_its_kind()
def test_buckets_and_processes_that_die(tmp_path: Path, small_model: Path, goldens: list[Golden]) -> None:
    overrides = {
        "kv": {"memory_bytes": kv_bytes(small_model, CACHE_BLOCKS)},
        "predictor": {"learns": True},
        "gateway": {"default_prediction_tokens": 4},  # an answer cut off later than predicted is learned from
    }
    bodies = [ask(golden) for golden in goldens]
    made = Pipeline(tmp_path, small_model, overrides, preset="bucketserve")
    made.held.add("decode-0")
    with made as pipeline, ThreadPoolExecutor(1) as other:
        compare(goldens, pipeline.complete_all(bodies, concurrency=len(bodies)))
        pipeline.wait_for("manager", "bucket_splits_total", 1)
        pipeline.wait_for("decode-0", "transfers_total", len(goldens) // 2)
        for number, victim in enumerate(("manager", "prefill-0")):
            with pipeline.hold("decode-0") as go_on:
                if not number:
                    answers = other.submit(pipeline.complete_all, bodies, len(bodies))
                go_on(5 * len(goldens[0].output))
                assert not answers.done()
                pipeline.kill(victim)
            time.sleep(0.5)  # a process must notice
            pipeline.start(victim)
            pipeline.wait_ready()
        compare(goldens, answers.result())
        pipeline.assert_nothing_left()


def test_padded_batches(tmp_path: Path, small_model: Path, goldens: list[Golden]) -> None:
    overrides = {
        "kv": {"memory_bytes": kv_bytes(small_model, CACHE_BLOCKS)},
        "policies": {"iteration": "padded_prefill"},
    }
    made = Pipeline(tmp_path, small_model, overrides, preset="bucketserve")
    made.held.add("prefill-0")
    with made as pipeline:
        half = goldens[::2]
        compare(half, pipeline.complete_together([ask(golden) for golden in half], "prefill-0"))
        pipeline.wait_for("manager", "bucket_splits_total", 1)
        pipeline.wait_for("prefill-0", "padding_tokens_total", 1)
        pipeline.assert_nothing_left()
