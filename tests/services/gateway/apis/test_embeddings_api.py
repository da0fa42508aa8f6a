"""POST /v1/embeddings: its inputs, vectors, errors, limits and what workers are sent."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from cohort.common.config import KeyLimits
from cohort.common.messages import TokenUpdate
from cohort.common.types import FinishReason, Prediction
from cohort.services.gateway.requests.embedding_form import EmbeddingForm, read_embedding_form
from tests.services.gateway.cluster import Worker, state_of
from tests.services.gateway.conftest import OpenSite, Site, eventually
from tests.services.gateway.tiny_model import CONTEXT, WIDTH

PATH = "/v1/embeddings"
MODULES = ("Transformer", "Pooling", "Normalize")


def modules(folder: Path, *steps: str, **pooling: Any) -> None:
    """Write sentence-transformers' files."""
    of = "sentence_transformers.models."
    named = [{"idx": at, "path": f"{at}_{step}", "type": of + step} for at, step in enumerate(steps)]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **pooling}))


@pytest.fixture
def mean_model(model_dir: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(model_dir, tmp_path / "tiny")
    modules(folder, *MODULES, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    return folder


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["embedding"] for each in answer["data"]]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [([7, 8, 9], [[7, 8, 9]]), ([[7, 8], [9]], [[7, 8], [9]]), ("fox", None), (["fox", "dog"], None)],
)
async def test_inputs_in_their_four_shapes(site: Site, given: Any, prompts: list[list[int]] | None) -> None:
    status, answer = await site.post(PATH, {"model": "tiny", "input": given})
    assert status == 200, answer
    sent = [request.tokens for request in site.manager.submitted]
    texts = [given] if isinstance(given, str) else given
    assert sent == (prompts or [site.tokenizer.encode(text, special_tokens=True) for text in texts])
    assert vectors(answer) == [state_of(tokens[-1]) for tokens in sent]
    used = sum(map(len, sent))
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (used, used)
    assert len(answer["cohort"]["requests"]) == len(sent)


async def test_a_request_ends_with_its_prompt_and_needs_no_prediction(site: Site) -> None:
    headers = {"x-cohort-class": "be", "x-cohort-ttft-slo-ms": "500"}
    await site.post(PATH, {"input": [7, 8], "priority": 3}, headers=headers)
    (request,) = site.manager.submitted
    assert (request.sampling.max_tokens, request.sampling.pooling, request.sampling.stop_token_ids) == (1, "last", ())
    assert request.prediction == Prediction(1.0, 1.0, 1.0, 1.0)
    assert (request.traffic_class, request.slo.ttft_s, request.priority) == ("be", 0.5, 3)
    await eventually(site.nothing_left)
    assert site.predictor.asked == site.predictor.observed == []


async def test_the_mean_of_all_positions_of_length_one(open_site: OpenSite, mean_model: Path) -> None:
    async with open_site(model=mean_model) as site:
        _, answer = await site.post(PATH, {"input": [3, 4, 6]})
        _, short = await site.post(PATH, {"input": [3, 4, 6], "dimensions": 3})
        assert site.manager.submitted[0].sampling.pooling == "mean"
    mean = [sum(numbers) / 3 for numbers in zip(*map(state_of, (3, 4, 6)), strict=True)]
    for ours, numbers in ((vectors(answer)[0], mean), (vectors(short)[0], mean[:3])):
        length = math.hypot(*numbers)
        assert ours == pytest.approx([number / length for number in numbers], abs=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, "input", "missing"),
        ({"input": ""}, 400, "input", "no tokens"),
        ({"input": []}, 400, "input", "empty"),
        ({"input": [[]]}, 400, "input", "empty"),
        ({"input": ["a", 3]}, 400, "input", "mixes"),
        ({"input": {"a": 1}}, 400, "input", ""),
        ({"input": [100_000]}, 400, "input", "no token id"),
        ({"input": [7] * CONTEXT}, 400, "input", f"{CONTEXT} tokens, but the input alone has {CONTEXT}"),
        ({"input": "x", "dimensions": 0}, 400, "dimensions", ""),
        ({"input": "x", "dimensions": WIDTH + 1}, 400, "dimensions", f"have {WIDTH} numbers"),
        ({"input": "x", "encoding_format": "hex"}, 400, "encoding_format", ""),
        ({"input": "x", "model": "gpt-9"}, 404, "model", "does not exist"),
    ],
)
async def test_errors_in_openais_form(site: Site, body: dict[str, Any], status: int, param: str, says: str) -> None:
    given, answer = await site.post(PATH, body)
    assert given == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param and says in answer["error"]["message"]
    assert site.manager.submitted == []


