"""Whatever a client writes into any place of any body, a gateway answers it: never a 5xx, always JSON, soon.

Attack: every value of a valid body, in turn and in pairs, replaced by values of every JSON type and by what JSON can
only almost say: integers of thousands of digits, 1e999, NaN, half surrogates, bytes that are no UTF-8, texts of
megabytes, nesting without end, a key twice, a key nobody knows. The bodies are bytes, because no JSON library writes
most of these. The gateway is the real one on a port, its cluster is scripted, so what is valid completes.

A batch's lines are bodies, too: whatever lies in one, the batch ends and the line has an answer or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.examples import another_of_its_kind, examples, nightly, run_in_thread
from tests.services.gateway.conftest import OpenSite, Site

ANSWER_S = 30.0
"""A bound that a busy machine keeps, and no endless loop does."""
NO_WORKER = {503, 504}
"""Documented for a cluster that is away; ours is there."""

COMPLETION: dict[str, Any] = {
    "prompt": "The sea",
    "max_tokens": 3,
    "model": "tiny",
    "min_tokens": 0,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_token_ids": [7],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_token_ids": False,
    "n": 1,
    "best_of": 1,
    "stream": False,
    "stream_options": None,
    "priority": 0,
    "cohort": {"class": "rt", "ttft_slo_ms": 100, "tpot_slo_ms": 10, "deadline_ms": 5000, "online": True},
    "user": "u",
    "metadata": {"k": "v"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "c",
    "use_beam_search": False,
    "echo": False,
    "prompt_logprobs": None,
    "logprobs": 1,
    "add_special_tokens": True,
    "suffix": None,
    "response_format": {"type": "text"},
    "structured_outputs": {"choice": ["a", "b"], "json_object": False},
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_decoding_backend": "auto",
}
_CHAT_ONLY: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "x"}],
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": 1,
    "add_generation_prompt": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "parallel_tool_calls": False,
    "prediction": None,
    "structured_outputs": None,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
    "tool_choice": "auto",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "reasoning_effort": None,
    "verbosity": None,
}
_COMPLETION_ONLY = ("prompt", "max_tokens", "logprobs", "echo", "add_special_tokens", "suffix")
CHAT = {name: value for name, value in COMPLETION.items() if name not in _COMPLETION_ONLY} | _CHAT_ONLY
BATCH: dict[str, Any] = {
    "input_file_id": "file-000000000000000000000000",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"k": "v"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "x"},
        {"role": "user", "content": "So?"},
    ],
    "instructions": "Be brief.",
    "previous_response_id": None,
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 1,
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 3,
    "metadata": {"k": "v"},
    "truncation": "auto",
    "store": True,
    "stream": False,
    "top_k": 5,
    "seed": 1,
    "priority": 0,
    "cohort": {"class": "rt"},
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "c",
    "prompt_cache_retention": "24h",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
    "max_tool_calls": 1,
    "reasoning": {"effort": None},
    "background": False,
    "conversation": None,
    "prompt": None,
    "context_management": None,
    "moderation": None,
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3,
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "y", "is_error": False},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
    "tool_choice": {"type": "none", "disable_parallel_tool_use": True},
    "output_config": {"format": None, "effort": None},
    "cache_control": None,
    "thinking": {"type": "disabled"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stream": False,
    "seed": 1,
    "priority": 0,
    "cohort": {"class": "rt"},
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "container": None,
    "mcp_servers": [],
    "context_management": None,
}
COUNTED = {
    name: MESSAGES[name]
    for name in ("model", "messages", "system", "tools", "tool_choice", "output_config", "cache_control", "thinking")
}
TOKENIZED: dict[str, Any] = {
    "model": "tiny",
    "prompt": None,
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "return_token_strs": True,
}
LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": COMPLETION}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/batches": BATCH,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNTED,
    "/tokenize": TOKENIZED,
    "/detokenize": {"model": "tiny", "tokens": [7, 8]},
}

ODD: list[bytes] = [
    b"null",
    b"true",
    b"0",
    b"-1",
    b"-0.0",
    b"1.5",
    b"2147483648",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"9" * 5000,
    b"1" + b"0" * 400,
    b"1e999",
    b"-1e999",
    b"1e-999",
    b"0." + b"9" * 400,
    b"NaN",
    b"Infinity",
    b'""',
    b'"x"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"\\udc80\\ud800"',
    b'"\xff\xfe"',
    b'"\xc0\xaf"',
    b'"\xed\xa0\x80"',
    '"🦊é\u202e"'.encode(),
    b'"\\',
    b'"' + b"a" * 100_000 + b'"',
    b'"' + b"\\u0000" * 20_000 + b'"',
    b'"../../etc/passwd"',
    b"[]",
    b"[null]",
    b"[[]]",
    b"[1,2]",
    b"[-1]",
    b"[" + b"1," * 20_000 + b"1]",
    b"[" * 50_000,
    b"[" * 500 + b"]" * 500,
    b"{}",
    b'{"":null}',
    b'{"a":{"a":{"a":1}}}',
    b'{"1":2,"1":3}',
    b'{"\\ud800":1}',
    b'{"a":' * 400 + b"1" + b"}" * 400,
    b'{"type":"text","text":[]}',
    b'[{"type":"text","text":5}]',
    b'[{"role":5,"content":{}}]',
    b'[{"role":"user","content":[{"type":"text","text":"\\ud800"}]}]',
    b"",
    b" ",
    b"}",
]

_text = st.text(max_size=20)
_any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
VALUES = st.sampled_from(ODD) | _any_json | st.binary(max_size=8)


def positions(body: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a value stands, containers and what is in them."""
    if here:
        yield here
    if isinstance(body, Mapping):
        for name, value in body.items():
            yield from positions(value, (*here, name))
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from positions(value, (*here, index))


