"""Refusals live: what becomes of a TTFT that no worker can keep is its client's choice; recordings replay."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cohort.common.machines.replayer import replay
from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

NEVER_MS = 0.001
"""No iteration is over so soon."""


def post(pipeline: Pipeline, **body: Any) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(
        f"{pipeline.url}/v1/completions",
        json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_a_ttft_that_no_worker_can_keep_is_refused_demoted_or_served(tmp_path: Path, small_model: Path) -> None:
    recordings = tmp_path / "recordings"
    overrides: dict[str, Any] = {"recording": {"folder": str(recordings)}}
    with Pipeline(tmp_path, small_model, overrides, preset="cohort") as pipeline:
        for _ in range(3):
            status, _, body = post(pipeline, cohort={"ttft_slo_ms": 60_000})
            assert status == 200, body
        deadline_s = time.monotonic() + 60
        while post(pipeline, cohort={"ttft_slo_ms": NEVER_MS})[0] == 200:
            assert time.monotonic() < deadline_s, "the worker never reported what a token takes"
        text = json.loads(body)["choices"][0]["text"]
        pipeline.wait_for("manager", "dispatched_total", 3)
        for stream in (False, True):
            status, headers, body = post(pipeline, cohort={"ttft_slo_ms": NEVER_MS}, stream=stream)
            error = json.loads(body)["error"]
            assert (status, error["type"]) == (429, "rate_limit_error"), body
            assert int(headers["Retry-After"]) >= 1
        status, _, body = post(pipeline, cohort={"ttft_slo_ms": NEVER_MS}, n=3)
        assert status == 429, body
        for outcome, demoted in (("best_effort", True), ("serve", False)):
            status, _, body = post(pipeline, cohort={"ttft_slo_ms": NEVER_MS, "if_late": outcome})
            answer = json.loads(body)
            assert (status, answer["choices"][0]["text"]) == (200, text)
            assert answer["cohort"]["requests"][0].get("best_effort", False) is demoted
        # Of three choices at least one: with it the gateway takes the others back.
        pipeline.wait_for("manager", "refused_infeasible_total", 3)
        pipeline.wait_for("manager", "demoted_total", 1)
        pipeline.assert_nothing_left()
    found = [replay(path) for path in sorted(recordings.rglob("*.jsonl"))]
    assert {each.machine for each in found} == {"gateway", "manager", "worker"}
    assert [each.difference for each in found] == [""] * len(found)
