"""The KV pools: layout, copies between them, and the bytes a transfer sees."""

from __future__ import annotations

import pytest
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.errors import InvariantViolated
from tests.common.engine.conftest import GEOMETRY


def test_shape_and_weight(kv: KvTensors) -> None:
    assert kv.blocks.shape == (10, 3, 2, 2, 8, 4)
    assert kv.block_bytes == 3 * 2 * 2 * 8 * 4 * 4
    assert kv.run_view(0, 1).numel() == kv.block_bytes
    kv.check()


def test_swap_out_and_in_elsewhere(kv: KvTensors) -> None:
    before, host_before = kv.blocks.clone(), kv.host_blocks.clone()
    kv.copy_out([(2, 0), (3, 1), (7, 5)])
    assert torch.equal(kv.host_blocks[[0, 1, 5]], before[[2, 3, 7]])
    assert torch.equal(kv.host_blocks[[2, 3, 4]], host_before[[2, 3, 4]])
    assert torch.equal(kv.blocks, before)
    kv.copy_in([(5, 9), (0, 4)])
    assert torch.equal(kv.blocks[[9, 4]], before[[7, 2]])
    untouched = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(kv.blocks[untouched], before[untouched])


def test_a_copy_never_leaves_its_pool(kv: KvTensors) -> None:
    before = kv.host_blocks.clone()
    for pairs in ([(9, 5), (10, 6)], [(-1, 0)], [(0, 6)]):
        with pytest.raises(InvariantViolated, match="leaves its pool"):
            kv.copy_out(pairs)
    assert torch.equal(kv.host_blocks, before)


def test_views_are_the_cache(kv: KvTensors) -> None:
    run = kv.run_view(3, 2)
    assert torch.equal(run.view(torch.float32), kv.blocks[3:5].reshape(-1))
    assert run.nbytes == 2 * kv.block_bytes
    kv.run_view(8, 1).copy_(kv.run_view(2, 1, host=True))
    assert torch.equal(kv.blocks[8], kv.host_blocks[2])
    run.zero_()
    assert not kv.blocks[3:5].any()
    assert kv.blocks[5].any()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (9, 2), (10, 1)])
def test_views_outside_the_pool_are_refused(kv: KvTensors, first: int, count: int) -> None:
    with pytest.raises(InvariantViolated, match="not in a pool of 10"):
        kv.run_view(first, count)


def test_gather_and_scatter_slots(kv: KvTensors) -> None:
    before = kv.blocks.clone()
    slots = torch.tensor([5, 79, 16, 33])
    tokens = kv.gather(slots)
    assert tokens.shape == (4, 3, 2, 2, 4)
    assert torch.equal(tokens[1], before[9, :, :, :, 7])
    targets = torch.tensor([0, 1, 2, 40])
    kv.scatter(tokens, targets)
    assert torch.equal(kv.gather(targets), tokens)
    assert torch.equal(kv.blocks[6:], before[6:])


def test_no_host_pool() -> None:
    kv = KvTensors(GEOMETRY, num_blocks=2, host_blocks=0, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(InvariantViolated):
        kv.copy_out([(0, 0)])
