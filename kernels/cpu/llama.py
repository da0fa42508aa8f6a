"""All layers of a Llama-shaped decoder in one call of the compiled kernels.

Called by the lean model where every layer's weights are packed; elsewhere it runs the same steps one by one. One call
instead of three hundred: the step keeps the interpreter's lock from no other thread, and nothing waits for it in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.cpu import native


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, in the order of the compiled operator's arguments: norms plain, projections as packed panels."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    sliding_window: int


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The outputs of a step of T tokens: residual and normed [T, hidden], qkv [T, q + 2 kv], attended [T, q] and
    activated [T, inner]. The residual goes in as the embedded tokens and comes out as the last layer's sum."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    activated: Tensor


class LayerStack:
    """The layers of one model; needs the compiled kernels."""

    def __init__(self, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, *, eps: float, scale: float) -> None:
        self._op: Any = native.operators().llama_layers
        self._weights = [[getattr(layer, field.name) for layer in layers] for field in fields(LayerWeights)]
        self._constants = (eps, scale, cos, sin)

    def run(self, buffers: StepBuffers, positions: Tensor, slots: Tensor, meta: AttentionMeta, kv: Tensor) -> None:
        """Run one step: write its keys and values into `kv` and update the residual."""
        tables, directions = meta.separate()
        self._op(
            *self._weights,
            *self._constants,
            positions,
            slots,
            meta.query_start,
            meta.context_lens,
            tables,
            directions,
            kv,
            buffers.residual,
            buffers.normed,
            buffers.qkv,
            buffers.attended,
            buffers.activated,
        )
