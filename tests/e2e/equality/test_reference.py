"""The reference itself: prompts of one batch are answered as each of them alone. No pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.equality.golden import Golden, batches, compute, near_ties
from tests.e2e.tiny_models import opt, qwen2, save

LENGTHS = (30, 1, 5, 7, 90, 12, 40, 2)


@pytest.mark.parametrize("make", [qwen2, opt])
def test_padding_changes_no_answer(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(3)
    save(make(), tmp_path)
    prompts = [[(index * step * 7) % 390 + 5 for step in range(1, length + 1)] for index, length in enumerate(LENGTHS)]
    together = compute(tmp_path, prompts, 12)
    alone = [compute(tmp_path, [prompt], 12)[0] for prompt in prompts]
    assert [golden.prompt for golden in together] == [tuple(prompt) for prompt in prompts]
    assert sum(near_ties(one, golden.output) for one, golden in zip(alone, together, strict=True)) <= 1
    assert len({golden.output for golden in together}) == len(LENGTHS)


def test_batches_hold_every_request_and_only_similar_lengths() -> None:
    lengths = [700, 1, 2, 3, 15, 16, 33, 48, 100, 129, 300, *[20] * 20]
    made = batches(lengths)
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) <= 16
        assert max(lengths[index] for index in batch) <= 2 * min(lengths[index] for index in batch) + 16
    assert len(made) <= 7


def test_another_token_where_the_reference_was_sure_fails() -> None:
    golden = Golden((1,), (5, 6), (0.5, 0.0001), (7, 8))
    assert near_ties(golden, (5, 6)) == 0
    assert near_ties(golden, (5, 8)) == 1
    with pytest.raises(AssertionError, match="token 0 is 7, should be 5"):
        near_ties(golden, (7, 6))
    with pytest.raises(AssertionError, match="token 1 is 9"):
        near_ties(golden, (5, 9))
