"""Decode steps over standing buffers, padded to a few batch sizes, each recorded once and replayed from then on.

Owned by `device_steps`. A step of R rows of one token each is written into the buffers of the smallest class that holds
it; the rows between R and the class are padding. A recording ends with the logits: sampling is one launch after it,
which can then have a grammar's masks, found while the device computes.

Padding rows are ordinary rows of one token in the spare block, which no request ever owns: every kernel computes them
like any other row, finite and never read. (Rows with an empty context would need a special case in each kernel.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.models.step_inputs import (
    Model,
    Places,
    StepInputs,
    slot_names,
    slots_of_groups,
    tables_of_groups,
)
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.decode_classes import CaptureBudget, MixedClass, batch_classes, capture_order, class_for
from cohort.common.engine.step.device_sampler import SampledOnDevice, StandingSampler
from cohort.common.engine.step.recorded_steps import Recorder, StepResult, record_all
from cohort.common.engine.step.standing_inputs import Numbers, StandingInputs, fill_sources, put_tokens
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.ops.paged_attention import AttentionMeta

_Class = TypeVar("_Class", int, MixedClass)


@dataclass(frozen=True, slots=True)
class Ground:
    """Ground of recorded steps of every kind. `kv` [blocks, layers, 2, kv heads, block size, head dim], of which
    `spare_block` belongs to no request. `places`: of layers in several groups."""

    model: Model
    kv: Tensor
    spare_block: int
    max_context: int
    device: torch.device
    workspace: Workspace | None = None
    places: Places | None = None


class StaticSteps(Generic[_Class]):
    """Standing buffers, of which each class of steps uses the first entries, and the recorded steps."""

    _buffers: StandingInputs

    def __init__(self, ground: Ground) -> None:
        self._model, self._kv = ground.model, ground.kv
        self._spare, self._block_size = ground.spare_block, ground.kv.shape[4]
        self._workspace, self._places = ground.workspace, ground.places
        self._slots = slot_names(self._places)
        self._width = -(-ground.max_context // self._block_size)
        self._steps: dict[_Class, Callable[[], StepResult]] = {}

    @property
    def classes(self) -> tuple[_Class, ...]:
        return tuple(sorted(self._steps))

    def forget(self) -> None:
        self._steps.clear()

    def _forward(
        self, tokens: int, query_start: Tensor, sample_index: Tensor, *, max_query_len: int, num_prefill_rows: int
    ) -> Callable[[], StepResult]:
        """Return the forward of the buffers' first `tokens` tokens, in as many rows as `query_start` [rows + 1] has."""
        tensors, rows = self._buffers.tensors, len(query_start) - 1
        metas = [
            AttentionMeta(
                query_start=query_start,
                context_lens=tensors["context_lens"][:rows],
                block_tables=tables[:rows],
                directions=None,
                block_size=self._block_size,
                max_query_len=max_query_len,
                num_prefill_rows=num_prefill_rows,
                max_context_len=self._width * self._block_size,
                workspace=self._workspace,
                signed=True,
            )
            for tables in self._buffers.tables
        ]
        slots = [tensors[name][:tokens] for name in self._slots]
        inputs = StepInputs(
            token_ids=tensors["token_ids"][:tokens],
            positions=tensors["positions"][:tokens],
            slot_mapping=slots[0],
            sample_index=sample_index,
            meta=metas[0],
            more=tuple(zip(slots[1:], metas[1:], strict=True)),
            places=self._places,
        )

        def forward() -> StepResult:
            logits = self._model.forward(inputs, self._kv)
            return StepResult(logits, self._model.sampled_states)

        return forward


