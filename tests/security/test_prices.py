"""The rule: whatever a request makes us compute or hold is priced before it is begun.

`prices.py` has every field with its price and bound. Here the table is compared with what the API parses, so that a new
field without a price fails; each bound is tried at its figure and one beyond, at a gateway with a scripted cluster; and
the heaviest legal requests run beside a polite client in virtual time, where work is counted, never timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Formatter
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec import inspect

from cohort.common.config import Config
from cohort.services.gateway.bounds import BOUNDS, Bounds
from cohort.services.gateway.openapi_operations import OPERATIONS
from tests.security import prices
from tests.security.prices import FREE, OPEN, ROUTES, ROWS, Row
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.tiny_model import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
ROW = {row.what: row for row in ROWS}

# -- The table is whole --------------------------------------------------------------------------------------------

UNPRICED = {
    "grammars: masks of steps",
    "templates: variables",
    "text: `/tokenize`",
    "text: `/detokenize`",
    "stored: earlier turns",
    "stored: reads",
    "adapters",
}
"""Rows without a price or a bound today. An entry leaves with its mend; none is added."""
UNPRICED_ROUTES = 14


def test_every_field_has_a_price() -> None:
    """And every entry a field, each in one place."""
    listed = [place for row in ROWS for place in row.places] + prices.places_of(FREE)
    assert sorted(listed) == sorted(prices.fields())


def test_every_route_has_a_price() -> None:
    assert sorted(" ".join(ROUTES.values()).split()) == sorted(operation.id for operation in OPERATIONS)


def test_every_bound_is_in_the_table() -> None:
    named = {name for row in ROWS for _, name, _, _ in Formatter().parse(row.bound) if name}
    own = {each.name for each in fields(Bounds)}
    spelled = {"file_mib": "file_bytes", "streams_mib": "streams_bytes", "grammar_mib": "grammar_memory_bytes"}
    assert own <= {spelled.get(name, name) for name in named}


def test_what_has_no_price_only_shrinks() -> None:
    assert {row.what for row in ROWS if OPEN in (row.price, row.bound)} == UNPRICED
    assert len(ROUTES.get(OPEN, "").split()) == UNPRICED_ROUTES


def test_options_of_the_table_exist() -> None:
    for row in ROWS:
        for option in (each for each in f"{row.price} {row.bound}".split("`") if "." in each and " " not in each):
            section, _, name = option.partition(".")
            assert hasattr(getattr(Config(), section), name), option


def test_the_page_has_the_same_table() -> None:
    """`python -m tests.security.prices --write` makes it."""
    assert prices.on_page(prices.PAGE.read_text(encoding="utf-8")) == prices.table()


class _Leaf(msgspec.Struct):
    pages: int


class _Wrapped(msgspec.Struct):
    leaf: _Leaf | None = None
    leaves: str | list[_Leaf] | None = None
    named: dict[str, list[_Leaf]] | None = None
    share: float = 0.5
    choice: bool | None = None


def test_the_walk_goes_through_unions_lists_and_maps() -> None:
    for name in ("leaf", "leaves", "named"):
        kind = next(each.type for each in inspect.type_info(_Wrapped).fields if each.name == name)  # type: ignore[attr-defined]
        assert list(prices.fields_of(kind, set())) == ["_Leaf.pages"]
    assert set(prices.fields_of(inspect.type_info(_Wrapped), set())) == {
        "_Leaf.pages",
        *(f"_Wrapped.{name}" for name in ("leaves", "named", "share", "choice")),
    }


# -- Each bound, at it and beyond it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`at` and `beyond`: bodies. `words`: the message of a refusal names the field and the limit by these. `limits`,
    `options`: smaller ones, where the real one would take the test long."""

    row: str
    path: str
    at: Any
    beyond: Any
    words: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.row} {self.words[0]} {self.path.rpartition('/')[2]}"


TEXT, CHAT, ANSWER, MESSAGE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "a"}]


