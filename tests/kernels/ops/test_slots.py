"""Gather and scatter of whole tokens: each the other's inverse, and neither touches anything else."""

from __future__ import annotations

import pytest
import torch

from cohort.kernels.ops.slots import gather_slots, scatter_slots

BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 7, 3, 2, 16, 24


def random_cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 80])
def test_gather_takes_each_slot(implementation, dtype, count):
    kv = random_cache(dtype)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:count]
    out = torch.empty(count, LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=dtype)
    gather_slots(kv, slots, out)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(out[row], kv[slot // BLOCK_SIZE, :, :, :, slot % BLOCK_SIZE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scatter_undoes_gather_and_leaves_the_rest(implementation, dtype):
    kv = random_cache(dtype)
    before = kv.clone()
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:50]
    saved = torch.empty(50, LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=dtype)
    gather_slots(kv, slots, saved)
    overwritten = torch.randn(saved.shape).to(dtype)
    scatter_slots(overwritten, kv, slots)
    again = torch.empty_like(saved)
    gather_slots(kv, slots, again)
    assert torch.equal(again, overwritten)
    assert not torch.equal(kv, before)
    scatter_slots(saved, kv, slots)
    assert torch.equal(kv, before)


def test_native_refuses_slots_outside_the_cache(implementation):
    if implementation != "native":
        pytest.skip("the reference leaves these checks to torch's indexing")
    kv = random_cache(torch.float32)
    token = torch.randn(1, LAYERS, 2, KV_HEADS, HEAD_DIM)
    for bad in (-1, BLOCKS * BLOCK_SIZE):
        with pytest.raises(IndexError):
            gather_slots(kv, torch.tensor([bad]), token)
        with pytest.raises(IndexError):
            scatter_slots(token, kv, torch.tensor([bad]))
    with pytest.raises(ValueError, match="slots"):
        gather_slots(kv, torch.tensor([1, 2]), token)
    with pytest.raises(ValueError, match="out"):
        gather_slots(kv, torch.tensor([1]), token[..., :8])
    with pytest.raises(TypeError):
        gather_slots(kv, torch.tensor([1]), token.bfloat16())