async def test_keys_and_their_limits(open_site: OpenSite) -> None:
    async with open_site(api_keys=("sk-1",), keys={"limits": KeyLimits(tokens_per_minute=10)}) as site:
        assert (await site.post(PATH, {"input": [7]}))[0] == 401
        key = {"Authorization": "Bearer sk-1"}
        assert (await site.post(PATH, {"input": [7] * 6}, headers=key))[0] == 200
        status, answer = await site.post(PATH, {"input": [7] * 6}, headers=key)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_an_adapter_embeds_too(open_site: OpenSite) -> None:
    async with open_site(lora={"poems": "/adapters/poems"}) as site:
        assert (await site.post(PATH, {"model": "poems", "input": "x"}))[1]["model"] == "poems"
        assert [request.adapter for request in site.manager.submitted] == ["poems"]


async def test_states_that_are_not_those_of_the_prompt_end_the_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of another version, say, which knows no embeddings: an error, never a vector of something else."""

    def send(self: Worker, updates: list[TokenUpdate]) -> None:
        plain = [TokenUpdate(each.attempt, each.position, each.tokens, finish=FinishReason.LENGTH) for each in updates]
        original(self, plain)

    original = Worker.send
    monkeypatch.setattr(Worker, "send", send)
    status, answer = await site.post(PATH, {"input": "x"})
    assert status >= 500 and "states of positions" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("steps", "pooling", "form"),
    [
        (MODULES, {"pooling_mode_mean_tokens": True}, EmbeddingForm(WIDTH, "mean", normalised=True)),
        (MODULES[:2], {"pooling_mode_lasttoken": True}, EmbeddingForm(WIDTH, "last")),
        (MODULES[:2], {"pooling_mode": "mean"}, EmbeddingForm(WIDTH, "mean")),
        (MODULES[:1], {}, EmbeddingForm(WIDTH, "last")),
    ],
)
def test_the_files_of_sentence_transformers(
    tmp_path: Path, steps: tuple[str, ...], pooling: dict[str, Any], form: EmbeddingForm
) -> None:
    modules(tmp_path, *steps, **pooling)
    assert read_embedding_form(tmp_path, WIDTH) == form


@pytest.mark.parametrize(
    ("steps", "pooling", "says"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
        (MODULES, {"pooling_mode_cls_token": True}, "cls"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean, max"),
        (MODULES, {}, "nothing"),
    ],
)
async def test_what_is_not_computed_is_refused(
    open_site: OpenSite, mean_model: Path, steps: tuple[str, ...], pooling: dict[str, Any], says: str
) -> None:
    """The model answers all else."""
    modules(mean_model, *steps, **pooling)
    async with open_site(model=mean_model) as site:
        status, answer = await site.post(PATH, {"input": "x"})
        assert (status, answer["error"]["param"]) == (400, "model") and says in answer["error"]["message"]
        assert (await site.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[{")
    assert "cannot be read" in read_embedding_form(tmp_path, WIDTH).refused
    modules(tmp_path, *MODULES)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert "cannot be read" in read_embedding_form(tmp_path, WIDTH).refused