def written(body: Any, odd: Mapping[tuple[str | int, ...], bytes], here: tuple[str | int, ...] = ()) -> bytes:
    """`body` as JSON, with bytes of our own in some places."""
    if here in odd:
        return odd[here]
    if isinstance(body, Mapping):
        members = [
            json.dumps(name).encode() + b":" + written(value, odd, (*here, name)) for name, value in body.items()
        ]
        return b"{" + b",".join(members) + b"}"
    if isinstance(body, list):
        return b"[" + b",".join(written(value, odd, (*here, index)) for index, value in enumerate(body)) + b"]"
    return json.dumps(body).encode()


PLACES = {path: list(positions(body)) for path, body in BODIES.items()}
LINE_PLACES = list(positions(LINE))


async def send(site: Site, path: str, data: bytes, method: str = "POST") -> int:
    """The property itself, for one request; its status."""
    headers = {"Content-Type": "application/json"}
    async with asyncio.timeout(ANSWER_S):
        async with site.session.request(method, site.url + path, data=data, headers=headers) as response:
            body = await response.read()
    assert response.status < 500 or response.status in NO_WORKER, (response.status, data[:300], body[:300])
    assert response.status not in NO_WORKER, (response.status, data[:300], body[:300])
    if response.content_type == "text/event-stream":
        assert response.status == 200 and body.endswith(b"\n\n")
        return response.status
    assert response.content_type == "application/json", (data[:300], body[:300])
    answer = msgspec.json.decode(body)
    if response.status >= 400:
        error = answer["error"]
        if path.startswith("/v1/messages"):
            assert set(answer) == {"type", "error"} and set(error) == {"type", "message"}, answer
            assert 0 < len(error["message"]) < 2100, error["message"][:300]
            return response.status
        assert set(error) == {"message", "type", "param", "code"} and isinstance(error["code"], str), answer
        assert 0 < len(error["message"]) < 2100, error["message"][:300]
    return response.status


@asynccontextmanager
async def fuzzed(open_site: OpenSite, **options: Any) -> AsyncIterator[Site]:
    # Small enough that a valid request with the largest `n` ends, and that bodies beyond a limit are tried, too.
    async with open_site(max_body_bytes=2_000_000, **options) as site:
        yield site


