"""Copies of a plan: slots and blocks, out before in, and those beside the rows are done when the rows are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cohort.common.engine.cache.kv_copies import KvCopier
from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.policies.kv_interface import KvCopy


@pytest.fixture
def copier(kv: KvTensors) -> Iterator[KvCopier]:
    copier = KvCopier(kv)
    yield copier
    copier.close()


def token(pool: torch.Tensor, slot: int) -> torch.Tensor:
    return pool[slot // 8, :, :, :, slot % 8].clone()


def test_slots_go_out_and_come_back_elsewhere(kv: KvTensors, copier: KvCopier) -> None:
    first, second = token(kv.blocks, 5), token(kv.blocks, 79)
    untouched = kv.blocks[3:9].clone()
    with copier.around([KvCopy("out", "slot", (5, 79), (40, 3)), KvCopy("in", "slot", (16,), (40,))]):
        assert torch.equal(token(kv.host_blocks, 40), first)
        assert torch.equal(token(kv.host_blocks, 3), second)
        assert torch.equal(token(kv.blocks, 16), first)
    assert torch.equal(kv.blocks[3:9], untouched)


def test_a_block_and_single_slots_of_it_meet_on_the_host(kv: KvTensors, copier: KvCopier) -> None:
    """A slot keeps its place within the block, so what left slot by slot can come back as a block."""
    before = kv.blocks[4].clone()
    slots = tuple(range(32, 40))
    with copier.around([KvCopy("out", "slot", slots, tuple(range(16, 24))), KvCopy("in", "block", (0,), (2,))]):
        assert torch.equal(kv.blocks[0], before)


def test_copies_beside_the_rows_are_done_with_them(kv: KvTensors, copier: KvCopier) -> None:
    wanted_block, wanted_slot = kv.host_blocks[1].clone(), token(kv.host_blocks, 2)
    copies = [KvCopy("in", "block", (7,), (1,), concurrent=True), KvCopy("in", "slot", (9,), (2,), concurrent=True)]
    with copier.around(copies):
        pass
    assert torch.equal(kv.blocks[7], wanted_block)
    assert torch.equal(token(kv.blocks, 9), wanted_slot)


def test_a_failed_copy_fails_the_iteration(kv: KvTensors, copier: KvCopier) -> None:
    outside = KvCopy("in", "slot", (80,), (0,), concurrent=True)
    with pytest.raises((IndexError, RuntimeError)), copier.around([outside]):
        pass
