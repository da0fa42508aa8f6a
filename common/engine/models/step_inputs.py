"""A step's tensors on the device, and the one interface all three forms of a model share.

Built by the model runner from a `StepBatch`; read by the lean and generic models. Without uploads, on
the CPU, the tensors are the batch's own arrays, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step.batch import StepBatch
from cohort.common.errors import InvariantViolated
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.ops.paged_attention import AttentionMeta

if TYPE_CHECKING:
    from cohort.common.engine.models.lora import LoraStep


Places = tuple[tuple[int, int], ...]
"""The group of every layer, and which layer of the group's blocks it is."""


@dataclass(slots=True)
class StepInputs:
    """The inputs of a forward."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    sample_index: Tensor  # int64 [S] flat index of the tokens whose logits are wanted
    meta: AttentionMeta
    lora: LoraStep | None = None  # what adapters add; None = no row has one
    more: tuple[tuple[Tensor, AttentionMeta], ...] = ()  # slots and rows of the groups of layers after the first
    places: Places | None = None  # None = there is one group
    state_index: Tensor | None = None
    """int64 [N] flat index of the tokens whose final states are wanted, beside any logits; None = of none."""
    states: Tensor | None = None
    """States [N, hidden] of these tokens, once the forward has run."""

    def of_layer(self, index: int) -> tuple[int, Tensor, AttentionMeta]:
        """Return which layer of its blocks this one is, and the slots and rows of its group."""
        if self.places is None:
            return index, self.slot_mapping, self.meta
        group, place = self.places[index]
        slots, meta = self.more[group - 1] if group else (self.slot_mapping, self.meta)
        return place, slots, meta


class Model(Protocol):
    """A decoder over the paged cache."""

    sampled_states: Tensor | None
    """Final hidden states [S, hidden] of the last step's sampled tokens, until the next step; None if not kept."""

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """Write the step's KV into the cache and return float32 logits [S, vocabulary] of the sampled tokens.
        Leave `StepInputs.states`."""
        ...


def step_inputs(
    batch: StepBatch,
    block_size: int,
    device: torch.device,
    uploads: Uploads | None = None,
    workspace: Workspace | None = None,
    pad_rows: int = 0,
    places: Places | None = None,
) -> StepInputs:
    """Place a batch on the device: array by array, or through `uploads` in one asynchronous copy, with directions in
    the tables' signs, as a GPU's kernels read them, and `pad_rows` for them. `places`: of layers in several groups."""
    lengths = np.diff(batch.query_start)
    longer_rows = np.flatnonzero(lengths > 1)
    more_slots, more_tables = _more(batch, places)
    arrays: list[npt.NDArray[np.generic]] = [
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        sampled_tokens(batch),
        batch.query_start,
        batch.context_lens,
        batch.block_tables if uploads is None else signed_tables(batch),
        *more_slots,
        *more_tables,
    ]
    if uploads is not None:
        tensors = uploads.put(arrays)
    else:
        if batch.directions is not None:
            arrays.append(batch.directions)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    token_ids, positions, slot_mapping, sample_index, query_start, context_lens, block_tables, *others = tensors
    groups = len(more_slots)
    directions = others[2 * groups :]
    prefill_rows = int(longer_rows[-1]) + 1 if len(longer_rows) else 0
    meta = AttentionMeta(
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
    )
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        sample_index=sample_index,
        meta=meta,
        more=tuple((others[group], replace(meta, block_tables=others[groups + group])) for group in range(groups)),
        places=places,
    )


def sampled_tokens(batch: StepBatch) -> npt.NDArray[np.int64]:
    """Return the flat index [S] of the tokens whose logits are sampled: the last one of each sample row that is no
    padding; where it has drafts, also those before it down to its known one."""
    last = batch.query_start[1:].astype(np.int64) - 1
    if batch.padding is not None:
        last -= batch.padding
    last = last[batch.sample_rows]
    if batch.drafts is None:
        return last
    each = 1 + batch.drafts[batch.sample_rows].astype(np.int64)
    ends = np.cumsum(each)
    return np.repeat(last - (ends - 1), each) + np.arange(int(each.sum()))


def signed_tables(batch: StepBatch) -> npt.NDArray[np.int32]:
    """R7, R13 · Return the block tables, with `~block` for a block filled right to left."""
    if batch.directions is None:
        return batch.block_tables
    return np.where(batch.directions != 0, ~batch.block_tables, batch.block_tables)


def slot_names(places: Places | None) -> tuple[str, ...]:
    """Return the names of the slots of every group of layers, among a recorded step's numbers."""
    groups = 1 if places is None else 1 + max(group for group, _ in places)
    return ("slots", *(f"slots_{group}" for group in range(1, groups)))


def slots_of_groups(batch: StepBatch, places: Places | None) -> list[npt.NDArray[np.int64]]:
    """Return the slots [T] of every group."""
    more, _ = _more(batch, places)
    return [batch.slot_mapping, *more]


def tables_of_groups(batch: StepBatch, places: Places | None) -> list[npt.NDArray[np.int32]]:
    """Return the tables [R, M] of every group, with signs: `signed_tables`."""
    _, more = _more(batch, places)
    return [signed_tables(batch), *more]


def _more(batch: StepBatch, places: Places | None) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int32]]]:
    """Return slots and tables of the groups after the first. Raises `InvariantViolated` where the batch lacks them."""
    if places is None:
        return [], []
    if batch.more_tables is None or batch.more_slots is None:
        raise InvariantViolated("a step without tables for all groups of layers")
    return list(batch.more_slots), list(batch.more_tables)
