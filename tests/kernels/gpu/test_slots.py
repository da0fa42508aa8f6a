"""Gather and scatter in Triton: each the other's inverse, equal to the reference, and neither touches anything else."""

from __future__ import annotations

import pytest
import torch

from cohort.kernels import reference
from cohort.kernels.gpu.slots import gather_slots, scatter_slots
from tests.examples import another_of_its_kind

BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 7, 3, 7, 16, 24
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def random_cache(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(device, dtype)


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 25])
def test_gather_takes_each_slot(device, dtype, count):
    kv = random_cache(dtype, device)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:count].to(device)
    out = torch.empty(count, LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    gather_slots(kv, slots, out)
    expected = torch.empty_like(out)
    reference.gather_slots(kv, slots, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=another_of_its_kind()) for each in (torch.float32, torch.float16))],
)
def test_scatter_undoes_gather_and_leaves_the_rest(device, dtype):
    kv = random_cache(dtype, device)
    before = kv.clone()
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:25].to(device)
    saved = torch.empty(25, LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    gather_slots(kv, slots, saved)
    overwritten = torch.randn(saved.shape).to(device, dtype)
    scatter_slots(overwritten, kv, slots)
    again = torch.empty_like(saved)
    gather_slots(kv, slots, again)
    assert torch.equal(again, overwritten)
    assert not torch.equal(kv, before)
    scatter_slots(saved, kv, slots)
    assert torch.equal(kv, before)


def test_a_reversed_block_is_gathered_by_its_slots(device):
    """R7 · Token j of a block filled from the right lies in slot BLOCK_SIZE - 1 - j."""
    kv = random_cache(torch.float32, device)
    slots = torch.tensor([3 * BLOCK_SIZE + BLOCK_SIZE - 1 - j for j in range(5)], device=device)
    out = torch.empty(5, LAYERS, 2, KV_HEADS, HEAD_DIM, device=device)
    gather_slots(kv, slots, out)
    assert torch.equal(out, kv[3].permute(3, 0, 1, 2, 4).flip(0)[:5])


def test_refuses_mismatched_tensors(device):
    kv = random_cache(torch.float32, device)
    token = torch.randn(1, LAYERS, 2, KV_HEADS, HEAD_DIM, device=device)
    slot = torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="slots"):
        gather_slots(kv, torch.tensor([1, 2], device=device), token)
    with pytest.raises(ValueError, match="hold"):
        scatter_slots(token[..., :8], kv, slot)
    with pytest.raises(TypeError):
        gather_slots(kv, slot, token.bfloat16())
    with pytest.raises(TypeError):
        gather_slots(kv, slot.int(), token)
    with pytest.raises(ValueError, match="contiguous"):
        gather_slots(kv.transpose(1, 2).contiguous().transpose(1, 2), slot, token)
