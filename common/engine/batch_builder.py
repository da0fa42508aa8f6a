"""From an iteration plan to the arrays of one forward.

Called by the worker loop between two iterations; the only place where block tables meet tokens. Decides nothing.
"""

from __future__ import annotations

import numpy as np

from cohort.common.engine.batch import SamplingRow, ScoringRow, StepBatch
from cohort.common.policies.interface import IterationPlan, Row
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.padding import row_padding
from cohort.common.sequence import Sequence


def build_batch(plan: IterationPlan, kv: KvAllocator) -> tuple[StepBatch, list[Sequence]]:
    """The batch of `plan.rows`, and the sequences whose next token it samples, in the order of `sample_rows`.

    With `plan.padded_to` (B2) every prefill row is filled up to that many tokens, as far as its blocks reach.
    """
    size = kv.geometry.block_size
    rows = plan.rows
    padding = np.array(row_padding(rows, plan.padded_to, kv), dtype=np.int32) if plan.padded_to else None
    counts = np.fromiter((row.count for row in rows), dtype=np.int64, count=len(rows))
    if padding is not None:
        counts += padding
    starts = np.fromiter((row.start for row in rows), dtype=np.int64, count=len(rows))
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = starts + counts
    widths = -(-context_lens // size)

    tables = np.zeros((len(rows), int(widths.max(initial=1))), dtype=np.int32)
    directions: np.ndarray | None = None
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        key = row.sequence.key
        width = int(widths[index])
        tables[index, :width] = kv.blocks(key)[:width]
        filled = kv.directions(key)
        if filled is not None:
            if directions is None:
                directions = np.zeros(tables.shape, dtype=np.uint8)
            directions[index, :width] = filled[:width]
        if row.count == 1:
            token_ids.append(row.sequence.tokens[row.start])
        else:
            token_ids.extend(row.sequence.tokens[row.start : row.start + row.count])
        if padding is not None:
            token_ids.extend([row.sequence.tokens[row.start + row.count - 1]] * int(padding[index]))

    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(token_ids), dtype=np.int64) - np.repeat(query_start[:-1] - starts, counts)
    offsets = positions % size
    blocks = positions // size
    if directions is not None:
        offsets = np.where(directions[row_of_token, blocks] == 1, size - 1 - offsets, offsets)
    slot_mapping = tables[row_of_token, blocks].astype(np.int64) * size + offsets

    sampled = [index for index, row in enumerate(rows) if row.start + row.count == row.sequence.known]
    batch = StepBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        query_start=query_start,
        context_lens=context_lens.astype(np.int32),
        block_tables=tables,
        directions=directions,
        slot_mapping=slot_mapping,
        sample_rows=np.array(sampled, dtype=np.int32),
        sampling=tuple(_sampling(rows[index]) for index in sampled),
        padding=padding,
        scoring=tuple(
            _scoring(index, row, int(query_start[index]))
            for index, row in enumerate(rows)
            if row.sequence.scores_prompt
        ),
        grammars=tuple(
            inputs.grammar
            for row in rows
            if (inputs := row.sequence.sampling_inputs) is not None and inputs.grammar is not None
        ),
    )
    return batch, [rows[index].sequence for index in sampled]


def _scoring(index: int, row: Row, first: int) -> ScoringRow:
    """The prompt tokens that follow this row's tokens; nothing is known yet to follow the prompt's last one."""
    request = row.sequence.request
    end = min(row.start + row.count + 1, request.prompt_tokens)
    targets = tuple(row.sequence.tokens[row.start + 1 : end])
    return ScoringRow(index, first, targets, request.sampling.prompt_logprobs)


def _sampling(row: Row) -> SamplingRow:
    sequence = row.sequence
    params = sequence.request.sampling
    inputs = sequence.sampling_inputs
    history = None if inputs is None else inputs.history
    grammar = None if inputs is None else inputs.grammar
    if history is not None:
        history.catch_up(sequence.tokens[sequence.request.prompt_tokens + history.output_tokens :])
    if grammar is not None:
        grammar.output.extend(sequence.tokens[sequence.request.prompt_tokens + len(grammar.output) :])
    return SamplingRow(
        seed=params.seed,
        position=sequence.known,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        history=history,
        logit_bias=None if inputs is None else inputs.bias,
        banned=params.stop_token_ids if sequence.output_tokens < params.min_tokens else (),
        logprobs=params.logprobs,
        grammar=grammar,
    )
