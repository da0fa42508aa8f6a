"""What a step takes to launch and what it takes a fast GPU to compute, estimated from a model's geometry.

Called by `device_steps`, which records steps with prompts where launching takes longer. Arithmetic on numbers that were
counted or estimated and not yet measured on a GPU; a wrong one costs time, never a token.
"""

from __future__ import annotations

from cohort.common.engine.config.model_config import ModelGeometry

LAUNCH_S = 12e-6
"""Host time of one launch from Python, a kernel's of torch or Triton's: 10 to 15 us."""

LEAN_LAUNCHES = 13
"""Of a layer with prompt and decode rows: ten as in a decode step, the gather of keys and values, flash attention and
the copy of its result."""

EXPERT_LAUNCHES = 15
"""More of a layer with a mixture of experts: routing, sorting, two grouped products, the weighted sum."""

LATENT_LAUNCHES = 5
"""More of a layer of latents: two products of all heads, the query's rotated part, norms of latent and query."""

GENERIC_LAUNCHES = 45
"""Of a layer of a transformers model: one per operation of its Python code."""

FAST_BYTES_S, FAST_OPERATIONS_S = 4.3e12, 7.9e14
"""Of the order of what an H200 reaches. On a slower device the device's part is longer than estimated here: then a step
is recorded without need, padded to no more than twice its prompt tokens."""


def launch_s(geometry: ModelGeometry) -> float:
    """Host time for all layers of a step with prompts that is not recorded."""
    launches = GENERIC_LAUNCHES if geometry.family == "generic" else LEAN_LAUNCHES
    if geometry.family == "deepseek":
        launches += LATENT_LAUNCHES
    if geometry.family in ("moe", "gpt_oss", "deepseek"):
        launches += EXPERT_LAUNCHES
    return geometry.num_layers * (launches + 2 * geometry.qk_norm) * LAUNCH_S


def device_s(geometry: ModelGeometry, element_bytes: int, tokens: int) -> float:
    """The least that a fast GPU takes for the products of a step of so many tokens; attention is left out."""
    g = geometry
    matrices = 2 if g.family == "opt" else 3
    layer = g.hidden_size * ((2 * g.num_heads + 2 * g.num_kv_heads) * g.head_dim + matrices * g.intermediate_size)
    weights = layer * g.num_layers
    products_s = max(weights * element_bytes / FAST_BYTES_S, 2.0 * weights * tokens / FAST_OPERATIONS_S)
    return products_s + g.hidden_size * g.vocab_size * element_bytes / FAST_BYTES_S


def launching_takes_longer(geometry: ModelGeometry, element_bytes: int, tokens: int) -> bool:
    """Whether the device would wait for the host in a step of so many tokens, some of them of prompts."""
    return launch_s(geometry) > device_s(geometry, element_bytes, tokens)
