"""Section: the model's five matrix products alone, at the row counts of decode, against their bounds, per library."""

from __future__ import annotations

from functools import partial

import torch

from cohort.common.engine.config.model_config import read_geometry
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.bounds import Product, products
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import NotThere
from cohort.services.bench.gpu_check.frame.shapes import shape_folder

_ROTATED_BYTES = 256 << 20  # several times the second-level cache: every weight comes from memory, as in a step
_MOST_COPIES = 8


def run(check: Check) -> None:
    model = "Llama-3-8B"
    geometry = read_geometry(shape_folder(check.folder / model, check.shape(model)))
    for product in products(geometry):
        for rows in (1, 8, 16, 64, 256) if check.real else (1, 3):
            for library in ("cublas", "cublaslt") if check.real else ("default",):
                name = f"{product.name} {product.outputs} x {product.inputs}, {rows} rows, {library}"
                check.guard.item(name, partial(_measure, check, name, product, rows, library), 6)


def _measure(check: Check, name: str, product: Product, rows: int, library: str) -> None:
    device, dtype = check.device, check.dtype
    weight_bytes = product.outputs * product.inputs * dtype.itemsize
    copies = max(1, min(_MOST_COPIES, -(-_ROTATED_BYTES // weight_bytes))) if check.real else 2
    weights = [
        torch.empty(product.outputs, product.inputs, device=device, dtype=dtype).normal_() for _ in range(copies)
    ]
    x = torch.randn(rows, product.inputs, device=device).to(dtype)
    out = torch.empty(rows, product.outputs, device=device, dtype=dtype)

    def every_copy() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    before = None
    if library != "default":
        try:
            before = torch.backends.cuda.preferred_blas_library(library)
        except (AttributeError, RuntimeError) as error:
            raise NotThere(str(error)) from None
    try:
        taken_s = rates.seconds(rates.replayed(every_copy, device), device) / copies
    finally:
        if before is not None:
            torch.backends.cuda.preferred_blas_library("default")
    ceilings = check.ceilings()
    least_s = product.least_s(rows, dtype.itemsize, ceilings)
    check.found.measured(
        name,
        taken_s / least_s,
        "x the bound",
        note=f"{taken_s * 1e6:.1f} us; {weight_bytes / taken_s / ceilings.bandwidth:.0%} of bandwidth",
    )
