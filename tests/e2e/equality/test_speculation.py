"""Live: whatever sampling asks for, the answer with drafts is the answer without, whatever drafts and whatever happens
to the request meanwhile."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.engine.drafts.test_eagle_head import head_folder
from tests.e2e.equality.golden import compute
from tests.e2e.equality.split_manager import PLACES
from tests.e2e.equality.test_golden import SHORT_SIGHTED, compare
from tests.e2e.equality.test_splits import REQUESTS, post, scores, splitting, told
from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import llama, save, save_deep_llama
from tests.examples import another_of_its_kind, nightly
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

PROMPT = "One fox ran over the hill. Two foxes ran over the hill. Three foxes ran over the hill. Four foxes ran"
"""Goes on as it began, so that prompt lookup finds what comes."""


def _post(pipeline: Pipeline, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{pipeline.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return list(json.loads(response.read())["choices"])


def _speculating(kind: str, model: Path, folder: Path) -> dict[str, Any]:
    """What drafts: texts, the model itself in fewer bits, or a random head on its states, whose drafts are wrong."""
    if kind == "head":
        return {"mode": "model", "draft_model": str(head_folder(folder / "head", model=model))}
    return {"mode": kind, "draft_model": str(model) if kind == "model" else "", "draft_quantization": "int4"}


def _ask_until_drafted(pipeline: Pipeline, worker: str, counter: str) -> None:
    """Go on asking: how many requests it takes depends on what steps seem to take on a machine that others load."""
    for _ in range(100):
        pipeline.wait_told(worker)
        if pipeline.heard(worker)[f"{counter}_tokens_rt_total"] >= 1:
            return
        _post(pipeline, {"prompt": PROMPT, "max_tokens": 64, "temperature": 0, "ignore_eos": True})
    raise AssertionError(f"no {counter} draft in a hundred requests:\n{pipeline.log(worker)}")


def _asked(tmp_path: Path, model: Path, preset: str, mode: str) -> dict[str, list[dict[str, Any]]]:
    speculating = {"speculation": _speculating(mode, model, tmp_path)}
    with Pipeline(tmp_path / mode, model, speculating, preset=preset) as pipeline:
        worker = list(pipeline.config.instance_roles)[-1]
        if mode != "off":  # first of all: where drafts pay is learned
            _ask_until_drafted(pipeline, worker, "drafted" if mode == "head" else "accepted")
        answers = {
            name: _post(
                pipeline, {"prompt": PROMPT, "max_tokens": 40 if nightly() else 16, "ignore_eos": True, **asked}
            )
            for name, asked in REQUESTS.items()
        }
        if mode == "off":
            assert pipeline.heard(worker)["drafted_tokens_rt_total"] == 0.0
        pipeline.assert_nothing_left()
    return answers


def _repeating(folder: Path) -> Path:
    """What comes next depends most on the last token, so that greedy answers go in circles: drafts are right."""
    torch.manual_seed(7)
    save(model := llama(), folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.1
    model.save_pretrained(folder)
    byte_level(400).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("preset", "mode"),
    [
        ("unified", "lookup"),
        *(
            pytest.param(preset, mode, marks=another_of_its_kind())
            for preset, mode in (
                ("disaggregated", "lookup"),
                ("unified", "model"),
                ("disaggregated", "model"),
                ("bros", "model"),
                ("dynaserve", "model"),
                ("dynaserve", "head"),
            )
        ),
    ],
)
def test_answers_are_the_same_with_drafts(tmp_path: Path, default_model: Path, preset: str, mode: str) -> None:
    for each in ("off", mode):
        (tmp_path / each).mkdir()
    model = default_model if nightly() else _repeating(tmp_path / "m")
    plain = _asked(tmp_path, model, preset, "off")
    drafted = _asked(tmp_path, model, preset, mode)
    for name, choices in plain.items():
        assert told(drafted[name]) == told(choices), name
        assert scores(drafted[name]) == pytest.approx(scores(choices), abs=2e-3), name


@another_of_its_kind()
@pytest.mark.parametrize("mode", ["lookup", "model"])
def test_every_split_gives_the_same_answer(tmp_path: Path, default_model: Path, mode: str) -> None:
    """Drafts end where another worker goes on."""
    options = {"engine": {"prefill_chunk": 8}, "speculation": _speculating(mode, default_model, tmp_path)}
    with splitting(tmp_path, default_model, options) as pipeline:
        for name in ("greedy, log-probabilities", "two choices, sampled", "penalties"):
            body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, **REQUESTS[name]}
            answers = [post(pipeline, body) for _ in PLACES]
            for place, answer in zip(PLACES, answers, strict=True):
                assert told(answer) == told(answers[0]), f"{name}, split at {place}"
        drafted = [pipeline.heard(name)["drafted_tokens_rt_total"] for name in pipeline.config.instance_roles]
        assert sum(drafted) > 0
        pipeline.assert_nothing_left()


KINDS = {"lookup": "lookup", "model": "model", "head": "head"}
"""What drafts, and what the metrics call it."""
CACHES = {"model": 7 << 20}
"""Bytes in which thirty of the requests do not find room at once."""
LENGTHS = (1, 15, 40, 100, 130, 190, 64, 70, 33, 80)


def _small(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model with random weights, and what drafts for it: a part of it is always right, heads hardly ever are."""
    model, draft = folder / "m", folder / "draft"
    torch.manual_seed(7)
    if kind == "model":
        save_deep_llama(model, draft)
    else:
        save(llama(), model)
    if kind == "head":
        head_folder(draft, model=model)
    for each in (model, draft) if kind == "model" else (model,):
        byte_level(400).save(str(each / "tokenizer.json"))
    return model, {
        "mode": kind if kind == "lookup" else "model",
        "draft_model": str(draft) if kind in ("model", "head") else "",
    }


