"""Checks of a running pipeline, each of them broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cohort import __version__
from cohort.services.cli.checks import pipeline
from cohort.services.cli.checks.finding import Finding
from cohort.services.cli.checks.reading import HealthReply, Reading
from cohort.services.cli.scraped import Scraped


def process(instance: str, role: str, **more: Any) -> dict[str, Any]:
    plain = {"status": "up", "ready": True, "restarts": 0, "stats": {}, "warnings": []}
    return {"instance": instance, "role": role, **plain, **more}


def reading(
    *, metrics: str = "", waiting: list[float] | None = None, words: dict[str, HealthReply] | None = None, **worker: Any
) -> Reading:
    processes = [process("gateway", "gateway"), process("decode-0", "decode_worker", **worker)]
    state = {"processes": processes, "samples": {"requests_waiting": waiting or []}}
    said = {"gateway": HealthReply(version=__version__), "decode-0": HealthReply(version=__version__)}
    return Reading(state, Scraped(metrics), {**said, **(words or {})})


def test_nothing_is_wrong_with_a_pipeline_that_is_well() -> None:
    assert {check(reading()).status for check in pipeline.CHECKS} == {"ok"}


Check = Callable[[Reading], Finding]
FULL = {"kv_total_blocks": 100.0, "kv_used_blocks": 99.0, "requests_waiting": 3.0}
GROWING = [0.0] * 60 + [float(count) for count in range(60)]


@pytest.mark.parametrize(
    ("check", "broken", "status", "says"),
    [
        (pipeline.answering, reading(status="down", ready=False), "problem", "decode-0: no heartbeat"),
        (pipeline.answering, reading(ready=False), "warning", "decode-0: not ready"),
        (
            pipeline.answering,
            reading(words={"decode-0": HealthReply(error="timed out")}),
            "problem",
            "decode-0 does not answer: timed out",
        ),
        (pipeline.workers, reading(ready=False), "problem", "no worker is ready"),
        (pipeline.versions, reading(words={"gateway": HealthReply(version="0.0.9")}), "problem", "0.0.9: gateway"),
        (
            pipeline.versions,
            reading(words={"gateway": HealthReply(version="9.9"), "decode-0": HealthReply(version="9.9")}),
            "warning",
            "the pipeline is 9.9",
        ),
        (pipeline.restarts, reading(restarts=3), "warning", "decode-0 3 times"),
        (pipeline.queue, reading(waiting=GROWING), "problem", "59 wait now"),
        (pipeline.kv, reading(stats=FULL), "warning", "decode-0: full"),
        (
            pipeline.event_loops,
            reading(metrics='cohort_event_loop_lag_seconds{instance="gateway"} 0.8\n'),
            "warning",
            "gateway 800 ms late",
        ),
        (
            pipeline.descriptors,
            reading(metrics='process_open_fds{instance="gateway"} 950\nprocess_max_fds{instance="gateway"} 1024\n'),
            "problem",
            "gateway has 950 of 1024 open",
        ),
        (
            pipeline.step_times,
            reading(metrics='cohort_step_time_error{instance="decode-0",kind="decode"} 0.9\n'),
            "warning",
            "decode-0 decode 90 %",
        ),
        (
            pipeline.losses,
            reading(metrics='cohort_kv_transfer_failures_total{link="ucx",reason="timeout"} 2\n'),
            "warning",
            "KV transfers failed (2)",
        ),
        (
            pipeline.kv_links,
            reading(
                metrics='cohort_kv_link_bytes_per_second{instance="p",link="ucx",peer="near"} 1e9\n'
                'cohort_kv_link_bytes_per_second{instance="p",link="ucx",peer="far"} 11e6\n'
                'cohort_kv_link_path{instance="p",link="ucx",path="tcp/eth0",peer="far"} 1\n'
            ),
            "warning",
            "p to far: ucx over tcp/eth0, 11 MB/s",
        ),
        (
            pipeline.clocks,
            reading(words={"decode-0": HealthReply(__version__, ahead_s=-40.0)}),
            "warning",
            "decode-0 40 s behind",
        ),
        (pipeline.own_warnings, reading(warnings=["no kernels"]), "warning", "decode-0: no kernels"),
    ],
)
def test_what_is_broken_is_found(check: Check, broken: Reading, status: str, says: str) -> None:
    found = check(broken)
    assert found.status == status and says in found.says and found.cure
    assert check(reading()).status == "ok"


@pytest.mark.parametrize(
    "waiting",
    [
        [10.0] * 120,  # long, and no longer than before
        [0.0] * 119 + [3.0],
        [float(120 - count) for count in range(120)],
        [0.0] * 60 + [20.0] * 30 + [0.0] * 30,  # a burst that is over
    ],
)
def test_a_queue_that_does_not_grow(waiting: list[float]) -> None:
    assert pipeline.queue(reading(waiting=waiting)).status == "ok"


def test_a_full_cache_that_no_request_waits_for() -> None:
    assert pipeline.kv(reading(stats={**FULL, "requests_waiting": 0.0})).status == "ok"
