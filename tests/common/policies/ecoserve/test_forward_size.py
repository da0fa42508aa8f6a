"""The target forward size from measured points."""

from __future__ import annotations

import pytest

from cohort.common.errors import ConfigError
from cohort.common.policies.ecoserve.forward_size import LearnedForwardSize, target_forward_tokens
from cohort.common.types import StepTimes


def test_the_fewest_tokens_within_a_tenth_of_the_peak_rate() -> None:
    points = [(64, 0.02), (128, 0.021), (256, 0.033), (512, 0.063), (1024, 0.125)]  # 3200, 6095, 7757, 8127, 8192/s
    assert target_forward_tokens(points) == 256
    assert target_forward_tokens(points, share=0.99) == 512
    assert target_forward_tokens(points, share=0.5) == 128


def test_of_equal_sizes_the_fastest_counts_and_nonsense_does_not() -> None:
    assert target_forward_tokens([(64, 1.0), (64, 0.01), (512, 0.08), (0, 0.1), (99, 0.0)]) == 64


def test_without_a_point_there_is_no_size() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        target_forward_tokens([])


def test_learned_size_is_a_full_step_until_something_is_learned() -> None:
    size = LearnedForwardSize(2048)
    size.refresh(None)
    assert size.tokens == 2048


def test_learned_size_follows_what_iterations_take() -> None:
    """Where reading the weights takes as long as computing 100 tokens, few hundred fill the device; where it takes as
    long as 2,000, no step is too large; and pairs make long steps slower again."""
    size = LearnedForwardSize(2048)
    size.refresh(StepTimes(step_s=0.0, row_s=0.0, token_s=1e-4, floor_s=1e-2, pair_s=0.0, position_s=0.0))
    quick = size.tokens
    size.refresh(StepTimes(step_s=0.0, row_s=0.0, token_s=1e-4, floor_s=2e-1, pair_s=0.0, position_s=0.0))
    slow = size.tokens
    assert 64 <= quick <= 256 < 1024 < slow <= 2048
    size.refresh(StepTimes(step_s=0.0, row_s=0.0, token_s=1e-4, floor_s=2e-1, pair_s=1e-6, position_s=0.0))
    assert size.tokens < slow
