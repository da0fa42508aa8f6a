"""Geometry of the KV cache against hand-computed figures."""

from __future__ import annotations

from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams


def test_kv_bytes_of_known_models() -> None:
    # B1: 2·L·H·D·B. Llama-2-13B in 16 bit: 2·40·40·128·2 = 819,200 bytes a token; SmolLM2-135M: 2·30·3·64·2 = 23,040.
    assert KvGeometry(40, 40, 128, 2, 16).token_bytes == 819_200
    smollm = KvGeometry(30, 3, 64, 2, 16)
    assert (smollm.token_bytes, smollm.block_bytes) == (23_040, 368_640)
    assert [smollm.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_the_last_output_token_needs_no_kv() -> None:
    request = Request(Attempt("r", 2), "g", [1, 2, 3, 9], 3, SamplingParams(max_tokens=5), 0.0)
    assert request.output_known == 1
    assert request.max_positions == 7
