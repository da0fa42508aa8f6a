"""Attention, products over codes and experts at the shapes that are served, against the torch reference in float32.

On a GPU in the precisions that are served; on a processor at one tiny shape in float32, by the processor's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.common.engine.config.model_config import read_geometry
from cohort.kernels import reference
from cohort.kernels.ops.coded import CodedMatrix
from cohort.kernels.ops.paged_attention import latent_attention, paged_attention
from cohort.kernels.types import ExpertCodes
from cohort.services.bench.gpu_check.frame.context import LLAMA_3_8B, TINY, shape_folder
from cohort.services.bench.gpu_check.frame.rates import products
from cohort.services.bench.gpu_check.kernels import experts, matrices
from cohort.services.bench.gpu_check.kernels.attention import BLOCK_SIZE, Heads, make_case
from tests.kernels.gpu.conftest import DEVICE, REAL

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SERVED, OTHERS = (Heads(32, 8, 128), Heads(40, 8, 128)), (Heads(9, 3, 64), Heads(16, 16, 256))
SMALL = Heads(4, 2, 16)
SERVED_TYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TYPES = (torch.bfloat16, torch.float32, torch.float16) if REAL else tuple(dict.fromkeys((SERVED_TYPE, torch.float32)))
LONG, ROWS = (5000, 40) if REAL else (90, 5)
CODED = ("qkv", "attention out", "gate and up", "down")


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model's attention is: `window`, 0 = none; `softcap` and `sinks` of its scores; a cache in FP8."""

    heads: Heads
    dtype: torch.dtype = SERVED_TYPE
    window: int = 0
    fp8: bool = False
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self) -> str:
        told = {"window": self.window, "KV in FP8": self.fp8, "soft cap": self.softcap, "sinks": self.sinks}
        return ", ".join([str(self.heads), str(self.dtype)[6:], *(name for name, value in told.items() if value)])


def attentions() -> list[Attention]:
    """What is served first stands first."""
    shapes = (*SERVED, *OTHERS) if REAL else (SMALL,)
    plain = [Attention(heads, dtype, window) for dtype in TYPES for heads in shapes for window in (0, 37)]
    coded = [Attention(heads, fp8=True) for heads in shapes]
    scored = [
        Attention(heads, window=window, fp8=fp8, softcap=softcap, sinks=sinks)
        for heads, most, softcap, sinks in (
            (Heads(64, 8, 64), 128, 0.0, True),  # gpt-oss
            (Heads(16, 8, 256), 4096, 50.0, False),  # Gemma 2
            (Heads(32, 8, 128), 0, 2.0, True),
        )
        for fp8 in (False, True)
        for window in {0, most}
    ]
    if not REAL:
        scored = [
            Attention(SMALL, window=window, fp8=fp8, softcap=2.0, sinks=True)
            for fp8 in (False, True)
            for window in (0, 37)
        ]
    return [*plain, *coded, *scored]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@pytest.fixture(params=["decode", "prefill beside decode", "prompts behind a prefix"])
