"""Bounds: arithmetic over a device's own rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.common.engine.config.model_config import ModelGeometry, read_geometry
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import LLAMA_3_8B, shape_folder
from cohort.services.bench.gpu_check.frame.rates import Ceilings, matrix_elements

H200 = Ceilings(copy=4.3e12, read=4.5e12, matrix=7.9e14)  # of the order of what one reaches


@pytest.fixture(name="llama", scope="module")
def llama_3_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    return read_geometry(shape_folder(tmp_path_factory.mktemp("shape"), LLAMA_3_8B))


def test_few_rows_are_bound_by_bytes(llama: ModelGeometry) -> None:
    """At one row nothing but weights and KV counts: 15 GB over 4.5 TB/s."""
    weights = 2 * (matrix_elements(llama) + llama.vocab_size * llama.hidden_size)
    assert llama.kv_token_bytes("bfloat16") == 131_072
    least = rates.decode_s(llama, "bfloat16", 1, 1024, H200)
    assert least == pytest.approx((weights + 1024 * 131_072) / H200.bandwidth, rel=0.01)


def test_many_rows_are_bound_by_operations_too(llama: ModelGeometry) -> None:
    """256 rows through 7.5e9 weights are more work for the matrix units than for the memory."""
    with_operations = rates.decode_s(llama, "bfloat16", 256, 1024, H200)
    without = rates.decode_s(llama, "bfloat16", 256, 1024, replace(H200, matrix=1e30))
    assert with_operations > 1.05 * without
    operations = 2 * 256 * 7.5e9 / H200.matrix
    assert rates.products_s(llama, "bfloat16", 256, H200) == pytest.approx(operations, rel=0.05)


def test_a_slower_device_has_a_higher_bound(llama: ModelGeometry) -> None:
    h100 = Ceilings(copy=3.0e12, read=3.1e12, matrix=7.0e14)
    slower, faster = (rates.decode_s(llama, "bfloat16", 16, 1024, each) for each in (h100, H200))
    assert slower / faster == pytest.approx(4.5 / 3.1, rel=0.02)
