"""A small model of the same vocabulary that proposes tokens for all rows of a step at once.

Its KV lies in a pool of its own under the same block ids, so that allocator, prefix cache and preemption serve both
without knowing it; which of it is there is read off the slots (`token_chain`).
"""

from __future__ import annotations

import numpy as np

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.drafts.batch_drafts import DraftRow, UnderWay, slots_of
from cohort.common.engine.drafts.slot_drafter import SlotDrafter
from cohort.common.engine.drafts.token_chain import SlotMarks, TokenChain
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models.step_inputs import Model
from cohort.common.engine.step.batch import StepBatch
from cohort.common.types import DraftSource


class DraftModel(SlotDrafter):
    source: DraftSource = "model"
    _ahead = 0

    def __init__(
        self,
        model: Model,
        geometry: ModelGeometry,
        kv: KvTensors,
        *,
        vocabulary: int,
        steps: DeviceSteps | None = None,
        graph_bytes: int = 0,
    ) -> None:
        """`vocabulary`: of the model that verifies; ids beyond it are padding of this one's tables."""
        least = min(vocabulary, geometry.vocab_size)
        super().__init__(model, kv, vocabulary=least, steps=steps, graph_bytes=graph_bytes)
        self._marks = SlotMarks(len(kv.blocks) * self._block_size)
        self._longest = geometry.max_positions

    def takes(self, chain: TokenChain, drafts: int) -> bool:
        """Whether it can say anything of a sequence: none of its tokens is unknown here, nor is its length."""
        return len(chain) + drafts <= self._longest and int(chain.tokens.max(initial=0)) < self._vocabulary

    def ran(self, batch: StepBatch) -> None:
        """Its own KV is all it goes by."""

    def _begun(self, row: DraftRow) -> UnderWay:
        """The last known position is always computed: a draft is what its logits say."""
        known = len(row.chain)
        slots = slots_of(row, known + max(0, len(row.sampling) - 1), self._block_size)
        return UnderWay(row, slots, known, min(self._marks.computed(slots, row.chain.marks), known - 1))

    def _mark(self, each: UnderWay, end: int) -> None:
        first, chain = each.computed, each.row.chain
        marks = chain.after(np.array(each.drafts))[-1:] if each.drafts else chain.marks[first:end]
        self._marks.write(each.slots[first:end], marks)