def completions(row: str, at: dict[str, Any], beyond: dict[str, Any], *words: str, **sizes: Any) -> Case:
    whole = {"prompt": "a", "max_tokens": 1}
    return Case(row, TEXT, whole | at, whole | beyond, words, **sizes)


def chats(row: str, at: dict[str, Any], beyond: dict[str, Any], *words: str, **sizes: Any) -> Case:
    whole = {"messages": ASKED, "max_tokens": 1}
    return Case(row, CHAT, whole | at, whole | beyond, words, **sizes)


def answers(row: str, at: dict[str, Any], beyond: dict[str, Any], *words: str, **sizes: Any) -> Case:
    whole = {"input": "a", "max_output_tokens": 1}
    return Case(row, ANSWER, whole | at, whole | beyond, words, **sizes)


def messages(row: str, at: dict[str, Any], beyond: dict[str, Any], *words: str, **sizes: Any) -> Case:
    whole = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
    return Case(row, MESSAGE, whole | at, whole | beyond, words, **sizes)


def keys(count: int) -> dict[str, str]:
    return {str(key): "" for key in range(count)}


def biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


def regex_of(size: int) -> str:
    """Return an expression whose question to the compiler has so many bytes."""
    return "a" * (size - len(msgspec.json.encode(("regex", ""))))


def lists(depth: int) -> Any:
    return [lists(depth - 1)] if depth else 0


def sized(size: int) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


def form(size: int = 1, purpose: str = "batch", **more: str) -> Callable[[], aiohttp.FormData]:
    def made() -> aiohttp.FormData:
        data = aiohttp.FormData({"purpose": purpose} | more)
        data.add_field("file", b"x" * size, filename="in.jsonl")
        return data

    return made


