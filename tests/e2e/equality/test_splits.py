"""Live: a request that changes hands at any token gives the answer it gives whole, whatever its sampling asks for."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.test_embeddings import with_modules
from tests.e2e.equality.golden import Golden
from tests.e2e.equality.split_manager import PLACES
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind, nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

PROMPT = "Once upon a time there was a fox who lived at the edge of a large forest and wanted"

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 3},
    "penalties": {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "two choices, sampled": {"temperature": 0.8, "seed": 11, "n": 2},
    "stop string": {"temperature": 0, "stop": [" the"]},
    "grammar, sampled": {
        "temperature": 0.8,
        "seed": 5,
        "ignore_eos": False,
        "guided_regex": "([A-Z][a-z]{2,9} ){9,12}",
    },
    "scored prompt": {"temperature": 0, "echo": True, "logprobs": 0},
}


def splitting(folder: Path, model: Path, overrides: dict[str, Any]) -> Pipeline:
    """With a manager that splits in turn."""
    made = Pipeline(folder, model, overrides, preset="dynaserve")
    made.instead["manager"] = "tests.e2e.equality.split_manager"
    return made


def post(
    pipeline: Pipeline, body: dict[str, Any], path: str = "/v1/completions", answers: str = "choices"
) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{pipeline.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return list(json.loads(response.read())[answers])


def told(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]


def scores(choices: list[dict[str, Any]]) -> list[float]:
    found = [choice["logprobs"]["token_logprobs"] for choice in choices if choice.get("logprobs")]
    return [score for scored in found for score in scored if score is not None]


def test_every_split_gives_the_same_answer(tmp_path: Path, small_model: Path) -> None:
    model = with_modules(small_model, tmp_path / "model", "mean_tokens")
    with splitting(tmp_path, model, {"engine": {"prefill_chunk": 8}}) as pipeline:
        handed_over, greedy = 0, ""
        for name, asked in REQUESTS.items():
            body = {"prompt": PROMPT, "max_tokens": 24 if nightly() else 14, "ignore_eos": True, **asked}
            if "stop" in asked:
                body["stop"] = greedy.split()[-2:-1]
            # `n` choices are `n` requests to the manager: each place comes up as often for either of them.
            answers = [post(pipeline, body) for _ in PLACES]
            for place, answer in zip(PLACES, answers, strict=True):
                assert told(answer) == told(answers[0]), f"{name}, split at {place}"
                assert scores(answer) == pytest.approx(scores(answers[0]), abs=2e-3), f"{name}, split at {place}"
            handed_over += 4
            greedy = greedy or answers[0][0]["text"]
            assert "stop" not in asked or answers[0][0]["finish_reason"] == "stop"
        vectors = [post(pipeline, {"input": PROMPT}, "/v1/embeddings", "data")[0]["embedding"] for _ in PLACES]
        for place, vector in zip(PLACES, vectors, strict=True):
            assert vector == pytest.approx(vectors[0], abs=1e-5), f"a mean, split at {place}"
        handed_over += 2  # within the prompt
        pipeline.wait_told(*pipeline.config.instance_roles)
        taken = sum(_transfers(pipeline, worker) for worker in pipeline.config.instance_roles)
        assert taken >= 2 * handed_over  # both ends count one
        pipeline.assert_nothing_left()


def _transfers(pipeline: Pipeline, worker: str) -> float:
    pipeline.wait_for(worker, "transfers_total", 8)
    return pipeline.heard(worker)["transfers_total"]


def test_keys_and_values_in_fp8_cross(tmp_path: Path, small_model: Path) -> None:
    """Also over a prefix that is cached."""
    overrides = {"model": {"max_model_len": 512}, "kv": {"cache_dtype": "fp8", "memory_bytes": 64 << 20}}
    with splitting(tmp_path, small_model, overrides) as pipeline:
        for repeat in (1, 4):
            body = {"prompt": f"{PROMPT} " * repeat, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answers = [told(post(pipeline, body)) for _ in PLACES]
            assert answers == answers[:1] * len(PLACES)
        assert max(_transfers(pipeline, worker) for worker in pipeline.config.instance_roles) >= 8


@another_of_its_kind()
def test_the_preset_itself_is_golden(tmp_path: Path, default_model: Path, goldens: list[Golden]) -> None:
    """Under load, so that it splits by itself; the bound on the time between tokens is tight for this machine."""
    some = [*goldens[::6], *goldens[-4:-1], *goldens[3::6]]
    overrides = {
        "dynaserve": {"tbt_slo_s": 0.03},
        "experiment": {"dynaserve": {"kv_transfer_s": 0.0, "await_arrivals": False}},
    }
    with Pipeline(tmp_path, default_model, overrides, preset="dynaserve") as pipeline:
        compare(some, pipeline.complete_all([ask(g) for g in some], concurrency=12))
        pipeline.wait_for("manager", "finish_tracked_total", len(some))
        pipeline.assert_nothing_left()
        stats = pipeline.heard("manager")
        assert stats["splits_total"] + stats["whole_total"] == len(some)
        pipeline.wait_for("unified-0", "profile_cells", 6)
        assert pipeline.terminate("unified-0") == 0
        assert list((tmp_path / "learned").glob("*unified-0*.json")), "what it learned is kept"
