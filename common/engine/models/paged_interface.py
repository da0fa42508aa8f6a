"""transformers' attention interface over the paged cache: the function its models call instead of their own attention.

Used by `generic` (a step is running: write the KV, attend) and by `generic_probe` (a trial forward: look at what each
layer asks for). Registered once under the name `cohort_paged`; transformers builds no mask for a name it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.errors import ModelError
from cohort.kernels.ops.paged_attention import paged_attention, write_kv

ATTENTION_NAME = "cohort_paged"

# Arguments of the interface that change the scores in a way the kernels do not compute.
_UNSUPPORTED = ("position_bias", "alibi", "head_mask", "cross_attn_head_mask")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's call of attention."""

    kv_heads: int
    key_width: int
    value_width: int
    sliding_window: int


@dataclass(slots=True)
class Probe:
    """Observations of a trial forward, by layer index, and calls that the kernels cannot serve."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)
    problems: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The forward in progress."""

    inputs: StepInputs
    kv: Tensor


# Not every architecture hands unknown keyword arguments down to its attention, so the step travels beside the call.
_current: ContextVar[RunningStep | Probe | None] = ContextVar("cohort_attention", default=None)


@contextmanager
def attending(state: RunningStep | Probe) -> Iterator[None]:
    """A model that runs inside attends for `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] of one layer → [1, T, Hq, D]. `s_aux`: a sink per head."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    match _current.get():
        case RunningStep(step, kv):
            rows = query[0].transpose(0, 1).contiguous()
            out = torch.empty_like(rows)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            place, slots, meta = step.of_layer(layer)
            write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), kv, place, slots)
            window, cap = int(sliding_window or 0), float(softcap or 0.0)
            sinks = None if s_aux is None else s_aux.float()
            paged_attention(rows, kv, place, meta, scale, out, sliding_window=window, softcap=cap, sinks=sinks)
            return out.unsqueeze(0), None
        case Probe() as probe:
            if layer in probe.layers:
                probe.problems.add(f"layer {layer} attends more than once")
            probe.layers[layer] = LayerAttention(key.shape[1], key.shape[3], value.shape[3], int(sliding_window or 0))
            if s_aux is not None and s_aux.shape != query.shape[1:2]:
                probe.problems.add("sinks that are not one per query head")
            probe.problems.update(f"{name} in its attention" for name in _UNSUPPORTED if kwargs.get(name) is not None)
            if attention_mask is not None:
                probe.problems.add("a mask of its own")
            if not getattr(module, "is_causal", True):
                probe.problems.add("attention that is not causal")
            if query.shape[1] % key.shape[1]:
                probe.problems.add("query heads that are no multiple of its KV heads")
            return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
        case None:
            raise ModelError(f"{ATTENTION_NAME} attention was called outside a step of the engine")
