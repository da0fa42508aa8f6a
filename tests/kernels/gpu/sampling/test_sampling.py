"""The sampling kernel against `common.engine.sampler`: the same tokens, whatever rows want and logits hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepOutput
from cohort.common.engine.step.counter_random import exponentials
from cohort.common.engine.step.device_sampler import eager_tables, results
from cohort.common.engine.step.sampler import sample
from cohort.common.sampling_inputs import LogitBias, TokenHistory
from cohort.kernels.gpu.sampling import sampling
from cohort.kernels.types import SampledRows
from cohort.services.bench.gpu_check.kernels.sampling import KINDS, rows_of
from tests.examples import another_example, examples, nightly
from tests.kernels.gpu.conftest import DEVICE, REAL
from tests.support.kinds import by_default

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about infinities under the interpreter

VOCABULARY = 97
TILES = {"lanes": 8, "vec": 4, "slots": 4, "edits": 8}  # several tiles a row, and brackets that do not fit aside
GUESSING_TILES = {"lanes": 32, "vec": 4, "slots": 16, "edits": 8}  # 192 tokens are few, and one in 16 is a sample
WIDE_TILES = {"lanes": 512, "vec": 4, "slots": 24, "edits": 1024}  # as served


def sampled(logits: torch.Tensor, rows: list[SamplingRow], **tiles: int) -> StepOutput:
    here = logits.to(DEVICE)
    tables = eager_tables(rows, logits.shape[1], Uploads(DEVICE))
    out = SampledRows.empty(len(rows), 20, DEVICE)
    sampling.sample_rows(here, tables, out, **(tiles or TILES))
    assert torch.equal(here.cpu().view(torch.int32), logits.view(torch.int32)), "the logits must be as they were"
    return results(rows, out).output()


def check(logits: torch.Tensor, rows: list[SamplingRow], **tiles: int) -> None:
    expected, output = sample(logits, rows), sampled(logits, rows, **tiles)
    assert output.tokens.tolist() == expected.tokens.tolist()
    for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)


def rows_for(vocabulary: int) -> st.SearchStrategy[SamplingRow]:
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=12)
    return st.builds(
        SamplingRow,
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 10**6),
        temperature=st.sampled_from([0.0, 1e-30, 1e-4, 0.3, 1.0, 2.5, 1e9]),
        top_p=st.sampled_from([1e-12, 0.01, 0.4, 0.9, 0.999999, 1.0]),
        top_k=st.sampled_from([0, 1, 2, 5, vocabulary - 1, vocabulary, vocabulary + 5]),
        min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.4]),
        history=st.none() | st.builds(TokenHistory, ids, ids),
        logit_bias=st.none()
        | st.dictionaries(st.integers(-2, vocabulary + 2), st.floats(-5, 5), max_size=4).map(LogitBias.of),
        banned=st.lists(st.integers(-1, vocabulary), max_size=3).map(tuple),
        logprobs=st.sampled_from([-1, -1, 0, 3]),
    )


def logits_for(vocabulary: int) -> st.SearchStrategy[torch.Tensor]:
    """Ties, single survivors, infinities, huge and minute numbers, both zeros, and ordinary ones."""
    few = st.sampled_from([0.0, -0.0, 1.0, 1.0 + 2.0**-23, -3.0])
    odd = st.sampled_from([-math.inf, -3e38, 3e38, 1e-45, -1e-45, 0.0, 7.0])
    values = st.sampled_from([few, odd, st.floats(-20, 20, width=32), st.just(0.5)])
    return values.flatmap(lambda each: st.lists(each, min_size=vocabulary, max_size=vocabulary)).map(
        lambda row: torch.tensor(row, dtype=torch.float32)
    )


@settings(max_examples=examples(0.25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), vocabulary=st.sampled_from([3, 32, 45]))
def test_any_logits_any_parameters(data: st.DataObject, vocabulary: int) -> None:
    row = data.draw(rows_for(vocabulary))
    logits = data.draw(logits_for(vocabulary))[None]
    try:
        expected = sample(logits, [row])
    except ValueError:  # nothing is left that could be sampled; the reference has no answer
        assert 0 <= int(sampled(logits, [row]).tokens[0]) < vocabulary
        return
    assume(not math.isnan(float(expected.tokens[0])))
    assert sampled(logits, [row]).tokens.tolist() == expected.tokens.tolist()


@settings(max_examples=examples(0.12), suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(rows_for(VOCABULARY), min_size=1, max_size=4), seed=st.integers(0, 1000))
@example(rows=[GREEDY, SamplingRow(seed=3, position=5, temperature=1.0, top_p=0.9, top_k=60)], seed=0)
def test_any_mixture_of_rows(rows: list[SamplingRow], seed: int) -> None:
    check(3 * torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)), rows)


@pytest.mark.parametrize("row", by_default(range(8), 1, 3, 4, 7))
def test_the_tile_that_is_served(row: int) -> None:
    """A vocabulary that is no multiple of a tile, over the tiles a GPU uses."""
    parameters = [
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 1000, "top_p": 0.5},
        {"min_p": 0.1},
        {"temperature": 3.0, "top_p": 0.999},
        {"temperature": 0.2, "top_k": 8999},
        {"temperature": 0.0, "logprobs": 20},
    ]
    logits = 4 * torch.randn(1, 9001, generator=torch.Generator().manual_seed(row))
    check(logits, [SamplingRow(seed=row, position=40 + row, **parameters[row])], **WIDE_TILES)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KINDS)
def test_many_rows_of_a_kind(name: str) -> None:
    """On a GPU over a vocabulary that is served; the penalised look back on 500 tokens."""
    rows, vocabulary = (16, 32000) if REAL else (3, 501)
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3))
    check(logits, rows_of(KINDS[name], rows, vocabulary), **WIDE_TILES)


@settings(max_examples=examples(0.05), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    spread=st.sampled_from([0.0, 0.05, 0.5, 2.0]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_p=st.sampled_from([0.3, 0.9, 0.99, 0.999999, 1.0]),
    top_k=st.sampled_from([0, 700, 2900]),
    steps=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(spread=0.5, temperature=1.0, top_p=0.9, top_k=0, steps=False, seed=1)
@another_example(spread=0.0, temperature=1.0, top_p=0.9, top_k=0, steps=False, seed=2)
@another_example(spread=2.0, temperature=1.0, top_p=0.999999, top_k=700, steps=True, seed=3)
def test_flat_rows_whose_last_one_is_guessed_from_a_sample(
    spread: float, temperature: float, top_p: float, top_k: int, steps: bool, seed: int
) -> None:
    """So many tokens where the last one must be that they do not fit aside; `steps`: many of them equally far away."""
    logits = spread * torch.randn(1, 3001, generator=torch.Generator().manual_seed(seed))
    logits = (2 * logits).round() / 2 if steps else logits
    row = SamplingRow(seed=seed, position=9, temperature=temperature, top_p=top_p, top_k=top_k)
    check(logits, [row], **GUESSING_TILES)


@pytest.mark.skipif(not nightly(), reason="the interpreter takes long: scripts/test --nightly")
def test_all_at_the_last_distance_stay() -> None:
    """Twenty equals at the border of top_k 3 and of a small top_p: each of them is sampled by some seed."""
    logits = torch.full((40, 33), -4.0)
    logits[:, 5:25], logits[:, 2] = 1.0, 1.5
    for limit in ({"top_k": 3}, {"top_p": 0.3}):
        rows = [SamplingRow(seed=seed, position=0, temperature=1.0, **limit) for seed in range(40)]  # type: ignore[arg-type]
        check(logits, rows)
        assert len(set(sampled(logits, rows).tokens.tolist())) > 10


def test_greedy_takes_the_first_of_equals_and_numbers_before_nothing() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0], [-0.0, 0.0, -1.0, 0.0], [1.0, nan, math.inf, nan], [-math.inf] * 4])
    assert sampled(logits, [GREEDY] * 4).tokens.tolist() == sample(logits, [GREEDY] * 4).tokens.tolist() == [1, 0, 1, 0]


def test_a_row_that_nothing_is_left_of_gets_its_largest() -> None:
    logits = torch.tensor([[-math.inf] * 5, [1.0, float("nan"), 2.0, 3.0, 0.0], [0.0, math.inf, 1.0, 2.0, 3.0]])
    rows = [SamplingRow(seed=1, position=2, temperature=1.0, top_p=0.9)] * 3
    assert sampled(logits, rows).tokens.tolist() == [0, 1, 1]


def test_the_race_runs_on_the_counter_based_numbers() -> None:
    """All weights equal: the winner is the smallest of the exponential numbers themselves."""
    for seed, position in ((0, 0), (2**63 + 5, 10**6), (2**64 - 1, 3)):
        expected = int(exponentials(seed, position, np.arange(3000)).argmin())
        row = SamplingRow(seed=seed, position=position, temperature=1.0)
        assert sampled(torch.zeros(1, 3000), [row], **WIDE_TILES).tokens.tolist() == [expected]


def test_refuses_what_it_would_misread() -> None:
    rows = [GREEDY, GREEDY]
    tables, out = eager_tables(rows, 8, Uploads(DEVICE)), SampledRows.empty(2, 20, DEVICE)
    with pytest.raises(ValueError, match="float32"):
        sampling.sample_rows(torch.zeros(2, 8, dtype=torch.float16, device=DEVICE), tables, out, **TILES)
    with pytest.raises(ValueError, match="3 rows"):
        sampling.sample_rows(torch.zeros(3, 8, device=DEVICE), tables, out, **TILES)
