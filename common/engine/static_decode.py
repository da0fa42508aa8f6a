"""Decode steps over standing buffers, padded to a few batch sizes, each recorded once and replayed from then on.

Owned by `device_steps`. A step of R rows of one token each is written into the buffers of the smallest class that holds
it; the rows between R and the class are padding. The meaning of "recorded" is the recorder's business: a CUDA graph on
a GPU; plain repetition of the forward elsewhere, which is how tests hold this logic against the ordinary path. Decides
nothing about requests.

Padding rows are ordinary rows of one token that lie in the spare block, which no request ever owns: every kernel
computes them like any other row, finite and never read. (Rows with an empty context would ask each kernel for a
special case instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from cohort.common.engine.batch import StepBatch
from cohort.common.engine.decode_classes import CaptureBudget, batch_classes, capture_order, class_for
from cohort.common.engine.device_sampler import SampledOnDevice, StandingSampler
from cohort.common.engine.step_inputs import Model, StepInputs, signed_tables
from cohort.common.engine.uploads import host_bytes
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.paged_attention import AttentionMeta

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """The results of a recorded step, in buffers that the next step writes again."""

    logits: Tensor  # float32 [rows of the class, vocabulary]
    tokens: Tensor  # int64 [rows of the class], sampled
    states: Tensor | None  # final hidden states [rows of the class, hidden], where the model keeps them


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that can be repeated, and the device memory that its recording took."""

    replay: Callable[[], DecodeOutput]
    cost_bytes: int


class Recorder(Protocol):
    def record(self, step: Callable[[], DecodeOutput]) -> Recorded:
        """Make `step` repeatable. Raises `torch.OutOfMemoryError` where the device has no room for it."""


class PlainRecorder:
    """Repeats a step by running it again."""

    def record(self, step: Callable[[], DecodeOutput]) -> Recorded:
        step()
        return Recorded(step, 0)


_NUMBERS = (
    ("token_ids", np.int64),
    ("positions", np.int64),
    ("slots", np.int64),
    ("sources", np.int64),
    ("context_lens", np.int32),
)
"""One of each per row."""


class _HostSide:
    """What a step sends from the host. There are two: the device may still copy from that of the step before."""

    def __init__(self, rows: int, width: int, numbers_bytes: int, device: torch.device) -> None:
        self.numbers = host_bytes(numbers_bytes, device)
        self.by_name: dict[str, np.ndarray] = {}
        offset = 0
        for name, dtype in _NUMBERS:
            end = offset + rows * np.dtype(dtype).itemsize
            self.by_name[name] = self.numbers[offset:end].numpy().view(dtype)
            offset = end
        self.tables = host_bytes(4 * rows * width, device).view(torch.int32)

    def write_padding(self, first: int, end: int, spare_slot: int) -> None:
        """Token 0 at position 0 of the spare block; the rows share its slots, whose content is never read."""
        self.by_name["token_ids"][first:end] = 0
        self.by_name["positions"][first:end] = 0
        self.by_name["slots"][first:end] = spare_slot
        self.by_name["context_lens"][first:end] = 1


