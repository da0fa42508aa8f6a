"""The two generation endpoints over HTTP, byte for byte where clients depend on it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.common.messages import TokenLogprob
from cohort.common.types import Request
from cohort.services.gateway.generation.answering import Answering, Mean
from cohort.services.gateway.generation.choice import ScoredToken
from cohort.services.gateway.text.tokenizer import TokenText
from tests.services.gateway.cluster import scores
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


async def test_a_completion_has_openais_shape_and_our_extras_under_one_key(site: Site) -> None:
    status, body = await site.post("/v1/completions", {"prompt": "hello", "max_tokens": 100, "model": "tiny"})
    assert status == 200
    prompt = len(site.tokenizer.encode("hello", special_tokens=True))
    output = len(site.tokenizer.encode(ANSWER, special_tokens=False)) + 1
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "cohort"}
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    [extras] = body["cohort"]["requests"]
    assert (extras["class"], extras["attempts"], extras["instances"]) == ("rt", 1, ["worker-0"])
    assert extras["prediction"] == {"mean": 7.0, "p50": 6.0, "p90": 12.0, "p99": 20.0}
    assert set(extras["stages_s"]) == {
        "tokenize",
        "predict",
        "bucket",
        "prefill_queue",
        "prefill",
        "transfer",
        "first_decode",
    }


async def test_a_chat_completion(site: Site) -> None:
    status, body = await site.post("/v1/chat/completions", CHAT)
    assert (status, body["object"]) == (200, "chat.completion")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    [submitted] = site.manager.submitted
    text = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert submitted.tokens == site.tokenizer.encode(text, special_tokens=False)
    assert submitted.sampling.max_tokens == 512 - len(submitted.tokens)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 100}, "text_completion"),
        ("/v1/chat/completions", CHAT, "chat.completion.chunk"),
    ],
)
async def test_a_stream(site: Site, path: str, body: dict[str, Any], kind: str) -> None:
    events = await site.stream(path, body)
    *chunks, done = events
    assert done == "[DONE]"
    assert texts(events) == ANSWER
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("\ufffd" not in texts([chunk, done]) for chunk in chunks)
    assert texts([chunks[0], done])  # the first chunk is the first token, not a greeting
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert ["cohort" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    if kind == "chat.completion.chunk":
        assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


async def test_the_bytes_of_a_stream(site: Site) -> None:
    async with site.session.post(site.url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        data = await response.read()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["x-request-id"]
    assert data.endswith(b"\n\ndata: [DONE]\n\n")
    assert all(part.startswith(b"data: ") for part in data.split(b"\n\n")[:-1])


async def test_usage_comes_last_and_only_when_asked_for(site: Site) -> None:
    events = await site.stream("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 16
    assert all("usage" not in chunk for chunk in events[:-2])


async def test_continuous_usage(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await site.stream("/v1/chat/completions", {**CHAT, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in events[:-1]]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == counts[-2]


async def test_max_tokens_is_reported_as_length(site: Site) -> None:
    _, body = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == site.tokenizer.decode(
        site.tokenizer.encode(ANSWER, special_tokens=False)[:2], skip_special=True
    )


async def test_no_tokens_at_all_with_echo(site: Site) -> None:
    _, body = await site.post("/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 0, "echo": True})
    assert [choice["text"] for choice in body["choices"]] == ["ab", "c"]
    assert body["usage"]["completion_tokens"] == 0
    assert site.manager.submitted == []


async def test_echo_repeats_text_and_ids(site: Site) -> None:
    _, body = await site.post("/v1/completions", {"prompt": "Köln ", "echo": True, "max_tokens": 100})
    assert body["choices"][0]["text"] == "Köln " + ANSWER
    ids = site.tokenizer.encode("東京", special_tokens=False)
    events = await site.stream("/v1/completions", {"prompt": ids, "echo": True, "max_tokens": 100})
    assert texts(events) == "東京" + ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["quick Köln 🦊", [5, 6, 7], [9]])
async def test_echo_with_logprobs_scores_the_prompt(site: Site, prompt: Any, stream: bool) -> None:
    ids = site.tokenizer.encode(prompt, special_tokens=True) if isinstance(prompt, str) else prompt
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3}
    if stream:
        events = await site.stream("/v1/completions", body)
        choices = [chunk["choices"][0] for chunk in events[:-1]]
    else:
        choices = [(await site.post("/v1/completions", body))[1]["choices"][0]]
    text = "".join(choice["text"] for choice in choices)
    found = {key: [item for choice in choices for item in choice["logprobs"][key]] for key in choices[0]["logprobs"]}
    echo = prompt if isinstance(prompt, str) else site.tokenizer.decode(ids, skip_special=True)
    assert text.startswith(echo) and len(text) > len(echo)
    assert len(found["tokens"]) == len(ids) + 3 == len(found["text_offset"])
    assert found["token_logprobs"] == [None, *[-0.5 - index for index in range(len(ids) - 1)], -0.25, -0.25, -0.25]
    assert found["top_logprobs"][0] is None and all(found["top_logprobs"][1:])
    assert found["text_offset"][len(ids)] == len(echo) and found["text_offset"] == sorted(found["text_offset"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        special = offset == 0 and token not in text  # the one that begins every prompt is not part of its text
        assert special or token.startswith("bytes:") or text[offset:].startswith(token)
    [request] = site.manager.submitted
    assert (request.sampling.prompt_logprobs, request.sampling.max_tokens) == (2, 3)


async def test_a_lost_worker_costs_a_scored_prompt_nothing(open_site: OpenSite) -> None:
    """Lost before the first token and after it: the scores are there, once."""
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 8, "ignore_eos": True}
    async with open_site(lambda request: [9] * 8, step_s=0.03) as site:
        for wait_s in (0.0, 0.1):
            asking = asyncio.create_task(site.post("/v1/completions", body))
            await eventually(lambda: bool(site.manager.held()))
            await asyncio.sleep(wait_s)
            lost = site.manager.held()
            for worker in site.manager.workers:
                worker.cancel(lost)
            site.manager.lose(lost)
            status, answer = await asking
            assert (status, answer["cohort"]["requests"][0]["attempts"]) == (200, 2)
            scores = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert scores == [None, -0.5, -1.5, *[-0.25] * 8]


async def test_long_bodies_are_parsed_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same answers and the same errors."""
    import threading

    from cohort.services.gateway.requests import parsing

    threads: list[bool] = []

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return original(*args)

    original = parsing.parse_completion
    monkeypatch.setattr(parsing, "parse_completion", noting)
    for padding, in_main in ((0, True), (parsing.PARSE_AT_ONCE_BYTES, False)):
        for temperature, expected in ((0, 200), (9, 400)):
            body = {"prompt": "x", "max_tokens": 1, "temperature": temperature, "user": "u" * padding}
            assert (await site.post("/v1/completions", body))[0] == expected
        assert threads[-2:] == [in_main, in_main]