def rows(request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """Contexts, and how many of each one's last tokens are computed."""
    if request.param == "decode":  # short, long, and everything around a block's border
        drawn = torch.randint(1, LONG, (ROWS,)).tolist()
        return [1, LONG, BLOCK_SIZE, BLOCK_SIZE + 1, *drawn][:ROWS], [1] * ROWS
    if request.param == "prefill beside decode":
        return ([LONG, 333, 64, 71, 1], [LONG // 2, 300, 64, 1, 1]) if REAL else ([90, 50, 9, 71, 1], [40, 50, 3, 1, 1])
    return ([700, 300, 90], [300, 300, 90]) if REAL else ([40, 20], [10, 20])


def error_of(ours: Tensor, truth: Tensor) -> float:
    """‖ours − truth‖ / ‖truth‖; NaN never passes."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def attention_error(
    attend: Callable[..., None], asked: Attention, contexts: list[int], queries: list[int]
) -> tuple[float, float]:
    """Over shuffled blocks of random direction, the output poisoned first; and what is allowed."""
    case = make_case(DEVICE, asked.dtype, asked.heads, contexts, queries, fp8=asked.fp8)
    ours, truth = torch.full_like(case.query, float("nan")), torch.empty(case.query.shape, device=DEVICE)
    sinks = torch.linspace(-3.0, 6.0, asked.heads.query, device=DEVICE) if asked.sinks else None
    options: dict[str, Any] = {"sliding_window": asked.window, "softcap": asked.softcap, "sinks": sinks}
    attend(case.query, case.kv, 1, case.meta, case.scale, ours, **options)
    kv = case.kv if asked.fp8 else case.kv.float()
    reference.paged_attention(case.query.float(), kv, 1, case.meta, case.scale, truth, **options)
    return error_of(ours, truth), ALLOWED[asked.dtype]


@pytest.mark.parametrize("asked", attentions(), ids=str)
def test_attention(asked: Attention, rows: tuple[list[int], list[int]]) -> None:
    error, allowed = attention_error(paged_attention, asked, *rows)
    assert error <= allowed


@pytest.mark.parametrize("rows", ["decode"], indirect=True)
def test_attention_that_misses_a_key_is_seen(rows: tuple[list[int], list[int]]) -> None:
    def short(query: Tensor, kv: Tensor, layer: int, meta: Any, *others: Any, **options: Any) -> None:
        kept, meta.context_lens = meta.context_lens, (meta.context_lens - 1).clamp(min=1)
        paged_attention(query, kv, layer, meta, *others, **options)
        meta.context_lens = kept

    error, allowed = attention_error(short, Attention(SERVED[0] if REAL else SMALL), *rows)
    assert not error <= allowed


@pytest.mark.parametrize("heads", [16, 128] if REAL else [6, 10])
def test_attention_over_latents(heads: int, rows: tuple[list[int], list[int]]) -> None:
    """Rows whose key is their value: DeepSeek's 512 + 64 numbers."""
    rank, width = (512, 576) if REAL else (24, 32)
    case = make_case(DEVICE, SERVED_TYPE, Heads(heads, 1, width), *rows)
    kv = case.kv[:, :, :1].contiguous()
    ours, truth = torch.full_like(case.query, float("nan")), torch.empty(case.query.shape, device=DEVICE)
    latent_attention(case.query, kv, 1, case.meta, case.scale, ours, rank)
    reference.paged_attention(case.query.float(), kv.float(), 1, case.meta, case.scale, truth)
    assert error_of(ours[..., :rank], truth[..., :rank]) <= ALLOWED[SERVED_TYPE]


@pytest.mark.parametrize("count", [1, 16, 33, 300] if REAL else [1, 5])
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("layout", matrices.LAYOUTS, ids=lambda layout: layout.name)
def test_a_product_over_codes(layout: matrices.Layout, name: str, count: int, tmp_path: Any) -> None:
    """And one that is added, against the dequantised weight."""
    geometry = read_geometry(shape_folder(tmp_path, LLAMA_3_8B if REAL else TINY))
    product = next(each for each in products(geometry) if each.name == name)
    part = matrices.make_codes(DEVICE, layout, product.outputs, product.inputs)
    matrix = CodedMatrix([part])
    x = torch.randn(count, product.inputs, device=DEVICE).to(SERVED_TYPE)
    truth = x.float() @ reference.coded_numbers(part.codes, part.scales, part.offsets, part.group).t()
    ours = torch.full_like(truth, float("nan"), dtype=SERVED_TYPE)
    matrix.product(x, None, ours)
    added = torch.ones_like(ours)
    matrix.add_product(x, added)
    assert error_of(ours, truth) <= 1e-2
    assert error_of(added, truth + 1) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 33, 900] if REAL else [1, 20])
@pytest.mark.parametrize("layout", experts.layouts(REAL), ids=lambda layout: layout.name)
def test_experts_in_codes(layout: experts.Layout, tokens: int) -> None:
    """Against the dequantised weights in float32, rounded to the model's type between the products."""
    weights = experts.make_weights(layout, DEVICE, SERVED_TYPE)
    x, chosen = experts.routed(layout.mixture, tokens, DEVICE, SERVED_TYPE)
    numbers = [
        reference.expert_numbers(each) for each in (weights.gate_up, weights.down) if isinstance(each, ExpertCodes)
    ]
    biases = None if weights.biases is None else (weights.biases[0].float(), weights.biases[1].float())
    truth = reference.expert_outputs(x.float(), chosen, numbers[0], numbers[1], biases, weights.clamped)
    assert error_of(weights.outputs(x, chosen), truth) <= 1e-2
