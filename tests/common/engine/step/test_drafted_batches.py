"""Batches with drafts: where they lie, what is sampled of them, their halves, and what of their tokens stands."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.models.step_inputs import sampled_tokens
from cohort.common.engine.ranks.rank_messages import batch_of, step_of
from cohort.common.engine.step.batch import SamplingRow, StepBatch, StepOutput
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.step.device_sampler import sample_on_device
from cohort.common.engine.step.sampler import sample
from cohort.common.engine.step.verification import joined, right_ones, sample_drafted
from cohort.common.errors import InvariantViolated
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sampling_inputs import TokenHistory
from cohort.common.sequence import Row, Sequence
from cohort.common.types import KvGeometry
from tests.common.engine.step.test_batch_builder import SIZE, running

VOCABULARY = 30


def _batch(lengths: list[int], proposals: list[list[int]], **sampling: float) -> tuple[StepBatch, list[Sequence]]:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 64, 0, prefix_caching=False)
    rows = []
    for index, (known, proposed) in enumerate(zip(lengths, proposals, strict=True)):
        sequence = running(f"s{index}", known, known - 1, **sampling)
        assert kv.admit(sequence) == 0 and kv.extend(sequence, known + len(proposed))
        rows.append(Row(sequence, known - 1, 1, len(proposed)))
    batch, sampled = BatchBuilder(kv).build(IterationPlan(rows=rows), None, proposals)
    batch.check()
    return batch, sampled


_drafts = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
_rows = st.lists(st.tuples(st.integers(2, 20), _drafts), min_size=1, max_size=6)


@given(_rows)
def test_rows_with_drafts_come_first_and_are_sampled_at_each_position(rows: list[tuple[int, list[int]]]) -> None:
    batch, sampled = _batch([known for known, _ in rows], [drafts for _, drafts in rows])
    order = sorted(range(len(rows)), key=lambda index: not rows[index][1])
    assert [each.request_id for each in sampled] == [f"s{index}" for index in order]
    tokens, positions, places = [], [], []
    for index in order:
        known, drafts = rows[index]
        sequence = sampled[order.index(index)]
        places += range(len(tokens), len(tokens) + 1 + len(drafts))
        tokens += [sequence.tokens[-1], *drafts]
        positions += range(known - 1, known + len(drafts))
    assert batch.token_ids.tolist() == tokens and batch.positions.tolist() == positions
    assert sampled_tokens(batch).tolist() == places
    assert [row.position for row in batch.sampling] == [position + 1 for position in positions]
    lengths = np.diff(batch.query_start).tolist()
    assert lengths == sorted(lengths, key=lambda length: length == 1), "rows of one token stand behind the others"


@given(_rows, st.data())
def test_what_stands_are_the_right_drafts_and_the_token_behind_them(
    rows: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Sampled in turn, all at once, and in halves."""
    batch, _ = _batch([known for known, _ in rows], [drafts for _, drafts in rows], temperature=0)
    best = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=batch.num_sampled, max_size=batch.num_sampled))
    drafts = [[] if batch.drafts is None else batch.token_ids[start + 1 : end].tolist() for start, end in _spans(batch)]
    expected, counts = [], []
    for (start, _), drafted in zip(_spans(batch), drafts, strict=True):
        right = next((at for at, token in enumerate(drafted) if best[start + at] != token), len(drafted))
        expected += best[start : start + right + 1]
        counts.append(right + 1)
    logits = torch.nn.functional.one_hot(torch.tensor(best), VOCABULARY).float()
    in_turn = sample_drafted(logits, batch, lambda rows: None)
    at_once = right_ones(StepOutput(np.array(best, dtype=np.int64), (None,) * len(best)), batch)
    for output in (in_turn, at_once):
        assert (output.tokens.tolist(), output.counts) == (expected, tuple(counts))
    if batch.num_rows > 1:
        halves = batch.split()
        for half in halves:
            half.check()
        cut = halves[0].num_sampled
        outputs = [sample_drafted(logits[:cut], halves[0], lambda rows: None)]
        outputs.append(sample_drafted(logits[cut:], halves[1], lambda rows: None))
        whole = joined(*outputs)
        assert (whole.tokens.tolist(), whole.counts) == (expected, tuple(counts))


@given(st.lists(st.tuples(st.integers(2, 12), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4), st.data())
def test_penalties_count_the_drafts_before_a_token(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Of each row so many tokens are known, drafted, and right. Against a history made anew for every token."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.9}
    seed, temperature = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0.0, 0.8]))
    given_logits = torch.randn(len(rows), 5, 1000, generator=torch.Generator().manual_seed(seed))
    given_logits[:, :, :6] += 6.0  # so that the same few tokens come again and again
    expected, proposals = list[list[int]](), list[list[int]]()
    for index, (known, drafts, right) in enumerate(rows):
        tokens, said = running(f"s{index}", known, known - 1).tokens, list[int]()
        for offset in range(drafts + 1):
            history = TokenHistory(tokens[:1], tokens[1:] + said)
            row = SamplingRow(5, known + offset, temperature, history=history, **penalties)
            said.append(int(sample(given_logits[index, offset][None], [row]).tokens[0]))
        expected.append(said[: min(drafts, right) + 1])
        proposals.append([token + (at == right) for at, token in enumerate(said[:drafts])])
    batch, sampled = _batch([known for known, _, _ in rows], proposals, temperature=temperature, **penalties)
    order = [int(each.request_id[1:]) for each in sampled]
    logits = torch.cat([given_logits[index, : len(proposals[index]) + 1] for index in order])
    at_once = right_ones(sample_on_device(logits, batch.sampling, Uploads(torch.device("cpu"))).output(), batch)
    for output in (sample_drafted(logits, batch, lambda rows: None), at_once):
        assert output.tokens.tolist() == [token for index in order for token in expected[index]]
    for each in sampled:  # what was drafted is not taken as said
        assert each.sampling_inputs is not None and each.sampling_inputs.history is not None
        assert each.sampling_inputs.history.output_tokens == len(each.tokens) - 1


def test_a_failure_ends_a_row_where_it_is_reached_alone() -> None:
    batch, _ = _batch([5, 9, 3], [[1, 2, 3], [4, 5], [6]])
    sampled = np.array([1, 2, 0, 0, 4, 0, 0, 6, 7])
    output = right_ones(StepOutput(sampled, (None,) * 9, failures={2: "reached", 6: "not reached", 7: "first"}), batch)
    assert (output.tokens.tolist(), output.counts) == ([1, 2, 0, 4, 0, 6], (3, 2, 1))
    assert output.failures == {2: "reached", 5: "first"}


def _spans(batch: StepBatch) -> list[tuple[int, int]]:
    ends = batch.query_start.tolist()
    return list(pairwise(ends))


def test_other_ranks_are_told_of_drafts() -> None:
    batch, _ = _batch([5, 9, 3], [[1, 2], [], [7]])
    heard = batch_of(step_of(batch))
    heard.check()
    assert sampled_tokens(heard).tolist() == sampled_tokens(batch).tolist()
    assert heard.token_ids.tolist() == batch.token_ids.tolist()


def test_drafts_without_a_token_before_them_are_refused() -> None:
    batch, _ = _batch([5, 9], [[1, 2], []])
    wrong = replace(batch, drafts=np.array([3, 0], dtype=np.int32), sampling=(*batch.sampling, SamplingRow(0, 0)))
    with pytest.raises(InvariantViolated, match="drafts stand behind one known token"):
        wrong.check()
