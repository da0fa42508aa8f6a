"""Steps with prompt and decode rows over standing buffers, recorded in a few classes and replayed from then on.

Owned by `device_steps`. A class has a number of prompt tokens and one of rows; a step runs in the smallest that holds
it. Its rows lie so, whatever the step has:

    prompt rows, PROMPT_ROWS of them │ one row of padding tokens │ decode rows, as many as the class has rows
    tokens of the prompts, then padding up to the class's prompt tokens │ one token each

Prompt rows that the step lacks have no tokens. The padding row fills the prompt tokens up; it lies in the spare block,
as do decode rows beyond the step's: finite, and read by no row of a request. Padding that a padded preset puts behind
its prompts is part of their rows. Sampling is not recorded (`device_steps` launches it afterwards).

Prompts attend to the paged cache: gathering keys for flash attention needs their number on the host, and a recorded
step has none. That is slower for long contexts: a step with a longer one than `LONGEST_CONTEXT` is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from cohort.common.engine.forward.static_decode import Ground, StaticSteps
from cohort.common.engine.models.step_inputs import sampled_tokens, slots_of_groups, tables_of_groups
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.decode_classes import CaptureBudget, MixedClass, mixed_class_for
from cohort.common.engine.step.recorded_steps import Recorder, StepResult, record_all
from cohort.common.engine.step.standing_inputs import StandingInputs, fill_sources, put_tokens

PROMPT_ROWS = 8
"""Prompts that a recorded step holds; each one that a step lacks costs a few programs that end at once."""

LONGEST_CONTEXT = 2048
"""Maximum tokens of a prompt row. Estimated: here the kernel over the paged cache takes 0.5 ms longer for 32 layers
than gathering and flash attention do, which is what recording saves a step that hides little."""


class StaticMixed(StaticSteps[MixedClass]):
    """Recorded steps with prompts. While a step is filled in, the one before it may still run."""

    def __init__(self, ground: Ground, classes: Sequence[MixedClass]) -> None:
        super().__init__(ground)
        # The padding row is a context of its own.
        self.pending_classes: Sequence[MixedClass] = sorted(
            each for each in classes if each.prompt_tokens <= self._width * self._block_size
        )
        tokens = max((each.tokens for each in self.pending_classes), default=0)
        rows = max((each.rows for each in self.pending_classes), default=0)
        all_rows = PROMPT_ROWS + 1 + rows
        self._buffers = StandingInputs(
            [
                *((name, np.int64, tokens) for name in ("token_ids", "positions", *self._slots)),
                *((name, np.int64, rows) for name in ("sample_index", "sources", "places")),
                ("query_start", np.int32, all_rows + 1),
                ("context_lens", np.int32, all_rows),
            ],
            rows=all_rows,
            width=self._width,
            spare_block=self._spare,
            device=ground.device,
            groups=len(self._slots),
        )

    def record(self, recorder: Recorder, budget: CaptureBudget, first_estimate_bytes: int = 0) -> None:
        wanted = sorted(self.pending_classes, key=lambda each: (each.tokens, each), reverse=True)
        self._steps |= record_all("mixed steps", wanted, self._step, recorder, budget, first_estimate_bytes)

    def takes(self, batch: StepBatch) -> MixedClass | None:
        """Return the class that computes this batch; None if none does."""
        if batch.scoring or batch.block_tables.shape[1] > self._width:
            return None
        prompts = _prompt_rows(batch)
        if not 0 < prompts <= PROMPT_ROWS or int(batch.context_lens[:prompts].max()) > LONGEST_CONTEXT:
            return None
        return mixed_class_for(int(batch.query_start[prompts]), max(batch.num_rows, batch.num_sampled), self._steps)

    def run(self, batch: StepBatch, mixed: MixedClass, before: Tensor | None = None) -> StepResult:
        """Launch the step. The first rows of its result are the batch's sampled ones, in order. The step before it may
        still run, the one before that must be over. `before`: sampled tokens that `token_source` takes from."""
        awaited = self._fill(batch, mixed)
        if before is not None:
            tensors = self._buffers.tensors
            put_tokens(tensors["token_ids"], before, tensors["sources"], tensors["places"], awaited)
        return self._steps[mixed]()

    def _fill(self, batch: StepBatch, mixed: MixedClass) -> int:
        """Fill the buffers. Return how many of the tokens the step before samples."""
        prompts, numbers = _prompt_rows(batch), self._buffers.next_numbers()
        used = int(batch.query_start[prompts])  # tokens of prompts
        gap, decodes = mixed.prompt_tokens - used, batch.num_rows - prompts
        first, end = mixed.prompt_tokens, mixed.prompt_tokens + decodes  # of the decode rows' tokens
        spare_slot = self._spare * self._block_size
        padding = np.arange(gap)
        for name, array, fill in (
            ("token_ids", batch.token_ids, 0),
            ("positions", batch.positions, padding),
            *(
                (name, slots, spare_slot + padding % self._block_size)
                for name, slots in zip(self._slots, slots_of_groups(batch, self._places), strict=True)
            ),
        ):
            row = numbers[name]
            row[:used], row[used:first], row[first:end] = array[:used], fill, array[used:]
            row[end : mixed.tokens] = spare_slot if name in self._slots else 0
        starts, lens = numbers["query_start"], numbers["context_lens"]
        starts[: prompts + 1] = batch.query_start[: prompts + 1]
        starts[prompts : PROMPT_ROWS + 1] = used
        starts[PROMPT_ROWS + 1 : PROMPT_ROWS + 2 + mixed.rows] = first + np.arange(mixed.rows + 1)
        lens[:prompts], lens[prompts:PROMPT_ROWS], lens[PROMPT_ROWS] = batch.context_lens[:prompts], 0, gap
        begin = PROMPT_ROWS + 1
        lens[begin : begin + decodes] = batch.context_lens[prompts:]
        lens[begin + decodes : begin + mixed.rows] = 1
        sampled = sampled_tokens(batch)
        index = numbers["sample_index"]
        index[: len(sampled)] = sampled + gap * (sampled >= used)
        index[len(sampled) : mixed.rows] = 0
        awaited = fill_sources(batch, numbers, gap, used)
        self._buffers.send_numbers()
        self._fill_tables(batch, prompts, decodes, begin + mixed.rows, -(-gap // self._block_size))
        return awaited

    def _fill_tables(self, batch: StepBatch, prompts: int, decodes: int, rows: int, gap_blocks: int) -> None:
        own = batch.block_tables.shape[1]
        width = max(own, gap_blocks)
        for tables, given in zip(
            self._buffers.host_tables(rows, width), tables_of_groups(batch, self._places), strict=True
        ):
            tables[:] = self._spare
            tables[:prompts, :own] = given[:prompts]
            tables[PROMPT_ROWS + 1 : PROMPT_ROWS + 1 + decodes, :own] = given[prompts:]
        self._buffers.send_tables(rows, width)

    def _step(self, mixed: MixedClass) -> Callable[[], StepResult]:
        tensors, rows = self._buffers.tensors, PROMPT_ROWS + 1 + mixed.rows
        starts, sampled = tensors["query_start"][: rows + 1], tensors["sample_index"][: mixed.rows]
        prompts = PROMPT_ROWS + 1
        step = self._forward(mixed.tokens, starts, sampled, max_query_len=mixed.prompt_tokens, num_prefill_rows=prompts)
        self._fill_nothing(mixed)
        return step

    def _fill_nothing(self, mixed: MixedClass) -> None:
        """Fill the buffers with padding, which a class computes while it is recorded."""
        none, others = np.zeros(0, dtype=np.int64), len(self._slots) - 1
        empty = np.zeros(0, dtype=np.int32)
        self._fill(
            StepBatch(
                *(none, none, np.zeros(1, dtype=np.int32), empty, np.zeros((0, 1), np.int32), None, none, empty, ()),
                more_tables=np.zeros((others, 0, 1), np.int32),
                more_slots=np.zeros((others, 0), np.int64),
            ),
            mixed,
        )


def _prompt_rows(batch: StepBatch) -> int:
    longer = np.flatnonzero(np.diff(batch.query_start) > 1)
    return int(longer[-1]) + 1 if len(longer) else 0