def _drafted_by(pipeline: Pipeline, drafter: str) -> float:
    lines = pipeline.metrics().splitlines()
    found = [line for line in lines if line.startswith("cohort_drafts_total{") and f'drafter="{drafter}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@another_of_its_kind()
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_drafts_answers_are_those_without(tmp_path: Path, kind: str) -> None:
    """Greedy and sampled ones, in a cache that is too small, while a worker is killed and another one drained."""
    model, speculation = _small(kind, tmp_path)
    chance = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 400, (length,), generator=chance).tolist() for length in LENGTHS]
    asked = [
        {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **sampled}
        for prompt in prompts
        for sampled in (
            {"temperature": 0},
            {"temperature": 0.9, "seed": 5},
            {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2},
        )
    ]
    options = {
        **SHORT_SIGHTED,
        "workers": [{"role": "unified", "count": 2, "threads": 1}],
        "engine": {"preemption": "swap"},
        "kv": {"memory_bytes": CACHES.get(kind, 1 << 20), "host_memory_bytes": 1 << 20},
    }
    folders = {name: tmp_path / name for name in ("off", "on")}
    for each in folders.values():
        each.mkdir()
    with Pipeline(folders["off"], model, {**options, "speculation": {"mode": "off"}}, preset="cohort") as pipeline:
        plain = pipeline.complete_all(asked)
    compare(compute(model, prompts, 60), plain[::3])
    made = Pipeline(folders["on"], model, {**options, "speculation": speculation}, preset="cohort")
    made.held.add("unified-0")
    with made as pipeline, ThreadPoolExecutor(1) as client:
        _same(pipeline.complete_all(asked, concurrency=2), plain)
        _same(pipeline.complete_all(asked, concurrency=30), plain)
        pipeline.wait_told()
        preempted = [pipeline.heard(name)["preemptions_total"] for name in pipeline.config.instance_roles]
        assert sum(preempted) > 0, "the cache is too large"
        for broken in ("killed", "drained"):
            pipeline.wait_told("manager", "unified-0")
            pipeline.wait_ready()
            before = _drafted_by(pipeline, KINDS[kind])
            with pipeline.hold("unified-0") as go_on:
                answers = client.submit(pipeline.complete_all, asked * 8, concurrency=8)
                go_on(100)
                until_s = time.monotonic() + 1.5
                while _drafted_by(pipeline, KINDS[kind]) < before + 4 and time.monotonic() < until_s:
                    time.sleep(0.02)
                assert not answers.done()
                if broken == "killed":
                    pipeline.kill("unified-0")
            if broken == "killed":
                pipeline.start("unified-0")
            else:
                assert pipeline.terminate("unified-1") == 0
            _same(answers.result(timeout=200), plain * 8)
        assert _drafted_by(pipeline, KINDS[kind]) > 0
        pipeline.assert_nothing_left()


def _same(answers: list[Answer], plain: list[Answer]) -> None:
    assert [answer.error for answer in answers] == [""] * len(plain)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
