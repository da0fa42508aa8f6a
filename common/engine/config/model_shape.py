"""A model's geometry in the numbers that cost depends on: the fields of a file in configs/models (`ModelShape`).

Asked by `cohort profile`, which writes such files, and by `fit`, where no file of weights tells their number. Without
PyTorch.
"""

from __future__ import annotations

from typing import Any

from cohort.common.engine.config.model_config import DTYPE_BYTES, ModelGeometry

_PLAIN_MLP = ("opt",)
MXFP4_BITS = 4.25
"""Four bits, and eight of scale for 32 weights."""


def model_shape(
    name: str, geometry: ModelGeometry, dtype: str, kv_dtype: str = "", *, mxfp4: bool = False
) -> dict[str, Any]:
    """Return the fields of a model. `kv_dtype`: as `ModelRunner` has it, "" where it is the model's. `mxfp4`: its
    experts stay in these codes."""
    shape: dict[str, Any] = dict(
        name=name,
        layers=geometry.num_layers,
        hidden=geometry.hidden_size,
        heads=geometry.num_heads,
        kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        intermediate=geometry.intermediate_size,
        gated_mlp=geometry.family not in _PLAIN_MLP,
        vocabulary=geometry.vocab_size,
        tied_embeddings=geometry.tie_embeddings,
        max_positions=geometry.max_positions,
        weight_bytes=DTYPE_BYTES[dtype],
        kv_bytes=DTYPE_BYTES[kv_dtype or dtype],
        window=geometry.kv_window,
    )
    mixture, latent = geometry.experts, geometry.latent
    if mixture is not None:
        shape["experts"], shape["experts_per_token"] = mixture.count, mixture.per_token
        shape["expert_intermediate"] = mixture.inner_size
        shape["shared_intermediate"] = mixture.shared_inner_size
        shape["dense_layers"] = mixture.layers.count(False)
        if mxfp4:
            shape["expert_bits"] = MXFP4_BITS
    if latent is not None:
        hidden, heads = geometry.hidden_size, geometry.num_heads
        query = heads * (latent.plain + latent.rotated)
        queries = latent.query_rank * (hidden + query) if latent.query_rank else hidden * query
        latents = hidden * latent.width + latent.rank * heads * (latent.plain + latent.value)
        shape["attention_weights"] = queries + latents + heads * latent.value * hidden
        # A latent is key and value in one (`kv_geometry`): scores are over all of it, values over its rank.
        shape["head_dim"], shape["pair_dim"] = latent.width // 2, (latent.width + latent.rank) // 2
    return shape
