"""A step's tensors on the device, and the one interface all three forms of a model share.

Built by the model runner from a `StepBatch`; read by the lean and generic models. On the CPU the tensors are the
batch's own arrays, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.batch import StepBatch
from cohort.kernels.paged_attention import AttentionMeta


@dataclass(slots=True)
class StepInputs:
    """What a forward reads."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    sample_index: Tensor  # int64 [S] flat index of the tokens whose logits are wanted
    meta: AttentionMeta


class Model(Protocol):
    """A decoder over the paged cache."""

    sampled_states: Tensor | None
    """Final hidden states [S, hidden] of the last step's sampled tokens, until the next step; None if not kept."""

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """Write the step's KV into the cache and return float32 logits [S, vocabulary] of the sampled tokens."""
        ...


def step_inputs(batch: StepBatch, block_size: int, device: torch.device) -> StepInputs:
    """Put a batch on the device."""
    lengths = np.diff(batch.query_start)
    last_token = batch.query_start[1:].astype(np.int64) - 1
    if batch.padding is not None:
        last_token -= batch.padding
    longer_rows = np.flatnonzero(lengths > 1)

    def put(array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return StepInputs(
        token_ids=put(batch.token_ids),
        positions=put(batch.positions),
        slot_mapping=put(batch.slot_mapping),
        sample_index=put(last_token[batch.sample_rows]),
        meta=AttentionMeta(
            query_start=put(batch.query_start),
            context_lens=put(batch.context_lens),
            block_tables=put(batch.block_tables),
            directions=None if batch.directions is None else put(batch.directions),
            block_size=block_size,
            max_query_len=int(lengths.max()),
            num_prefill_rows=int(longer_rows[-1]) + 1 if len(longer_rows) else 0,
        ),
    )
