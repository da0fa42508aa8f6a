"""Section: products over weights of 8 and 4 bits: their time against the bound and against 16 bits.

That they are right is shown by tests/kernels/gpu/test_served_shapes.py. The layouts are those that published
checkpoints have (`quantized_files`). A metric of 1 is a product that takes as long as reading its codes and scales; the
note says how many times as fast as cuBLAS over 16 bits it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from cohort.common.engine.config.model_config import read_geometry
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.ops.coded import CodedMatrix
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.bounds import Product, products
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import shape_folder

_ROTATED_BYTES = 256 << 20  # several times the second-level cache, as in `products`
_MOST_COPIES = 16


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
    torch.manual_seed(13)
    model = "Llama-3-8B"
    found = products(read_geometry(shape_folder(check.folder / model, check.shape(model))))
    layers = [product for product in found if product.name != "head"]
    for layout in LAYOUTS:
        for product in layers:
            for rows in (1, 16, 64, 256) if check.real else (1,):
                name = f"{layout.name}: {product.name} {product.outputs} x {product.inputs}, {rows} rows"
                check.guard.item(name, partial(_measure, check, name, layout, product, rows), 6)


def make_codes(device: torch.device, layout: Layout, outputs: int, inputs: int) -> Codes:
    """Random codes, and scales that leave sums of the order of 1."""
    group = layout.group or inputs
    if layout.codes == torch.uint8:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    elif layout.codes == torch.int8:
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    else:
        codes = (64 * torch.randn((outputs, inputs), device=device)).clamp(-448, 448).to(layout.codes)
    size = {torch.uint8: 5.0, torch.int8: 73.0}.get(layout.codes, 64.0)
    scales = (0.5 + torch.rand((outputs, -(-inputs // group)), device=device)) * inputs**-0.5 / size
    return Codes(codes, scales, -8 * scales if layout.offsets else None, group)


def _measure(check: Check, name: str, layout: Layout, product: Product, rows: int) -> None:
    device, dtype = check.device, check.dtype
    first = CodedMatrix([make_codes(check.device, layout, product.outputs, product.inputs)])
    copies = max(1, min(_MOST_COPIES, -(-_ROTATED_BYTES // first.num_bytes))) if check.real else 2
    matrices = [first, *_more(check, layout, product, copies - 1)]
    x = torch.randn(rows, product.inputs, device=device).to(dtype)
    out = torch.empty(rows, product.outputs, device=device, dtype=dtype)
    taken_s = _seconds(check, [partial(matrix.product, x, None, out) for matrix in matrices])
    plain = torch.empty(product.outputs, product.inputs, device=device, dtype=dtype).normal_()
    of_plain = max(1, -(-_ROTATED_BYTES // plain.nbytes)) if check.real else 2
    weights = [plain, *(plain.clone() for _ in range(of_plain - 1))]
    plain_s = _seconds(check, [partial(torch.mm, x, weight.t(), out=out) for weight in weights])
    ceilings = check.ceilings()
    moved = first.num_bytes + rows * (product.inputs + product.outputs) * dtype.itemsize
    least_s = ceilings.least_s(moved, 2.0 * rows * product.outputs * product.inputs)
    check.found.measured(
        name,
        taken_s / least_s,
        "x the bound",
        note=f"{taken_s * 1e6:.1f} us; 16 bits take {plain_s * 1e6:.1f} us, {plain_s / taken_s:.2f} times as long",
    )


def _more(check: Check, layout: Layout, product: Product, count: int) -> Iterator[CodedMatrix]:
    for _ in range(count):
        yield CodedMatrix([make_codes(check.device, layout, product.outputs, product.inputs)])


def _seconds(check: Check, calls: list[Callable[[], object]]) -> float:
    """Of one of these calls, each over another copy of the weight."""

    def every() -> None:
        for call in calls:
            call()

    return rates.seconds(rates.replayed(every, check.device), check.device) / len(calls)
