"""Drafts of all rows of a step at once: the rows under way, their course, and a model of its own that proposes them.

    known tokens, computed up to some position ─▶ what is lacking, as chunks ─▶ first draft
                                                  a step of all rows for each further one ─┘

A drafter has KV of its own in the slots of a sequence. Runs its batches as they are, or as a GPU's steps do: recorded,
over standing buffers, sampled there. Called by `drafting` between two steps of the model, on the engine's thread. Never
changes a response: the model verifies every draft. Decides nothing about requests.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.drafts.token_chain import SlotMarks, TokenChain
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.step_inputs import Model, step_inputs
from cohort.common.engine.step.batch import Int64Array, SamplingRow, StepBatch
from cohort.common.engine.step.sampler import sample
from cohort.common.types import DraftSource

FILLED_AT_ONCE = 512
"""Positions that a drafter computes for what it lacks before one step; a row that lacks more waits for the next."""
SHORT = 16
"""Positions that a row may lack to be computed together with those of the other rows."""
_RECORDED_ROWS = (1, 2, 4, 8)
"""Iterations of more rows have no drafts (`speculation_control`)."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence whose next tokens are wanted. `blocks` hold its known tokens and all drafts but the last."""

    chain: TokenChain
    blocks: Sequence[int]
    directions: Sequence[int] | None
    sampling: tuple[SamplingRow, ...]
    """The sampling of each draft's position; penalties count the drafts before it besides."""
    number: int = 0
    """The number of the sequence, as in `StepBatch.numbers`."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """`seconds`: what they took, without `filled_positions`, which were computed first because the KV lacked them."""

    tokens: list[list[int]]
    seconds: float
    filled_positions: int


@dataclass(slots=True)
class UnderWay:
    """A row under way: of the drafter's positions that known tokens give, `known`, [begins, computed) are in its slots.
    The last of them makes the first draft."""

    row: DraftRow
    slots: Int64Array
    known: int
    computed: int
    begins: int = 0
    """The first position that is attended to; at the beginning of a block."""
    drafts: list[int] = field(default_factory=list)

    @property
    def lacks(self) -> int:
        """Positions until the first draft; none where nothing is known to begin with."""
        return self.known - self.computed


def drafted(
    under: Sequence[UnderWay], fill: Callable[[UnderWay, int], None], step: Callable[[Sequence[UnderWay]], None]
) -> Drafts:
    """Draft as many tokens of each row as it has `sampling`; none where more is lacking than can be filled at once.
    `fill` computes some positions of a row; `step` one draft more of each row, those that lack most first."""
    before = sum(each.lacks for each in under)
    remaining = FILLED_AT_ONCE
    for each in under:
        count = min(remaining, each.lacks - 1)  # `step` computes the end
        if each.lacks > SHORT and count > 0:
            fill(each, count)
            remaining -= count
    filled = before - sum(each.lacks for each in under)
    began_s = time.perf_counter()
    going = [each for each in under if 0 < each.lacks <= SHORT and each.row.sampling]
    while going:
        step(sorted(going, key=lambda each: -each.lacks))  # prefill rows first
        going = [each for each in going if len(each.drafts) < len(each.row.sampling)]
    return Drafts([each.drafts for each in under], time.perf_counter() - began_s, filled)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a row that are computed next, from position `first` on. `begins`: as of `UnderWay`."""

    row: DraftRow
    tokens: Int64Array
    first: int
    slots: Int64Array
    begins: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


def slots_of(row: DraftRow, positions: int, block_size: int) -> Int64Array:
    """Return the slots of the row's first positions."""
    places = np.arange(positions)
    indices, offsets = places // block_size, places % block_size
    if row.directions is not None:  # R13
        offsets = np.where(np.asarray(row.directions)[indices] == 1, block_size - 1 - offsets, offsets)
    slots: Int64Array = np.asarray(row.blocks, dtype=np.int64)[indices] * block_size + offsets
    return slots


def batch_of(parts: Sequence[Part], block_size: int, sampling: Sequence[SamplingRow] = ()) -> StepBatch:
    """Build a step of a drafter: after each part's last token one is sampled as `sampling` says, or after none."""
    widths = [-(-part.end // block_size) - part.begins // block_size for part in parts]
    tables = np.zeros((len(parts), max(widths)), dtype=np.int32)
    directions = None
    for index, part in enumerate(parts):
        begins = part.begins // block_size
        within = slice(begins, begins + widths[index])
        tables[index, : widths[index]] = part.row.blocks[within]
        if part.row.directions is not None:
            if directions is None:
                directions = np.zeros(tables.shape, dtype=np.uint8)
            directions[index, : widths[index]] = part.row.directions[within]
    return StepBatch(
        token_ids=np.concatenate([part.tokens for part in parts]),
        positions=np.concatenate([np.arange(part.first, part.end, dtype=np.int64) for part in parts]),
        query_start=np.cumsum([0, *[len(part.tokens) for part in parts]], dtype=np.int32),
        context_lens=np.array([part.end - part.begins for part in parts], dtype=np.int32),
        block_tables=tables,
        directions=directions,
        slot_mapping=np.concatenate([part.slots[part.first : part.end] for part in parts]),
        sample_rows=np.arange(len(sampling), dtype=np.int32),
        sampling=tuple(sampling),
    )


class BatchDrafter(ABC):
    """A proposer of tokens for all rows of a step at once."""

    source: DraftSource
    _ahead: int
    """Position p takes the token at p + this."""

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
        """Return whether it can draft for a sequence. On the event loop's thread."""

    def ran(self, batch: StepBatch) -> None:  # noqa: B027 - only some go by the model's steps
        """Note that the model has computed a step."""

    @abstractmethod
    def _start(self, row: DraftRow) -> UnderWay:
        """Find which positions of a row are in its slots."""

    @abstractmethod
    def _mark(self, each: UnderWay, end: int) -> None:
        """Note that positions of the row from those computed up to `end` are in their slots, the last one's token being
        its last draft where it has any."""

    def propose_all(self, rows: Sequence[DraftRow]) -> Drafts:
        """Draft as many tokens for each row as it has `sampling`, or none."""
        with torch.inference_mode():
            return drafted([self._start(row) for row in rows], self._fill, self._step)

    def warm_up(self) -> None:
        """Compile kernels and record steps, on a device, before anything is served."""
        if self._steps is not None:
            with torch.inference_mode():
                self._steps.compile(threads=min(16, os.cpu_count() or 1))
                self._steps.record(self._graph_bytes, _RECORDED_ROWS)
            if self._steps.decode.classes and isinstance(self._model, LeanLlama):
                self._model.freeze_buffers()

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


class DraftModel(BatchDrafter):
    """A model of the same vocabulary. Its KV lies in a pool of its own under the same block ids, so allocator, prefix
    cache and preemption serve both without knowing it; the slots tell which of it is there (`token_chain`)."""

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
        """Return whether all tokens of a sequence are known here, and its length."""
        return len(chain) + drafts <= self._longest and int(chain.tokens.max(initial=0)) < self._vocabulary

    def _start(self, row: DraftRow) -> UnderWay:
        """Leave the last known position to be computed: a draft is what its logits say."""
        known = len(row.chain)
        slots = slots_of(row, known + max(0, len(row.sampling) - 1), self._block_size)
        return UnderWay(row, slots, known, min(self._marks.computed(slots, row.chain.marks), known - 1))

    def _mark(self, each: UnderWay, end: int) -> None:
        first, chain = each.computed, each.row.chain
        marks = chain.after(np.array(each.drafts))[-1:] if each.drafts else chain.marks[first:end]
        self._marks.write(each.slots[first:end], marks)
