"""A mixture of experts: which of them a token takes, their products, and their weighted sum.

The one entry for engine and tests; dispatches to C++, to Triton on a GPU, or to the torch reference. `expert_outputs`
is for experts whose weights stand in two tensors: on a processor the engine packs every expert for itself and groups
rows on the host (`common.engine.experts`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu
from cohort.kernels.types import ClampedSwiglu, ExpertCodes


def choose_experts(scores: Tensor, per_token: int, over_chosen: bool, rounded: bool) -> tuple[Tensor, Tensor]:
    """Return the `per_token` experts of the largest scores [T, experts] of each token: experts int64 [T, k], ascending
    in each row, and their weights [T, k], a softmax over all experts, or `over_chosen` ones alone.

    Computed in float32, and `rounded` to the scores' dtype. Who wins of equals does not depend on other rows.
    """
    if (ops := native.ops_for(scores)) is None:
        return reference.choose_experts(scores, per_token, over_chosen, rounded)
    experts = torch.empty((len(scores), per_token), dtype=torch.int64)
    weights = torch.empty((len(scores), per_token), dtype=torch.float32)
    ops.choose_experts(scores, over_chosen, rounded, experts, weights)
    return experts, weights


def expert_outputs(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor | ExpertCodes,
    down: Tensor | ExpertCodes,
    biases: tuple[Tensor, Tensor] | None = None,
    clamped: ClampedSwiglu | None = None,
    *,
    fixed: bool = False,
) -> Tensor:
    """Return [T · k, hidden]: of every token of x [T, hidden] the output of each of its experts, `chosen` [T, k].

    gate_up [experts, 2 · inner, hidden], gates over ups; down [experts, hidden, inner]; or both in codes, with scales
    [experts, outputs, groups]. `biases` of x's type: of both products [experts, outputs]. The activation is SiLU, or
    `clamped`: then each gate stands before its up. `fixed`: a row's bits do not follow the number of rows on a GPU.
    """
    if (ops := gpu.ops_for(x)) is not None:
        out: Tensor = ops.expert_outputs(x, chosen, gate_up, down, biases, clamped, fixed=fixed)
        return out
    plain = [
        each if isinstance(each, Tensor) else reference.expert_numbers(each).to(x.dtype) for each in (gate_up, down)
    ]
    return reference.expert_outputs(x, chosen, plain[0], plain[1], biases, clamped)


def add_weighted(parts: Tensor, weights: Tensor, shared: Tensor | None, residual: Tensor) -> None:
    """Add Σ weights [T, k] · parts [T · k, hidden], in ascending k, and shared to residual [T, hidden], rounding
    each."""
    if (ops := native.ops_for(residual)) is not None:
        ops.add_weighted(parts, weights.float(), shared, residual)
    elif (ops := gpu.ops_for(residual)) is not None:
        ops.add_weighted(parts, weights, shared, residual)
    else:
        reference.add_weighted(parts, weights, shared, residual)
