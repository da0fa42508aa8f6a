"""Attack: small bodies that ask for much. A bias for every token of the vocabulary, sixteen long stop strings times
thousands of choices, a scored prompt times n, a million empty messages or metadata keys, lists within lists.

Each must be refused by name, with the figure and the configured limit, before anything of it is built; and what is
accepted must be built once, however many choices or steps it has: counted here, never timed.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.common.config import GatewayConfig
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.step.sampler import sample
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sampling_inputs import LogitBias, SamplingInputs
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from cohort.services.gateway.generation import choice, generator
from cohort.services.gateway.generation.choice import StopAutomaton
from cohort.services.gateway.generation.preparation import RequestBudget
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.requests import parsing
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import parse_completion
from tests.counting import lines_run
from tests.services.gateway.conftest import OpenSite, Site, eventually

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
LIMITS = GatewayConfig()
CARD = ModelCard("tiny", Path("/m"), 8192, 50_000, (2,))


async def refusal(site: Site, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with site.session.post(f"{site.url}/v1/{path}", data=data, headers=headers) as response:
        answer = await response.json()
    assert response.status == status, answer
    error: dict[str, Any] = answer["error"]
    return error


def repeated(head: bytes, item: bytes, count: int, tail: bytes) -> bytes:
    return head + b",".join([item] * count) + tail


# -- refused at the door -------------------------------------------------------------------------------------------


BIASES = {str(token): 1 for token in range(1025)}
ALL_BIASES = {str(token): 1 for token in range(45_000)}
STOPS = [f"{digit:x}" * 205 for digit in range(5)]
KEYS = {str(key): "" for key in range(65)}
CONTENT = b'{"messages":[{"role":"user","content":['
DEEP = b'{"messages":[{"role":"user","content":"a","x":' + b"[" * 30 + b"]" * 30 + b"}]}"


@pytest.mark.parametrize(
    ("path", "body", "param", "figure", "words"),
    [
        ("completions", {"prompt": "a", "logit_bias": BIASES}, "logit_bias", 1025, "at most 1024"),
        ("completions", {"prompt": "a", "stop": ["a" * 257]}, "stop", 257, "at most 256"),
        ("completions", {"prompt": "a", "stop": STOPS}, "stop", 1025, "at most 1024"),
        ("completions", {"prompt": ["a"] * 129, "n": 2}, "n", 258, "may have 128"),
        ("completions", {"prompt": ["a"] * 129}, "prompt", 129, "may have 128"),
        ("chat/completions", {**CHAT, "metadata": KEYS}, "metadata", 65, "at most 64"),
        ("chat/completions", {"messages": CHAT["messages"] * 4097}, "messages", 4097, "at most 4096"),
        ("chat/completions", repeated(b'{"messages":[', b"{}", 200_000, b"]}"), None, 21_632, "those of 4096 messages"),
        ("chat/completions", repeated(CONTENT, b"[]", 200_000, b"]}]}"), None, 21_632, "those of 4096 messages"),
        ("chat/completions", DEEP, None, 32, "nested too deeply"),
        ("completions", repeated(b'{"prompt":[', b"1", 700_000, b"]}"), None, 533_504, "gateway.max_request_work"),
        ("completions", {"prompt": "a", "logit_bias": ALL_BIASES}, None, 10_368, "1024 biases"),
        ("completions", {"prompt": ["a"] * 12_000}, None, 10_368, "those of 128 prompts"),
        ("completions", {"prompt": [[1]] * 8000}, None, 5248, "those of 128 prompts"),
    ],
)  # fmt: skip
async def test_refused_by_name(site: Site, path: str, body: Any, param: str | None, figure: int, words: str) -> None:
    error = await refusal(site, path, body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert str(figure) in error["message"] and words in error["message"]
    assert not site.manager.submitted


@pytest.mark.parametrize(
    ("extra", "param", "largest"),
    [
        ({"prompt": [1, 2, 3], "max_tokens": 300, "n": 128, "logprobs": 20}, "n", "the answers"),
        ({"prompt": [7] * 190, "max_tokens": 1, "n": 128, "logprobs": 20, "echo": True}, "n", "the echo"),
        ({"prompt": [[7] * 300] * 100, "max_tokens": 1, "n": 1, "logprobs": 20, "echo": True}, "logprobs", "the echo"),
        ({"prompt": [[7] * 300] * 4, "max_tokens": 9, "n": 32, "logprobs": 20, "echo": True}, "n", "the echo"),
    ],
)  # fmt: skip
async def test_the_price_names_its_largest_part(site: Site, extra: dict[str, Any], param: str, largest: str) -> None:
    error = await refusal(site, "completions", extra)
    assert error["param"] == param
    assert f"The largest part is {largest}: " in error["message"]
    assert f"one may ask for {LIMITS.max_request_work} (gateway.max_request_work)" in error["message"]
    assert not site.manager.submitted


async def test_limits_are_the_configured_ones(open_site: OpenSite) -> None:
    limits = {"logit_biases": 2, "stop_length": 3, "choices": 2, "messages": 1}
    async with open_site(limits=limits, max_request_work=200) as site:
        for path, body, figure in (
            ("completions", {"prompt": "a", "logit_bias": {"1": 1, "2": 1, "3": 1}}, "at most 2"),
            ("completions", {"prompt": "a", "stop": "abcd"}, "at most 3"),
            ("completions", {"prompt": "a", "n": 3}, "at most 2"),
            ("completions", {"prompt": ["a"] * 3}, "may have 2"),
            ("completions", {"prompt": "a", "max_tokens": 150}, "may ask for 200"),
            (
                "completions",
                {"prompt": "a", "n": 2, "logit_bias": {"1": 1, "2": 1}, "max_tokens": 40},
                "may ask for 200",
            ),
            ("chat/completions", {"messages": CHAT["messages"] * 2}, "at most 1"),
        ):
            assert figure in (await refusal(site, path, body))["message"]


async def test_the_units_of_all_open_requests_are_bounded(open_site: OpenSite) -> None:
    """Beyond the limit a request waits outside with 429; plain ones always come in; what ends gives back."""
    async with open_site(max_open_work=1000) as site:
        site.manager.place = False
        held = {"prompt": "a", "n": 8, "max_tokens": 20}
        asking = asyncio.create_task(site.post("/v1/completions", held))
        await eventually(lambda: len(site.manager.submitted) == 8)
        budget = site.gateway.generator.budget
        assert 500 < budget.open_units <= 1000
        error = await refusal(site, "completions", held, status=429)
        assert "gateway.max_open_work" in error["message"] and str(budget.open_units) in error["message"]
        plain = asyncio.create_task(site.post("/v1/completions", {"prompt": "a", "max_tokens": 400}))
        await eventually(lambda: len(site.manager.submitted) == 9)
        never = await refusal(site, "completions", {**held, "n": 16})
        assert "all open requests together may hold 1000" in never["message"]
        for task in (asking, plain):
            task.cancel()
        await asyncio.gather(asking, plain, return_exceptions=True)
        await eventually(lambda: budget.open_units == 0)


async def test_a_refused_offer_gives_back_its_reservation(open_site: OpenSite) -> None:
    async with open_site(max_waiting_requests=8) as site:
        site.manager.place = False
        asking = asyncio.create_task(site.post("/v1/completions", {"prompt": "a", "n": 8}))
        await eventually(lambda: len(site.manager.submitted) == 8)
        before = site.gateway.generator.budget.open_units
        error = await refusal(site, "completions", {"prompt": "a", "n": 2}, status=429)
        assert "wait" in error["message"]
        assert site.gateway.generator.budget.open_units == before
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(site.nothing_left)


def test_honest_bodies_pass() -> None:
    """Long texts full of what looks like structure, quotes and backslashes; many messages with parts."""
    for text in ('[{"a":["b"]}]' * 50_000, '\\"' * 100_000, "\\" * 99_999, '"' * 100_001, "[" * 10_000):
        refuse_shape(json.dumps({"prompt": text}).encode(), LIMITS, chat=True)
        refuse_shape(json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), LIMITS, chat=True)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    refuse_shape(json.dumps({"messages": [{"role": "user", "content": parts}] * 4096}).encode(), LIMITS, chat=True)
    refuse_shape(json.dumps({"prompt": [[12345] * 1000] * 500}).encode(), LIMITS, chat=True)


def test_a_price_is_counts_alone() -> None:
    """The same lines for the smallest request and for one at every limit."""

    def call_of(**body: Any) -> parsing.Call:
        return parse_completion(json.dumps(body).encode(), {}, LIMITS, CARD)

    budget = RequestBudget(LIMITS, lambda text: len(text) // 16)
    small = call_of(prompt="a")
    biases = {str(i): 1 for i in range(1024)}
    large = call_of(prompt=[7] * 8000, logit_bias=biases, n=8, stop=["a" * 256] * 4, max_tokens=50, logprobs=20)

    def lines(call: parsing.Call, tokens: int) -> int:
        def work() -> None:
            budget.check(call)
            budget.price(call, [tokens], [call.max_tokens or 0])

        return lines_run(work)

    assert lines(large, 8000) <= lines(small, 1) + 10


async def test_bytes_that_are_no_tokens_of_the_prompt_are_taken(open_site: OpenSite) -> None:
    """White space of JSON, and turns that truncation drops: only a text that is tokenised may be too long for it."""
    turn = {"role": "user", "content": "quick brown fox " * 100}
    async with open_site() as site:
        chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}) + " " * (3 << 20)
        headers = {"Content-Type": "application/json"}
        async with site.session.post(site.url + "/v1/chat/completions", data=chat, headers=headers) as response:
            assert response.status == 200, await response.text()
        turns = {"input": [turn] * 1200 + [{"role": "user", "content": "Hi"}], "max_output_tokens": 2}
        status, answer = await site.post("/v1/responses", {**turns, "truncation": "auto", "store": False})
        assert status == 200, answer
        status, answer = await site.post("/v1/responses", {**turns, "store": False})
        assert status == 400 and "maximum context length" in answer["error"]["message"]


# -- built once ----------------------------------------------------------------------------------------------------


async def test_one_automaton_however_many_choices(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[StopAutomaton] = []

    class Counted(StopAutomaton):
        def __init__(self, stops: Any) -> None:
            super().__init__(stops)
            built.append(self)

    for module in (generator, choice):
        monkeypatch.setattr(module, "StopAutomaton", Counted)
    async with open_site() as site:
        stops = ["fox", *("x" * 64 for _ in range(3))]
        status, answer = await site.post(
            "/v1/completions", {"prompt": ["a"] * 2, "n": 64, "stop": stops, "max_tokens": 50}
        )
        assert status == 200
        assert len(built) == 1
        assert [choice["text"] for choice in answer["choices"]] == ["The quick brown "] * 128
        await eventually(site.nothing_left)


async def test_choices_share_biases_stop_tokens_and_prompt(site: Site) -> None:
    site.manager.place = False
    body = {"prompt": "hello there", "n": 16, "max_tokens": 2, "logit_bias": {str(i): 1 for i in range(200)}}
    asking = asyncio.create_task(site.post("/v1/completions", {**body, "stop_token_ids": [5, 6]}))
    await eventually(lambda: len(site.manager.submitted) == 16)
    requests = [entry.request for entry in site.gateway.streams.ledger.entries()]
    assert len(requests) == 16
    assert len({id(request.tokens) for request in requests}) == 1
    assert len({id(request.sampling.logit_bias) for request in requests}) == 1
    assert len({id(request.sampling.stop_token_ids) for request in requests}) == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_prompt_is_scored_by_its_first_choice_for_all(site: Site) -> None:
    body = {"prompt": ["quick brown fox", "hello"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": 3}
    status, answer = await site.post("/v1/completions", body)
    assert status == 200
    assert [request.sampling.prompt_logprobs for request in site.manager.submitted] == [2, -1, -1, 2, -1, -1]
    choices = answer["choices"]
    for first in (0, 3):
        alike = [{k: v for k, v in choice.items() if k != "index"} for choice in choices[first : first + 3]]
        assert alike[0] == alike[1] == alike[2]
        assert len({len(values) for values in alike[0]["logprobs"].values()}) == 1
    assert choices[0]["logprobs"]["token_logprobs"][:3] == [None, -0.5, -1.5]
    events = await site.stream("/v1/completions", body)
    for index in range(6):
        chunks = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in chunks) == choices[index]["text"]
        for name, whole in choices[index]["logprobs"].items():
            assert [value for c in chunks for value in c["logprobs"][name]] == whole


async def test_only_the_first_choice_computes_where_no_token_is_wanted(site: Site) -> None:
    body = {"prompt": "quick brown fox", "n": 4, "echo": True, "logprobs": 0, "max_tokens": 0}
    status, answer = await site.post("/v1/completions", body)
    assert status == 200
    assert len(site.manager.submitted) == 1
    assert [choice["text"] for choice in answer["choices"]] == ["quick brown fox"] * 4
    assert len({json.dumps(choice["logprobs"]) for choice in answer["choices"]}) == 1
    assert answer["usage"]["completion_tokens"] == 0


def biased(name: str) -> Sequence:
    sampling = SamplingParams(
        max_tokens=40, temperature=0.0, logit_bias={i: 0.5 for i in range(1024)}, repetition_penalty=1.2
    )
    return Sequence(Request(Attempt(name, 0), "g", [3] * 20, 20, sampling, 0.0), [3] * 20, None, 0, 0.0)


def test_arrays_are_built_once_per_request_not_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight biased and penalised rows over thirty steps: the dictionary is read once each, and a step runs as many
    lines of Python with 1024 biases as with one."""
    import torch

    built: list[int] = []
    of = LogitBias.of
    monkeypatch.setattr(LogitBias, "of", staticmethod(lambda bias: built.append(len(bias)) or of(bias)))
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, 16), 64, 0)
    sequences = [biased(str(index)) for index in range(8)]
    for sequence in sequences:
        assert kv.admit(sequence) == 0
    logits = torch.randn(8, 2000, generator=torch.Generator().manual_seed(1))
    rows_of_step = []
    for step in range(30):
        for sequence in sequences:
            assert kv.extend(sequence, sequence.known)
        rows = [Row(sequence, sequence.known - 1 if step else 0, 1 if step else 20) for sequence in sequences]
        batch, _ = BatchBuilder(kv).build(IterationPlan(rows=rows))
        tokens = sample(logits, batch.sampling).tokens.tolist()
        rows_of_step.append(batch.sampling)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
            sequence.computed = sequence.known - 1
    assert built == [1024] * 8
    for index in range(8):
        assert len({id(rows[index].logit_bias) for rows in rows_of_step}) == 1
        history = rows_of_step[-1][index].history
        assert history is not None and history.output_tokens == 29


def test_a_step_does_not_read_the_biases_in_python() -> None:
    import torch

    from cohort.common.engine.step.batch import SamplingRow

    logits = torch.zeros(1, 2000)

    def lines(entries: int) -> int:
        inputs = SamplingInputs.of(SamplingParams(max_tokens=1, logit_bias={i: 1.0 for i in range(entries)}), [1])
        assert inputs is not None
        row = SamplingRow(seed=1, position=2, temperature=0.0, logit_bias=inputs.bias)
        return lines_run(lambda: sample(logits, [row]))

    lines(1)
    assert lines(1024) == lines(1)


def test_a_long_history_costs_a_step_one_token() -> None:
    inputs = SamplingInputs.of(SamplingParams(max_tokens=1, presence_penalty=1.0), list(range(4000)))
    assert inputs is not None and inputs.history is not None
    history = inputs.history
    first = lines_run(lambda: history.extend([5]))
    for token in range(3000):
        history.extend([token % 700])
    assert lines_run(lambda: history.extend([5])) <= first
    said, counts = history.output_counts
    assert counts.sum() == 3002 and np.unique(said).size == said.size == 700
