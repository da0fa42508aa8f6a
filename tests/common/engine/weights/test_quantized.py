"""A quantised weight's exchange form: what it stands for, and what it refuses."""

import pytest
import torch

from cohort.common.engine.weights.quantized import QuantizedWeight, stacked
from cohort.common.errors import InvariantViolated


def _four_bits(seed: int, outputs: int = 3, inputs: int = 8, group: int = 4) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator)
    return QuantizedWeight("uint4", codes, scales, -8 * scales, group)


def test_a_nibble_is_its_scale_times_its_value_plus_its_offset():
    weight = _four_bits(1)
    wide = weight.dequantized()
    for output in range(3):
        for position in range(8):
            byte = int(weight.codes[output, position // 2])
            value = byte >> 4 if position % 2 else byte & 15
            scale = float(weight.scales[output, position // 4])
            assert wide[output, position] == pytest.approx(scale * (value - 8), abs=1e-6)


@pytest.mark.parametrize("code", ["int8", "e4m3"])
def test_a_byte_is_its_scale_times_its_value(code):
    values = torch.tensor([[-3.0, 0.0, 1.5 if code == "e4m3" else 1.0, 96.0]])
    codes = values.to(torch.float8_e4m3fn if code == "e4m3" else torch.int8)
    weight = QuantizedWeight(code, codes, torch.tensor([[0.5, 2.0]]), None, 2)
    assert torch.equal(weight.dequantized(), values * torch.tensor([[0.5, 0.5, 2.0, 2.0]]))


def test_stacked_weights_are_each_other_s_rows():
    parts = [_four_bits(1), _four_bits(2, outputs=2)]
    assert torch.equal(stacked(parts).dequantized(), torch.cat([part.dequantized() for part in parts]))
    plain = QuantizedWeight("uint4", parts[0].codes, parts[0].scales, None, 4)
    both = stacked([plain, parts[1]])
    assert torch.equal(both.dequantized(), torch.cat([plain.dequantized(), parts[1].dequantized()]))


def test_parts_that_do_not_fit_are_refused():
    weight = _four_bits(1)
    with pytest.raises(InvariantViolated, match="groups of 2"):
        QuantizedWeight("uint4", weight.codes, weight.scales, None, 2)
    with pytest.raises(InvariantViolated, match="different kinds"):
        stacked([weight, _four_bits(2, group=8)])


def test_codes_of_a_file_go_where_the_model_is():
    """A GGUF file's are read on the host, whatever multiplies them."""
    weight, there = _four_bits(1), torch.device("meta")
    moved = weight.on(there)
    assert moved.offsets is not None
    assert {part.device for part in (moved.codes, moved.scales, moved.offsets)} == {there}
    assert (moved.shape, moved.group) == (weight.shape, weight.group)
    assert weight.on(torch.device("cpu")) is weight
