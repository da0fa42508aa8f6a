"""A drafter with KV of its own in the slots of a sequence: what a model and a head have in common.

    known tokens ─▶ chunks of what is lacking ─▶ a step of all rows for each draft ─▶ marks of what lies in the slots

Runs its batches as they are, or as a GPU's steps do: recorded, over standing buffers, sampled there. Called on the
engine's thread, between two steps of the model. Never changes a response: the model verifies every draft.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.drafts.batch_drafts import DraftRow, Drafts, Part, UnderWay, batch_of, drafted
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.step_inputs import Model, step_inputs
from cohort.common.engine.step.batch import Int64Array, SamplingRow, StepBatch
from cohort.common.engine.step.sampler import sample
from cohort.common.types import DraftSource

_RECORDED_ROWS = (1, 2, 4, 8)
"""Iterations of more rows have no drafts (`speculation_desk`)."""


class SlotDrafter(ABC):
    """A `BatchDrafter`."""

    source: DraftSource
    _ahead: int
    """Position p takes the token at p and so many more."""

    def __init__(
        self, model: Model, kv: KvTensors, *, vocabulary: int, steps: DeviceSteps | None, graph_bytes: int
    ) -> None:
        """`vocabulary`: logits beyond it are of no token. `steps`: of this model on a device, recorded in
        `graph_bytes`."""
        self._model, self._kv, self._vocabulary = model, kv, vocabulary
        self._steps, self._graph_bytes = steps, graph_bytes
        self._block_size = kv.geometry.block_size

    @abstractmethod
    def takes(self, chain: TokenChain, drafts: int) -> bool:
        """See `BatchDrafter`."""

    @abstractmethod
    def ran(self, batch: StepBatch) -> None:
        """See `BatchDrafter`."""

    @abstractmethod
    def _begun(self, row: DraftRow) -> UnderWay:
        """What of a row lies in its slots."""

    @abstractmethod
    def _mark(self, each: UnderWay, end: int) -> None:
        """Positions of the row from those computed up to `end` lie in their slots now, the last one's token being its
        last draft where it has any."""

    def propose_all(self, rows: Sequence[DraftRow]) -> Drafts:
        """See `BatchDrafter`."""
        with torch.inference_mode():
            return drafted([self._begun(row) for row in rows], self._fill, self._step)

    def warm_up(self) -> None:
        """See `BatchDrafter`."""
        if self._steps is not None:
            with torch.inference_mode():
                self._steps.compile(threads=min(16, os.cpu_count() or 1))
                self._steps.record(self._graph_bytes, _RECORDED_ROWS)
            if self._steps.decode.classes and isinstance(self._model, LeanLlama):
                self._model.keep_buffers()

    def _fill(self, each: UnderWay, count: int) -> None:
        first = each.computed + self._ahead
        self._compute([(each, each.row.chain.tokens[first : first + count])])

    def _step(self, going: Sequence[UnderWay]) -> None:
        work, sampling = list[tuple[UnderWay, Int64Array]](), list[SamplingRow]()
        for each in going:
            drafts = np.array(each.drafts[-1:], dtype=np.int64)
            work.append((each, drafts if each.drafts else each.row.chain.tokens[each.computed + self._ahead :]))
            row = each.row.sampling[len(each.drafts)]
            sampling.append(row if row.history is None else replace(row, ahead=tuple(each.drafts)))
        for each, token in zip(going, self._compute(work, sampling), strict=True):
            each.drafts.append(token)

    def _compute(self, work: Sequence[tuple[UnderWay, Int64Array]], sampling: Sequence[SamplingRow] = ()) -> list[int]:
        """Compute these tokens behind what is computed, and sample what follows the last of each row, or nothing."""
        parts = [Part(each.row, tokens, each.computed, each.slots, each.begins) for each, tokens in work]
        tokens = self._run(batch_of(parts, self._block_size, sampling))
        for (each, _), part in zip(work, parts, strict=True):  # only now: it may have failed
            self._mark(each, part.end)
            each.computed = part.end
        return tokens

    def _run(self, batch: StepBatch) -> list[int]:
        if self._steps is not None:
            found: list[int] = self._steps.launch(batch).finish().tokens.tolist()
            return [token if token < self._vocabulary else 0 for token in found]  # a wrong one, as that is
        logits = self._model.forward(step_inputs(batch, self._block_size, self._kv.device), self._kv.blocks)
        return [int(token) for token in sample(logits[:, : self._vocabulary], batch.sampling).tokens]
