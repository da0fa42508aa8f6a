"""R7, R13 · Directions in the block tables' signs: the same attention as with directions beside the tables."""

from __future__ import annotations

import pytest
import torch

from cohort.kernels import reference
from cohort.kernels.ops.paged_attention import paged_attention

ROWS = [(37, 12), (50, 1), (16, 1)]


@pytest.mark.parametrize("directions", ["forward", "reversed", "mixed"])
def test_there_and_back(make_step, directions):
    meta = make_step(ROWS, directions=directions).meta
    signed = meta.as_signed()
    assert signed.as_signed() is signed
    tables, reverse = signed.separate()
    assert torch.equal(tables, meta.block_tables)
    expected = torch.zeros_like(tables) if meta.directions is None else meta.directions
    assert reverse is not None and torch.equal(reverse.int(), expected.int())
    assert ((signed.block_tables < 0) == expected.bool()).all()
    assert meta.separate() == (meta.block_tables, meta.directions)


def test_block_zero_has_a_direction_too(make_step):
    """What a minus sign could not say."""
    meta = make_step([(16, 1)], directions="reversed").meta
    meta.block_tables.zero_()
    assert meta.as_signed().block_tables.tolist() == [[-1]]
    assert [tensor.tolist() for tensor in meta.as_signed().separate()] == [[[0]], [[1]]]


@pytest.mark.parametrize("directions", ["forward", "reversed", "mixed"])
def test_the_same_attention(make_step, assert_close, implementation, directions):
    step = make_step(ROWS, directions=directions)
    out, signed = torch.empty_like(step.query), torch.empty_like(step.query)
    paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out)
    paged_attention(step.query, step.kv, step.layer, step.meta.as_signed(), step.scale, signed)
    assert torch.equal(out, signed)
    reference.paged_attention(step.query, step.kv, step.layer, step.meta.as_signed(), step.scale, signed)
    assert_close(signed, step.expected())
