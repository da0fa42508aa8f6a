"""Routing and weighted sums of a mixture, against what is written out here, for both implementations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.cpu import native
from cohort.kernels.ops.experts import add_weighted, choose_experts

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def routed(scores: Tensor, per_token: int, over_chosen: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Experts and weights of every row, in Python's floats."""
    experts, weights = [], []
    for row in scores.tolist():
        best = sorted(sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:per_token])
        likely = [math.exp(score - max(row)) for score in row]
        total = sum(likely[expert] for expert in best) if over_chosen else sum(likely)
        experts.append(best)
        weights.append([likely[expert] / total for expert in best])
    return experts, weights


@DTYPES
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("over_chosen", [False, True])
@pytest.mark.parametrize(("count", "per_token"), [(128, 8), (8, 2), (5, 5), (60, 1)])
def test_routing(implementation, dtype, rounded, over_chosen, count, per_token):
    scores = torch.stack([torch.randperm(count) for _ in range(37)]).to(dtype) / 8  # no two of a row are equal
    experts, weights = choose_experts(scores, per_token, over_chosen, rounded)
    expected, parts = routed(scores, per_token, over_chosen)
    assert experts.tolist() == expected
    precision = 2**-8 if rounded and dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(weights.double(), torch.tensor(parts).double(), rtol=precision, atol=1e-9)
    if rounded:
        assert torch.equal(weights.float(), weights.to(dtype).float())


@given(scores=st.lists(st.sampled_from([-3.0, 0.0, 0.5, 0.5, 7.0]), min_size=1, max_size=20), data=st.data())
def test_of_equal_scores_the_first_expert_wins(scores, data):
    if native.operators() is None:
        pytest.skip("the reference takes whatever torch.topk takes")
    per_token = data.draw(st.integers(1, len(scores)))
    experts, _ = choose_experts(torch.tensor([scores, scores[::-1]]), per_token, True, False)
    assert experts[0].tolist() == routed(torch.tensor([scores]), per_token, True)[0][0]


@DTYPES
def test_a_row_is_routed_and_summed_to_the_same_bits_anywhere(dtype):
    if native.operators() is None:
        pytest.skip("the reference promises no such thing")
    scores, parts = torch.randn(50, 60).to(dtype), torch.randn(50 * 4, 83).to(dtype)
    own, residual = torch.randn(50, 83).to(dtype), torch.randn(50, 83).to(dtype)
    experts, weights = choose_experts(scores, 4, False, True)
    together = residual.clone()
    add_weighted(parts, weights, own, together)
    for row in range(50):
        one, factors = choose_experts(scores[row : row + 1], 4, False, True)
        assert torch.equal(one[0], experts[row])
        assert torch.equal(factors[0], weights[row])
        alone = residual[row : row + 1].clone()
        add_weighted(parts[4 * row : 4 * row + 4], factors, own[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("over_chosen", [False, True])
def test_a_score_that_is_no_number_spoils_its_row_alone(implementation, over_chosen):
    scores = torch.randn(3, 16)
    scores[1, 5] = math.nan
    experts, weights = choose_experts(scores, 4, over_chosen, False)
    assert weights[1].isnan().any()
    assert not weights[[0, 2]].isnan().any()
    assert int(experts.min()) >= 0
    assert int(experts.max()) < 16


@DTYPES
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "per_token", "width"), [(1, 8, 64), (33, 2, 83), (1, 1, 5)])
def test_weighted_sum_rounds_after_every_operation(implementation, dtype, shared, tokens, per_token, width):
    parts, weights = torch.randn(tokens * per_token, width).to(dtype), torch.rand(tokens, per_token)
    own, residual = torch.randn(tokens, width).to(dtype) if shared else None, torch.randn(tokens, width).to(dtype)
    expected = residual.clone()
    reference.add_weighted(parts, weights, own, expected)
    add_weighted(parts, weights, own, residual)
    if dtype == torch.bfloat16:  # its products are exact in float32, so there is one way to round them
        assert torch.equal(residual, expected)
    torch.testing.assert_close(residual, expected)


def test_what_does_not_fit_is_refused():
    if (ops := native.operators()) is None:
        pytest.skip("the compiled kernels' own checks")
    scores, experts, weights = torch.zeros(2, 4), torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5)
    with pytest.raises(ValueError, match="k from 1 to the number of experts"):
        ops.choose_experts(scores, True, False, experts, weights)
    with pytest.raises(ValueError, match="weights must be like experts"):
        ops.choose_experts(scores, True, False, experts[:, :2].contiguous(), weights)
    with pytest.raises(ValueError, match="parts must be dense"):
        ops.add_weighted(torch.zeros(5, 8), torch.zeros(3, 2), None, torch.zeros(3, 8))
    with pytest.raises(TypeError, match="weights must be float32"):
        ops.add_weighted(torch.zeros(6, 8), torch.zeros(3, 2).double(), None, torch.zeros(3, 8))
