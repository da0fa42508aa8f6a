"""`GET /`, as a browser and as a program."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import msgspec
import pytest

from cohort.common.http.static_pages import CONTENT_POLICY
from cohort.services.gateway.apis import token_api
from cohort.services.gateway.apis.messages_api_bodies import CountTokensBody, MessagesBody
from cohort.services.gateway.apis.responses_api_bodies import ResponsesBody
from cohort.services.gateway.apis.token_api import SLICE_TOKENS, Tokenized, tokenized_json
from cohort.services.gateway.front_page import DOCS_PATH
from cohort.services.gateway.http.bodies import ChatBody, CompletionBody
from cohort.services.gateway.text import text_budget
from cohort.services.gateway.text.tokenizer import Tokenizer
from tests.services.gateway.conftest import OpenSite
from tests.services.gateway.tiny_model import CONTEXT


async def test_a_program_is_told_name_version_and_links(open_site: OpenSite) -> None:
    async with open_site() as site:
        status, body = await site.get("/")
        assert (status, body["name"], body["model"]) == (200, "cohort", "tiny")
        for name, link in body["links"].items():
            if name not in ("live_page",):
                async with site.session.get(site.url + link) as response:
                    assert response.status in (200, 503), link  # 503: not ready


async def test_a_browser_here_is_led_to_the_live_page_and_one_elsewhere_to_the_docs(open_site: OpenSite) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with open_site(allowed_hosts=("models.example",)) as site:
        async with site.session.get(site.url + "/", headers=browser, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, "http://127.0.0.1:8001/")
        away = {**browser, "Host": "models.example"}
        async with site.session.get(site.url + "/", headers=away, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, DOCS_PATH)


async def test_what_the_request_says_never_becomes_part_of_the_address(open_site: OpenSite) -> None:
    async with open_site(api_keys=("k",), allowed_hosts=("evil.example",)) as site:
        headers = {"Accept": "text/html", "Host": "evil.example", "X-Forwarded-Host": "evil.example"}
        async with site.session.get(site.url + "//evil.example", headers=headers, allow_redirects=False) as response:
            assert response.status == 404
        async with site.session.get(site.url + "/", headers=headers, allow_redirects=False) as response:
            assert "evil" not in response.headers["Location"]


async def test_the_api_is_documented_from_what_parses_it(open_site: OpenSite) -> None:
    async with open_site() as site:
        status, document = await site.get("/openapi.json")
        assert status == 200 and document["openapi"].startswith("3.1")
        schemas = document["components"]["schemas"]
        for body in (ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody):
            fields = {field.encode_name for field in msgspec.structs.fields(body)}
            assert set(schemas[body.__name__]["properties"]) == fields
        assert not [name for name in schemas if "." in name]  # no two structs have one name
        wrong = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["$ref"]
        wrong = document["components"]["responses"][wrong.removeprefix("#/components/responses/")]
        assert wrong["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicError")
        text = msgspec.json.encode(document).decode()
        references = {part.partition('"')[0] for part in text.split('"$ref":"#/components/schemas/')[1:]}
        assert references and references <= set(schemas)
        routes = site.gateway.application(_NoBatches()).router.routes()
        served = {
            (route.method.lower(), route.resource.canonical)
            for route in routes
            if route.resource is not None and route.method != "HEAD"
            if not route.resource.canonical.startswith("/chat/")  # files of that page
        }
        documented = {(method, path) for path, methods in document["paths"].items() for method in methods}
        of_batches = {(method, path) for method, path in documented if "/files" in path or "/batches" in path}
        assert documented - of_batches == served and len(of_batches) == 9


async def test_the_docs_need_nothing_from_elsewhere(open_site: OpenSite) -> None:
    async with open_site() as site, site.session.get(site.url + DOCS_PATH) as response:
        page = await response.text()
        assert response.content_type == "text/html" and "temperature" in page and "/v1/chat/completions" in page
        assert response.headers["Content-Security-Policy"] == CONTENT_POLICY and "`" not in page
        addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert addresses and all(address[0] in "/#" for address in addresses)
        inside = {address[1:] for address in addresses if address[0] == "#"}
        assert inside and inside <= set(re.findall(r'id="([^"]*)"', page))
        for address in {each for each in addresses if each[0] == "/"}:
            async with site.session.get(site.url + address) as linked:
                assert linked.status == 200, address


async def test_tokens_and_text(open_site: OpenSite) -> None:
    async with open_site(api_keys=("k",)) as site:
        key = {"Authorization": "Bearer k"}
        text = "Grüße aus 東京 42"
        assert (await site.post("/tokenize", {"prompt": text}))[0] == 401
        status, found = await site.post("/tokenize", {"prompt": text, "return_token_strs": True}, headers=key)
        assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["tokens"] == site.tokenizer.encode(text, special_tokens=True)
        status, back = await site.post("/detokenize", {"tokens": found["tokens"]}, headers=key)
        assert (status, back) == (200, {"prompt": text})
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        status, found = await site.post("/tokenize", chat, headers=key)
        spelled = site.tokenizer.decode(found["tokens"], skip_special=False)
        assert spelled == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", **chat}, "prompt"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ):
            status, answer = await site.post(path, body, headers=key)
            assert (status, answer["error"]["param"]) == (400, param)
        assert (await site.post("/tokenize", {"prompt": "x", "model": "other"}, headers=key))[0] == 404


async def test_at_most_four_contexts_are_tokenised(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site() as site:
        most = 4 * CONTEXT
        ids = {"tokens": site.tokenizer.encode("x", special_tokens=False) * most}
        assert (await site.post("/detokenize", ids)) == (200, {"prompt": "x" * most})
        text = "x" * most
        status, found = await site.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert (status, found["count"]) == (200, most)
        chat = {"messages": [{"role": "user", "content": text}]}
        for path, body, param in (
            ("/tokenize", {"prompt": text + "x"}, "prompt"),
            ("/tokenize", chat, "messages"),
            ("/detokenize", {"tokens": [*ids["tokens"], 5]}, "tokens"),
        ):
            status, answer = await site.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert f"at most {most} are taken: 4 contexts" in answer["error"]["message"]
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
        status, answer = await site.post("/tokenize", {"prompt": "word " * 100_000})
        assert status == 400 and "prompt has at least" in answer["error"]["message"]


async def test_an_answer_is_made_with_its_text_however_many_wait(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One admission each: once its text is tokenised, an answer neither waits in line again nor is refused by it."""
    monkeypatch.setattr(text_budget, "INLINE_BYTES", 0)
    monkeypatch.setattr(text_budget, "THREAD_BYTES", 0)
    monkeypatch.setattr(text_budget, "MOST_BYTES", 100)
    monkeypatch.setattr(text_budget, "MOST_WAITING", 400)
    async with open_site() as site:
        budget = site.gateway.generator.served.tokenizer.texts
        submitted: list[int] = []
        threads = budget._threads
        budget._threads = SimpleNamespace(submit=lambda work: (submitted.append(1), threads.submit(work))[1])
        body = {"prompt": "x" * 100, "return_token_strs": True}
        answers = await asyncio.gather(*(site.post("/tokenize", body) for _ in range(5)))
        assert [status for status, _ in answers] == [200] * 5 and len(submitted) == 5
        assert all(len(found["token_strs"]) == found["count"] for _, found in answers)


@pytest.mark.parametrize("count", [0, 1, SLICE_TOKENS, 3 * SLICE_TOKENS + 1])
@pytest.mark.parametrize("strings", [False, True])
def test_slices_of_an_answer_are_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, count: int, strings: bool
) -> None:
    sizes: list[int] = []
    encode = token_api._encode
    tokens = [number % 390 for number in range(count)]
    pieces = [tokenizer.piece(token) or "" for token in tokens] if strings else None
    monkeypatch.setattr(token_api, "_encode", lambda part: (sizes.append(len(part)), encode(part))[1])
    body = tokenized_json(tokenizer, tokens, 512, strings=strings)
    assert body == encode(Tokenized(count, 512, tokens, pieces))
    assert sum(sizes) == count * (1 + strings) and max(sizes, default=0) <= SLICE_TOKENS


class _NoBatches:
    def routes(self) -> list[object]:
        return []
