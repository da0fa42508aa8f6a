"""Blocks of every served type against the gguf package's own decoder, over random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from cohort.common.engine.weights.gguf_files import BLOCKS, decoded

CODES = {"Q4_0": "uint4", "Q4_1": "uint4", "Q4_K": "uint4"}
HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_say_what_the_package_reads(kind: str) -> None:
    block = BLOCKS[kind]
    typed = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[typed] == (block.inputs, block.stored)
    random = np.random.default_rng(7)
    rows = random.integers(0, 256, (5, 3, block.stored), dtype=np.uint8)
    for place in HALVES.get(kind, (0, 2)):  # any bytes but those of NaN and infinity
        halves = random.uniform(-2, 2, (5, 3)).astype(np.float16)
        rows[:, :, place : place + 2] = halves[:, :, None].view(np.uint8)
    flat = rows.reshape(5, -1)
    weight = decoded(kind, torch.from_numpy(flat))
    expected = torch.from_numpy(quants.dequantize(flat, typed))
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-5, atol=1e-5)
    assert weight.code == CODES.get(kind, "int8")
    assert weight.group == (16 if kind == "Q6_K" else 32)
