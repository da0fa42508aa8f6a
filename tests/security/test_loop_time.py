"""Attack: a body that keeps the gateway's event loop to itself, accepted or refused: megabytes of escapes or quotes, a
million messages, half a million token ids, a bias for each token of the vocabulary.

A count and a decoder serve no other thread while they run, in whichever thread that is. So what is bounded, and
asserted here, is how much each of them is given at once and how much is looked at before a refusal; never milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.bounds import BOUNDS, Bounds
from cohort.services.gateway.http.request_bodies import SLICE_BYTES, refuse_shape
from cohort.services.gateway.requests import prompt_field
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import parse_chat, parse_completion
from tests.counting import lines_run
from tests.services.gateway.conftest import OpenSite

LIMITS = GatewayConfig()
CARD = ModelCard("tiny", Path("/m"), 8192, 50_000, (2,))
LARGEST = LIMITS.max_body_bytes


def filled(head: bytes, item: bytes, tail: bytes, *, between: bytes = b",") -> bytes:
    """The largest body that is read."""
    count = (LARGEST - len(head) - len(tail)) // (len(item) + len(between))
    return head + between.join([item] * count) + tail


def text(item: bytes) -> bytes:
    return filled(b'{"prompt":"', item, b'"}', between=b"")


# -- how large a body may be ---------------------------------------------------------------------------------------


def test_the_largest_body_holds_the_largest_request() -> None:
    """Eight bytes for each unit of work: a token id with its comma, a word, an escaped character."""
    assert 8 * LIMITS.max_request_work == LARGEST


async def test_a_longer_body_is_not_even_read(open_site: OpenSite) -> None:
    async with open_site() as site:
        for count, status in ((LARGEST, 400), (LARGEST + 1, 413)):
            data = b"[" + b" " * (count - 1)
            headers = {"Content-Type": "application/json"}
            async with site.session.post(f"{site.url}/v1/completions", data=data, headers=headers) as response:
                assert response.status == status
                message = (await response.json())["error"]["message"]
        assert f"{LARGEST} bytes (gateway.max_body_bytes)" in message


# -- counted in slices, no further than to the limit ------------------------------------------------------------------


class Watched(bytes):
    """A body that gives out slices, and notes them. Whatever looks at all of it at once is an error."""

    slices: list[int]

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        self.slices.append(len(found) if isinstance(found, bytes) else 1)
        return found

    def _whole(self, *_: object) -> NoReturn:
        raise AssertionError("a pass over the whole body")

    replace = count = split = translate = find = __iter__ = __contains__ = _whole  # type: ignore[assignment]


def watched(data: bytes) -> Watched:
    body = Watched(data)
    body.slices = []
    return body


WORST = {
    "escapes": (text(b"\\u00e4"), False, None),
    "quotes": (text(b'\\"'), False, None),
    "backslashes": (text(b"\\\\"), False, None),
    "spaces": (filled(b'{"prompt":', b" ", b'"a"}', between=b""), False, None),
    "messages": (filled(b'{"messages":[', b'{"role":"user","content":""}', b"]}"), True, BOUNDS.messages * 16),
    "empty messages": (filled(b'{"messages":[', b"{}", b"]}"), True, BOUNDS.messages * 4),
    "prompts": (filled(b'{"prompt":[', b'"a"', b"]}"), False, 3000),
    "lists": (filled(b'{"prompt":[', b"[1]", b"]}"), False, 2000),
    "biases": (b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":0' % i for i in range(45_000)) + b"}}", False, 3000),
    "small ids": (filled(b'{"prompt":[', b"1", b"]}"), False, 600_000),
    "opened": (filled(b'{"prompt":', b"[", b"", between=b""), False, 17),
    "closed": (b"]" * LARGEST, False, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WORST)
def test_a_body_is_counted_in_slices_up_to_the_limit(name: str) -> None:
    data, chat, values = WORST[name]
    body = watched(data)
    if values is None or name == "closed":
        refuse_shape(body, LIMITS, chat=chat)
    else:
        with pytest.raises(RequestError, match="The body "):
            refuse_shape(body, LIMITS, chat=chat)
    assert max(body.slices) <= SLICE_BYTES
    seen = sum(body.slices)
    if values is None:
        assert seen == len(data)
    else:  # no further than the slice in which the limit lies
        item = len(data) / max(data.count(b",") + 1, data.count(b"["), data.count(b"]"))
        assert seen <= (math.ceil(values * item / SLICE_BYTES) + 1) * SLICE_BYTES


def test_counting_is_as_many_lines_for_each_slice() -> None:
    """Of Python, however many values are in a slice."""
    few, many = (json.dumps({"prompt": item * 10, "stop": ["b"] * 4}).encode() for item in ("a", "a[{"))
    assert lines_run(lambda: refuse_shape(many, LIMITS, chat=False)) == lines_run(
        lambda: refuse_shape(few, LIMITS, chat=False)
    )
    large = json.dumps({"prompt": "a[{" * 400_000, "stop": ["b"] * 4}).encode()
    slices = math.ceil(len(large) / SLICE_BYTES)
    assert lines_run(lambda: refuse_shape(large, LIMITS, chat=False)) <= slices * lines_run(
        lambda: refuse_shape(few, LIMITS, chat=False)
    )


JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text('a"\\[{]},:é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\', max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(body=JSON, width=st.integers(1, 9), ascii=st.booleans())
def test_where_slices_end_makes_no_difference(body: Any, width: int, ascii: bool) -> None:
    """Strings, escapes and runs of backslashes may lie across any number of them."""

    def shape(value: Any, depth: int = 0) -> tuple[int, int, int]:
        """Texts and keys, lists and objects, depth."""
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        if isinstance(value, str):
            return 1, 0, depth
        found = [shape(item, depth + 1) for item in items]
        own = isinstance(value, list | dict)
        deepest = max(
            [
                depth + own,
                *(
                    deep if isinstance(item, list | dict) else 0
                    for item, (_, _, deep) in zip(items, found, strict=True)
                ),
            ]
        )
        return sum(part[0] for part in found), own + sum(part[1] for part in found), deepest

    data = json.dumps(body, ensure_ascii=ascii).encode()
    strings, containers, depth = shape(body)

    def accepts(**limits: int) -> bool:
        few = {"choices": 1, "logit_biases": 1, "messages": 1}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cohort.services.gateway.http.request_bodies.SLICE_BYTES", width)
            patch.setattr("cohort.services.gateway.http.request_bodies._OTHERS", 0)
            patch.setattr("cohort.services.gateway.bounds.BOUNDS", Bounds(**{**few, **limits}))
            try:
                refuse_shape(data, LIMITS, chat=False)
            except RequestError:
                return False
        return True

    roomy = {"choices": containers + strings + 1, "logit_biases": strings + 1, "nesting": depth + 1, "grammar_bytes": 1}
    assert accepts(**roomy)
    if depth:
        assert accepts(**{**roomy, "nesting": depth})
        assert depth == 1 or not accepts(**{**roomy, "nesting": depth - 1})
    if containers > 1:
        assert not accepts(**{**roomy, "choices": containers - 1, "logit_biases": strings + 1})
    if strings > 1:
        assert not accepts(**{**roomy, "choices": max(1, containers), "logit_biases": 1}) or (
            strings <= max(1, containers) + 1
        )


# -- decoded one prompt at a time ----------------------------------------------------------------------------------


class Counting:
    """A decoder that notes how much it is given."""

    def __init__(self, decoder: msgspec.json.Decoder[Any], given: list[bytes]) -> None:
        self._decoder, self._given = decoder, given

    def decode(self, data: bytes) -> Any:
        self._given.append(data)
        return self._decoder.decode(data)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    given: list[bytes] = []
    for name in ("_any", "_text", "_texts", "_ids"):
        monkeypatch.setattr(prompt_field, name, Counting(getattr(prompt_field, name), given))
    return given


def parsed(body: dict[str, Any]) -> tuple[str | list[int], ...]:
    return parse_completion(json.dumps(body).encode(), {}, LIMITS, CARD).prompts


def test_half_a_million_ids_are_decoded_one_prompt_at_a_time(decoded: list[bytes]) -> None:
    body = [[20_000 + index] * 4000 for index in range(120)]
    assert list(parsed({"prompt": body})) == body
    assert len(decoded) == 120
    assert max(data.count(b",") for data in decoded) < CARD.max_model_len


@pytest.mark.parametrize(
    "prompt", [[1] * 100_000, [[1]] * 200 + [[1] * 100_000], [1] * 8193], ids=["ids", "lists", "one too many"]
)
def test_more_ids_than_the_context_are_not_decoded(decoded: list[bytes], prompt: list[Any]) -> None:
    if len(prompt) == 8193:
        prompt = [10_000_000] * 8193
    with pytest.raises(RequestError, match=r"8192 tokens, but the prompt alone has (100000|8193) tokens"):
        parsed({"prompt": prompt})
    assert sum(data.count(b",") for data in decoded) <= 200


@pytest.mark.parametrize(
    "prompt",
    [["a", *[1] * 100_000], [[1], *[1] * 100_000], [[1] * 40_000, "a"], [[1] * 40_000, [[1]]], [[], [1] * 40_000]],
    ids=["text first", "list first", "text within", "too deep", "empty"],
)
def test_mixtures_are_refused_before_they_are_objects(decoded: list[bytes], prompt: list[Any]) -> None:
    with pytest.raises(RequestError) as refused:
        parsed({"prompt": prompt})
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert sum(data.count(b",") for data in decoded if not data.startswith(b'["')) <= CARD.max_model_len


PROMPTS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 60_000) | st.floats(0, 2) | st.text('a"]\\[, é', max_size=5),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(prompt=PROMPTS, indent=st.sampled_from([None, 1]))
def test_in_parts_as_in_one(prompt: Any, indent: int | None) -> None:
    """A long field is read as a short one is: the same prompts, or a refusal."""
    data = json.dumps({"prompt": prompt}, indent=indent).encode()

    def outcome(at_once: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_field, "DECODED_AT_ONCE_BYTES", at_once)
            try:
                return parse_completion(data, {}, LIMITS, CARD).prompts
            except RequestError as error:
                return error.status

    assert outcome(1) == outcome(1 << 20)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("where", ["prompt", "within", "beside"])
def test_half_a_character_is_a_refusal_at_any_length(chat: bool, where: str) -> None:
    parse: Callable[..., Any] = parse_chat if chat else parse_completion
    long = b"a" * prompt_field.DECODED_AT_ONCE_BYTES
    content = {"prompt": b'"%s\xff"', "within": b'["a","%s\xff"]', "beside": b'"%s"'}[where] % long
    user = b"\xff" if where == "beside" else b"u"
    if chat:
        content = b'[{"role":"user","content":%s}]' % content
    body = b'{"%s":%s,"user":"%s"}' % (b"messages" if chat else b"prompt", content, user)
    with pytest.raises(RequestError) as refused:
        parse(body, {}, LIMITS, CARD)
    assert refused.value.status == 400
