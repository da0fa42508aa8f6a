"""Decides whether a transformers model can run over the paged cache; a clear refusal at load instead of wrong text.

Called once per load by `generic`. Two questions: is attention, in the form the kernels compute, all that the model
remembers its past by (`check_structure`); and does it, over the paged cache, answer what it answers by itself
(`check_answers`), which catches all that an architecture hides from the first question.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.paged_interface import ATTENTION_NAME, LayerAttention, Probe, attending
from cohort.common.engine.models.step_inputs import Model, StepInputs
from cohort.common.errors import ModelError
from cohort.kernels.ops.paged_attention import AttentionMeta

_TRIAL_TOKENS = 48
_BLOCK_SIZE = 16
_LAYER_KINDS = {"full_attention", "sliding_attention"}


def check_structure(model: Any, geometry: ModelGeometry, model_dir: Path, device: torch.device) -> Tensor:
    """Switch `model`, loaded with eager attention, to the paged one; returns its own logits [tokens, vocabulary]."""
    refused = f"{model_dir}: {geometry.model_type} cannot be served: "
    if getattr(model, "_is_stateful", False):
        raise ModelError(refused + "it keeps recurrent state besides attention")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(refused + "it takes no position ids, so rows of different requests cannot share a forward")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - _LAYER_KINDS:
        raise ModelError(refused + f"it has layers of kind {', '.join(sorted(unknown))}")
    ids = _trial_ids(geometry, device)
    positions = torch.arange(len(ids), device=device)
    trial = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0), "use_cache": False}
    probe = Probe()
    with torch.inference_mode():
        try:
            own_logits: Tensor = model(**trial).logits[0].float()
        except Exception as error:  # an architecture's code for values that it was not written for fails in any way
            raise ModelError(refused + f"a trial forward of it fails ({error})") from error
        try:
            model.set_attn_implementation(ATTENTION_NAME)
            with attending(probe):
                model(**trial)
        except (KeyError, ValueError) as error:
            raise ModelError(refused + f"its attention cannot be replaced ({error})") from error
    if not probe.layers:
        raise ModelError(refused + "its attention does not go through transformers' attention interface")
    if probe.problems:
        raise ModelError(refused + "it has " + "; ".join(sorted(probe.problems)))
    if sorted(probe.layers) != list(range(geometry.num_layers)):
        raise ModelError(refused + f"attention in layers {sorted(probe.layers)}, not in all {geometry.num_layers}")
    for index, layer in probe.layers.items():
        _check_layer(index, layer, model, geometry, refused)
    return own_logits


def check_answers(
    model: Model, expected: Tensor, geometry: ModelGeometry, model_dir: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare the trial's logits over a paged cache with the model's own.

    The median over positions: in 16 bits a mixture of experts may route single tokens differently, and rightly.
    """
    ids = _trial_ids(geometry, device)
    tokens = len(ids)
    blocks = -(-tokens // _BLOCK_SIZE)
    shape = (blocks, geometry.num_layers, 2, geometry.num_kv_heads, _BLOCK_SIZE, geometry.head_dim)
    positions = torch.arange(tokens, device=device)
    step = StepInputs(
        token_ids=ids,
        positions=positions,
        slot_mapping=positions.clone(),
        sample_index=positions.clone(),
        meta=AttentionMeta(
            query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            block_tables=torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0),
            directions=None,
            block_size=_BLOCK_SIZE,
            max_query_len=tokens,
            num_prefill_rows=1,
        ),
    )
    with torch.inference_mode():
        logits = model.forward(step, torch.zeros(shape, dtype=dtype, device=device))
    error = float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).median())
    allowed = 1e-3 if dtype == torch.float32 else 0.1
    if not error <= allowed:  # NaN is refused too
        raise ModelError(
            f"{model_dir}: {geometry.model_type} cannot be served: over the paged cache its logits differ from its own "
            f"by {error:.2g} (allowed {allowed})"
        )


def _check_layer(index: int, layer: LayerAttention, model: Any, geometry: ModelGeometry, refused: str) -> None:
    expected = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
    if (seen := (layer.kv_heads, layer.key_width, layer.value_width)) != expected:
        raise ModelError(refused + f"layer {index} has (KV heads, key width, value width) {seen}, not {expected}")
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds and (kinds[index] == "sliding_attention") != (layer.sliding_window > 0):
        raise ModelError(refused + f"layer {index} is {kinds[index]} but asks for a window of {layer.sliding_window}")


def _trial_ids(geometry: ModelGeometry, device: torch.device) -> Tensor:
    """Tokens spread over the vocabulary."""
    tokens = min(_TRIAL_TOKENS, geometry.max_positions)
    return (torch.arange(tokens, device=device) * 7919 + 11) % geometry.vocab_size
