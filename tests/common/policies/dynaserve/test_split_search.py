"""Alg. 1: balanced at once, towards either side, bounded, and never worse than its start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.dynaserve.split_search import search_split


def test_the_micro_benchmark_of_the_paper() -> None:
    """§4.1, Fig. 5: 1,024 + 1,024 tokens. Prefill is cheap, a decode token is dear, so the second instance is the
    bottleneck of a split at P and the balance lies inside the output."""
    prompt = output = 1024

    def first(s: int) -> float:
        return 0.1e-3 * min(s, prompt) + 20e-3 * max(0, s - prompt)

    def second(s: int) -> float:
        return 0.1e-3 * max(0, prompt - s) + 20e-3 * (prompt + output - max(s, prompt))

    split = search_split(prompt, output, lambda s: (first(s), second(s)), probes=6, tolerance=0.02)
    assert split.position == 1536
    assert split.later_s == pytest.approx(10.34, abs=0.01)
    assert split.later_s < 0.51 * max(first(1024), second(1024))
    assert split.probes == 2


def test_it_starts_at_the_end_of_the_prompt_and_stops_there_if_that_is_balanced() -> None:
    split = search_split(300, 100, lambda s: (1.0, 1.01), probes=6, tolerance=0.02)
    assert (split.position, split.probes) == (300, 1)


def test_a_loaded_first_instance_gets_less() -> None:
    total = 2000
    split = search_split(1000, 1000, lambda s: (500 + s, total - s), probes=12, tolerance=0.0)
    assert split.position == pytest.approx(750, abs=2)
    split = search_split(1000, 1000, lambda s: (s, 500 + total - s), probes=12, tolerance=0.0)
    assert split.position == pytest.approx(1250, abs=2)


def test_no_probe_is_no_search() -> None:
    with pytest.raises(ValueError, match="at least one probe"):
        search_split(10, 10, lambda s: (s, s), probes=0, tolerance=0.1)


@given(
    prompt=st.integers(1, 4000),
    output=st.integers(1, 2000),
    first_load=st.floats(0, 50),
    second_load=st.floats(0, 50),
    token_s=st.floats(1e-4, 1e-2),
    decode_s=st.floats(1e-3, 0.1),
    probes=st.integers(1, 12),
    tolerance=st.floats(0.0, 0.2),
)
def test_against_trying_every_token(
    prompt: int,
    output: int,
    first_load: float,
    second_load: float,
    token_s: float,
    decode_s: float,
    probes: int,
    tolerance: float,
) -> None:
    total = prompt + output
    asked: list[int] = []

    def first(s: int) -> float:
        asked.append(s)
        return first_load + token_s * min(s, prompt) + decode_s * max(0, s - prompt)

    def second(s: int) -> float:
        return second_load + token_s * max(0, prompt - s) + decode_s * (total - max(s, prompt))

    split = search_split(prompt, output, lambda s: (first(s), second(s)), probes=probes, tolerance=tolerance)
    assert 1 <= split.position <= total - 1
    assert len(asked) == split.probes <= probes
    assert split.later_s <= max(first(prompt), second(prompt))
    if probes >= 12 and tolerance < 0.01:
        best = min(max(first(s), second(s)) for s in range(1, total))
        resolution = 2 * total / 2**probes + 1
        assert split.later_s <= best * (1 + 2 * tolerance) + resolution * max(token_s, decode_s)
