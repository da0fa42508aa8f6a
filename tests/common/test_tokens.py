"""Token ids travel as bytes and are recorded as a list; both are read, whoever wrote them."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common import codec
from cohort.common.errors import WireError
from cohort.common.messages import Message, Submit
from cohort.common.policies.cohort.prefix_record import Chain
from cohort.common.tokens import PackedTokens, joined, listed, unpacked
from cohort.common.types import Attempt, Request, SamplingParams

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


def read_again(value: object, kind: Any) -> Any:
    """Return what a recording of it holds."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=listed), type=kind, dec_hook=unpacked)


def submit(tokens: list[int] | PackedTokens) -> Submit:
    return Submit(Request(Attempt("r", 0), "g", tokens, len(tokens), SamplingParams(max_tokens=5), 0.0))


@given(IDS)
def test_bytes_and_lists_of_the_same_ids_are_the_same_message(tokens: list[int]) -> None:
    as_list, as_bytes = submit(tokens), submit(PackedTokens(tokens))
    for sent in (as_list, as_bytes):
        received = codec.decode(codec.encode(sent))
        assert isinstance(received, Submit) and isinstance(received.request.tokens, PackedTokens)
        assert received == as_bytes and received.request.tokens == tokens
        recorded = msgspec.json.encode(received, enc_hook=listed)
        assert recorded == msgspec.json.encode(as_list), "a recording is what it was"
        assert read_again(sent, Message) == as_bytes
    assert len(codec.encode(as_bytes)) <= 4 * len(tokens) + len(codec.encode(submit([]))) + 4


@given(IDS, IDS)
def test_more_ids_are_joined_as_lists_are(tokens: list[int], more: list[int]) -> None:
    packed = joined(PackedTokens(tokens), more)
    assert list(packed) == joined(tokens, more) == tokens + more
    assert isinstance(packed, array) and isinstance(joined(tokens, more), list)


@pytest.mark.parametrize("sent", [b"abc", [2**31], ["1"], [1.5], 7, None])
def test_what_are_no_ids_is_no_message(sent: object) -> None:
    plain = msgspec.msgpack.decode(codec.encode(submit([1])))
    plain["request"]["tokens"] = sent
    with pytest.raises(WireError):
        codec.decode(msgspec.msgpack.encode(plain))


@given(IDS, IDS)
def test_packed_prompts_share_the_chunks_that_lists_share(shared: list[int], own: list[int]) -> None:
    first, second = [*shared * 40, *own * 10], [*shared * 40, *own * 11]
    lists = [Chain(submit(tokens).request) for tokens in (first, second)]
    both = [Chain(submit(PackedTokens(tokens)).request) for tokens in (first, second)]
    found = [[one[at] == other[at] for at in range(len(one.ends))] for one, other in (lists, both)]
    assert found[0] == found[1] and lists[0].ends == both[0].ends
