"""Collecting answers from a server, going on after an interruption, and judging predictions."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cohort.common.errors import ConfigError
from cohort.services.bench.__main__ import main
from cohort.services.bench.study.answers import Asker, made_up_answers, read_answers, read_prompts
from cohort.services.bench.study.judging import read_states, report
from cohort.services.length_predictor.judgement import judge
from tests.examples import another_of_its_kind


def test_every_figure_by_hand() -> None:
    predicted, real = np.array([100.0, 100.0, 10.0, 50.0]), np.array([115.0, 60.0, 11.0, 90.0])
    found = judge("x", predicted, np.array([110.0, 70.0, 20.0, 95.0]), real)
    assert found.mae_tokens == pytest.approx((15 + 40 + 1 + 40) / 4)
    assert found.near == 0.5
    assert found.covered_p90 == 0.75
    # +10 %: 110, 110, 11, 55; +15 %: 115, 115, 12, 58
    assert found.enough == {"10%": 0.5, "15%": 0.75, "20%": 0.75}
    # Buckets (64, 128], (32, 64], ≤ 32: 110 and 115, 110 and 60, 11 and 11, 55 and 90
    assert found.bucket_hit["10%"] == 0.5
    assert found.over["10%"] == pytest.approx(50 / 286)
    assert "MAE 24.0 tokens" in str(found)


def test_the_model_beats_guessing_where_there_is_something_to_learn() -> None:
    judgements = {found.name: found for found in report(made_up_answers(1200), 0.25)}
    model = judgements["model"]
    assert model.count == 300
    for guess in ("mean", "median", "max_tokens"):
        assert model.mae_tokens < 0.6 * judgements[guess].mae_tokens
    assert model.bucket_hit["10%"] > judgements["mean"].bucket_hit["10%"]
    assert 0.82 < model.covered_p90 < 0.97
    assert judgements["max_tokens"].enough["10%"] == 1.0
    assert judgements["max_tokens"].over["10%"] > 0.5


def test_a_state_that_knows_more_than_the_prompt_refines(tmp_path: Path) -> None:
    answers = made_up_answers(400)
    draw = np.random.default_rng(3)
    noise = draw.normal(size=(len(answers), 8))
    # The state's first component says how long the answer will be, which the prompt says only roughly.
    hidden = {answer.index: np.log(answer.output_tokens) - 4.5 + draw.normal(0.0, 0.05) for answer in answers}
    states = np.column_stack([list(hidden.values()), noise * 0.1, np.ones(len(answers))]).astype(np.float16)
    np.savez(tmp_path / "states.npz", index=np.array([a.index for a in answers[10:]]), states=states[10:])
    found = {each.name: each for each in report(answers, 0.25, read_states(tmp_path / "states.npz"))}
    assert found["refined"].count == round(0.25 * 390)
    assert found["refined"].mae_tokens < 0.85 * found["model"].mae_tokens
    assert found["refined"].near > found["model"].near
    with pytest.raises(ConfigError, match="--states"):
        read_states(tmp_path / "absent.npz")


def test_too_few_answers_are_said_to_be_too_few() -> None:
    with pytest.raises(ConfigError, match="12 answers are too few"):
        report(made_up_answers(12), 0.2)


def test_prompts_are_read_as_instructions_or_plainly(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    lines = [{"prompt": "plain"}, {"instruction": "Add.", "input": "1 2"}, {"instruction": "Hello"}]
    file.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    plain, with_input, alone = read_prompts(file, None)
    assert plain == "plain"
    assert "### Input:\n1 2\n" in with_input and "### Instruction:\nAdd." in with_input
    assert "Input" not in alone and "Hello" in alone
    assert read_prompts(file, 1) == ["plain"]
    file.write_bytes(gzip.compress(b'{"prompt": "ok"}\n{"nothing": 1}\n'))
    with pytest.raises(ConfigError, match=r"p\.jsonl\.gz:2: neither"):
        read_prompts(file, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl", None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 30)}}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@asynccontextmanager
async def server(asked: list[dict[str, Any]], refuse_from: int = 1000) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if len(asked) > refuse_from:
            return web.json_response({"error": "overloaded"}, status=429)
        tokens = min(len(str(body)) % 40 + 1, body["max_tokens"])
        reason = "length" if tokens == body["max_tokens"] else "stop"
        return web.json_response({"usage": {"completion_tokens": tokens}, "choices": [{"finish_reason": reason}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


async def test_collecting_goes_on_where_it_was_interrupted(tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"w{i} w{i + 1} nothing" for i in range(1, 13)]
    cache = tmp_path / "cache" / "answers.jsonl"
    asked: list[dict[str, Any]] = []
    async with server(asked, refuse_from=5) as url:
        asker = Asker(url, tokenizer, chat=True, max_tokens=30, temperature=0.0)
        with pytest.raises(ConfigError, match="429"):
            await asker.collect(texts, cache, concurrency=1)
    assert len(read_answers(cache)) == 5
    with cache.open("ab") as file:
        file.write(b'{"index": 5, "tok')  # killed in the middle of a line
    assert len(read_answers(cache)) == 5
    asked.clear()
    async with server(asked) as url:
        asker = Asker(url, tokenizer, chat=True, max_tokens=30, temperature=0.0)
        assert await asker.collect(texts, cache, concurrency=4) == 7
        assert await asker.collect(texts, cache, concurrency=4) == 0
    answers = sorted(read_answers(cache), key=lambda each: each.index)
    assert [each.index for each in answers] == list(range(12))
    assert answers[2].tokens == [3, 4, 0]
    assert all(each.truncated == (each.output_tokens == 30) for each in answers)
    assert asked[0]["messages"][0]["role"] == "user"


async def test_completions_and_a_server_that_is_not_there(tokenizer: Path, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    async with server(asked) as url:
        asker = Asker(url, tokenizer, chat=False, max_tokens=8, temperature=0.5, api_key="k")
        await asker.collect(["w1"], tmp_path / "a.jsonl", concurrency=2)
    assert asked == [{"prompt": "w1", "max_tokens": 8, "temperature": 0.5}]
    with pytest.raises(ConfigError, match="v1/completions"):
        await asker.collect(["w1", "w2"], tmp_path / "a.jsonl", concurrency=2)


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "a.jsonl"
    cache.write_bytes(b"nonsense\n{}\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1"):
        read_answers(cache)


@another_of_its_kind()
def test_the_commands(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "answers.jsonl"
    assert main(["study", "report", "--cache", str(cache)]) == 2
    assert "0 answers are too few" in capsys.readouterr().err
    cache.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in made_up_answers(300)))
    assert main(["study", "report", "--cache", str(cache), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "model"
    assert main(["study", "report", "--cache", str(cache)]) == 0
    assert "model's median" in capsys.readouterr().out
    assert main(["study", "latency", "--cache", str(cache), "--rounds", "50"]) == 0
    assert "one prediction" in capsys.readouterr().out
    assert main(["study", "latency", "--cache", str(cache), "--rounds", "50", "--training"]) == 0
    assert "trainings beside it" in capsys.readouterr().out
    assert main(["study", "collect", "--prompts", str(cache), "--tokenizer", str(tmp_path / "no"), "--count", "0"]) == 2
