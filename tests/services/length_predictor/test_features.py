"""Features are finite, bounded in cost, and see what they claim to see, whatever the input."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.messages import LengthFacts
from cohort.services.length_predictor.features import (
    COMPACT,
    HASH_DIMS,
    HEAD_TOKENS,
    TAIL_TOKENS,
    extract,
    layout,
    ngram_weights,
)
from tests.counting import CountedReads


def facts(tokens: list[int], **changes: object) -> LengthFacts:
    values: dict[str, object] = {
        "chat": False,
        "max_tokens": 64,
        "temperature": 1.0,
        "stop_strings": 0,
        "text_bytes": 4 * len(tokens),
    }
    return LengthFacts(tokens=tokens, **{**values, **changes})  # type: ignore[arg-type]


@given(
    tokens=st.lists(st.integers(min_value=-(2**70), max_value=2**70), max_size=50),
    chat=st.booleans(),
    max_tokens=st.integers(min_value=-(2**63), max_value=2**63),
    temperature=st.floats(),
    stop_strings=st.integers(min_value=0, max_value=2**40),
    text_bytes=st.integers(min_value=0, max_value=2**63),
)
def test_any_request_gives_finite_features(
    tokens: list[int], chat: bool, max_tokens: int, temperature: float, stop_strings: int, text_bytes: int
) -> None:
    vector = extract(LengthFacts(tokens, chat, max_tokens, temperature, stop_strings, text_bytes))
    assert vector.compact.shape == (len(COMPACT),)
    assert np.isfinite(vector.compact).all()
    assert (np.diff(vector.buckets.astype(int)) > 0).all()
    assert vector.buckets.size == vector.counts.size
    assert (vector.buckets < HASH_DIMS).all()
    assert (vector.counts > 0).all()
    weights = ngram_weights(vector.counts)
    assert np.isfinite(weights).all()
    assert not tokens or np.isclose(weights @ weights, 1.0)


def test_compact_features_are_named_facts() -> None:
    vector = extract(facts([5, 5, 6, 7], chat=True, max_tokens=100, temperature=0.7, stop_strings=2, text_bytes=18))
    named = dict(zip((feature.name for feature in COMPACT), vector.compact.tolist(), strict=True))
    assert named["prompt_tokens"] == 4
    assert np.isclose(named["log_prompt_tokens"], np.log(5))
    assert named["chat"] == 1
    assert np.isclose(named["log_max_tokens"], np.log(101))
    assert np.isclose(named["temperature"], 0.7)
    assert named["stop_strings"] == 2
    assert named["bytes_per_token"] == 4.5
    assert named["distinct_share"] == 0.75


def test_order_and_place_of_tokens_matter() -> None:
    forwards, backwards = extract(facts(list(range(200)))), extract(facts(list(range(199, -1, -1))))
    assert (
        forwards.buckets.tolist() != backwards.buckets.tolist() or forwards.counts.tolist() != backwards.counts.tolist()
    )


def test_hashes_spread_over_the_table() -> None:
    used = extract(facts(list(range(1000)))).buckets
    assert len(used) > HASH_DIMS / 2


def test_repeated_tokens_are_counted_up_to_a_byte() -> None:
    vector = extract(facts([9] * 400))
    assert vector.counts.max() == 255


def test_the_middle_of_a_long_prompt_costs_nothing() -> None:
    long = [1] * HEAD_TOKENS + [2] * 100_000 + [3] * TAIL_TOKENS
    other = [1] * HEAD_TOKENS + [4] * 100_000 + [3] * TAIL_TOKENS
    assert extract(facts(long)).buckets.tolist() == extract(facts(other)).buckets.tolist()
    read = CountedReads(long)
    extract(facts(read))
    assert read.reads == HEAD_TOKENS + TAIL_TOKENS


def test_layout_names_every_feature() -> None:
    assert all(feature.name in layout() for feature in COMPACT)
