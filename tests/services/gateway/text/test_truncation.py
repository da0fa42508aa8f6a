"""Conversations without their oldest turns: as few as it takes, whole, and found in a few renderings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.services.gateway.text.tokenizer import PromptTooLong, latest_turns
from tests.examples import examples

Kept = Sequence[Mapping[str, Any]]


def message(role: str, size: int) -> dict[str, Any]:
    return {"role": role, "size": size}


class Encoder:
    """A message has as many tokens as its size; the first of each is its place."""

    def __init__(self, messages: Kept, hopeless: int = 10**9) -> None:
        self.places = {id(each): place for place, each in enumerate(messages)}
        self.hopeless = hopeless
        self.calls = 0

    async def __call__(self, messages: Kept) -> list[int]:
        self.calls += 1
        tokens = [self.places[id(each)] for each in messages for _ in range(each["size"])]
        if len(tokens) > self.hopeless:
            raise PromptTooLong("too long")
        return tokens


@settings(max_examples=examples(2))
@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(1, 9)), min_size=1, max_size=30),
    st.integers(1, 120),
    st.booleans(),
)
async def test_as_few_turns_go_as_are_needed(heads: int, tail: list[tuple[str, int]], most: int, raises: bool) -> None:
    messages = [message("system", 1) for _ in range(heads)] + [message(*each) for each in tail]
    encoder = Encoder(messages, hopeless=most if raises else 10**9)
    starts = [place for place in range(heads, len(messages)) if messages[place]["role"] == "user"]
    starts = [heads, *starts[1:]]
    sizes = {start: heads + sum(each["size"] for each in messages[start:]) for start in starts}
    fitting = [start for start in starts if sizes[start] <= most]
    if raises and not fitting:
        with pytest.raises(PromptTooLong):
            await latest_turns(messages, most, encoder)
        return
    tokens, kept = await latest_turns(messages, most, encoder)
    best = fitting[0] if fitting else starts[-1]
    assert list(dict.fromkeys(tokens)) == [*range(heads), *range(best, len(messages))]
    assert [encoder.places[id(each)] for each in kept] == list(dict.fromkeys(tokens))
    assert encoder.calls <= 3 + math.log2(len(starts))
