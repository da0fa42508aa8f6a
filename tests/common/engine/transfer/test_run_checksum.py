"""Sums of transferred bytes: what changes them, and that both ends understand each other."""

from __future__ import annotations

import zlib

import torch

from cohort.common.engine.transfer.run_checksum import JOINED, alike_all, crc32, weighted_all


def weighted(data: torch.Tensor) -> int:
    return weighted_all([data])[0]


def some_bytes(size: int = 3 * 8192) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def test_crc() -> None:
    data = some_bytes()
    assert crc32(data) == zlib.crc32(data.numpy().tobytes())


def test_by_hand() -> None:
    """Two groups of 1024 ones and of 1024 twos: 1 · 1024 + 3 · 2048 = 7168."""
    words = torch.cat([torch.full((1024,), 1), torch.full((1024,), 2)]).to(torch.int32)
    assert weighted(words.view(torch.uint8)) == 7168 | 1 << 32


def test_any_changed_byte_and_swapped_groups_show() -> None:
    data = some_bytes()
    before = weighted(data)
    for index in range(0, len(data), 977):
        changed = data.clone()
        changed[index] ^= 1 << (index % 8)
        assert weighted(changed) != before
    swapped = torch.cat([data[4096:8192], data[:4096], data[8192:]])
    assert weighted(swapped) != before


def test_sums_of_zeros_are_sums() -> None:
    """0 would mean that nothing was summed."""
    assert weighted(torch.zeros(64, dtype=torch.uint8)) != 0
    assert crc32(torch.zeros(0, dtype=torch.uint8)) != 0


def test_the_receiver_sums_as_the_sender_did() -> None:
    data = some_bytes(4 * 37)
    for sent in (crc32(data), weighted(data)):
        assert alike_all([data], [sent]) == [sent]


def test_many_at_once_are_the_same_sums() -> None:
    datas = [some_bytes(4 * 37), some_bytes(8192), some_bytes(64)]
    likes = [crc32(datas[0]), weighted(datas[1]), weighted(datas[2])]
    assert weighted_all(datas) == [weighted(data) for data in datas]
    assert alike_all(datas, likes) == likes
    assert weighted_all([]) == alike_all([], []) == []


def test_no_sum_looks_like_a_joined_run() -> None:
    assert not any(form(some_bytes(4 * n)) & JOINED for n in range(1, 60) for form in (crc32, weighted))
