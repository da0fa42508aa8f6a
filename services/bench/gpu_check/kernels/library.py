"""Section: our products, experts and prefill attention against torch's library products, on the same card.

A metric is our time over the library's, below 1 where ours is faster; it decides what is worth keeping. FP8 and 4 bits
go through `scaled_mm` and tinygemm, and through 16 bits (dequantised, then cuBLAS); mixtures through `grouped_mm`;
prompts through SDPA. The library's FP8 products round x to FP8, ours do not: what the rounding takes, unfused, stands
in the note beside how far the results are apart. What this torch or device lacks is "not there".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cohort.kernels import reference
from cohort.kernels.code_dtypes import E4M3
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.ops.coded import CodedMatrix
from cohort.kernels.ops.paged_attention import paged_attention
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import NotInstalled
from cohort.services.bench.gpu_check.frame.rates import Product
from cohort.services.bench.gpu_check.kernels import attention, experts, matrices

_ITEM_S = 6
_LARGEST_E4M3 = 448.0
_FAR = 0.1
"""Relative distance of two results of random data from which on one of them is another product."""
_ENOUGH = 1 << 40
"""Size of a weight that is measured in one place: a layer's experts are larger than the second-level cache."""
_INNER_TILES = 8  # of tinygemm's packing
_CHANNEL, _BLOCKS, _FOUR_BITS = matrices.LAYOUTS[3], matrices.LAYOUTS[1], matrices.LAYOUTS[0]


@dataclass(frozen=True, slots=True)
class Side:
    """Form of a product that is compared: `call` over weights of `size` bytes that `make` makes."""

    size: int
    make: Callable[[], Any]
    call: Callable[[Any], Tensor]


def run(check: Check) -> None:
    torch.manual_seed(19)
    for product in matrices.products_of(check):
        if product.name not in ("gate and up", "down"):
            continue
        for rows in (1, 16, 64, 256, 2048) if check.real else (3,):
            place = f"{product.outputs} x {product.inputs}, {rows} rows"
            for name, kind in (
                ("FP8 by channel / scaled_mm", _by_channel),
                ("FP8, blocks of 128 / scaled_mm", _by_blocks),
                ("FP8, blocks of 128 / 16 bits", partial(_in_16_bits, _BLOCKS)),
                ("4 bits, groups of 128 / tinygemm", _four_bits),
                ("4 bits, groups of 128 / 16 bits", partial(_in_16_bits, _FOUR_BITS)),
            ):
                check.guard.item(f"{name}: {place}", partial(kind, check, f"{name}: {place}", product, rows), _ITEM_S)
    for tokens in (1, 16, 256, 2048) if check.real else (3,):
        for layout in (None, experts.layouts(check.real)[0], experts.layouts(check.real)[2]):
            name = f"experts, {'16 bits' if layout is None else layout.name} / grouped_mm: {tokens} tokens"
            check.guard.item(name, partial(_mixture, check, name, layout, tokens), _ITEM_S)
    for tokens in (2048, 8192) if check.real else (20,):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for own in (False, True):
                form = "own kernel" if own else "as served"
                name = f"a prompt of {tokens}, {form} / SDPA {backend.name.partition('_')[0].lower()}"
                check.guard.item(name, partial(_prompt, check, name, tokens, backend, own), _ITEM_S)


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Raise `NotInstalled` where torch refuses; a broken device stays one."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise NotInstalled(str(error)) from error


def _compare(check: Check, name: str, ours: Side, library: Side, note: str = "") -> None:
    """Add the row of two that take the same input. Raises `NotInstalled`."""
    first, theirs = ours.make(), library.make()
    with _if_there():
        result = library.call(theirs).float()
    truth = ours.call(first).float()
    apart = float((result - truth).norm() / truth.norm())
    if not apart <= _FAR:
        check.found.checked(f"{name}: the same product", False, f"results are {apart:.1%} apart")
        return
    with _if_there():
        theirs_s = check.over_copies_s(theirs, library.size, library.make, library.call)
    del theirs
    ours_s = check.over_copies_s(first, ours.size, ours.make, ours.call)
    words = f"{ours_s * 1e6:.1f} and {theirs_s * 1e6:.1f} us; results {apart:.1%} apart"
    check.found.measured(name, ours_s / theirs_s, "x", note=f"{words}; {note}".removesuffix("; "))