class StaticDecode(StaticSteps[int]):
    def __init__(self, ground: Ground, max_rows: int, vocabulary: int) -> None:
        super().__init__(ground)
        device = ground.device
        self._max_rows = max_rows
        self.sampler = StandingSampler(max_rows, vocabulary, device)
        names64, names32 = ("token_ids", "positions", *self._slots, "sources", "places"), ("context_lens",)
        layout = [(name, np.int64, max_rows) for name in names64] + [(name, np.int32, max_rows) for name in names32]
        self._buffers = StandingInputs(
            layout, rows=max_rows, width=self._width, spare_block=self._spare, device=device, groups=len(self._slots)
        )
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._write_padding(self._buffers.next_numbers(), 0, max_rows)
        self._buffers.send_numbers()

    def record(
        self,
        recorder: Recorder,
        budget: CaptureBudget,
        first_estimate_bytes: int = 0,
        classes: Sequence[int] | None = None,
    ) -> None:
        """Record the classes (None: all), largest first, as far as the budget goes."""
        wanted = capture_order(batch_classes(self._max_rows) if classes is None else classes)
        self._steps |= record_all("decode steps", wanted, self._step, recorder, budget, first_estimate_bytes)

    def takes(self, batch: StepBatch) -> int | None:
        """Return the class that computes this batch; None for other than one token per row, or if no class holds it."""
        if batch.num_tokens != batch.num_rows or batch.scoring:
            return None
        if batch.block_tables.shape[1] > self._width:
            return None
        return class_for(batch.num_rows, self._steps)

    def run(self, batch: StepBatch, rows_class: int, before: Tensor | None = None) -> StepResult:
        """Launch the step. Its first `batch.num_rows` rows are the batch's, in order. The step before it may still run,
        the one before that must be over. `before`: sampled tokens on the device that `token_source` takes from."""
        awaited = self._fill(batch, rows_class)
        if before is not None:
            tensors = self._buffers.tensors
            put_tokens(tensors["token_ids"][: batch.num_rows], before, tensors["sources"], tensors["places"], awaited)
        return self._steps[rows_class]()

    def sample(self, batch: StepBatch, rows_class: int, done: StepResult) -> SampledOnDevice | None:
        """Sample after `run`; the tokens are then on their way to the host. None if the tables are too small."""
        if not self.sampler.takes(batch.sampling):
            return None
        self.sampler.fill(batch.sampling, batch.sample_rows, rows_class)
        self.sampler.sample(done.logits)
        return self.sampler.results(batch.sampling, batch.sample_rows, batch.num_rows)

    def repeat(self, rows_class: int) -> StepResult:
        """Launch the last step of this class again, over the same inputs and sampled alike: for measuring it alone."""
        done = self._steps[rows_class]()
        self.sampler.sample(done.logits)
        return done

    def _write_padding(self, numbers: Numbers, first: int, end: int) -> None:
        """Write token 0 at position 0 of the spare block; the rows share its slots, whose content is never read."""
        numbers["token_ids"][first:end] = 0
        numbers["positions"][first:end] = 0
        for name in self._slots:
            numbers[name][first:end] = self._spare * self._block_size
        numbers["context_lens"][first:end] = 1

    def _fill(self, batch: StepBatch, rows_class: int) -> int:
        """Fill the buffers. Return how many of the tokens the step before samples."""
        rows, width, numbers = batch.num_rows, batch.block_tables.shape[1], self._buffers.next_numbers()
        for name, array in (
            ("token_ids", batch.token_ids),
            ("positions", batch.positions),
            ("context_lens", batch.context_lens),
            *zip(self._slots, slots_of_groups(batch, self._places), strict=True),
        ):
            numbers[name][:rows] = array
        awaited = fill_sources(batch, numbers)
        self._write_padding(numbers, rows, rows_class)
        self._buffers.send_numbers()
        tables = self._buffers.host_tables(rows_class, width)
        for own, given in zip(tables, tables_of_groups(batch, self._places), strict=True):
            own[:rows] = given
            own[rows:] = self._spare
        self._buffers.send_tables(rows_class, width)
        return awaited

    def _step(self, rows: int) -> Callable[[], StepResult]:
        starts, every_row = self._starts[: rows + 1], self._every_row[:rows]
        return self._forward(rows, starts, every_row, max_query_len=1, num_prefill_rows=0)
