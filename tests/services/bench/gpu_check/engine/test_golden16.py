"""Responses in 16 bits against float32, on the processor: the comparison holds, and a wrong kernel breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.models import lean_llama
from cohort.services.bench.gpu_check.engine import golden, golden16

PROMPTS = [[3 + (7 * at + 5 * row) % 900 for at in range(length)] for row, length in enumerate((5, 1, 33, 40))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden._model(tmp_path_factory.mktemp("golden16") / "model", real=False, dtype="bfloat16")


def test_bfloat16_agrees_at_every_clear_decision(model: Path) -> None:
    found = golden16.agreement(model, "cpu", PROMPTS, outputs=16)
    assert found.holds, found
    assert 0.0 < found.error < golden16.LARGEST_ERROR
    assert found.clear >= 6


@pytest.mark.parametrize("fault", ["scale", "directions", "last key"])
def test_a_wrong_kernel_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = lean_llama.paged_attention

    def wrong(query: Any, kv: Any, layer: int, meta: Any, scale: float, out: Any, *, sliding_window: int = 0) -> None:
        if fault == "scale":
            scale *= 1.5
        elif fault == "directions":
            meta = golden16.dataclasses.replace(meta, block_tables=meta.separate()[0])
        elif meta.max_query_len == 1:
            meta = golden16.dataclasses.replace(meta, context_lens=meta.context_lens - (meta.context_lens > 1).int())
        right(query, kv, layer, meta, scale, out, sliding_window=sliding_window)

    monkeypatch.setattr(lean_llama, "paged_attention", wrong)
    monkeypatch.setattr(lean_llama.LeanLlama, "_layer_stack", lambda self: None)
    with torch.inference_mode():
        assert not golden16.agreement(model, "cpu", PROMPTS, outputs=4).holds