def _ours(check: Check, layout: matrices.Layout, product: Product, rows: int) -> tuple[Codes, Tensor, Side]:
    """Return a weight's codes, x, and our product of both. Copies of the codes lie elsewhere, scales do not."""
    codes = matrices.make_codes(check.device, layout, product.outputs, product.inputs)
    if layout is _BLOCKS:  # a scale for 128 x 128, as checkpoints have it
        shared = codes.scales[::128].repeat_interleave(128, dim=0)[: product.outputs]
        codes = replace(codes, scales=shared.contiguous())
    x = torch.randn(rows, product.inputs, device=check.device).to(check.dtype)
    out = torch.empty(rows, product.outputs, device=check.device, dtype=check.dtype)

    def make() -> CodedMatrix:
        return CodedMatrix([replace(codes, codes=codes.codes.clone())])

    def call(matrix: CodedMatrix) -> Tensor:
        matrix.product(x, None, out)
        return out

    return codes, x, Side(codes.codes.nbytes, make, call)


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return x [rows, inputs] in E4M3, and float32 scales [rows, groups] of so many inputs each."""
    parts = x.float().view(len(x), -1, group)
    scales = parts.abs().amax(dim=2).clamp(min=1e-6) / _LARGEST_E4M3
    return (parts / scales.unsqueeze(2)).flatten(1).to(E4M3), scales


def _by_channel(check: Check, name: str, product: Product, rows: int) -> None:
    codes, x, ours = _ours(check, _CHANNEL, product, rows)
    x8, x_scales = rounded(x, product.inputs)
    scales, by_row = codes.scales.reshape(1, -1).contiguous(), F.ScalingType.RowWise

    def call(weight: Tensor) -> Tensor:
        return F.scaled_mm(x8, weight.t(), x_scales, by_row, scales, by_row, output_dtype=check.dtype)

    library = Side(codes.codes.nbytes, codes.codes.clone, call)
    _compare(check, name, ours, library, _rounding(check, x, product.inputs))


def _by_blocks(check: Check, name: str, product: Product, rows: int) -> None:
    """Compare FP8 by blocks; x's scales lie group after group, the weight's output after output: cuBLASLt's layouts."""
    codes, x, ours = _ours(check, _BLOCKS, product, rows)
    x8, x_scales = rounded(x, codes.even_group)
    x_scales = x_scales.t().contiguous().t()
    groups = codes.scales.shape[1]
    scales = F.pad(codes.scales[::128], (0, -groups % 4)).contiguous().t()
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128

    def call(weight: Tensor) -> Tensor:
        return F.scaled_mm(x8, weight.t(), x_scales, kinds[0], scales, kinds[1], output_dtype=check.dtype)

    library = Side(codes.codes.nbytes, codes.codes.clone, call)
    _compare(check, name, ours, library, _rounding(check, x, codes.even_group))


def _rounding(check: Check, x: Tensor, group: int) -> str:
    taken_s = rates.seconds(rates.replayed(lambda: rounded(x, group), check.device), check.device)
    return f"to round x takes {taken_s * 1e6:.1f} us more"


def _in_16_bits(layout: matrices.Layout, check: Check, name: str, product: Product, rows: int) -> None:
    """Compare with a weight that is made anew from its codes, whole, before each product."""
    codes, x, ours = _ours(check, layout, product, rows)
    groups = codes.scales.shape[1]
    scales = codes.scales.to(check.dtype).unsqueeze(2)

    def call(weight: Tensor) -> Tensor:
        if codes.nibbles:  # offsets are eight scales below zero
            weight = torch.stack((weight & 15, weight >> 4), dim=2).flatten(1)
        numbers = weight.to(check.dtype) - (8 if codes.nibbles else 0)
        return torch.mm(x, (numbers.view(len(numbers), groups, -1) * scales).flatten(1).t())

    _compare(check, name, ours, Side(codes.codes.nbytes, codes.codes.clone, call))


