"""Bounds and predictions: arithmetic over a device's own rates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cohort.common.engine.config.model_config import ModelGeometry, read_geometry
from cohort.services.bench.gpu_check.frame import bounds, predictions
from cohort.services.bench.gpu_check.frame.bounds import H200, Ceilings
from cohort.services.bench.gpu_check.frame.predictions import TABLE, Facts, expect
from cohort.services.bench.gpu_check.frame.shapes import LLAMA_3_8B, decode_bytes, shape_folder


@pytest.fixture(name="llama", scope="module")
def llama_3_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    return read_geometry(shape_folder(tmp_path_factory.mktemp("shape"), LLAMA_3_8B))


def test_few_rows_are_bound_by_bytes(llama: ModelGeometry) -> None:
    """At one row nothing but weights and KV counts: 15 GB over 4.5 TB/s."""
    least = bounds.decode_s(llama, "bfloat16", 1, 1024, H200)
    assert least == pytest.approx(decode_bytes(llama, "bfloat16", 1, 1024) / H200.bandwidth, rel=0.01)


def test_many_rows_are_bound_by_operations_too(llama: ModelGeometry) -> None:
    """256 rows through 7.5e9 weights are more work for the matrix units than for the memory."""
    with_operations = bounds.decode_s(llama, "bfloat16", 256, 1024, H200)
    without = bounds.decode_s(llama, "bfloat16", 256, 1024, replace(H200, matrix=1e30))
    assert with_operations > 1.05 * without
    operations = 2 * 256 * 7.5e9 / H200.matrix
    assert bounds.products_s(llama, "bfloat16", 256, 256, H200) == pytest.approx(operations, rel=0.05)


def test_a_slower_device_has_a_higher_bound(llama: ModelGeometry) -> None:
    h100 = Ceilings(copy=3.0e12, read=3.1e12, matrix=7.0e14)
    slower, faster = (bounds.decode_s(llama, "bfloat16", 16, 1024, each) for each in (h100, H200))
    assert slower / faster == pytest.approx(4.5 / 3.1, rel=0.02)


def test_every_prediction_is_a_number_with_a_derivation(llama: ModelGeometry) -> None:
    for line in TABLE:
        facts = Facts(H200, llama, rows=64, context=512, tokens=128, moved_bytes=1 << 28, messages=4)
        found = expect(line, facts)
        assert math.isfinite(found.value) and found.value >= 0 and len(found.why) > len(line) + 10


def test_predictions_of_known_size(llama: ModelGeometry) -> None:
    """The orders of magnitude that the derivations give for an H200."""
    steps = [expect("decode, whole", Facts(H200, llama, rows=rows, context=1024)).value for rows in (1, 16, 64, 256)]
    assert steps == sorted(steps) and 4.0 < steps[0] < 5.5 and 14.0 < steps[-1] < 19.0
    prompt = expect("prefill", Facts(H200, llama, tokens=8192)).value
    assert 0.6 < prompt < 0.8
    with pytest.raises(ValueError, match="needs a model"):
        expect("prefill", Facts(H200))


def test_sampling_takes_rounds_of_rows_or_what_memory_takes(llama: ModelGeometry) -> None:
    """As the page about the kernels has it for 256 rows of 128,256 logits."""
    flat, greedy = Facts(H200, llama, instructions=205), Facts(H200, llama, instructions=10)
    whole, one = (expect("sampler", replace(flat, rows=rows)).value for rows in (256, 1))
    assert whole == pytest.approx(0.41, abs=0.02) and one == pytest.approx(whole / 2, rel=0.1), (
        "256 rows are two rounds"
    )
    assert expect("sampler", replace(greedy, rows=256)).value == pytest.approx(0.06, abs=0.01), "memory's time"


def test_a_recorded_mixed_step_is_expected_to_gain_where_it_is_recorded(llama: ModelGeometry) -> None:
    """Short prompts hide no launches: there recording wins, and with it what is recorded."""
    short, long = (Facts(H200, llama, rows=64, context=1024, tokens=tokens) for tokens in (16, 1024))
    assert expect("mixed, recorded", short).value < 0.95 * expect("mixed", short).value
    assert expect("mixed, recorded", long).value > 0.9 * expect("mixed", long).value
    assert expect("mixed, recorded", short).value > expect("decode, whole", short).value


def test_wanting_is_within_reach_of_the_prediction(llama: ModelGeometry) -> None:
    """A target that the design itself does not expect to meet is known as such, here and in the report."""
    from cohort.services.bench.gpu_check.engine.decode import WANTED

    expected = {
        rows: expect("decode, recorded", Facts(H200, llama, rows=rows, context=1024)).value for rows in (1, 16, 64, 256)
    }
    assert all(WANTED - 0.1 < each < WANTED + 0.3 for each in expected.values()), expected
    assert predictions.TABLE["idle"].of(Facts(H200)) <= 0.02
