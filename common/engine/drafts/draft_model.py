"""A small model of the same vocabulary that proposes tokens for all rows of a step at once.

Its KV lies in a pool of its own under the same block ids, so that allocator, prefix cache and preemption serve both
without knowing it; which of it is there is read off the slots (`token_chain`). Called on the engine's thread, between
two steps of the model. Never changes a response: the model verifies every draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.batch import Int64Array, SamplingRow, StepBatch
from cohort.common.engine.drafts.batch_drafts import DraftRow, Drafts, Part, UnderWay, batch_of, drafted, slots_of
from cohort.common.engine.drafts.token_chain import SlotMarks, TokenChain
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.model_config import ModelGeometry
from cohort.common.engine.sampler import sample
from cohort.common.engine.step_inputs import Model, step_inputs
from cohort.common.types import DraftSource


class DraftModel:
    source: DraftSource = "model"

    def __init__(self, model: Model, geometry: ModelGeometry, kv: KvTensors, *, vocabulary: int) -> None:
        """`vocabulary`: of the model that verifies; ids beyond it are padding of this one's tables."""
        self._model = model
        self._kv = kv
        self._block_size = kv.geometry.block_size
        self._marks = SlotMarks(len(kv.blocks) * self._block_size)
        self._vocabulary = min(vocabulary, geometry.vocab_size)
        self._longest = geometry.max_positions

    def takes(self, chain: TokenChain, drafts: int) -> bool:
        """Whether it can say anything of a sequence: none of its tokens is unknown here, nor is its length."""
        return len(chain) + drafts <= self._longest and int(chain.tokens.max(initial=0)) < self._vocabulary

    def propose_all(self, rows: Sequence[DraftRow]) -> Drafts:
        """See `BatchDrafter`."""
        with torch.inference_mode():
            return drafted([self._begun(row) for row in rows], self._fill, self._step)

    def ran(self, batch: StepBatch) -> None:
        """Its own KV is all it goes by."""

    def _begun(self, row: DraftRow) -> UnderWay:
        """The last known position is always computed: a draft is what its logits say."""
        known = len(row.chain)
        slots = slots_of(row, known + max(0, len(row.sampling) - 1), self._block_size)
        return UnderWay(row, slots, known, min(self._marks.computed(slots, row.chain.marks), known - 1))

    def _fill(self, each: UnderWay, count: int) -> None:
        first, end = each.computed, each.computed + count
        self._forward([(each, each.row.chain.tokens[first:end])])  # before its marks: it may fail
        self._marks.write(each.slots[first:end], each.row.chain.marks[first:end])
        each.computed = end

    def _step(self, going: Sequence[UnderWay]) -> None:
        work, sampling = list[tuple[UnderWay, Int64Array]](), list[SamplingRow]()
        for each in going:
            drafts = np.array(each.drafts, dtype=np.int64)
            work.append((each, drafts[-1:] if each.drafts else each.row.chain.tokens[each.computed :]))
            sampling.append(each.row.sampling[len(drafts)])
        logits = self._forward(work)[:, : self._vocabulary]
        tokens = sample(logits, sampling).tokens.tolist()
        for (each, computed), token in zip(work, tokens, strict=True):
            first, chain = each.computed, each.row.chain
            marks = chain.after(np.array(each.drafts))[-1:] if each.drafts else chain.marks[first:]
            each.computed += len(computed)
            self._marks.write(each.slots[first : each.computed], marks)
            each.drafts.append(token)

    def _forward(self, work: Sequence[tuple[UnderWay, Int64Array]]) -> Tensor:
        """Compute these tokens behind what is computed; the logits [rows, vocabulary] of the last of each row."""
        parts = [Part(each.row, tokens, each.computed, each.slots) for each, tokens in work]
        inputs = step_inputs(batch_of(parts, self._block_size), self._block_size, self._kv.device)
        return self._model.forward(inputs, self._kv.blocks)
