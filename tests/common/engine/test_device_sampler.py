"""The sampler of whole batches against the sampler of rows: the same tokens, whatever rows want."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine import device_sampler
from cohort.common.engine.batch import GREEDY, SamplingRow, StepOutput
from cohort.common.engine.counter_random import exponentials, sample_key
from cohort.common.engine.device_sampler import sample_on_device
from cohort.common.engine.sampler import sample
from cohort.common.engine.uploads import Uploads
from cohort.common.sampling_inputs import LogitBias, TokenHistory

VOCABULARY = 97
CPU = torch.device("cpu")


def sampled_on_device(logits: torch.Tensor, rows: list[SamplingRow]) -> StepOutput:
    return sample_on_device(logits, logits.argmax(dim=-1), rows, Uploads(CPU)).output()


ROWS = st.builds(
    SamplingRow,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.01, 0.4, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY - 1, VOCABULARY, VOCABULARY + 5]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    history=st.none()
    | st.builds(
        TokenHistory,
        st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
    ),
    logit_bias=st.none()
    | st.dictionaries(st.integers(-2, VOCABULARY + 2), st.floats(-5, 5), max_size=4).map(LogitBias.of),
    banned=st.lists(st.integers(-1, VOCABULARY), max_size=3).map(tuple),
    logprobs=st.sampled_from([-1, 0, 3]),
)


@given(rows=st.lists(ROWS, max_size=6), seed=st.integers(0, 1000))
def test_the_same_as_row_by_row(rows: list[SamplingRow], seed: int) -> None:
    logits = 3 * torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    expected, output = sample(logits, rows), sampled_on_device(logits, rows)
    assert output.tokens.tolist() == expected.tokens.tolist()
    assert output.tokens.dtype == np.int64
    assert torch.equal(logits, before)
    for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.top_ids == theirs.top_ids
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-6)


def test_a_batch_cut_into_parts_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SamplingRow(seed=seed, position=7, temperature=1.0, top_p=0.9) for seed in range(9)]
    logits = torch.randn(9, VOCABULARY)
    whole = sampled_on_device(logits, rows).tokens.tolist()
    monkeypatch.setattr(device_sampler, "SAMPLER_BYTES", 2 * 64 * VOCABULARY)
    assert sampled_on_device(logits, rows).tokens.tolist() == whole == sample(logits, rows).tokens.tolist()


def test_the_race_runs_on_the_counter_based_numbers() -> None:
    """All weights equal: the winner is the smallest of the exponential numbers themselves."""
    for seed, position in ((0, 0), (2**63 + 5, 10**6), (2**64 - 1, 3)):
        key = torch.from_numpy(np.array([sample_key(seed, position)], dtype=np.uint64).view(np.int64))
        expected = int(exponentials(seed, position, np.arange(5000)).argmin())
        assert device_sampler._race(torch.ones(1, 5000), key).tolist() == [expected]


def test_a_large_vocabulary_samples_the_softmax() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = torch.full((1200, 700), -50.0)
    logits[:, 600:604] = torch.tensor([math.log(p) for p in probabilities])
    base = SamplingRow(seed=5, position=0)
    tokens = sampled_on_device(logits, [dataclasses.replace(base, position=p) for p in range(1200)]).tokens
    for index, p in enumerate(probabilities):
        share = float((tokens == 600 + index).mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 1200)


def test_plain_greedy_asks_for_nothing_else() -> None:
    logits = torch.randn(3, VOCABULARY)
    likeliest = torch.tensor([5, 6, 7])  # what the recorded step found, taken as it is
    assert sample_on_device(logits, likeliest, [GREEDY] * 3, Uploads(CPU)).output().tokens.tolist() == [5, 6, 7]
