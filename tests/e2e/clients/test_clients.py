"""The running pipeline as its users meet it: `openai` and `anthropic`, other architectures, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.e2e.clients.client_scripts import run_here
from tests.e2e.conftest import NEW_TOKENS, make_prompts
from tests.e2e.equality.golden import compute, golden_outputs, near_ties
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import CONTEXT_LIMIT, Pipeline
from tests.e2e.tiny_models import opt, qwen2, qwen3_moe, save_of_bytes
from tests.examples import another_of_its_kind, nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(standard: Pipeline) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{standard.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_chat_streamed_and_whole_say_the_same(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours of the sea."}],
        "max_completion_tokens": 24,
        "temperature": 0.7,
        "seed": 11,
    }
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert len(text) > 20
    if not nightly():  # weights are random
        return
    question = {"role": "user", "content": "What is the capital of France?"}
    known = client.chat.completions.create(model=model, messages=[question], max_tokens=40, temperature=0)  # type: ignore[list-item]
    assert "Paris" in (known.choices[0].message.content or "")


def test_responses_go_on_stream_and_call(standard: Pipeline) -> None:
    found = run_here("`openai`: responses", standard)
    assert found["answer"].output_text and found["ended"].output_text == found["streamed"] != ""
    assert found["ended"].previous_response_id == found["answer"].id
    assert found["ended"].usage.input_tokens > found["answer"].usage.total_tokens
    assert isinstance(found["arguments"]["city"], str) and found["told"].status in ("completed", "incomplete")
    with pytest.raises(openai.NotFoundError):
        found["client"].responses.retrieve(found["answer"].id)


def test_chats_stream_parse_call_and_run_as_a_batch(standard: Pipeline) -> None:
    found = run_here("`openai`: chat, files and batches", standard)
    assert found["streamed"] and 0 < found["usage"].completion_tokens <= 40
    assert isinstance(found["pet"].name, str) and 0 <= found["pet"].age <= 99
    assert found["call"].function.name == "get_weather" and isinstance(found["arguments"]["city"], str)
    assert found["told"].choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert found["batch"].status == "completed" and found["batch"].request_counts.completed == 2
    assert [result["custom_id"] for result in found["results"]] == ["sea", "sky"]
    with pytest.raises(openai.NotFoundError):
        found["client"].files.retrieve(found["file"].id)


def test_events_by_hand(standard: Pipeline) -> None:
    assert len(run_here("`aiohttp`", standard)["streamed"]) > 5


def test_messages_count_stream_and_call(standard: Pipeline) -> None:
    pytest.importorskip("anthropic")
    found = run_here("`anthropic`: messages", standard)
    answer, ended = found["answer"], found["ended"]
    told_of = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert found["counted"].input_tokens == told_of and answer.stop_reason in ("end_turn", "max_tokens")
    assert ended.content[0].text == found["streamed"] != "" and ended.usage.output_tokens <= 40
    assert found["asked"].stop_reason == "tool_use" and isinstance(found["call"].input["city"], str)
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        found["client"].messages.create(model="no-such-model", messages=[found["question"]], max_tokens=1)


def test_every_process_has_metrics_and_the_monitor_has_all(standard: Pipeline) -> None:
    standard.complete_all([{"prompt": "Hello", "max_tokens": 4}])
    text = standard.get("/metrics")
    assert "cohort_time_to_first_token_seconds_bucket" in text
    assert 'cohort_request_success_total{class="rt",finished_reason="length"' in text
    standard.wait_told()
    merged = standard.metrics()
    for instance in ("gateway", "predictor", "manager", "prefill-0", "decode-0"):
        assert f'instance="{instance}"' in merged
    for family in ("kv_cache_usage_perc", "kv_transfer_bytes_total", "up", "step_seconds_sum"):
        assert f"cohort_{family}" in merged


def test_disaggregated_with_prefix_cache_and_long_prompts(standard: Pipeline) -> None:
    """Tokens of `transformers.generate`; the longest prompt and its answer take the whole context."""
    model = Path(standard.config.model.path)
    prompts = make_prompts(Tokenizer.from_file(str(model / "tokenizer.json")))
    if not nightly():
        prompts = [*prompts[3:14:10], *prompts[27:29]]
    random = Random(21)
    prompts.append([random.randrange(3, 49_000) for _ in range(CONTEXT_LIMIT - NEW_TOKENS)])
    goldens = golden_outputs(model, prompts, NEW_TOKENS)
    before = standard.heard("decode-0").get("transfers_total", 0.0)
    failed = standard.heard("decode-0").get("transfer_failures_total", 0.0)
    compare(goldens, standard.complete_all([ask(g) for g in goldens]))
    again = [g for g in goldens if len(g.prompt) > 48]
    answers = standard.complete_all([ask(g) for g in again])
    compare(again, answers)
    assert sum(answer.cached_tokens > 0 for answer in answers) >= len(again) // 2
    standard.wait_for("decode-0", "transfers_total", before + len(goldens))
    assert standard.heard("decode-0")["transfer_failures_total"] == failed
    standard.assert_nothing_left()


@another_of_its_kind()  # `tests/chaos/test_chaos.py` restarts every process under requests
def test_a_drained_worker_finishes_its_requests(standard: Pipeline) -> None:
    async def run(pipeline: Pipeline) -> None:
        async with aiohttp.ClientSession() as session:
            asked = [
                asyncio.create_task(
                    pipeline.complete(session, prompt=[50 + i] * 9, max_tokens=30, temperature=0, ignore_eos=True)
                )
                for i in range(6)
            ]
            await asyncio.sleep(1.0)
            assert await asyncio.to_thread(pipeline.terminate, "decode-0") == 0
            answers = await asyncio.gather(*asked)
            later = await pipeline.complete(session, prompt="Still there?", max_tokens=5, ignore_eos=True)
        assert [answer.error for answer in [*answers, later]] == [""] * 7
        assert all(answer.finish == "length" for answer in answers)

    try:
        asyncio.run(run(standard))
        assert standard.terminate("prefill-0") == 0
    finally:
        for name in standard.config.instance_roles:
            if name not in standard.processes:
                standard.start(name)
        standard.wait_ready()


@pytest.mark.parametrize(
    "make", [qwen3_moe, *(pytest.param(other, marks=another_of_its_kind()) for other in (qwen2, opt))]
)
def test_other_architectures_equal_the_reference(tmp_path: Path, make: type[PreTrainedModel]) -> None:
    torch.manual_seed(7)
    folder = save_of_bytes(make(), tmp_path / "model")
    prompts = [[(i * j) % 390 + 5 for j in range(1, 4 + 7 * i)] for i in range(1, 14)]
    goldens = compute(folder, prompts, 20)
    overrides = {"engine": {"prefill_chunk": 24}, "kv": {"memory_bytes": 16 << 20}}
    with Pipeline(tmp_path, folder, overrides, preset="disaggregated") as pipeline:
        answers = pipeline.complete_all(
            [
                {
                    "prompt": list(g.prompt),
                    "max_tokens": 20,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                for g in goldens
            ]
        )
        assert [answer.error for answer in answers] == [""] * len(goldens)
        assert sum(near_ties(g, a.tokens) for g, a in zip(goldens, answers, strict=True)) <= 1
        pipeline.wait_for("decode-0", "transfers_total", len(goldens))
        pipeline.assert_nothing_left()