async def test_a_prompt_scored_and_nothing_more(site: Site) -> None:
    """As evaluation harnesses ask: no token of the answer is wanted."""
    body = {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    _, answer = await site.post("/v1/completions", body)
    for ids, choice in zip(body["prompt"], answer["choices"], strict=True):  # type: ignore[call-overload]
        assert choice["text"] == site.tokenizer.decode(ids, skip_special=True)
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert [extras["token_ids"] for extras in answer["cohort"]["requests"]] == [[], []]


async def test_scores_that_are_missing_are_an_error(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says too little must not make a text that looks complete."""
    from tests.services.gateway import cluster

    monkeypatch.setattr(cluster, "prompt_scores", lambda request: [])
    async with open_site() as site:
        status, body = await site.post("/v1/completions", {"prompt": [5, 6, 7], "echo": True, "logprobs": 0})
        assert (status, "0 log-probabilities for a prompt of 3" in body["error"]["message"]) == (500, True)


async def test_prompts_and_choices_are_requests_of_their_own(open_site: OpenSite) -> None:
    def script(request: Request) -> list[int]:
        return [*request.tokens[: request.prompt_tokens], 5 + request.sampling.seed % 50, 2]

    async with open_site(script) as site:
        a, b = (site.tokenizer.encode(text, special_tokens=True) for text in ("aa", "quick"))
        status, body = await site.post("/v1/completions", {"prompt": ["aa", "quick"], "n": 2, "seed": 4})
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        starts = [choice["text"] for choice in body["choices"]]
        assert [text.startswith("aa") for text in starts] == [True, True, False, False]
        assert starts[0] != starts[1]
        assert body["usage"]["prompt_tokens"] == len(a) + len(b)
        assert len({request.request_id for request in site.manager.submitted}) == 4
        assert len(site.predictor.asked) == 2  # one question per prompt
        again = await site.post("/v1/completions", {"prompt": ["aa", "quick"], "n": 2, "seed": 4})
        assert [choice["text"] for choice in again[1]["choices"]] == starts
        events = await site.stream("/v1/completions", {"prompt": [a, b], "n": 2, "seed": 4})
        assert [texts(events, index) for index in range(4)] == starts


async def test_seeds_are_chosen_when_there_is_none(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "x"})
    await site.post("/v1/completions", {"prompt": "x"})
    await site.post("/v1/completions", {"prompt": "x", "seed": 3})
    seeds = [request.sampling.seed for request in site.manager.submitted]
    assert seeds[0] != seeds[1] and seeds[2] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_answer_and_frees_the_worker(open_site: OpenSite, stream: bool) -> None:
    async with open_site(step_s=0.005) as site:
        body = {"prompt": "x", "max_tokens": 100, "stop": ["never", "n Köln"]}
        expected = ANSWER[: ANSWER.index("n Köln")]
        if stream:
            events = await site.stream("/v1/completions", body)
            assert texts(events) == expected
            last = events[-2]
        else:
            _, last = await site.post("/v1/completions", body)
            assert last["choices"][0]["text"] == expected
            assert last["usage"]["completion_tokens"] < len(site.tokenizer.encode(ANSWER, special_tokens=False))
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["cohort"]["requests"][0]["stop_string"] == "n Köln"
        await eventually(site.nothing_left)
        assert site.manager.cancelled


async def test_ignore_eos_and_min_tokens_reach_the_workers(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "x", "ignore_eos": True, "min_tokens": 3, "stop_token_ids": [9]})
    [request] = site.manager.submitted
    assert (request.sampling.stop_token_ids, request.sampling.min_tokens) == ((9,), 3)


async def test_completion_logprobs(site: Site) -> None:
    _, body = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 100, "logprobs": 2})
    logprobs = body["choices"][0]["logprobs"]
    count = body["usage"]["completion_tokens"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    assert logprobs["tokens"][0] == "The" and logprobs["text_offset"][:2] == [0, 3]
    assert logprobs["token_logprobs"][0] == -0.25
    assert len(logprobs["top_logprobs"][0]) == 2 and "The" in logprobs["top_logprobs"][0]
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])  # the fox takes several tokens


async def test_chat_logprobs_stream_and_not_are_the_same(site: Site) -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": 3}
    _, body = await site.post("/v1/chat/completions", asked)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert b"".join(bytes(item["bytes"]) for item in content) == (ANSWER + "<|end|>").encode()
    token = site.tokenizer.encode("The", special_tokens=False)[0]
    expected = scores(site.manager.submitted[0], token)[0]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == expected.top_logprobs
    events = await site.stream("/v1/chat/completions", asked)
    streamed = [
        item
        for event in events[:-1]
        if event["choices"][0]["logprobs"]
        for item in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


async def test_no_top_logprobs_still_scores_the_token(site: Site) -> None:
    _, body = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logprobs": 0})
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"The": -0.25}]
    _, chat = await site.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "logprobs": True})
    assert chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_special_tokens_are_shown_on_request(site: Site) -> None:
    _, body = await site.post("/v1/chat/completions", {**CHAT, "skip_special_tokens": False})
    assert body["choices"][0]["message"]["content"] == ANSWER + "<|end|>"


async def test_request_ids_are_echoed_and_travel(site: Site) -> None:
    headers = {"x-request-id": "trace-17"}
    async with site.session.post(site.url + "/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        assert response.headers["x-request-id"] == "trace-17"
    async with site.session.post(site.url + "/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        body = await response.json()
    first, second = (request.request_id for request in site.manager.submitted)
    assert first != second  # a client may repeat its ids
    assert first.startswith("trace-17-") and body["id"] == "cmpl-" + second
    async with site.session.get(site.url + "/health") as response:
        assert response.headers["x-request-id"]


async def test_class_and_slo_reach_the_manager(site: Site) -> None:
    headers = {"x-cohort-class": "be", "x-cohort-ttft-slo-ms": "1500"}
    await site.post("/v1/completions", {"prompt": "x", "priority": 4}, headers=headers)
    [request] = site.manager.submitted
    assert (request.traffic_class, request.slo.ttft_s, request.slo.tpot_s, request.priority) == ("be", 1.5, 0.0, 4)


async def test_a_prediction_rides_with_the_request_and_the_end_is_learned(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "x", "max_tokens": 100, "stop": "zzz"})
    [request] = site.manager.submitted
    assert request.prediction is not None and request.prediction.mean == 7
    await eventually(lambda: bool(site.predictor.observed))
    [observed] = site.predictor.observed
    assert (observed.output_tokens, observed.truncated, observed.facts.stop_strings) == (
        len(site.tokenizer.encode(ANSWER, special_tokens=False)) + 1,
        False,
        1,
    )


async def test_a_slow_predictor_is_not_waited_for_and_revised_later(open_site: OpenSite) -> None:
    async with open_site(predictor_delay_s=0.1, settings={"predictor_wait_s": 0.005}, step_s=0.02) as site:
        status, body = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 100})
        assert status == 200
        assert site.manager.submitted[0].prediction.source == "default"
        assert [message.prediction.mean for message in site.manager.revised] == [7]
        assert body["cohort"]["requests"][0]["prediction"]["mean"] == 7


async def test_many_streams_at_once(open_site: OpenSite) -> None:
    async with open_site(step_s=0.001) as site:
        for number in range(3):
            site.manager.add_worker(f"extra-{number}")
        results = await asyncio.gather(
            *(site.stream("/v1/completions", {"prompt": f"{number}", "max_tokens": 100}) for number in range(60))
        )
        assert [texts(events) for events in results] == [ANSWER] * 60
        await eventually(site.nothing_left)


async def test_a_long_prompt_is_refused_with_both_numbers(site: Site) -> None:
    status, body = await site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]})
    assert status == 400
    assert "512 tokens" in body["error"]["message"]
    assert body["error"]["param"] == "messages"
    status, body = await site.post("/v1/completions", {"prompt": [5] * 510, "max_tokens": 3})
    assert (status, all(number in body["error"]["message"] for number in ("512", "513", "510"))) == (400, True)


async def test_half_a_surrogate_pair_is_the_clients_error(site: Site) -> None:
    for path, data in (
        ("/v1/completions", '{"prompt": "a\\udc80b"}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a\\udc80b"}]}'),
        ("/v1/completions", '{"prompt": "a", "model": "\\udc80"}'),
    ):
        async with site.session.post(
            site.url + path, data=data, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status in (400, 404), await response.text()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompts_log_probabilities_come_beside_the_answer(site: Site, path: str) -> None:
    prompt = (
        {"prompt": "Köln and a fox", "n": 2}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    status, body = await site.post(path, {**prompt, "prompt_logprobs": 2, "max_tokens": 3})
    assert status == 200
    request = next(each for each in site.manager.submitted if each.sampling.prompt_logprobs >= 0)
    assert (request.sampling.prompt_logprobs, request.sampling.logprobs) == (2, -1)
    found = [choice.get("prompt_logprobs") for choice in body["choices"]]
    if path != "/v1/completions":
        assert found == [None]  # the chat's own place is beside its choices
        found = [body["prompt_logprobs"]]
    for places in found:
        assert places[0] is None and len(places) == request.prompt_tokens
        for token, place in zip(request.tokens[1:], places[1:], strict=True):
            own = place[str(token)]
            assert own["logprob"] <= 0
            assert own["decoded_token"] == TokenText(site.tokenizer).token_bytes(token).decode("utf-8", "replace")
            assert [each["rank"] for each in place.values()][:2] == [1, 2]
    assert all(choice["logprobs"] is None for choice in body["choices"])


async def test_the_likeliest_of_several_choices_are_the_answer(site: Site) -> None:
    body = {"prompt": ["ab", "cd"], "n": 1, "best_of": 3, "max_tokens": 3, "return_token_ids": True}
    status, answer = await site.post("/v1/completions", body)
    assert status == 200 and len(site.manager.submitted) == 6
    assert all(request.sampling.logprobs == 0 for request in site.manager.submitted)
    assert [(choice["index"], choice["logprobs"]) for choice in answer["choices"]] == [(0, None), (1, None)]
    assert [each["index"] for each in answer["cohort"]["requests"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 18


def test_means_choose() -> None:
    def scored(*logprobs: float) -> list[ScoredToken]:
        return [ScoredToken(1, TokenLogprob(logprob), 0) for logprob in logprobs]

    means = [Mean() for _ in range(4)]
    for mean, logprobs in zip(means, ([-1.0], [-0.5, -0.4], [-0.1, -9.0], []), strict=True):
        mean.add(scored(*logprobs))
    assert [mean.value for mean in means] == pytest.approx([-1.0, -0.45, -4.55, 0.0])
    call = SimpleNamespace(n=3, returned_choices=2)
    answering = SimpleNamespace(call=call)
    assert Answering.likeliest(answering, [-1.0, -0.45, -4.55, -3.0, -2.0, -1.0]) == [1, 0, 5, 4]  # type: ignore[arg-type]
    call.returned_choices = 3
    assert Answering.likeliest(answering, [-1.0, -0.45, -4.55]) == [0, 1, 2]  # type: ignore[arg-type]
