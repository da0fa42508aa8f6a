"""The sampler of whole batches against the sampler of rows: the same tokens, whatever rows want.

Here over the torch reference of the kernel; `tests/kernels/gpu/sampling/test_sampling.py` has the kernel itself."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step import counter_random, device_sampler
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepOutput
from cohort.common.engine.step.counter_random import exponentials
from cohort.common.engine.step.device_sampler import StandingSampler, sample_on_device
from cohort.common.engine.step.sampler import GREEDY_BELOW, NEGLIGIBLE, sample
from cohort.common.sampling_inputs import LogitBias, TokenHistory
from cohort.kernels.ops import sampling
from tests.examples import examples

VOCABULARY = 97
CPU = torch.device("cpu")


def sampled_on_device(logits: torch.Tensor, rows: list[SamplingRow]) -> StepOutput:
    return sample_on_device(logits, rows, Uploads(CPU)).output()


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


def test_the_race_runs_on_the_counter_based_numbers() -> None:
    """All weights equal: the winner is the smallest of the exponential numbers themselves."""
    for seed, position in ((0, 0), (2**63 + 5, 10**6), (2**64 - 1, 3)):
        signed = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64))
        key = sampling.sample_key(signed, torch.tensor([position]))
        expected = int(exponentials(seed, position, np.arange(5000)).argmin())
        assert int(sampling.race(torch.ones(5000), key)) == expected


def test_kernels_and_engine_agree_on_their_constants() -> None:
    """Kernels may not import the engine."""
    ours = (sampling.GOLDEN, sampling.MIX_1, sampling.MIX_2, sampling.GREEDY_BELOW, sampling.NEGLIGIBLE)
    theirs = (counter_random.GOLDEN, counter_random.MIX_1, counter_random.MIX_2, GREEDY_BELOW, NEGLIGIBLE)
    assert ours == theirs


def test_a_large_vocabulary_samples_the_softmax() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = torch.full((1200, 700), -50.0)
    logits[:, 600:604] = torch.tensor([math.log(p) for p in probabilities])
    base = SamplingRow(seed=5, position=0)
    tokens = sampled_on_device(logits, [dataclasses.replace(base, position=p) for p in range(1200)]).tokens
    for index, p in enumerate(probabilities):
        share = float((tokens == 600 + index).mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 1200)


class TestStandingTables:
    """What a recorded step reads: the same addresses, other rows each time."""

    @settings(max_examples=examples(0.4))
    @given(batches=st.lists(st.lists(ROWS, min_size=1, max_size=5), min_size=1, max_size=4), seed=st.integers(0, 1000))
    def test_nothing_of_the_step_before_stays(self, batches: list[list[SamplingRow]], seed: int) -> None:
        standing = StandingSampler(8, VOCABULARY, CPU)
        random = torch.Generator().manual_seed(seed)
        for rows in batches:
            logits = 3 * torch.randn(8, VOCABULARY, generator=random)
            places = torch.randperm(6, generator=random)[: len(rows)].sort().values.numpy()
            assert standing.takes(rows)
            standing.fill(rows, places, 8)
            standing.sample(logits)
            output, expected = standing.results(rows, places, 6).output(), sample(logits[places], rows)
            assert output.tokens.tolist() == expected.tokens.tolist()
            assert [each is None for each in output.logprobs] == [each is None for each in expected.logprobs]

    def test_greedy_rows_after_greedy_rows_write_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        standing, places = StandingSampler(4, VOCABULARY, CPU), np.arange(3)
        logits = torch.randn(4, VOCABULARY)
        monkeypatch.setattr(device_sampler, "_write_numbers", None)
        standing.fill([GREEDY] * 3, places, 4)
        standing.sample(logits)
        assert standing.results([GREEDY] * 3, places, 4).output().tokens.tolist() == logits[:3].argmax(-1).tolist()

    def test_what_does_not_fit_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_sampler, "STANDING_EDITS", 10)
        standing = StandingSampler(4, VOCABULARY, CPU)
        history = TokenHistory(range(6))
        penalised = dataclasses.replace(GREEDY, repetition_penalty=1.1, history=history)
        assert standing.takes([penalised, GREEDY])
        assert not standing.takes([penalised, penalised])
        assert not standing.takes([dataclasses.replace(GREEDY, logprobs=21)])
        assert standing.takes([dataclasses.replace(GREEDY, logprobs=20)])
