"""Arrays of a step from an iteration plan, and the sequences of its rows.

Called by the worker loop, between two iterations or while one runs; the only place where block tables meet tokens.
State from one step to the next: block tables per sequence, of which a step changes only new entries, and how a sequence
samples. All else is arithmetic over whole arrays. Arrays of a step are its own: the engine may still read those of the
step before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from cohort.common.engine.step.batch import PoolingRow, SamplingRow, ScoringRow, StepBatch
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.padding import row_padding
from cohort.common.sampling_inputs import LogitBias, TokenHistory
from cohort.common.sequence import Row, Sequence

_SPARE_ROWS = 64
"""Sequences beyond twice a step's rows that may be stored before those without a row are forgotten."""

Int64s = npt.NDArray[np.int64]


_Constant = tuple[float, float, int, float, float, float, float, TokenHistory | None, LogitBias | None]


class _Standing:
    """Sequence with the row of its block table and its sampling."""

    def __init__(self, slot: int, sequence: Sequence, number: int) -> None:
        self.number = number
        params, inputs = sequence.request.sampling, sequence.sampling_inputs
        self.slot = slot
        self.blocks: Seq[int] | None = None
        """List of the allocator whose first `length` entries are in the table."""
        self.length = 0
        self.beyond_sampling = params.prompt_logprobs >= 0 or params.pooling != ""
        self.banned_before = sequence.request.prompt_tokens + params.min_tokens if params.stop_token_ids else 0
        """Position from which end tokens are no longer banned."""
        self.adapter = sequence.request.adapter
        self.seed = params.seed
        self.grammar = None if inputs is None else inputs.grammar
        self.constant: _Constant = (
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            None if inputs is None else inputs.history,
            None if inputs is None else inputs.bias,
        )
        """Fields of a `SamplingRow` between `position` and `banned`."""
        self.always: SamplingRow | None = None
        """Row for every position, if nothing is drawn."""
        if params.temperature == 0.0 and self.constant[7] is None and self.grammar is None:
            self.always = SamplingRow(params.seed, 0, *self.constant, (), params.logprobs)

    def sampling(self, sequence: Sequence, position: int, ahead: Seq[int] = ()) -> SamplingRow:
        """Return the sampling of the token at `position`, `ahead` being the drafts before it. If the token before it is
        still to be sampled, the engine brings history and grammar up to date with it."""
        banned = sequence.request.sampling.stop_token_ids if position < self.banned_before else ()
        history, grammar, prompt_tokens = self.constant[7], self.grammar, sequence.request.prompt_tokens
        logprobs, bound = sequence.request.sampling.logprobs, history is not None or grammar is not None
        if position > len(sequence.tokens) + len(ahead):
            awaits = position - prompt_tokens if bound else 0
            return SamplingRow(self.seed, position, *self.constant, banned, logprobs, grammar, awaits)
        if history is not None:
            history.extend(sequence.tokens[prompt_tokens + history.output_tokens :])
        if grammar is not None:
            grammar.output.extend(sequence.tokens[prompt_tokens + len(grammar.output) :])
        before = tuple(ahead) if bound else ()
        return SamplingRow(self.seed, position, *self.constant, banned, logprobs, grammar, ahead=before)


