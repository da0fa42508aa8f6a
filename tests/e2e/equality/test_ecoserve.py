"""EcoServe live, predictors wrong on purpose: a cache of few blocks, lent and returned; answers stay golden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import SENTENCES
from tests.e2e.equality.golden import Golden, golden_outputs, kv_bytes
from tests.e2e.equality.test_golden import compare
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LENGTHS = (6, 20, 40)


def cut(golden: Golden, tokens: int) -> Golden:
    """A greedy answer's beginning is the shorter answer."""
    return Golden(golden.prompt, golden.output[:tokens], golden.gaps[:tokens], golden.runner_up[:tokens])


@pytest.mark.parametrize(
    ("prediction", "lending", "evidence"),
    [
        pytest.param(1, "halves", "underpredictions_continued_total", id="always 1", marks=another_of_its_kind()),
        pytest.param(
            100_000, "halves", "borrowers_total", id="always the most a client may get", marks=another_of_its_kind()
        ),
        pytest.param(None, "forecast", "underpredicted_total", id="random, and revised at random"),
    ],
)
def test_a_wrong_predictor_changes_no_answer(
    tmp_path: Path, small_model: Path, prediction: int | None, lending: str, evidence: str
) -> None:
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in SENTENCES[:6]]
    wanted = [cut(golden, n) for golden in golden_outputs(small_model, prompts, max(LENGTHS)) for n in LENGTHS]
    overrides: dict[str, Any] = {
        "gateway": {"default_prediction_tokens": prediction or 256},
        "kv": {"block_size": 8, "memory_bytes": kv_bytes(small_model, 17), "prefix_caching": False},
        "ecoserve": {"lending": lending},
        "experiment": {"ecoserve": {"tune_padding": False}},
    }
    pipeline = Pipeline(tmp_path, small_model, overrides, preset="ecoserve")
    pipeline.held.add("unified-0")
    if prediction is None:
        pipeline.instead["predictor"] = "tests.e2e.equality.random_predictor"
    with pipeline:
        bodies = [
            {
                "prompt": list(golden.prompt),
                "max_tokens": len(golden.output),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for golden in wanted
        ]
        pipeline.wait_told("predictor")  # the gateway does not wait for it
        compare(wanted, pipeline.complete_together(bodies, "unified-0"))
        pipeline.wait_for("unified-0", evidence, 1)
        pipeline.assert_nothing_left()
