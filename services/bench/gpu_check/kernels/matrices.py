"""Sections: the model's matrix products at the row counts of decode, against their bounds: over weights in 16 bits, and
over codes of 8 and 4 bits.

That they are right is shown by tests/kernels/gpu/test_served_shapes.py. The layouts are those that published
checkpoints have (`quantized_files`). A metric of 1 is a product that takes as long as reading its weight or codes; the
note of one over codes says how many times as fast as cuBLAS over 16 bits it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import read_geometry
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.ops.coded import CodedMatrix
from cohort.services.bench.gpu_check.frame.context import Check, shape_folder
from cohort.services.bench.gpu_check.frame.rates import Product, products

_MODEL = "Llama-3-8B"


@dataclass(frozen=True, slots=True)
class Layout:
    """`group` inputs share a scale; 0 = a whole row."""

    name: str
    codes: torch.dtype
    group: int
    offsets: bool


LAYOUTS = (
    Layout("4 bits, groups of 128 (AWQ, GPTQ)", torch.uint8, 128, True),
    Layout("FP8, blocks of 128 (DeepSeek, Qwen)", torch.float8_e4m3fn, 128, False),
    Layout("INT8 by channel", torch.int8, 0, False),
    Layout("FP8 by tensor or channel", torch.float8_e4m3fn, 0, False),
    Layout("4 bits, groups of 32", torch.uint8, 32, True),
)


def run(check: Check) -> None:
    for product in products_of(check):
        for rows in (1, 8, 16, 64, 256) if check.real else (1, 3):
            name = f"{product.name} {product.outputs} x {product.inputs}, {rows} rows"
            check.guard.item(name, partial(_measure, check, name, product, rows), 6)


def run_coded(check: Check) -> None:
    torch.manual_seed(13)
    for layout in LAYOUTS:
        for product in products_of(check):
            for rows in ((1, 16, 64, 256) if check.real else (1,)) if product.name != "head" else ():
                name = f"{layout.name}: {product.name} {product.outputs} x {product.inputs}, {rows} rows"
                check.guard.item(name, partial(_measure_coded, check, name, layout, product, rows), 6)


def products_of(check: Check) -> list[Product]:
    return products(read_geometry(shape_folder(check.folder / _MODEL, check.shape(_MODEL))))


def random_codes(
    codes: torch.dtype, group: int, offsets: bool, shape: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return random codes [*shape], scales that leave sums of the order of 1, offsets, and the inputs of a scale."""
    *others, inputs = shape
    group = min(group or inputs, inputs)
    if codes == torch.uint8:
        drawn = torch.randint(0, 256, (*others, inputs // 2), dtype=torch.uint8, device=device)
    elif codes == torch.int8:
        drawn = torch.randint(-127, 128, (*others, inputs), dtype=torch.int8, device=device)
    else:
        drawn = (64 * torch.randn((*others, inputs), device=device)).clamp(-448, 448).to(codes)
    size = {torch.uint8: 5.0, torch.int8: 73.0}.get(codes, 64.0)
    scales = (0.5 + torch.rand((*others, -(-inputs // group)), device=device)) * inputs**-0.5 / size
    return drawn, scales, -8 * scales if offsets else None, group


def make_codes(device: torch.device, layout: Layout, outputs: int, inputs: int) -> Codes:
    return Codes(*random_codes(layout.codes, layout.group, layout.offsets, (outputs, inputs), device))


def _plain_s(check: Check, product: Product, x: Tensor, out: Tensor) -> float:
    weight = torch.empty(product.outputs, product.inputs, device=check.device, dtype=check.dtype).normal_()
    return check.over_copies_s(weight, weight.nbytes, weight.clone, lambda each: torch.mm(x, each.t(), out=out))


def _rows(check: Check, product: Product, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, product.inputs, device=check.device).to(check.dtype)
    return x, torch.empty(rows, product.outputs, device=check.device, dtype=check.dtype)


def _measure(check: Check, name: str, product: Product, rows: int) -> None:
    taken_s = _plain_s(check, product, *_rows(check, product, rows))
    ceilings = check.ceilings()
    least_s = product.least_s(rows, check.dtype.itemsize, ceilings)
    rate = product.outputs * product.inputs * check.dtype.itemsize / taken_s
    note = f"{taken_s * 1e6:.1f} us; {rate / ceilings.bandwidth:.0%} of bandwidth"
    check.found.measured(name, taken_s / least_s, "x the bound", note=note)


def _measure_coded(check: Check, name: str, layout: Layout, product: Product, rows: int) -> None:
    def matrix() -> CodedMatrix:
        return CodedMatrix([make_codes(check.device, layout, product.outputs, product.inputs)])

    first = matrix()
    x, out = _rows(check, product, rows)
    taken_s = check.over_copies_s(first, first.num_bytes, matrix, lambda each: each.product(x, None, out))
    plain_s = _plain_s(check, product, x, out)
    moved = first.num_bytes + rows * (product.inputs + product.outputs) * check.dtype.itemsize
    least_s = check.ceilings().least_s(moved, 2.0 * rows * product.outputs * product.inputs)
    check.found.measured(
        name,
        taken_s / least_s,
        "x the bound",
        note=f"{taken_s * 1e6:.1f} us; 16 bits take {plain_s * 1e6:.1f} us, {plain_s / taken_s:.2f} times as long",
    )
