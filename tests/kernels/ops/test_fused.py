"""The elementwise steps against formulas written out here in float64, for both implementations."""

from __future__ import annotations

import pytest
import torch

from cohort.kernels.ops.fused import clamped_swiglu, rms_norm, rope_and_write_kv, rope_inplace, silu_mul
from cohort.kernels.ops.paged_attention import write_kv

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EPS = 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@DTYPES
@pytest.mark.parametrize("shape", [(576,), (1, 576), (300, 64), (5, 37), (6, 3, 80)], ids=str)
def test_rms_norm(implementation, assert_close, dtype, shape):
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
    out = torch.empty_like(x)
    rms_norm(x, weight, EPS, out)
    assert_close(out, normed(x, weight))


@DTYPES
def test_rms_norm_in_place_on_heads_of_a_fused_projection(implementation, assert_close, dtype):
    qkv, weight = torch.randn(9, 8, 48).to(dtype), torch.randn(48).to(dtype)
    before = qkv.clone()
    rms_norm(qkv[:, 2:5], weight, EPS, qkv[:, 2:5])
    assert_close(qkv[:, 2:5], normed(before[:, 2:5], weight))
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


def test_the_epsilon_counts(implementation, assert_close):
    x, out = torch.full((2, 32), 1e-4), torch.empty(2, 32)
    rms_norm(x, torch.ones(32), EPS, out)
    assert_close(out, normed(x, torch.ones(32)))
    assert out.max() < 0.1  # without it this would be 1


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 20), (36, 36)])
@pytest.mark.parametrize("tokens", [1, 200])
def test_rope_on_views_of_a_fused_projection(implementation, assert_close, dtype, head_dim, rotary_dim, tokens):
    qkv = torch.randn(tokens, 8, head_dim).to(dtype)
    before = qkv.clone()
    q, k, _ = torch.split(qkv, [4, 2, 2], dim=1)
    half = rotary_dim // 2
    angle = torch.arange(500)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    positions = torch.randint(0, 500, (tokens,))
    rope_inplace(q, k, angle.cos(), angle.sin(), positions)
    # a head's element i and element i + half are one complex number, turned by the position's angle
    pairs = torch.complex(before[:, :6, :half].double(), before[:, :6, half:rotary_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[positions][:, None].to(torch.complex128)
    assert_close(qkv[:, :6, :half], turned.real)
    assert_close(qkv[:, :6, half:rotary_dim], turned.imag)
    assert torch.equal(qkv[:, :6, rotary_dim:], before[:, :6, rotary_dim:])
    assert torch.equal(qkv[:, 6:], before[:, 6:])


def test_rope_refuses_a_position_beyond_the_table(implementation):
    q, k, table = torch.randn(1, 2, 8), torch.randn(1, 1, 8), torch.rand(10, 4)
    with pytest.raises(IndexError):
        rope_inplace(q, k, table, table, torch.tensor([10]))


@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (200, 48), (3, 21)])
def test_silu_mul(implementation, assert_close, dtype, tokens, width):
    gate_up = (4 * torch.randn(tokens, 2 * width)).to(dtype)
    out = torch.empty(tokens, width, dtype=dtype)
    silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(out, gate / (1 + torch.exp(-gate)) * up)


@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (200, 48), (3, 21)])
def test_clamped_swiglu(implementation, assert_close, dtype, tokens, width):
    gate_up = (4 * torch.randn(tokens, 2 * width)).to(dtype)
    out = torch.empty(tokens, width, dtype=dtype)
    clamped_swiglu(gate_up, 1.702, 3.0, out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    assert (gate == 3.0).any()
    assert (up == -3.0).any()
    assert_close(out, (up + 1) * gate / (1 + torch.exp(-1.702 * gate)))


@DTYPES
def test_silu_mul_at_the_extremes(implementation, dtype):
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30, float("inf"), float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)
    out = torch.empty(1, 7, dtype=dtype)
    silu_mul(gate_up, out)
    expected = torch.tensor([0.0, 0.0, 0.0, 200.0, 1e30, float("inf"), float("nan")]).to(dtype)
    torch.testing.assert_close(out[0], expected, equal_nan=True)


def rotated(first: torch.Tensor, second: torch.Tensor, cos: float, sin: float) -> torch.Tensor:
    """first · cos - second · sin, computed as one head's first half."""
    head = torch.cat((first, second), dim=1)[:, None]
    half = first.shape[1]
    positions = torch.zeros(len(first), dtype=torch.int64)
    rope_inplace(head, head.clone(), torch.full((1, half), cos), torch.full((1, half), sin), positions)
    return head[:, 0, :half]


def test_bfloat16_rounds_as_torch_does(implementation):
    """Every bfloat16 there is, times one: none may change, NaN stays NaN. Then sums that must be rounded."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    same = rotated(every, torch.zeros_like(every), cos=1.0, sin=0.0)
    assert torch.equal(same.isnan(), every.isnan())
    assert torch.equal(same.nan_to_num(), every.nan_to_num())
    x, y = torch.randn(64, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    assert torch.equal(rotated(x, y, cos=1.0, sin=-1.0), x + y)


def test_rotation_and_store_in_one_call(implementation):
    qkv = torch.randn(5, 8, 32)
    query, key, value = torch.split(qkv.clone(), [4, 2, 2], dim=1)
    angle, positions, slots = torch.rand(9, 16), torch.tensor([3, 0, 8, 8, 1]), torch.tensor([17, 3, 40, 0, 47])
    kv = torch.randn(3, 2, 2, 2, 16, 32)
    both, apart = kv.clone(), kv.clone()
    rope_inplace(query, key, angle.cos(), angle.sin(), positions)
    write_kv(key, value, apart, 1, slots)
    parts = torch.split(qkv, [4, 2, 2], dim=1)
    rope_and_write_kv(*parts, angle.cos(), angle.sin(), positions, both, 1, slots)
    assert torch.equal(both, apart)
    assert not torch.equal(both, kv)
    assert torch.equal(parts[0], query)
