"""The target forward size from measured points."""

from __future__ import annotations

import pytest

from cohort.common.errors import ConfigError
from cohort.common.policies.ecoserve.forward_size import target_forward_tokens


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