class StaticDecode:
    """The buffers of all classes (each uses the first rows of the same ones) and the recorded steps."""

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        *,
        spare_block: int,
        max_rows: int,
        max_context: int,
        vocabulary: int,
        device: torch.device,
        workspace: Workspace | None = None,
    ) -> None:
        """`kv` [blocks, layers, 2, kv heads, block size, head dim], of which `spare_block` belongs to no request."""
        self._model, self._kv = model, kv
        self._spare = spare_block
        self._block_size = kv.shape[4]
        self._workspace = workspace
        self._width = -(-max_context // self._block_size)
        self._max_rows = max_rows
        self._steps: dict[int, Callable[[], DecodeOutput]] = {}
        self._sampler = StandingSampler(max_rows, vocabulary, device)
        rows, width = max_rows, self._width
        # One piece of memory for everything that is one number per row, so that a step sends it in one copy.
        size = sum(rows * np.dtype(dtype).itemsize for _, dtype in _NUMBERS)
        self._numbers = torch.zeros(size, dtype=torch.uint8, device=device)
        there: dict[str, Tensor] = {}
        offset = 0
        for name, dtype in _NUMBERS:
            end = offset + rows * np.dtype(dtype).itemsize
            there[name] = self._numbers[offset:end].view(torch.int64 if dtype is np.int64 else torch.int32)
            offset = end
        self._there: Mapping[str, Tensor] = there
        self._host, self._other_host = (_HostSide(rows, width, size, device) for _ in range(2))
        # Tables travel as wide as the step needs, and are spread over the full width on the device.
        self._tables_packed = torch.zeros(rows * width, dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(rows, dtype=torch.int64, device=device)
        self._host.write_padding(0, rows, self._spare * self._block_size)
        self._numbers.copy_(self._host.numbers)
        self._tables.fill_(spare_block)

    @property
    def classes(self) -> tuple[int, ...]:
        """Recorded classes, ascending."""
        return tuple(sorted(self._steps))

    def record(
        self,
        recorder: Recorder,
        budget: CaptureBudget,
        first_estimate_bytes: int = 0,
        classes: Sequence[int] | None = None,
    ) -> None:
        """Record the classes (None: all), largest first, as far as the budget goes; the log tells what was recorded."""
        estimate, refused = first_estimate_bytes, []
        for rows in capture_order(batch_classes(self._max_rows) if classes is None else classes):
            if not budget.admits(estimate):
                refused.append(rows)
                continue
            inputs = self._inputs(rows)
            try:
                recorded = recorder.record(lambda inputs=inputs: self._forward(inputs))  # type: ignore[misc]
            except torch.OutOfMemoryError:
                refused.append(rows)
                continue
            except RuntimeError as error:  # a kernel that cannot be recorded: steps run one kernel after the other
                log.warning("decode steps cannot be recorded", rows=rows, reason=str(error))
                break
            if not budget.spend(recorded.cost_bytes):
                refused.append(rows)
                continue
            self._steps[rows] = recorded.replay
            # A smaller class fits into the same pool: it adds no more than this one took.
            estimate = recorded.cost_bytes
        log.info(
            "decode steps recorded",
            classes=list(self.classes),
            refused=refused,
            mebibytes=budget.spent_bytes >> 20,
            budget_mebibytes=budget.budget_bytes >> 20,
        )

    def takes(self, batch: StepBatch) -> int | None:
        """The class that computes this batch; None where it has other than one token per row, or no class holds it."""
        if batch.num_tokens != batch.num_rows or batch.padding is not None or batch.scoring:
            return None
        if batch.block_tables.shape[1] > self._width or not self._sampler.takes(batch.sampling):
            return None
        return class_for(batch.num_rows, self._steps)

    def run(self, batch: StepBatch, rows_class: int, before: Tensor | None = None) -> DecodeOutput:
        """Launch the step. Its first `batch.num_rows` rows are the batch's, in order. The step before it may still run,
        the one before that must be over. `before`: sampled tokens on the device that `token_source` takes from."""
        self._host, self._other_host = self._other_host, self._host
        self._fill(batch, rows_class)
        self._sampler.fill(batch.sampling, batch.sample_rows, rows_class)
        if before is not None:
            rows = batch.num_rows
            torch.index_select(before, 0, self._there["sources"][:rows], out=self._there["token_ids"][:rows])
        return self._steps[rows_class]()

    def results(self, batch: StepBatch) -> SampledOnDevice:
        """The tokens that `run` sampled for this batch, on their way to the host."""
        return self._sampler.results(batch.sampling, batch.sample_rows, batch.num_rows)

    def repeat(self, rows_class: int) -> DecodeOutput:
        """Launch the last step of this class again, over the same inputs: for measuring it alone."""
        return self._steps[rows_class]()

    def _fill(self, batch: StepBatch, rows_class: int) -> None:
        rows, width, host = batch.num_rows, batch.block_tables.shape[1], self._host
        for name, array in (
            ("token_ids", batch.token_ids),
            ("positions", batch.positions),
            ("slots", batch.slot_mapping),
            ("context_lens", batch.context_lens),
            ("sources", batch.token_source),
        ):
            if array is not None:
                host.by_name[name][:rows] = array
        host.write_padding(rows, rows_class, self._spare * self._block_size)
        self._numbers.copy_(host.numbers, non_blocking=True)
        tables = host.tables[: rows_class * width].numpy().reshape(rows_class, width)
        tables[:rows] = signed_tables(batch)
        tables[rows:] = self._spare
        _spread(host.tables, self._tables_packed, self._tables, rows_class, width)

    def _inputs(self, rows: int) -> StepInputs:
        return StepInputs(
            token_ids=self._there["token_ids"][:rows],
            positions=self._there["positions"][:rows],
            slot_mapping=self._there["slots"][:rows],
            sample_index=self._every_row[:rows],
            meta=AttentionMeta(
                query_start=self._starts[: rows + 1],
                context_lens=self._there["context_lens"][:rows],
                block_tables=self._tables[:rows],
                directions=None,
                block_size=self._block_size,
                max_query_len=1,
                num_prefill_rows=0,
                max_context_len=self._width * self._block_size,
                workspace=self._workspace,
                signed=True,
            ),
        )

    def _forward(self, inputs: StepInputs) -> DecodeOutput:
        logits = self._model.forward(inputs, self._kv)
        return DecodeOutput(logits, self._sampler.sample(logits), self._model.sampled_states)


def _spread(host: Tensor, packed: Tensor, full: Tensor, rows: int, width: int) -> None:
    """[rows, width], packed on the host → the first columns of `full`."""
    used = rows * width
    packed[:used].copy_(host[:used], non_blocking=True)
    full[:rows, :width].copy_(packed[:used].view(rows, width))