class BatchBuilder:
    def __init__(self, kv: KvAllocator, *, numbers_sequences: bool = False) -> None:
        """`numbers_sequences`: batches name each row's sequence (`StepBatch.numbers`)."""
        self._kv = kv
        self._numbers_sequences = numbers_sequences
        self._numbers = itertools.count(1)
        self._directed = type(kv).directions is not KvAllocator.directions
        self._standing: dict[Sequence, _Standing] = {}
        self._free: list[int] = []
        self._tables = np.zeros((0, 1), dtype=np.int32)
        self._more = [self._tables] * (kv.geometry.num_groups - 1)
        """Tables of the layer groups after the first, of the same shape."""
        # Of the last step: its sequences with their stored state, and their positions if each had one token.
        self._sequences: list[Sequence] = []
        self._rows: list[_Standing] = []
        self._slots: Int64s = np.zeros(0, dtype=np.int64)
        self._starts: Int64s | None = None
        self._beyond_sampling = self._bound = False
        self._adapters: tuple[str, ...] = ()
        """Adapters of these rows; empty if none has one."""
        self._always: tuple[SamplingRow, ...] | None = None
        """Sampling of these rows, if nothing is drawn for any of them."""

    def build(
        self, plan: IterationPlan, in_flight: Seq[Sequence] | None = None, proposals: Seq[list[int]] | None = None
    ) -> tuple[StepBatch, list[Sequence]]:
        """Return the batch of `plan.rows`, and the sequences whose next token it samples, in the order of
        `sample_rows`. With `plan.padded_to` (B2) every prefill row is filled up to that many tokens, as far as its
        blocks reach. `in_flight`: the sequences that the step in flight samples, in its order, for a plan that was made
        ahead. `proposals`: drafts for each of the rows, of a plan of decode rows; rows with some come first (R14)."""
        kv, rows = self._kv, plan.rows
        if proposals is not None:
            pairs = sorted(zip(rows, proposals, strict=True), key=lambda pair: not pair[1])
            rows, proposals = [row for row, _ in pairs], [proposed for _, proposed in pairs]
        size, number = kv.geometry.block_size, len(rows)
        sequences = [row.sequence for row in rows]
        row_counts = [row.count for row in rows]
        single = proposals is None and max(row_counts, default=1) == 1 and not plan.padded_to
        if in_flight is not None and single and self._starts is not None and sequences == self._sequences:
            starts = self._starts + 1
        else:
            starts = np.array([row.start for row in rows], dtype=np.int64)
        counts: Int64s = np.array(row_counts, dtype=np.int64)
        padding = np.array(row_padding(rows, plan.padded_to, kv), dtype=np.int32) if plan.padded_to else None
        if padding is not None:
            counts += padding
        drafts = None if proposals is None else np.array([len(tokens) for tokens in proposals], dtype=np.int32)
        if drafts is not None:
            counts += drafts
        query_start = np.zeros(number + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        context_lens = starts + counts
        width = int((-(-context_lens // size)).max(initial=1))

        self._stand(plan, sequences, starts if single else None, width)
        tables = self._tables[self._slots, :width]
        directions = self._directions(sequences, context_lens) if self._directed else None
        sources = None if in_flight is None else _sources(sequences, in_flight)
        token_ids: Int64s
        if sources is not None and single and bool((sources >= 0).all()):
            token_ids = np.zeros(number, dtype=np.int64)
        elif sources is None and single:
            token_ids = np.array([row.sequence.tokens[row.start] for row in rows], dtype=np.int64)
        else:
            token_ids = _tokens(rows, padding, proposals)

        if single:
            positions, table_rows = starts, np.arange(number)
        else:
            table_rows = np.repeat(np.arange(number), counts)
            positions = np.arange(len(token_ids), dtype=np.int64) - np.repeat(query_start[:-1] - starts, counts)
        offsets, blocks = positions % size, positions // size
        if directions is not None:
            offsets = np.where(directions[table_rows, blocks] == 1, size - 1 - offsets, offsets)
        slot_mapping = tables[table_rows, blocks].astype(np.int64) * size + offsets
        more_tables = more_slots = None
        if self._more:
            more_tables = np.stack([table[self._slots, :width] for table in self._more])
            more_slots = more_tables[:, table_rows, blocks].astype(np.int64) * size + offsets

        sampled: Seq[int] = range(number)
        if sources is None or not single:
            known = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)
            # The one that the step in flight samples is the last token of its row.
            sampled = np.flatnonzero(starts + np.array(row_counts, dtype=np.int64) >= known).tolist()
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            context_lens=context_lens.astype(np.int32),
            block_tables=tables,
            directions=directions,
            slot_mapping=slot_mapping,
            sample_rows=np.array(sampled, dtype=np.int32),
            sampling=self._sampling(rows, sampled) if proposals is None else self._sampling_of(rows, proposals),
            padding=padding,
            scoring=tuple(
                [
                    _scoring(index, row, int(query_start[index]))
                    for index, row in enumerate(rows)
                    if row.sequence.scores_prompt and row.start < row.sequence.request.prompt_tokens
                ]
            )
            if self._beyond_sampling
            else (),
            pooling=_pooling(rows, query_start) if self._beyond_sampling else (),
            grammars=tuple([each.grammar for each in self._rows if each.grammar is not None]) if self._bound else (),
            token_source=None if sources is None or not bool((sources >= 0).any()) else np.repeat(sources, counts),
            adapters=self._adapters,
            more_tables=more_tables,
            more_slots=more_slots,
            numbers=np.array([each.number for each in self._rows], dtype=np.int64) if self._numbers_sequences else None,
            drafts=drafts,
        )
        return batch, sequences if len(sampled) == number else [sequences[index] for index in sampled]

    def number_of(self, sequence: Sequence) -> int:
        """Return a sequence's number in `StepBatch.numbers`; 0 while none is stored here."""
        standing = self._standing.get(sequence)
        return 0 if standing is None else standing.number

    def _sampling(self, rows: list[Row], sampled: Seq[int]) -> tuple[SamplingRow, ...]:
        whole = len(sampled) == len(rows)
        if whole and self._always is not None:
            return self._always
        standing, found, always = self._rows, [], whole
        for index in sampled:
            row, each = rows[index], standing[index]
            position = row.start + row.count
            if each.always is not None and position >= each.banned_before:
                found.append(each.always)
            else:
                always = False
                found.append(each.sampling(row.sequence, position))
        sampling = tuple(found)
        if always:
            self._always = sampling
        return sampling

    def _sampling_of(self, rows: list[Row], proposals: Seq[list[int]]) -> tuple[SamplingRow, ...]:
        """Return the sampling of every token of decode rows with drafts, and of the others."""
        return tuple(
            [
                each.sampling(row.sequence, row.start + 1 + offset, drafts[:offset])
                for row, each, drafts in zip(rows, self._rows, proposals, strict=True)
                for offset in range(len(drafts) + 1)
            ]
        )

    def _stand(self, plan: IterationPlan, sequences: list[Sequence], starts: Int64s | None, width: int) -> None:
        """Bring the tables of these rows up to date. `starts`: of rows that all have one token."""
        if width > self._tables.shape[1]:
            self._grow(columns=max(width, 2 * self._tables.shape[1]) - self._tables.shape[1])
        kv, before = self._kv, self._starts
        same = sequences == self._sequences
        if not same:
            self._enter(sequences)
        changed: Seq[int] = range(len(sequences))
        grows = kv.grows_by_block and not plan.copies and not plan.preempted
        if same and grows and starts is not None and before is not None and bool((starts == before + 1).all()):
            # The block of every other row holds its next position too.
            changed = np.flatnonzero(starts % kv.geometry.block_size == 0).tolist()
        for index in changed:
            standing, blocks = self._rows[index], kv.blocks(sequences[index].key)
            length = len(blocks)
            if kv.grows_by_block and blocks is standing.blocks:
                first = standing.length  # nothing but appended to
                if length == first:
                    continue
            else:
                first = 0
            if length > self._tables.shape[1]:  # allocated ahead
                self._grow(columns=2 * length - self._tables.shape[1])
            self._tables[standing.slot, first:length] = blocks[first:]
            if self._more:
                for table, others in zip(self._more, kv.tables(sequences[index].key)[1:], strict=True):
                    table[standing.slot, first:length] = others[first:]
            standing.blocks, standing.length = blocks, length
        self._starts = starts

    def _grow(self, *, rows: int = 0, columns: int = 0) -> None:
        self._tables, *self._more = (np.pad(table, ((0, rows), (0, columns))) for table in (self._tables, *self._more))

    def _enter(self, sequences: list[Sequence]) -> None:
        standing = self._standing
        if len(standing) > 2 * len(sequences) + _SPARE_ROWS:
            present = set(sequences)
            for ended in [each for each in standing if each not in present]:
                self._free.append(standing.pop(ended).slot)
        rows = []
        for sequence in sequences:
            found = standing.get(sequence)
            if found is None:
                if not self._free:
                    held = len(self._tables)
                    self._grow(rows=max(_SPARE_ROWS, held))
                    self._free = list(range(len(self._tables) - 1, held - 1, -1))
                found = standing[sequence] = _Standing(self._free.pop(), sequence, next(self._numbers))
            rows.append(found)
        self._sequences, self._rows = sequences, rows
        self._beyond_sampling, self._always = any([each.beyond_sampling for each in rows]), None
        self._bound = any([each.grammar is not None for each in rows])
        adapters = tuple([each.adapter for each in rows])
        self._adapters = adapters if any(adapters) else ()
        self._slots = np.array([each.slot for each in rows], dtype=np.int64)

    def _directions(self, sequences: list[Sequence], context_lens: Int64s) -> npt.NDArray[np.uint8] | None:
        """Return [R, M], or None if every block is filled from the left."""
        size, directions = self._kv.geometry.block_size, None
        widths = -(-context_lens // size)
        for index, sequence in enumerate(sequences):
            filled = self._kv.directions(sequence.key)
            if filled is not None:
                if directions is None:
                    directions = np.zeros((len(sequences), int(widths.max(initial=1))), dtype=np.uint8)
                width = int(widths[index])
                directions[index, :width] = filled[:width]
        return directions


def _sources(sequences: list[Sequence], in_flight: Seq[Sequence]) -> Int64s:
    """Return the index of each sequence in `in_flight`; -1: its tokens are known."""
    if sequences == in_flight:  # none has left, and no prompt has come to its end
        return np.arange(len(sequences), dtype=np.int64)
    places = {sequence: index for index, sequence in enumerate(in_flight)}
    return np.array([places.get(sequence, -1) for sequence in sequences], dtype=np.int64)


def _tokens(rows: list[Row], padding: npt.NDArray[np.int32] | None, proposals: Seq[list[int]] | None = None) -> Int64s:
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        if row.count == 1:
            tokens = row.sequence.tokens
            token_ids.append(tokens[row.start] if row.start < len(tokens) else 0)
        else:
            token_ids.extend(row.sequence.tokens[row.start : row.start + row.count])
        if proposals is not None:
            token_ids.extend(proposals[index])
        if padding is not None:
            token_ids.extend([row.sequence.tokens[row.start + row.count - 1]] * int(padding[index]))
    return np.array(token_ids, dtype=np.int64)


def _pooling(rows: list[Row], query_start: npt.NDArray[np.int32]) -> tuple[PoolingRow, ...]:
    """Return all tokens of rows whose prompt is pooled by its mean; of others the prompt's last one, if it is here."""
    found = []
    for index, row in enumerate(rows):
        request, first = row.sequence.request, int(query_start[index])
        if request.sampling.pooling == "mean":
            found.append(PoolingRow(request.attempt, index, first, row.count))
        elif request.sampling.pooling and row.start + row.count == request.prompt_tokens:
            found.append(PoolingRow(request.attempt, index, first + row.count - 1, 1))
    return tuple(found)


def _scoring(index: int, row: Row, first: int) -> ScoringRow:
    """Return the prompt tokens that follow this row's tokens; nothing is known yet to follow the prompt's last one."""
    request = row.sequence.request
    end = min(row.start + row.count + 1, request.prompt_tokens)
    targets = tuple(row.sequence.tokens[row.start + 1 : end])
    return ScoringRow(index, first, targets, request.sampling.prompt_logprobs)