# 64 units of the choice, 100 of the prompt and 136 of the answer.
WORK = {"max_request_work": 300}
WORDS = ("300 (gateway.max_request_work)",)
CASES = (
    completions("tokens: of prompts", {"prompt": [7] * (CONTEXT - 1)}, {"prompt": [7] * CONTEXT}, str(CONTEXT)),
    completions(
        "tokens: of answers",
        {"prompt": [7] * 100, "max_tokens": CONTEXT - 100},
        {"prompt": [7] * 100, "max_tokens": CONTEXT - 99},
        str(CONTEXT),
    ),
    completions(
        "tokens: of answers",
        {"prompt": [7] * 100, "max_tokens": 136},
        {"prompt": [7] * 100, "max_tokens": 137},
        *WORDS,
        "max_tokens",
        options=WORK,
    ),
    completions("choices", {"n": BOUNDS.choices}, {"n": BOUNDS.choices + 1}, "128 choices", "n "),
    completions("choices", {"best_of": BOUNDS.choices}, {"best_of": BOUNDS.choices + 1}, "128 choices", "best_of"),
    completions("choices", {"prompt": ["a"] * 2, "n": 2}, {"prompt": ["a"] * 5}, "4", limits={"choices": 4}),
    completions("scores", {"logprobs": 20}, {"logprobs": 21}, "<= 20", "logprobs"),
    completions("scores", {"prompt_logprobs": 20}, {"prompt_logprobs": 21}, "<= 20", "prompt_logprobs"),
    chats("scores", {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}, "<= 20", "top_"),
    answers("scores", {"top_logprobs": 20}, {"top_logprobs": 21}, "<= 20", "top_logprobs"),
    completions(  # 3 tokens, each of 2 log-probabilities of the prompt's echo: 64 + 3 + 1 × 3 + 3 × 3
        "scores",
        {"prompt": [7] * 3, "echo": True, "logprobs": 1},
        {"prompt": [7] * 3, "echo": True, "logprobs": 2},
        "79 (gateway.max_request_work)",
        options={"max_request_work": 79},
    ),
    completions("stops: texts", {"stop": "x" * 256}, {"stop": "x" * 257}, "at most 256", "stop"),
    completions(
        "stops: texts",
        {"stop": [letter * 256 for letter in "vwxy"]},
        {"stop": [*(letter * 256 for letter in "vwxy"), "z"]},
        "at most 1024",
        "stop",
    ),
    completions("stops: texts", {"stop": list("abcdefghijklmnop")}, {"stop": list("abcdefghijklmnopq")}, "<= 16", "stop"),
    messages("stops: texts", {"stop_sequences": ["x" * 256]}, {"stop_sequences": ["x" * 257]}, "256", "stop_sequences"),
    completions("stops: tokens", {"stop_token_ids": [5] * 256}, {"stop_token_ids": [5] * 257}, "<= 256", "stop_token_ids"),
    completions(
        "biases", {"logit_bias": biases(300)}, {"logit_bias": biases(301)}, "300", "logit_bias", limits={"logit_biases": 300}
    ),
    *(
        case("grammars: compiled", *({name: value(size)} for size in (99, 100)), "99", words, limits={"grammar_bytes": 99})
        for case, name, value, words in (
            (completions, "guided_regex", regex_of, "guided_regex"),
            (chats, "structured_outputs", lambda size: {"regex": regex_of(size)}, "structured_outputs.regex"),
        )
    ),
    chats("tools", {"tools": tools(128)}, {"tools": tools(129)}, "at most 128", "tools", options={"default_max_tokens": 1}),
    chats("messages", {"messages": ASKED * 3}, {"messages": ASKED * 4}, "at most 3", "messages", limits={"messages": 3}),
    answers("messages", {"input": ASKED * 3}, {"input": ASKED * 4}, "at most 3", limits={"messages": 3}),
    completions("metadata", {"metadata": keys(64)}, {"metadata": keys(65)}, "at most 64", "metadata"),
    answers("metadata", {"metadata": keys(16)}, {"metadata": keys(17)}, "<= 16", "metadata"),
    answers("metadata", {"metadata": {"a": "x" * 512}}, {"metadata": {"a": "x" * 513}}, "<= 512", "metadata"),
    *(case("nesting", {"user": "u"} if case is answers else {"metadata": lists(31)}, {"metadata": lists(32)}, "32 deep")
      for case in (completions, chats, answers, messages)),
    Case("bodies: one", TEXT, sized(2000), sized(2001), ("2000", "gateway.max_body_bytes"), options={"max_body_bytes": 2000}),
    Case("listings", f"{ANSWER}/resp_x/input_items", {"limit": 100}, {"limit": 101}, ("100", "limit")),
    Case("listings", "/v1/files", {"limit": 10_000}, {"limit": 10_001}, ("10000", "limit")),
    Case("listings", "/v1/batches", {"limit": 100}, {"limit": 101}, ("100", "limit")),
    Case("files: one", "/v1/files", form(50), form(51), ("50 bytes", "file"), limits={"file_bytes": 50}),
    Case("files: other fields", "/v1/files", form(), form(purpose="x" * 1025), ("1024 bytes", "purpose")),
)  # fmt: skip


async def sent(site: Site, case: Case, body: Any) -> tuple[int, str]:
    if callable(body):
        asked = site.session.post(site.url + case.path, data=body())
    elif case.row == "listings":
        asked = site.session.get(site.url + case.path, params=body)
    else:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = site.session.post(site.url + case.path, data=data, headers={"Content-Type": "application/json"})
    async with asked as response:
        return response.status, await response.text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_at_the_bound_and_beyond(open_site: OpenSite, case: Case) -> None:
    async with open_site(limits=case.limits, **case.options) as site:
        status, text = await sent(site, case, case.at)
        assert status == (404 if "resp_x" in case.path else 200), text
        submitted = len(site.manager.submitted)
        status, text = await sent(site, case, case.beyond)
        assert str(status) == ROW[case.row].beyond, text
        message = json.loads(text)["error"]["message"]
        assert all(word in message for word in case.words), message
        assert len(site.manager.submitted) == submitted


def test_every_bound_is_tried() -> None:
    """Here or in the test that the row names."""
    cases = {case.row for case in CASES}
    missing = [row.what for row in ROWS if row.what not in cases and not row.tested and row.what not in UNPRICED]
    assert missing == []
    assert [row.tested for row in ROWS if row.tested and not (ROOT / row.tested).is_file()] == []
