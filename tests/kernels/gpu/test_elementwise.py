"""The elementwise steps in Triton against the torch reference."""

from __future__ import annotations

import pytest
import torch

from cohort.kernels import reference
from cohort.kernels.gpu import elementwise

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EPS = 1e-5


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (5, 37), (4, 3, 80)], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(device, assert_close, dtype, shape, in_place):
    x, weight = (3 * torch.randn(shape)).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    expected = torch.empty_like(x)
    reference.rms_norm(x, weight, EPS, expected)
    out = x if in_place else torch.empty_like(x)
    elementwise.rms_norm(x, weight, EPS, out)
    assert_close(out.cpu(), expected.cpu())


def test_rms_norm_with_a_weight_in_float32_is_rounded_once(device):
    """To the bit but where a sum's order decides a rounding; a rounding more would move some by a step."""
    x, weight = (3 * torch.randn(20, 3, 48)).to(device, torch.bfloat16), torch.randn(48, device=device)
    expected, twice, out = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    reference.wide_rms_norm(x, weight, EPS, expected)
    reference.rms_norm(x, weight, EPS, twice)
    elementwise.rms_norm(x, weight, EPS, out)
    assert (out == expected).float().mean() > 0.999
    assert (twice == expected).float().mean() < 0.9


def test_rms_norm_on_heads_of_a_fused_projection(device, assert_close):
    qkv, weight = torch.randn(9, 8, 48, device=device), torch.randn(48, device=device)
    before, expected = qkv.clone(), torch.empty(9, 3, 48, device=device)
    reference.rms_norm(qkv[:, 2:5], weight, EPS, expected)
    elementwise.rms_norm(qkv[:, 2:5], weight, EPS, qkv[:, 2:5])
    assert_close(qkv[:, 2:5].cpu(), expected.cpu())
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


def test_the_epsilon_counts(device):
    x, out = torch.full((2, 32), 1e-4, device=device), torch.empty(2, 32, device=device)
    elementwise.rms_norm(x, torch.ones(32, device=device), EPS, out)
    assert out.max() < 0.1  # without it this would be 1


@DTYPES
@pytest.mark.parametrize("width", [37, 1500])
def test_silu_mul(device, assert_close, dtype, width):
    gate_up = (3 * torch.randn(3, 2 * width)).to(device, dtype)
    out, expected = torch.empty(2, 3, width, device=device, dtype=dtype)
    elementwise.silu_mul(gate_up, out)
    reference.silu_mul(gate_up, expected)
    assert_close(out.cpu(), expected.cpu())


@DTYPES
@pytest.mark.parametrize(("width", "in_turn"), [(37, False), (1500, False), (37, True)])
def test_clamped_swiglu(device, assert_close, dtype, width, in_turn):
    gate_up = (3 * torch.randn(3, 2 * width)).to(device, dtype)
    out, expected = torch.empty(2, 3, width, device=device, dtype=dtype)
    elementwise.clamped_swiglu(gate_up, 1.702, 2.5, out, in_turn=in_turn)
    halves = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1) if in_turn else gate_up
    reference.clamped_swiglu(halves, 1.702, 2.5, expected)
    assert_close(out.cpu(), expected.cpu())


def test_silu_mul_at_the_extremes(device):
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30, float("inf"), float("nan")]], device=device)
    out = torch.empty(1, 7, device=device)
    elementwise.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), out)
    expected = torch.tensor([0.0, 0.0, 0.0, 200.0, 1e30, float("inf"), float("nan")])
    torch.testing.assert_close(out[0].cpu(), expected, equal_nan=True)


class Projection:
    """A fused projection of 3 query heads and 2 kv heads, as the lean model cuts it, and rotary tables."""

    def __init__(self, dtype: torch.dtype, head_dim: int, rotary_dim: int, device: torch.device, tokens: int = 5):
        self.fused = torch.randn(tokens, 7, head_dim).to(device, dtype)
        self.query, self.key, self.value = torch.split(self.fused, [3, 2, 2], dim=1)
        angle = torch.randn(300, rotary_dim // 2)
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.positions = torch.randint(0, 300, (tokens,)).to(device)
        self.cache = torch.randn(4, 3, 2, 2, 16, head_dim).to(device, dtype)
        self.slots = torch.randperm(64)[:tokens].to(device)


SHAPES = pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 20), (128, 128)])