def _four_bits(check: Check, name: str, product: Product, rows: int) -> None:
    codes, x, ours = _ours(check, _FOUR_BITS, product, rows)
    swapped = codes.codes << 4 | codes.codes >> 4  # the earlier input in the high nibble
    zeros = torch.zeros_like(codes.scales)
    scales = torch.stack((codes.scales, zeros), dim=2).transpose(0, 1).to(torch.bfloat16).contiguous()

    def make() -> Tensor:
        with _if_there():
            return torch._convert_weight_to_int4pack(swapped, _INNER_TILES)

    def call(packed: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, packed, codes.group, scales)

    _compare(check, name, ours, Side(swapped.nbytes, make, call))


def _mixture(check: Check, name: str, layout: experts.Layout | None, tokens: int) -> None:
    """Compare experts, in 16 bits or codes, with a sort by expert and two products of groups in 16 bits."""
    whole = experts.layouts(check.real)[0]
    mixture = whole.mixture
    x, chosen = experts.routed(mixture, tokens, check.device, check.dtype)
    make = partial(experts.make_weights, layout or whole, check.device, check.dtype, plain=layout is None)
    first = make()
    plain = first if layout is None else _numbers(first, check.dtype)
    assert isinstance(plain.gate_up, Tensor) and isinstance(plain.down, Tensor)
    gate_up, down = plain.gate_up.transpose(1, 2), plain.down.transpose(1, 2)

    def grouped(_: object) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort()
        counts = torch.zeros(mixture.count, device=check.device, dtype=torch.int32)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        gates, ups = F.grouped_mm(x[order // mixture.per_token], gate_up, offs=ends).chunk(2, dim=1)
        parts = F.grouped_mm(F.silu(gates) * ups, down, offs=ends)
        return torch.empty_like(parts).index_copy_(0, order, parts)

    ours = Side(_ENOUGH, lambda: first, lambda weights: weights.outputs(x, chosen))
    _compare(check, name, ours, Side(_ENOUGH, lambda: None, grouped))


def _numbers(weights: experts.Weights, dtype: torch.dtype) -> experts.Weights:
    """Return the numbers that the codes stand for."""
    plain = [
        each if isinstance(each, Tensor) else reference.expert_numbers(each).to(dtype)
        for each in (weights.gate_up, weights.down)
    ]
    return replace(weights, gate_up=plain[0], down=plain[1])


def _prompt(check: Check, name: str, tokens: int, backend: SDPBackend, own: bool) -> None:
    """Compare a prompt over the paged cache, with the gathering that flash attention takes, or by our kernel."""
    heads = attention.LLAMA if check.real else attention.TINY
    case = attention.make_case(check.device, check.dtype, heads, [tokens], [tokens], staged=not own)
    out = torch.empty_like(case.query)

    def ours() -> None:
        paged_attention(case.query, case.kv, 1, case.meta, case.scale, out)

    query, key, value = (
        torch.randn(1, count, tokens, heads.dim, device=check.device).to(check.dtype)
        for count in (heads.query, heads.kv, heads.kv)
    )

    def library() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with _if_there():
        library()
        theirs_s = rates.seconds(rates.replayed(library, check.device), check.device)
    ours_s = rates.seconds(rates.replayed(ours, check.device), check.device)
    operations = 2.0 * heads.query * heads.dim * tokens * (tokens + 1)
    rate = f"{operations / ours_s / 1e12:.0f} and {operations / theirs_s / 1e12:.0f} TFLOP/s"
    check.found.measured(name, ours_s / theirs_s, "x", note=f"{ours_s * 1e6:.0f} and {theirs_s * 1e6:.0f} us, {rate}")
