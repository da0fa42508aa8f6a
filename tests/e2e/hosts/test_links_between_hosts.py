"""Prefill here, decode there, over a link that is slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.equality.golden import Golden
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind
from tests.hosts import DEVICE, Hosts, needs_namespaces, two_hosts

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SLOW_MBIT = 50.0
TWO_DECODERS = [{"role": "prefill"}, {"role": "decode", "count": 2}]


def measured(pipeline: Pipeline, peer: str) -> float:
    """Bytes a second from the prefill worker, by its heartbeat; 0 while nothing was measured."""
    return pipeline.heard("prefill-0").get(f"link_bytes_per_s.{peer}", 0.0)


def placed_at(pipeline: Pipeline) -> dict[str, float]:
    """Requests that came from the prefill worker so far."""
    pipeline.wait_told("decode-0", "decode-1")
    return {name: pipeline.heard(name).get("transfers_total", 0.0) for name in ("decode-0", "decode-1")}


@needs_namespaces
@another_of_its_kind()
def test_requests_go_around_a_slow_link_as_far_as_that_pays(
    tmp_path: Path, small_model: Path, goldens: list[Golden]
) -> None:
    """`decode-0` is behind 50 Mbit/s. Where nothing is known of links it is the first to be asked, being empty. Of
    requests that come one by one none goes there any more once its link was used, and all bytes of a crowd arrive."""
    pytest.importorskip("ucxx")
    with two_hosts() as hosts:
        hosts.limit(SLOW_MBIT)
        options = {
            "workers": TWO_DECODERS,
            "policies": {"placement": "disaggregated"},
            "transfer": {"links": ["ucx"], "ucx": {"tls": "tcp", "net_devices": DEVICE}, "run_timeout_s": 2.0},
            "kv": {"prefix_caching": False},
        }
        with Pipeline(tmp_path, small_model, options, before=_places(hosts)) as pipeline:
            for name in ("decode-0", "decode-1"):  # one that has not reported yet counts as full
                pipeline.wait_for(name, "kv_free_blocks", 1.0, 20.0)
            time.sleep(2.0)
            long = [golden for golden in goldens if len(golden.prompt) >= 128]
            crowd = [ask(golden) | {"max_tokens": 100} for golden in long]
            answers = pipeline.complete_all(crowd, concurrency=len(crowd))
            assert [len(answer.tokens) for answer in answers] == [100] * len(crowd)
            before = placed_at(pipeline)
            slow, fast = (measured(pipeline, name) for name in ("decode-0", "decode-1"))
            print(f"measured: {slow / 1e6:.1f} MB/s and {fast / 1e6:.0f} MB/s; a crowd of {len(crowd)}: {before}")
            assert min(before.values()) > 0
            assert 0.4 * SLOW_MBIT < 8e-6 * slow < 1.3 * SLOW_MBIT
            assert fast > 2 * slow
            for golden in long:
                compare([golden], pipeline.complete_all([ask(golden)]))
            after = placed_at(pipeline)
            print(f"then {len(long)} one by one: {after}")
            assert (after["decode-0"], after["decode-1"]) == (before["decode-0"], before["decode-1"] + len(long))
            for name in ("prefill-0", "decode-0", "decode-1"):
                assert pipeline.heard(name).get("transfer_failures_total", 0.0) == 0.0
            pipeline.assert_nothing_left()


def _places(hosts: Hosts) -> dict[str, list[str]]:
    return {name: hosts.before(int(name == "decode-0")) for name in ("prefill-0", "decode-0", "decode-1")}
