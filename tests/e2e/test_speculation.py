"""Live: whatever sampling asks for, the answer with drafts is the answer without, on one worker and on two."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import Golden
from tests.e2e.pipeline import Pipeline
from tests.e2e.test_golden import MEBIBYTE, ask, compare
from tests.e2e.test_splits import REQUESTS, scores, told
from tests.examples import another_of_its_kind, nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

PROMPT = "One fox ran over the hill. Two foxes ran over the hill. Three foxes ran over the hill. Four foxes ran"
"""Goes on as it began, so that prompt lookup finds what comes."""


def _post(pipeline: Pipeline, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{pipeline.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return list(json.loads(response.read())["choices"])


def _speculating(mode: str, model: Path) -> dict[str, Any]:
    """With the model itself in fewer bits as the one that drafts."""
    return {"mode": mode, "draft_model": str(model) if mode == "model" else "", "draft_quantization": "int4"}


def _asked(tmp_path: Path, model: Path, preset: str, mode: str) -> dict[str, list[dict[str, Any]]]:
    with Pipeline(tmp_path / mode, model, {"speculation": _speculating(mode, model)}, preset=preset) as pipeline:
        answers = {
            name: _post(
                pipeline, {"prompt": PROMPT, "max_tokens": 40 if nightly() else 24, "ignore_eos": True, **asked}
            )
            for name, asked in REQUESTS.items()
        }
        worker = list(pipeline.config.instance_roles)[-1]
        if mode != "off":
            pipeline.wait_for(worker, "accepted_tokens_rt_total", 1)  # how many depends on what steps take here
        else:
            assert pipeline.stats(worker)["drafted_tokens_rt_total"] == 0.0
        pipeline.assert_nothing_left()
    return answers


@pytest.mark.parametrize(
    ("preset", "mode"),
    [
        ("unified", "lookup"),
        *(
            pytest.param(preset, mode, marks=another_of_its_kind())
            for preset, mode in (
                ("disaggregated", "lookup"),
                ("unified", "recent"),
                ("unified", "model"),
                ("disaggregated", "model"),
                ("bros", "model"),
                ("dynaserve", "model"),
            )
        ),
    ],
)
def test_answers_are_the_same_with_drafts(tmp_path: Path, default_model: Path, preset: str, mode: str) -> None:
    for each in ("off", mode):
        (tmp_path / each).mkdir()
    plain = _asked(tmp_path, default_model, preset, "off")
    drafted = _asked(tmp_path, default_model, preset, mode)
    for name, choices in plain.items():
        assert told(drafted[name]) == told(choices), name
        assert scores(drafted[name]) == pytest.approx(scores(choices), abs=2e-3), name


@another_of_its_kind()
@pytest.mark.parametrize("mode", ["lookup", "model"])
def test_drafts_are_golden_under_preemption(
    tmp_path: Path, default_model: Path, goldens: list[Golden], mode: str
) -> None:
    overrides = {
        "speculation": _speculating(mode, default_model),
        "engine": {"prefill_chunk": 48, "preemption": "swap"},
        "kv": {"memory_bytes": (36 if mode == "lookup" else 72) * MEBIBYTE},
    }
    with Pipeline(tmp_path, default_model, overrides, preset="unified") as pipeline:
        for concurrency in (2, 32):
            compare(goldens, pipeline.complete_all([ask(g) for g in goldens], concurrency=concurrency))
        pipeline.wait_for("unified-0", "preemptions_total", 1)
        pipeline.wait_for("unified-0", "drafted_tokens_rt_total", 1)
        pipeline.assert_nothing_left()


@another_of_its_kind()
def test_a_worker_killed_while_a_model_drafts_costs_a_pause_and_nothing_else(
    tmp_path: Path, default_model: Path, goldens: list[Golden]
) -> None:
    with (
        Pipeline(
            tmp_path, default_model, {"speculation": _speculating("model", default_model)}, preset="unified"
        ) as pipeline,
        ThreadPoolExecutor(1) as client,
    ):
        answers = client.submit(pipeline.complete_all, [ask(golden) for golden in goldens], concurrency=2)
        pipeline.wait_for("unified-0", "drafted_tokens_rt_total", 8, timeout_s=60.0)  # most steps have some by then
        pipeline.kill("unified-0")
        pipeline.start("unified-0")
        compare(goldens, answers.result(timeout=300))
        pipeline.assert_nothing_left()
