"""A small model of the same vocabulary that proposes tokens for all rows of a step at once.

Its KV lies in a pool of its own under the same block ids, so that allocator, prefix cache and preemption serve both
without knowing it; which of it is there is read off the slots (`token_chain`). Called on the engine's thread, between
two steps of the model. Never changes a response: the model verifies every draft.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from cohort.common.engine.batch import GREEDY, Int64Array, SamplingRow, StepBatch
from cohort.common.engine.device_steps import DeviceSteps
from cohort.common.engine.drafts.batch_drafts import DraftRow, Drafts, Part, UnderWay, batch_of, drafted, slots_of
from cohort.common.engine.drafts.token_chain import SlotMarks, TokenChain
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.lean_llama import LeanLlama
from cohort.common.engine.model_config import ModelGeometry
from cohort.common.engine.sampler import sample
from cohort.common.engine.step_inputs import Model, step_inputs
from cohort.common.types import DraftSource

_RECORDED_ROWS = (1, 2, 4, 8)
"""Iterations of more rows have no drafts (`speculation_desk`)."""


class DraftModel:
    source: DraftSource = "model"

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
        """`vocabulary`: of the model that verifies; ids beyond it are padding of this one's tables. `steps`: of this
        model on a device, which run and sample what would be computed here; recorded in `graph_bytes`."""
        self._model, self._steps, self._graph_bytes = model, steps, graph_bytes
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

    def warm_up(self) -> None:
        """See `BatchDrafter`."""
        if self._steps is not None:
            with torch.inference_mode():
                self._steps.compile(threads=min(16, os.cpu_count() or 1))
                self._steps.record(self._graph_bytes, _RECORDED_ROWS)
            if self._steps.decode.classes and isinstance(self._model, LeanLlama):
                self._model.keep_buffers()

    def _begun(self, row: DraftRow) -> UnderWay:
        """The last known position is always computed: a draft is what its logits say."""
        known = len(row.chain)
        slots = slots_of(row, known + max(0, len(row.sampling) - 1), self._block_size)
        return UnderWay(row, slots, known, min(self._marks.computed(slots, row.chain.marks), known - 1))

    def _fill(self, each: UnderWay, count: int) -> None:
        first, end = each.computed, each.computed + count
        self._compute([(each, each.row.chain.tokens[first:end])])  # before its marks: it may fail
        self._marks.write(each.slots[first:end], each.row.chain.marks[first:end])
        each.computed = end

    def _step(self, going: Sequence[UnderWay]) -> None:
        work, sampling = list[tuple[UnderWay, Int64Array]](), list[SamplingRow]()
        for each in going:
            drafts = np.array(each.drafts, dtype=np.int64)
            work.append((each, drafts[-1:] if each.drafts else each.row.chain.tokens[each.computed :]))
            sampling.append(each.row.sampling[len(drafts)])
        tokens = self._compute(work, sampling)
        for (each, computed), token in zip(work, tokens, strict=True):
            first, chain = each.computed, each.row.chain
            marks = chain.after(np.array(each.drafts))[-1:] if each.drafts else chain.marks[first:]
            each.computed += len(computed)
            self._marks.write(each.slots[first : each.computed], marks)
            each.drafts.append(token)

    def _compute(
        self, work: Sequence[tuple[UnderWay, Int64Array]], sampling: Sequence[SamplingRow] | None = None
    ) -> list[int]:
        """Compute these tokens behind what is computed, and sample what follows the last of each row; None: nothing."""
        parts = [Part(each.row, tokens, each.computed, each.slots) for each, tokens in work]
        batch = batch_of(parts, self._block_size, [GREEDY] * len(parts) if sampling is None else sampling)
        if self._steps is not None:
            found = self._steps.launch(batch).finish().tokens.tolist()
            return [token if token < self._vocabulary else 0 for token in found]  # a wrong one, as that is
        inputs = step_inputs(batch, self._block_size, self._kv.device)
        logits = self._model.forward(inputs, self._kv.blocks)[:, : self._vocabulary]
        return [] if sampling is None else sample(logits, sampling).tokens.tolist()