def for_all(site: Site, sequence: Any, share: float) -> Any:
    """Hypothesis is synchronous, the site lives in the running loop: examples are asked for in a thread."""
    loop = asyncio.get_running_loop()

    @settings(
        max_examples=examples(share),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    @given(sequence)
    def run(case: tuple[str, bytes]) -> None:
        path, data = case
        asyncio.run_coroutine_threadsafe(send(site, path, data), loop).result(ANSWER_S + 10)

    return run_in_thread(run)


@pytest.mark.parametrize("path", BODIES)
async def test_the_bodies_are_valid_as_they_stand(open_site: OpenSite, path: str) -> None:
    """Otherwise every example would be refused for the same reason, and nothing tried."""
    async with fuzzed(open_site) as site:
        wanted = 400 if path == "/v1/batches" else 200  # there is no such file
        assert await send(site, path, written(BODIES[path], {})) == wanted


ALL_PLACES = ("/v1/completions", "/v1/chat/completions", "/v1/batches")
"""By default; the others' fields are sampled below."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path if path in ALL_PLACES else pytest.param(path, marks=another_of_its_kind()) for path in BODIES]
)
async def test_every_odd_value_in_every_place(open_site: OpenSite, path: str) -> None:
    """No sampling misses one place; by default each meets a third of the values, and each value a third of the places.
    In turn, so that the answer to each is bounded by itself."""
    places = PLACES[path]
    if path == "/v1/chat/completions" and not nightly():  # the others are fields of a completion, read by the same code
        places = [place for place in places if place[0] in _CHAT_ONLY]
    async with fuzzed(open_site) as site:
        for (at, place), (which, odd) in itertools.product(enumerate(places), enumerate(ODD)):
            if not nightly() and (at + which) % 3:
                continue
            try:
                await send(site, path, written(BODIES[path], {place: odd}))
            except Exception as error:
                error.add_note(f"{path} {place} = {odd[:80]!r}")
                raise
        assert await site.get("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("path", BODIES)
async def test_several_odd_values_at_once(open_site: OpenSite, path: str) -> None:
    cases = st.dictionaries(st.sampled_from(PLACES[path]), VALUES, min_size=1, max_size=3).map(
        lambda odd: (path, written(BODIES[path], odd))
    )
    async with fuzzed(open_site) as site:
        await for_all(site, cases, 1.0)


@pytest.mark.parametrize("path", BODIES)
async def test_fields_of_one_body_alone(open_site: OpenSite, path: str) -> None:
    """Without the other fields, so that no earlier refusal hides a later one."""
    wanted = ("prompt", "messages", "input", "model", *BATCH)
    needed = [name for name in wanted if name in BODIES[path] and name != "metadata"]

    def body(choice: tuple[str, bytes]) -> tuple[str, bytes]:
        small = {name: BODIES[path][name] for name in needed} | {choice[0]: None}
        for limit in ("max_tokens", "max_output_tokens"):
            if limit in BODIES[path] or (limit == "max_tokens" and path == "/v1/chat/completions"):
                small.setdefault(limit, 3)
        return path, written(small, {(choice[0],): choice[1]})

    async with fuzzed(open_site) as site:
        await for_all(site, st.tuples(st.sampled_from(list(BODIES[path])), VALUES).map(body), 1.0)


async def test_bytes_that_are_no_body(open_site: OpenSite) -> None:
    cases = st.tuples(st.sampled_from(list(BODIES)), st.binary(max_size=200) | st.sampled_from(ODD))
    async with fuzzed(open_site) as site:
        await for_all(site, cases, 1.0)


@pytest.mark.parametrize("odd", ["%00", "%ff", "..%2f..%2fetc", "a" * 3000, "%ed%a0%80", "{}", "%F0%9F%A6%8A", "*"])
async def test_odd_names_in_addresses(open_site: OpenSite, odd: str) -> None:
    import yarl

    async with fuzzed(open_site) as site:
        for method, path in (
            ("GET", "/v1/models/{}"),
            ("GET", "/v1/files/{}"),
            ("DELETE", "/v1/files/{}"),
            ("GET", "/v1/files/{}/content"),
            ("GET", "/v1/batches/{}"),
            ("POST", "/v1/batches/{}/cancel"),
            ("GET", "/v1/files?limit={}"),
            ("GET", "/v1/files?after={}"),
            ("GET", "/v1/batches?after={}"),
            ("GET", "/v1/files?order={}"),
            ("GET", "/v1/files?purpose={}"),
            ("GET", "/v1/responses/{}"),
            ("DELETE", "/v1/responses/{}"),
            ("GET", "/v1/responses/{}/input_items"),
            ("POST", "/v1/responses/{}/cancel"),
        ):
            url = yarl.URL(site.url + path.format(odd), encoded=True)
            async with asyncio.timeout(ANSWER_S), site.session.request(method, url) as response:
                body = await response.json()
            assert response.status < 500, (method, path, odd, body)


FORM = b'--B\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


async def test_odd_upload_forms(open_site: OpenSite) -> None:
    """Fields, names and contents of the form: what is accepted is one file of purpose batch, all else a 4xx."""
    part = st.tuples(
        st.sampled_from(
            [b"purpose", b"file", b"expires_after[anchor]", b"expires_after[seconds]", b"", b"\xff", b'a"b']
        ),
        st.sampled_from(
            [b"", b'; filename="x.jsonl"', b'; filename="../../x"', b'; filename="\xff"', b"; filename*=x"]
        ),
        st.sampled_from([b"batch", b"created_at", b"3600", b"9" * 5000, b"\xff", b"", b"x" * 10_000])
        | st.binary(max_size=20),
    )
    forms = st.tuples(st.lists(part, max_size=5), st.sampled_from([b"--B--\r\n", b"--B\r\n", b"", b"--C--"]))
    loop = asyncio.get_running_loop()

    async def upload(site: Site, data: bytes) -> None:
        headers = {"Content-Type": "multipart/form-data; boundary=B"}
        async with asyncio.timeout(ANSWER_S):
            async with site.session.post(site.url + "/v1/files", data=data, headers=headers) as response:
                answer = await response.json()
        assert response.status < 500, (data, answer)
        assert ("error" in answer) == (response.status >= 400)

    async with fuzzed(open_site, limits={"upload_idle_s": 5.0}) as site:

        @settings(max_examples=examples(1.0), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(forms)
        def run(form: tuple[list[tuple[bytes, bytes, bytes]], bytes]) -> None:
            data = b"".join(FORM % one for one in form[0]) + form[1]
            asyncio.run_coroutine_threadsafe(upload(site, data), loop).result(ANSWER_S + 10)

        await run_in_thread(run)


async def run_batch(site: Site, line: bytes) -> dict[str, Any]:
    """One batch of `line` and a good one; the batch when it has ended. The odd line is the first: of that one the
    batch takes its model."""
    good = json.dumps({**LINE, "custom_id": "good"}).encode()
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", line.replace(b"\n", b" ") + b"\n" + good + b"\n", filename="in.jsonl")
    async with site.session.post(site.url + "/v1/files", data=form) as response:
        assert response.status == 200
        file_id = (await response.json())["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, batch = await site.post("/v1/batches", body)
    assert status == 200, batch
    async with asyncio.timeout(ANSWER_S):
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            _, batch = await site.get(f"/v1/batches/{batch['id']}")
    return dict(batch)


async def test_whatever_lies_in_a_line_the_batch_ends(open_site: OpenSite) -> None:
    cases = st.dictionaries(st.sampled_from(LINE_PLACES), VALUES, min_size=1, max_size=2).map(
        lambda odd: written(LINE, odd)
    )
    loop = asyncio.get_running_loop()
    async with fuzzed(open_site, limits={"unfinished_batches": 4}) as site:

        @settings(max_examples=examples(0.5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(cases)
        @example(written(LINE, {("body", "model"): b"1e999"}))
        @example(written(LINE, {("body", "model"): b"9" * 5000}))
        @example(written(LINE, {("body", "model"): b'"\xff"'}))
        def run(line: bytes) -> None:
            batch = asyncio.run_coroutine_threadsafe(run_batch(site, line), loop).result(ANSWER_S + 10)
            assert batch["status"] in ("completed", "failed")

        await run_in_thread(run)