@DTYPES
@SHAPES
def test_rope_in_place(device, assert_close, dtype, head_dim, rotary_dim):
    made = Projection(dtype, head_dim, rotary_dim, device)
    query, key, before = made.query.clone(), made.key.clone(), made.fused.clone()
    reference.rope_inplace(query, key, made.cos, made.sin, made.positions)
    elementwise.rope_inplace(made.query, made.key, made.cos, made.sin, made.positions)
    assert_close(made.query.cpu(), query.cpu())
    assert_close(made.key.cpu(), key.cpu())
    assert torch.equal(made.value, before[:, 5:])
    assert not torch.allclose(made.query, before[:, :3], atol=1e-2)


@DTYPES
@SHAPES
def test_rope_and_store_in_one(device, assert_close, dtype, head_dim, rotary_dim):
    made = Projection(dtype, head_dim, rotary_dim, device)
    query, key, expected = made.query.clone(), made.key.clone(), made.cache.clone()
    reference.rope_inplace(query, key, made.cos, made.sin, made.positions)
    reference.write_kv(key, made.value, expected, 1, made.slots)
    elementwise.rope_and_write_kv(
        made.query, made.key, made.value, made.cos, made.sin, made.positions, made.cache, 1, made.slots
    )
    assert_close(made.query.cpu(), query.cpu())
    assert_close(made.cache.cpu(), expected.cpu())
    assert torch.equal(made.cache[:, [0, 2]], expected[:, [0, 2]])
    assert torch.equal(made.cache[:, 1, 1], expected[:, 1, 1])


@DTYPES
def test_write_kv_puts_strided_views_into_their_slots_only(device, dtype):
    made = Projection(dtype, 24, 24, device, tokens=11)
    expected = made.cache.clone()
    reference.write_kv(made.key, made.value, expected, 2, made.slots)
    elementwise.write_kv(made.key, made.value, made.cache, 2, made.slots)
    assert torch.equal(made.cache, expected)


def test_a_slot_below_zero_takes_nothing(device):
    made = Projection(torch.float32, 64, 64, device)
    before = made.cache.clone()
    elementwise.write_kv(made.key, made.value, made.cache, 1, torch.full_like(made.slots, -1))
    assert torch.equal(made.cache, before)


def test_refuses_mismatched_tensors(device):
    made = Projection(torch.float32, 64, 64, device)
    with pytest.raises(ValueError, match="slots"):
        elementwise.write_kv(made.key, made.value, made.cache, 1, made.slots[:2])
    with pytest.raises(TypeError):
        elementwise.write_kv(made.key.half(), made.value, made.cache, 1, made.slots)
    with pytest.raises(ValueError, match="side by side"):
        elementwise.rope_inplace(
            made.query.transpose(1, 2).contiguous().transpose(1, 2), made.key, made.cos, made.sin, made.positions
        )
    with pytest.raises(TypeError, match="float32"):
        elementwise.rope_inplace(made.query, made.key, made.cos.double(), made.sin.double(), made.positions)
    with pytest.raises(ValueError, match="gate"):
        elementwise.silu_mul(torch.randn(2, 9), torch.empty(2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_gemma_activates_and_caps_with(device, dtype):
    """Within a rounding of torch's: the forms differ where nothing is left of either."""
    gate_up = torch.cat([torch.linspace(-12, 12, 37), torch.randn(37)])[None].to(device, dtype)
    out = torch.empty(1, 37, dtype=dtype, device=device)
    elementwise.gelu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    logits = torch.cat([torch.linspace(-300, 300, 41), torch.tensor([0.0, 1e-3])])[None].to(device)
    capped = (logits / 30).tanh() * 30
    elementwise.soft_cap(logits, 30.0)
    torch.testing.assert_close(logits, capped, rtol=1e-5, atol=1e-5)
