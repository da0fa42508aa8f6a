"""Live: with keys and values in FP8, a request that crosses two workers gives the answer that one worker gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


def test_fp8_crosses(tmp_path: Path, small_model: Path) -> None:
    """Beside one another, over a prefix that is cached, and with log-probabilities."""
    words = "Once upon a time there was a fox who lived at the edge of a large forest and wanted "
    requests: list[dict[str, Any]] = [
        {"prompt": words * repeat, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for repeat in (1, 4, 4)
    ]
    kv = {"cache_dtype": "fp8", "memory_bytes": 64 << 20}
    answers = {}
    for preset in ("unified", "disaggregated"):
        overrides = {"model": {"max_model_len": 512}, "kv": kv}
        folder = tmp_path / preset[0]  # sockets lie in it, whose paths must be short
        folder.mkdir()
        with Pipeline(folder, small_model, overrides, preset=preset) as pipeline:
            found = pipeline.complete_all(requests) + pipeline.complete_all(requests[-1:])
            assert not any(answer.error for answer in found)
            answers[preset] = [answer.tokens for answer in found]
            if preset == "disaggregated":
                pipeline.wait_for("decode-0", "transfers_total", 1)
    assert answers["disaggregated"] == answers["unified"]
    assert all(len(tokens) == 8 for tokens in answers["unified"])
