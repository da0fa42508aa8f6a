"""Batches of different lengths: the right slots, and the comparison by hand."""

from __future__ import annotations

import pytest

from cohort.services.bench.engine.inside.mixed_lengths import (
    Timed,
    aligned_and_mixed,
    decode_batch,
    few_long_among_short,
    mixed_over_aligned,
)


def test_every_row_has_blocks_of_its_own_and_writes_its_last_position() -> None:
    batch = decode_batch([3, 9, 4], block_size=4, num_blocks=5)
    assert batch is not None
    assert batch.block_tables.tolist() == [[0, 0, 0], [1, 2, 3], [4, 0, 0]]
    assert batch.positions.tolist() == [2, 8, 3]
    assert batch.slot_mapping.tolist() == [2, 12, 19]
    assert batch.context_lens.tolist() == [3, 9, 4]
    assert len(batch.sampling) == 3


def test_requests_beyond_the_cache_are_no_batch() -> None:
    assert decode_batch([3, 9, 4], block_size=4, num_blocks=4) is None


def test_the_papers_two_comparisons() -> None:
    assert few_long_among_short(16, 32, 4096)[1] == ("15 short, 1 long", [32] * 15 + [4096])
    assert [name for name, _ in few_long_among_short(2, 32, 64)] == ["2 short, 0 long", "1 short, 1 long"]
    assert aligned_and_mixed([10, 70]) == [
        ("aligned at 10", [10, 10]),
        ("aligned at 70", [70, 70]),
        ("mixed", [10, 70]),
    ]


def test_mixed_over_aligned_compares_equal_work() -> None:
    found = [Timed("aligned at 1", 2, 2, 1.0), Timed("aligned at 9", 2, 18, 3.0), Timed("mixed", 2, 10, 2.5)]
    assert mixed_over_aligned(found) == pytest.approx(1.25)
