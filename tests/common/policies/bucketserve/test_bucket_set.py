"""Alg. 1: the paper's rules by hand, the holes it leaves, and the counters against a recount."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bucketserve.bucket_set import BucketSet
from tests.examples import examples


class Lengths:
    """A sorted list of cells: the plainest thing that can count a range."""

    def __init__(self, max_tokens: int, **options: int) -> None:
        self.cells: list[int] = []
        self.buckets = BucketSet(
            max_tokens,
            count_between=lambda low, high: bisect_left(self.cells, high) - bisect_left(self.cells, low),
            **options,  # type: ignore[arg-type]
        )

    def add(self, *tokens: int) -> None:
        for length in tokens:
            cell = self.buckets.cell_of(length)
            insort(self.cells, cell)
            self.buckets.added(cell)

    def remove(self, tokens: int) -> None:
        cell = self.buckets.cell_of(tokens)
        self.cells.remove(cell)
        self.buckets.removed(cell)

    def bounds(self) -> list[int]:
        return self.buckets.upper_bounds


def test_one_bucket_until_more_wait_than_one_batch_takes() -> None:
    lengths = Lengths(1024)
    lengths.add(10, 20, 30)
    lengths.buckets.adjust(4)
    assert lengths.bounds() == [1024]
    assert len(lengths.buckets) == 1


def test_a_bucket_splits_at_its_midpoint_until_nothing_splits() -> None:
    lengths = Lengths(1024)
    # Five of six below 512, five of those below 256, and so on down to [0, 32): of ten others two are above 16.
    lengths.add(10, 12, 14, 20, 25, 900)
    lengths.buckets.adjust(4)
    # [0,1024) → 512 → 256 → 128 → 64 → 32 (all five below 32) → [0,32): three of five below 16 → splits once more
    assert lengths.bounds() == [16, 32, 64, 128, 256, 512, 1024]
    assert [bucket.count for bucket in lengths.buckets.buckets] == [3, 2, 0, 0, 0, 0, 1]
    lengths.buckets.check(6)


def test_on_a_padded_path_one_forward_bounds_a_batch_of_a_bucket_too() -> None:
    lengths = Lengths(1024)
    lengths.add(20, 22, 24, 26, 100, 900)
    lengths.buckets.adjust(100)
    assert lengths.bounds() == [1024]  # memory alone would take all six in one batch
    # Rectangles of 512 tokens: rows of U_b = 1024 … 64 that fit are 0 (so 1), 1, 2, 4, 8; [0, 64) keeps its four.
    lengths.buckets.adjust(100, 512, 182.0)
    assert lengths.bounds() == [64, 128, 256, 512, 1024]
    assert [bucket.count for bucket in lengths.buckets.buckets] == [4, 1, 0, 0, 1]
    lengths.buckets.check(6)
    for tokens in (100, 900, 20, 22):
        lengths.remove(tokens)
    lengths.buckets.adjust(100, 512, 25.0)  # 20 of mean length fit one forward: two wait
    assert lengths.bounds() == [1024]


def test_exactly_half_below_the_midpoint_is_no_majority() -> None:
    lengths = Lengths(100)
    lengths.add(10, 20, 60, 70)
    lengths.buckets.adjust(3)
    assert lengths.bounds() == [100]
    lengths.add(30)
    lengths.buckets.adjust(3)
    assert lengths.bounds() == [50, 100]


def test_exactly_n_max_is_not_more_than_n_max() -> None:
    lengths = Lengths(100)
    lengths.add(10, 11, 12)
    lengths.buckets.adjust(3)
    assert lengths.bounds() == [100]


def test_fewer_than_n_max_merge_all() -> None:
    lengths = Lengths(1024)
    lengths.add(10, 12, 14, 20, 25, 900)
    lengths.buckets.adjust(4)
    assert len(lengths.buckets) > 1
    for tokens in (10, 12, 900):
        lengths.remove(tokens)
    lengths.buckets.adjust(4)
    assert lengths.bounds() == [1024]
    assert lengths.buckets.merges == 1
    lengths.buckets.check(3)


def test_holes_of_the_paper() -> None:
    lengths = Lengths(8)
    # An empty set with N_max 0 would be 0/0; nothing happens.
    lengths.buckets.adjust(0)
    assert lengths.bounds() == [8]
    # Equal lengths can never be told apart: the bucket of one cell stays, however many wait.
    lengths.add(*[0] * 50)
    lengths.buckets.adjust(1)
    assert lengths.bounds() == [1, 2, 4, 8]
    # S ≥ L_max goes to the last bucket.
    assert lengths.buckets.bucket_of(lengths.buckets.cell_of(10_000)).high == 8
    lengths.add(10_000)
    lengths.buckets.check(51)


def test_a_mere_two_tokens_and_one_token_of_context() -> None:
    for limit in (1, 2, 3):
        lengths = Lengths(limit)
        lengths.add(*[0] * 9)
        lengths.buckets.adjust(1)
        lengths.buckets.check(9)
        assert lengths.bounds()[-1] == limit


def test_cells_of_a_long_context_are_wider_than_a_token() -> None:
    lengths = Lengths(131_072)
    assert lengths.buckets.cell_tokens == 32
    lengths.add(*[5] * 100)
    lengths.buckets.adjust(10)
    assert lengths.bounds()[0] == 32
    lengths.buckets.check(100)


def test_at_most_so_many_buckets() -> None:
    lengths = Lengths(4096, max_buckets=5)
    lengths.add(*[1] * 100)
    lengths.buckets.adjust(1)
    assert len(lengths.buckets) == 5


@settings(max_examples=examples(0.8))
@given(data=st.data(), limit=st.integers(1, 3000))
def test_buckets_always_meet_cover_everything_and_count_right(data: st.DataObject, limit: int) -> None:
    lengths = Lengths(limit, max_cells=64)
    present: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        fresh: list[int] = data.draw(st.lists(st.integers(0, 2 * limit), max_size=8))
        lengths.add(*fresh)
        present += fresh
        if present:
            lengths.remove(present.pop(data.draw(st.integers(0, len(present) - 1))))
        safe = data.draw(st.integers(0, 6))
        lengths.buckets.adjust(safe)
        lengths.buckets.check(len(present))
        # What Alg. 1 would still split, it has split.
        if len(present) >= safe:
            for bucket in lengths.buckets.buckets:
                uneven = bucket.count > safe and bucket.below > 0.5 * bucket.count and bucket.high - bucket.low > 1
                assert not uneven or len(lengths.buckets) == 64


class Visited(list[Any]):
    """Counts the entries that are looked at."""

    seen = 0

    def __getitem__(self, index: Any) -> Any:
        Visited.seen += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            Visited.seen += 1
            yield entry


@pytest.mark.parametrize("buckets", [2, 16, 256, 1024])
def test_a_request_looks_at_logarithmically_many_buckets(buckets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B11 · The paper walks over all buckets (O(n·k)); arrival, batch and departure here bisect."""
    held = BucketSet(4096, max_buckets=buckets, count_between=lambda low, high: 0)
    width = held.cells // buckets
    held.rebound([number * width for number in range(buckets)])
    monkeypatch.setattr(held, "_lows", Visited(held._lows))
    monkeypatch.setattr(held, "_buckets", Visited(held._buckets))
    most = 0
    for cell in range(0, held.cells, 37):
        for ask in (held.added, held.bucket_of, held.removed):
            Visited.seen = 0
            ask(cell)
            most = max(most, Visited.seen)
    assert 0 < most <= math.ceil(math.log2(buckets)) + 2
