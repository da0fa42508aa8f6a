"""The module for one token more that DeepSeek-V3's checkpoints bring (multi-token prediction, DeepSeek-V3 §2.2).

    eh_proj [ enorm(embedding of token p + 1) ; hnorm(state at p) ] ─▶ a layer like the model's ─▶ shared_head

Made by `draft_loading`, asked by `states_drafter`. Its tensors stand behind the model's last layer, as if it were one
more; embedding and last product are the model's. Its own states are normed as the last product takes them, as the
model's are.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.lean_deepseek import LayerArithmetic, LayerReader
from cohort.common.engine.models.model_files import Loading
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.common.errors import ModelError
from cohort.kernels.ops.fused import rms_norm


def module_geometry(geometry: ModelGeometry) -> ModelGeometry:
    """Return the geometry of the module alone: one layer, with experts where the model's last layer has them."""
    experts = geometry.experts
    if experts is not None:
        experts = dataclasses.replace(experts, layers=experts.layers[-1:])
    return dataclasses.replace(geometry, num_layers=1, sliding_windows=(0,), experts=experts)


class NextTokenModule:
    """The weights of a module and their forward: a `StatesHead`."""

    last_product: Linear | None = None
    drafted: Tensor | None = None

    def __init__(self, load: Loading) -> None:
        """`load.geometry`: the model's. Raises `ModelError` where the module's tensors are not there."""
        self._geometry = geometry = load.geometry
        if geometry.latent is None:
            raise ModelError(f"{geometry.model_type}: its configuration names no latents")
        hidden = geometry.hidden_size
        self._compute = LayerArithmetic(geometry, geometry.latent, load.device)
        with load.open() as files:
            outer = files.weights.prefix(("model.", ""), "embed_tokens.weight")
            prefix = f"{outer}layers.{geometry.num_layers}."
            names = ("enorm", "hnorm", "shared_head.norm")
            files.weights.require([f"{prefix}{name}.weight" for name in (*names, "eh_proj")])
            self._enorm, self._hnorm, self._norm = (files.vector(prefix + name, hidden) for name in names)
            self._eh_proj = files.linear([f"{prefix}eh_proj"], [hidden], 2 * hidden)
            reader = LayerReader(files, module_geometry(geometry), geometry.latent, load.max_step_tokens)
            self._layer = reader.layer(prefix, 0)

    def forward(self, step: StepInputs, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """See `StatesHead`."""
        eps = self._geometry.norm_eps
        both = embedded.new_empty((len(embedded), 2 * embedded.shape[1]))
        for part, norm, half in zip((embedded, states), (self._enorm, self._hnorm), both.chunk(2, dim=1), strict=True):
            normed = torch.empty_like(part)
            rms_norm(part, norm, eps, normed)
            half.copy_(normed)
        residual = self._eh_proj(both)
        self._compute(self._layer, 0, residual, self._compute.buffers(residual), step, kv)
        after = torch.empty_like(residual)
        rms_norm(residual, self._norm, eps, after)
        return after
