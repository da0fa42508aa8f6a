"""The sampler: what each parameter keeps, the distribution it draws from, and that rows are alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.engine.step.batch import GREEDY, SamplingRow
from cohort.common.engine.step.counter_random import exponentials, splitmix64
from cohort.common.engine.step.sampler import draw, sample
from cohort.common.sampling_inputs import LogitBias, TokenHistory
from cohort.kernels.cpu import native
from tests.examples import examples

PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
LOGITS = torch.tensor([math.log(p) for p in PROBABILITIES])
DRAWS = 4000


def draw_many(row: SamplingRow, logits: torch.Tensor = LOGITS, draws: int = DRAWS) -> Counter[int]:
    rows = [dataclasses.replace(row, position=position) for position in range(draws)]
    return Counter(sample(logits.expand(draws, -1), rows).tokens.tolist())


def assert_distribution(counts: Counter[int], probabilities: dict[int, float]) -> None:
    """Within five standard deviations of every probability, and nothing else drawn."""
    total, mass = sum(counts.values()), sum(probabilities.values())
    assert set(counts) <= set(probabilities)
    for token, weight in probabilities.items():
        p = weight / mass
        assert abs(counts[token] / total - p) < 5 * math.sqrt(p * (1 - p) / total) + 1e-9


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    output = sample(logits, [GREEDY, GREEDY])
    assert output.tokens.tolist() == [1, 0]
    assert output.logprobs == (None, None)


@settings(max_examples=examples(30), deadline=None)
@given(
    size=st.sampled_from((1, 2, 15, 16, 63, 64, 65, 129, 1000, 20_000)),
    scale=st.sampled_from((0.01, 1.0, 3.0, 30.0)),
    rounded=st.booleans(),
    allowed=st.sampled_from((1.0, 0.5, 0.01)),
    temperature=st.sampled_from((0.01, 0.3, 0.7, 1.0, 1.5, 100.0)),
    top_k=st.sampled_from((0, 1, 5, 40, 10**6)),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.5, 0.0)),
    min_p=st.sampled_from((0.0, 0.05, 0.5)),
    seed=st.integers(min_value=-(2**63), max_value=2**64 - 1),
    position=st.integers(min_value=0, max_value=10**6),
)
def test_the_compiled_sampler_draws_the_token_of_the_plain_one(
    size: int,
    scale: float,
    rounded: bool,
    allowed: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    """Beside other rows, with ties and with tokens that are out."""
    random = torch.Generator().manual_seed(seed % 2**63)
    logits = torch.randn(3, size, generator=random) * scale
    if rounded:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=random) > allowed] = float("-inf")
    logits[:, seed % size] = logits.amax().clamp(min=0.0)
    row = SamplingRow(seed=seed, position=position, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    others = dataclasses.replace(row, seed=seed + 1), dataclasses.replace(row, temperature=0.0)
    tokens = sample(logits, [others[0], row, others[1]]).tokens
    assert tokens.tolist() == [draw(logits[0], others[0]), draw(logits[1], row), int(logits[2].argmax())]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_do_not_stop_a_batch(odd: float) -> None:
    if native.operators() is None:
        pytest.skip("the compiled sampler")
    logits = torch.zeros(2, 100)
    logits[0, 17] = odd
    logits[1] = float("-inf")
    logits[1, 40] = 0.0
    rows = [SamplingRow(seed=1, position=1, temperature=0.7, top_p=0.9)] * 2
    assert sample(logits, rows).tokens.tolist() == [17, 40]


def test_no_rows() -> None:
    output = sample(torch.empty((0, 7)), [])
    assert output.tokens.tolist() == []
    assert output.tokens.dtype == np.int64


def test_temperature_one_samples_the_softmax() -> None:
    assert_distribution(draw_many(SamplingRow(seed=1, position=0)), dict(enumerate(PROBABILITIES)))


def test_temperature_sharpens() -> None:
    squared = {token: p**2 for token, p in enumerate(PROBABILITIES)}
    assert_distribution(draw_many(SamplingRow(seed=2, position=0, temperature=0.5)), squared)


def test_top_k() -> None:
    assert_distribution(draw_many(SamplingRow(seed=3, position=0, top_k=2), draws=1500), {0: 0.4, 1: 0.25})


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.5, 2), (0.75, 3), (0.81, 4), (0.97, 6)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: int) -> None:
    counts = draw_many(SamplingRow(seed=4, position=0, top_p=top_p), draws=1500)
    assert_distribution(counts, dict(list(enumerate(PROBABILITIES))[:kept]))


def test_min_p_is_relative_to_the_likeliest() -> None:
    # 0.3 · 0.4 = 0.12: keeps 0.4, 0.25 and 0.15
    assert_distribution(draw_many(SamplingRow(seed=5, position=0, min_p=0.3)), {0: 0.4, 1: 0.25, 2: 0.15})


def test_top_k_then_top_p() -> None:
    # top_k 3 leaves 0.4, 0.25, 0.15 (mass 0.8); top_p 0.75 of that is 0.6: 0.4 and 0.25 suffice
    counts = draw_many(SamplingRow(seed=6, position=0, top_k=3, top_p=0.75), draws=1500)
    assert_distribution(counts, {0: 0.4, 1: 0.25})


def test_top_p_over_a_large_flat_vocabulary() -> None:
    """More candidates than the first partial sort looks at."""
    logits = torch.linspace(0.0, 1.0, 5000)
    probabilities = logits.double().softmax(0)
    descending = probabilities.flip(0).cumsum(0)
    kept = int((descending < 0.9).sum()) + 1
    counts = draw_many(SamplingRow(seed=7, position=0, top_p=0.9), logits, draws=600)
    assert min(counts) >= 5000 - kept
    assert min(counts) < 5000 - kept + 300  # the tail is really used


def test_logit_bias_and_bans() -> None:
    row = SamplingRow(seed=0, position=0, temperature=0.0, logit_bias=LogitBias.of({5: 100.0}))
    assert sample(LOGITS[None], [row]).tokens.tolist() == [5]
    row = dataclasses.replace(row, banned=(5, 0))
    assert sample(LOGITS[None], [row]).tokens.tolist() == [1]


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    row = SamplingRow(
        seed=0, position=0, temperature=0.0, logit_bias=LogitBias.of({99: 100.0, -1: 100.0}), banned=(50, -1)
    )
    assert sample(LOGITS[None], [row]).tokens.tolist() == [0]


def test_penalties() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, 0.5]])
    base = SamplingRow(seed=0, position=0, temperature=0.0)

    def best(context: TokenHistory, **penalties: float) -> int:
        return int(sample(logits, [dataclasses.replace(base, history=context, **penalties)]).tokens[0])

    # repetition counts the prompt: 2.0 / 2 < 1.5
    assert best(TokenHistory([0], []), repetition_penalty=2.0) == 1
    # presence and frequency do not
    assert best(TokenHistory([0, 0, 0], []), presence_penalty=2.0, frequency_penalty=2.0) == 0
    # presence once, however often the token came: 2.0 - 0.6 < 1.5
    assert best(TokenHistory([], [0, 0, 0]), presence_penalty=0.4) == 0
    assert best(TokenHistory([], [0]), presence_penalty=0.6) == 1
    # frequency by count: 2.0 - 3 · 0.2 < 1.5
    assert best(TokenHistory([], [0]), frequency_penalty=0.2) == 0
    assert best(TokenHistory([], [0, 0, 0]), frequency_penalty=0.2) == 1


def test_logprobs_come_from_the_raw_logits() -> None:
    row = SamplingRow(seed=0, position=0, temperature=0.0, logit_bias=LogitBias.of({3: 100.0}), logprobs=2)
    (logprobs,) = sample(LOGITS[None], [row]).logprobs
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert logprobs.top_ids == (0, 1)
    assert logprobs.top_logprobs == pytest.approx((math.log(0.4), math.log(0.25)), abs=1e-5)


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3]])
    assert sample(logits, [SamplingRow(seed=1, position=3, temperature=1e-30)]).tokens.tolist() == [0]
    assert sample(logits, [SamplingRow(seed=1, position=3, temperature=1e-4)]).tokens.tolist() == [0]
    hot = {int(sample(logits, [SamplingRow(seed=1, position=p, temperature=1e9)]).tokens[0]) for p in range(64)}
    assert hot == {0, 1, 2}


def test_logits_are_left_alone() -> None:
    logits = LOGITS[None].clone()
    row = SamplingRow(
        seed=1,
        position=1,
        top_p=0.5,
        banned=(0,),
        logit_bias=LogitBias.of({1: 3.0}),
        repetition_penalty=1.5,
        history=TokenHistory([1], [2]),
        logprobs=1,
    )
    sample(logits, [row])
    assert torch.equal(logits, LOGITS[None])


VOCABULARY = 40
ROWS = st.builds(
    SamplingRow,
    seed=st.integers(0, 2**63),
    position=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, VOCABULARY + 5),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    history=st.none() | st.just(TokenHistory([1, 2, 3], [3, 3, 4])),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5), max_size=3).map(LogitBias.of),
    banned=st.lists(st.integers(0, VOCABULARY - 1), max_size=4).map(tuple),
    logprobs=st.sampled_from([-1, 0, 3]),
)


@settings(max_examples=examples(1.5))
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_samples_the_same_in_every_batch(rows: list[SamplingRow], seed: int) -> None:
    logits = torch.randn((len(rows), VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, rows)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row])
        assert alone.tokens[0] == together.tokens[index]
        assert alone.logprobs[0] == together.logprobs[index]
    assert sample(logits, rows).tokens.tolist() == together.tokens.tolist()


@settings(max_examples=examples(2))
@given(row=ROWS, seed=st.integers(0, 1000))
def test_sampled_tokens_were_allowed(row: SamplingRow, seed: int) -> None:
    """Against a plain float64 reading of the rules."""
    logits = torch.randn((1, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3
    plain = dataclasses.replace(row, history=None, logit_bias=None)
    token = int(sample(logits, [plain]).tokens[0])
    assert token not in plain.banned
    scores = logits[0].double()
    scores[list(plain.banned)] = -math.inf
    if plain.temperature == 0.0:
        assert token == int(scores.argmax())
        return
    probabilities = (scores / plain.temperature).softmax(0)
    if plain.top_k:
        kept = probabilities.topk(min(plain.top_k, VOCABULARY)).values
        assert probabilities[token] >= kept[-1] * (1 - 1e-5)
        probabilities[probabilities < kept[-1]] = 0
        probabilities /= probabilities.sum()
    likelier = probabilities[probabilities > probabilities[token] * (1 + 1e-5)].sum()
    assert likelier <= plain.top_p + 1e-5  # the tokens before it did not yet hold top_p
    assert probabilities[token] >= plain.min_p * probabilities.max() * (1 - 1e-5)


@settings(max_examples=examples(3))
@given(seed=st.integers(-(2**63), 2**64), position=st.integers(0, 2**40), tokens=st.lists(st.integers(0, 10**6)))
def test_exponentials_are_pure_in_range_and_by_token(seed: int, position: int, tokens: list[int]) -> None:
    ids = np.array(tokens, dtype=np.int64)
    values = exponentials(seed, position, ids)
    assert ((values >= 0.0) & (values < 37.0)).all()
    for index, token in enumerate(tokens):
        assert exponentials(seed, position, np.array([token], dtype=np.int64))[0] == values[index]


def test_exponentials_are_exponential_along_tokens_positions_and_seeds() -> None:
    """Chi-square over 64 cells of equal probability, along each axis; and neighbours are uncorrelated."""
    count = 6400
    one = np.array([17])
    for values in (
        exponentials(123, 5, np.arange(count)),
        np.array([exponentials(123, position, one)[0] for position in range(count)]),
        np.array([exponentials(seed, 17, one)[0] for seed in range(count)]),
    ):
        uniform = np.exp(-values)
        cells = np.bincount(np.minimum((uniform * 64).astype(int), 63), minlength=64)
        assert ((cells - count / 64) ** 2 / (count / 64)).sum() < 130  # 63 degrees of freedom; p < 1e-6 beyond
        assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.06


def test_known_values() -> None:
    """SplitMix64's published first output for seed 1234567, and our numbers computed with Python's integers: a change
    would make the recovered requests of a pipeline of two versions draw differently."""
    assert splitmix64(1234567) == 6457827717110365317
    for seed, position, token in ((0, 0, 0), (1, 7, 42), (2**63, 10**6, 49151)):
        bits = splitmix64(splitmix64(splitmix64(seed) ^ position) ^ token) >> 11
        assert exponentials(seed, position, np.array([token]))[0] == pytest.approx(-math.log((bits + 1) * 2.0**-53))


def test_rounding_rarely_changes_a_sample() -> None:
    """Logits of two workers differ in their last bits; draws must not."""
    logits = torch.randn((400, 20_000), generator=torch.Generator().manual_seed(1)) * 3
    nudged = logits * (1 + 2e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)))
    rows = [SamplingRow(seed=index, position=index) for index in range(400)]
    assert sample(logits, rows).tokens.tolist() == sample(nudged, rows).tokens.tolist()
