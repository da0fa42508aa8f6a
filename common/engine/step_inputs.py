"""A step's tensors on the device, and the one interface all three forms of a model share.

Built by the model runner from a `StepBatch`; read by the lean and generic models. Without uploads, on
the CPU, the tensors are the batch's own arrays, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.batch import StepBatch
from cohort.common.engine.uploads import Uploads
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.paged_attention import AttentionMeta

if TYPE_CHECKING:
    from cohort.common.engine.lora import LoraStep


@dataclass(slots=True)
class StepInputs:
    """The inputs of a forward."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    sample_index: Tensor  # int64 [S] flat index of the tokens whose logits are wanted
    meta: AttentionMeta
    lora: LoraStep | None = None  # what adapters add; None = no row has one


class Model(Protocol):
    """A decoder over the paged cache."""

    sampled_states: Tensor | None
    """Final hidden states [S, hidden] of the last step's sampled tokens, until the next step; None if not kept."""

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """Write the step's KV into the cache and return float32 logits [S, vocabulary] of the sampled tokens."""
        ...


def step_inputs(
    batch: StepBatch,
    block_size: int,
    device: torch.device,
    uploads: Uploads | None = None,
    workspace: Workspace | None = None,
    pad_rows: int = 0,
) -> StepInputs:
    """Put a batch on the device: array by array, or through `uploads` in one asynchronous copy, with directions in the
    tables' signs, as a GPU's kernels read them, and `pad_rows` for them."""
    lengths = np.diff(batch.query_start)
    longer_rows = np.flatnonzero(lengths > 1)

    arrays: list[npt.NDArray[np.generic]] = [
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        sampled_tokens(batch),
        batch.query_start,
        batch.context_lens,
        batch.block_tables if uploads is None else signed_tables(batch),
    ]
    if uploads is not None:
        tensors = uploads.put(arrays)
    else:
        if batch.directions is not None:
            arrays.append(batch.directions)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    token_ids, positions, slot_mapping, sample_index, query_start, context_lens, block_tables, *directions = tensors
    prefill_rows = int(longer_rows[-1]) + 1 if len(longer_rows) else 0
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        sample_index=sample_index,
        meta=AttentionMeta(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=block_tables,
            directions=directions[0] if directions else None,
            block_size=block_size,
            max_query_len=int(lengths.max()),
            num_prefill_rows=prefill_rows,
            max_context_len=int(batch.context_lens.max()),
            prefill_context=int(batch.context_lens[:prefill_rows].sum()),
            pad_rows=pad_rows,
            workspace=workspace,
            signed=uploads is not None,
        ),
    )


def last_tokens(batch: StepBatch) -> npt.NDArray[np.int64]:
    """[R] flat index of each row's last token that is no padding."""
    last = batch.query_start[1:].astype(np.int64) - 1
    if batch.padding is not None:
        last -= batch.padding
    return last


def sampled_tokens(batch: StepBatch) -> npt.NDArray[np.int64]:
    """[S] flat index of the tokens whose logits are sampled: the last one of each sample row; where it has drafts, also
    those before it down to its known one."""
    last = last_tokens(batch)[batch.sample_rows]
    if batch.drafts is None:
        return last
    each = 1 + batch.drafts[batch.sample_rows].astype(np.int64)
    ends = np.cumsum(each)
    return np.repeat(last - (ends - 1), each) + np.arange(int(each.sum()))


def signed_tables(batch: StepBatch) -> npt.NDArray[np.int32]:
    """R7, R13 · The block tables, with `~block` for a block filled right to left."""
    if batch.directions is None:
        return batch.block_tables
    return np.where(batch.directions != 0, ~batch.block_tables, batch.block_tables)
