"""Live: whatever sampling asks for, the answer with drafts is the answer without, on one worker and on two."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import Golden
from tests.e2e.pipeline import Pipeline
from tests.e2e.test_golden import MEBIBYTE, ask, compare
from tests.e2e.test_splits import REQUESTS, scores, told
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

PROMPT = "One fox ran over the hill. Two foxes ran over the hill. Three foxes ran over the hill. Four foxes ran"
"""Goes on as it began, so that prompt lookup finds what comes."""


def _post(pipeline: Pipeline, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{pipeline.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return list(json.loads(response.read())["choices"])


def _asked(tmp_path: Path, model: Path, preset: str, mode: str) -> dict[str, list[dict[str, Any]]]:
    with Pipeline(tmp_path / mode, model, {"speculation": {"mode": mode}}, preset=preset) as pipeline:
        answers = {
            name: _post(pipeline, {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, **asked})
            for name, asked in REQUESTS.items()
        }
        worker = list(pipeline.config.instance_roles)[-1]
        if mode != "off":
            pipeline.wait_for(worker, "accepted_tokens_rt_total", 1)  # how many depends on what steps take here
        else:
            assert pipeline.stats(worker)["drafted_tokens_rt_total"] == 0.0
        pipeline.assert_nothing_left()
    return answers


@pytest.mark.parametrize("preset", ["unified", pytest.param("disaggregated", marks=another_of_its_kind())])
def test_answers_are_the_same_with_drafts(tmp_path: Path, default_model: Path, preset: str) -> None:
    for mode in ("off", "lookup"):
        (tmp_path / mode).mkdir()
    plain = _asked(tmp_path, default_model, preset, "off")
    drafted = _asked(tmp_path, default_model, preset, "lookup")
    for name, choices in plain.items():
        assert told(drafted[name]) == told(choices), name
        assert scores(drafted[name]) == pytest.approx(scores(choices), abs=2e-3), name


@another_of_its_kind()
def test_drafts_are_golden_under_preemption(tmp_path: Path, default_model: Path, goldens: list[Golden]) -> None:
    overrides = {
        "speculation": {"mode": "lookup"},
        "engine": {"prefill_chunk": 48, "preemption": "swap"},
        "kv": {"memory_bytes": 36 * MEBIBYTE},
    }
    with Pipeline(tmp_path, default_model, overrides, preset="unified") as pipeline:
        for concurrency in (2, 32):
            compare(goldens, pipeline.complete_all([ask(g) for g in goldens], concurrency=concurrency))
        pipeline.wait_for("unified-0", "preemptions_total", 1)
        pipeline.wait_for("unified-0", "drafted_tokens_rt_total", 1)
        pipeline.assert_nothing_left()
