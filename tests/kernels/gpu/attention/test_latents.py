"""Triton's attention over latents against dense attention in float64, which knows nothing of blocks or directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.kernels.gpu import elementwise
from cohort.kernels.gpu.attention import latents
from cohort.kernels.gpu.plan import DecodePlan, latent_group
from tests.examples import another_of_its_kind

RANK = 24  # of rows of 32: neither a power of two nor a multiple of 16
MIXED = [(20, 20), (45, 13), (1, 1), (0, 1), (16, 1), (90, 1)]  # a prompt, a chunk after a prefix, decode rows


@pytest.fixture
def make_latents(make_gpu_step: Callable[..., Any]) -> Callable[..., Any]:
    """`make_gpu_step` whose cache has the keys alone."""

    def make(rows: list[tuple[int, int]], *, heads: int, **options: Any) -> Any:
        step = make_gpu_step(rows, kv_heads=1, group=heads, head_dim=32, **options)
        step.kv = step.kv[:, :, :1].contiguous()
        step.values = [key.clone() for key in step.keys]
        return step

    return make


def _attended(step: Any, plan: DecodePlan | None = None) -> Tensor:
    out = torch.full_like(step.query, float("nan"))
    if plan is None:
        latents.latent_attention(step.query, step.kv, step.layer, step.meta, step.scale, out, RANK)
    else:
        latents.decode(step.query, step.kv, step.layer, step.meta, step.scale, out, RANK, plan)
    assert out[:, :, RANK:].isnan().all()  # nothing is written there
    return out[:, :, :RANK].cpu()


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.float32, 20),  # two tiles of ten
        pytest.param(torch.bfloat16, 6, marks=another_of_its_kind()),
        pytest.param(torch.float16, 66, marks=another_of_its_kind()),  # two tiles of 33
    ],
)
def test_prompts_and_decode_rows_in_one_call(make_latents, assert_close, dtype, heads):
    step = make_latents(MIXED, heads=heads, dtype=dtype, directions="mixed")
    assert_close(_attended(step), step.expected()[:, :, :RANK])


@pytest.mark.parametrize("items", [1, 6, pytest.param(1000, marks=another_of_its_kind())])
def test_however_contexts_fall_into_parts(make_latents, assert_close, items):
    step = make_latents([(length, 1) for length in (1, 0, 17, 33, 90)], heads=5, directions="mixed")
    plan = DecodePlan(3, items, min_part_keys=16, tile_keys=16, warps=1, stages=1)
    assert_close(_attended(step, plan), step.expected()[:, :, :RANK])


def test_a_latent_is_stored_once(make_latents):
    """What would be values' place belongs to the next layer."""
    step = make_latents([(40, 1)], heads=2)
    before = step.kv.clone()
    new = torch.randn(2, 1, 32, device=step.kv.device)
    slots = torch.tensor([17, -1], device=step.kv.device)
    elementwise.write_kv(new, new, step.kv, 0, slots)
    assert torch.equal(step.kv[1, 0, 0, 0, 1], new[0, 0])
    step.kv[1, 0, 0, 0, 1] = before[1, 0, 0, 0, 1]
    assert torch.equal(step.kv.nan_to_num(7.0), before.nan_to_num(7.0))


def test_heads_are_served_together_as_far_as_they_divide():
    assert [latent_group(heads, 2) for heads in (16, 128, 66, 67, 1)] == [16, 64, 33, 1, 1]
    assert latent_group(128, 4) == 16


@pytest.mark.parametrize("wrong", ["planes", "dtype", "width"])
def test_what_the_kernels_would_misread(make_latents, wrong):
    step = make_latents([(20, 1)], heads=2)
    if wrong == "planes":
        step.kv = step.kv.repeat(1, 1, 2, 1, 1, 1)
    elif wrong == "dtype":
        step.kv = step.kv.to(torch.bfloat16)
    else:
        step.query = step.query[:, :, :30]
    with pytest.raises((ValueError, TypeError)):
        latents.latent_attention(
            step.query, step.kv, step.layer, step.meta, 1 / math.sqrt(32), torch.empty_like(step.query), RANK
        )
