"""How a GPU's memory is divided: between the workers that share it, and inside a worker between KV and all else.

Called once at start, when the weights are loaded, so that the free memory is known and not guessed. Arithmetic only:
the caller asks the device. Nothing is allocated later that is not in these sums; that is why a full cache cannot run
the device out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.engine.config.model_config import ModelGeometry

SAMPLER_BYTES = 1 << 27
"""Memory for sampling tokens beside the logits: tables, results and 48 KiB a row for the search, twice (recorded steps
keep theirs), and penalised ids."""

STAGING_TOKENS = 32768
"""Positions of prefill rows whose keys and values are gathered for flash attention; more read the paged cache."""

_CONTEXT_BYTES = 1 << 30
"""CUDA context, libraries' workspaces, loaded kernels, copy staging, what the allocator rounds up."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """One worker's share of its GPU: `fraction` of the memory, divided by the workers that share it; `most_kv`
    bytes for KV at most (0 = no bound); `graphs` bytes for recorded steps."""

    fraction: float = 0.9
    sharers: int = 1
    most_kv: int = 0
    graphs: int = 0
    draft: int = 0
    """Bytes that a draft model takes beside the cache: weights, steps, graphs."""
    draft_block: int = 0
    """Bytes that it takes for each block of the cache."""


def step_bytes(geometry: ModelGeometry, dtype_bytes: int, max_rows: int, max_step_tokens: int) -> int:
    """Return the max bytes allocated after the weights, without KV and graphs: every layer's widest intermediate,
    attention's workspace, block tables, the logits in the model's precision, drawing, and a reserve for the context."""
    widest = 2 * geometry.intermediate_size + (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    if (mixture := geometry.experts) is not None:  # of every token each of its experts' inputs, inside and output
        inside = mixture.inner_size + 2 * geometry.hidden_size
        if geometry.quantization is not None or geometry.family == "gpt_oss":  # gates and ups beside what they become
            inside = max(inside, 3 * mixture.inner_size)
        widest += mixture.per_token * inside + 2 * mixture.shared_inner_size
    activations = max_step_tokens * (widest + 4 * geometry.hidden_size) * dtype_bytes
    attention = max_step_tokens * geometry.num_heads * (geometry.head_dim + 2) * 4 * 2
    staging = 2 * max(STAGING_TOKENS, max_step_tokens) * geometry.num_kv_heads * geometry.head_dim * dtype_bytes
    tables = max_rows * geometry.max_positions * 3  # eighteen bytes a block, of eight tokens at least
    logits = max_rows * geometry.vocab_size * (dtype_bytes + 4)
    return activations + attention + staging + tables + logits + SAMPLER_BYTES + _CONTEXT_BYTES


def host_step_bytes(geometry: ModelGeometry, dtype_bytes: int, max_rows: int, max_step_tokens: int) -> int:
    """Return the bytes of a model on a processor besides weights and KV: the buffers of one layer, and the logits."""
    qkv = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    width = 2 * geometry.hidden_size + qkv + geometry.num_heads * geometry.head_dim + geometry.intermediate_size
    return max_step_tokens * width * dtype_bytes + max_rows * geometry.vocab_size * 4


def kv_bytes(*, total: int, free: int, own: int, sharers: int, fraction: float, reserved: int) -> int:
    """B3 · Return the device memory for one worker's KV cache.

    `total` and `free` are the device's, `own` what this worker has allocated already (its weights), `fraction` the
    share of the memory that may be used at all, `reserved` what its steps and graphs will take. Each sharer counts on
    its part of the whole, however far the others have got with loading; the memory really free bounds it.
    """
    part = int(fraction * total / max(1, sharers)) - own
    return max(0, min(part, int(fraction * free)) - reserved)
