"""How work is cut: numbers from shapes alone, so a captured graph may keep them."""

from __future__ import annotations

import pytest

from cohort.kernels.gpu.plan import decode_plan, power_of_two_from, prefill_plan

H200 = 132


def test_every_multiprocessor_has_two_programs_and_each_a_few_items():
    plan = decode_plan(head_dim=128, element_bytes=2, multiprocessors=H200)
    assert (plan.programs, plan.items, plan.tile_keys) == (264, 1056, 64)


def test_room_for_parts_grows_with_the_rows_not_with_their_length():
    """256 rows of one part each, and 1056 items of 8 kv heads if all were one row's."""
    plan = decode_plan(head_dim=128, element_bytes=2, multiprocessors=H200)
    assert plan.parts(256, kv_heads=8) == 256 + 132


@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 17, 71])
def test_tiles_fit_the_device(head_dim, element_bytes, group):
    """What is on its way stays within the 227 KiB of a multiprocessor; Triton wants powers of two."""
    decode = decode_plan(head_dim=head_dim, element_bytes=element_bytes, multiprocessors=H200)
    prefill = prefill_plan(group=group, head_dim=head_dim, element_bytes=element_bytes)
    for plan in (decode, prefill):
        assert plan.tile_keys == power_of_two_from(plan.tile_keys) >= 16
        assert plan.stages * 2 * plan.tile_keys * power_of_two_from(head_dim) * element_bytes <= 200 << 10
    assert decode.min_part_keys % decode.tile_keys == 0
    assert prefill.tile_rows == power_of_two_from(prefill.tile_rows)
    assert 1 <= prefill.tile_tokens <= prefill.tile_rows // group
