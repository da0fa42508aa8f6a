"""A live pipeline's workers, replayed: the same machines and policies plan and answer exactly as they did live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cohort.common.machines.replayer import replay
from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


def question(number: int) -> dict[str, Any]:
    return {
        "prompt": [1000 + number] * (40 + 37 * number),
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def test_recorded_live_workers_replay_to_the_same_decisions(tmp_path: Path, default_model: Path) -> None:
    folder = tmp_path / "recordings"
    # A small cache, so that the workers have to preempt and to wait for blocks.
    overrides = {"engine": {"record_dir": str(folder), "prefill_chunk": 64}, "kv": {"memory_bytes": 40 * 16 * 46080}}
    with Pipeline(tmp_path, default_model, overrides, preset="disaggregated") as pipeline:
        answers = pipeline.complete_all([question(number) for number in range(8)])
        assert [len(answer.tokens) for answer in answers] == [24] * 8
        pipeline.complete_all([question(8) | {"echo": True, "logprobs": 1}])  # the prompt's own log-probabilities
        for name in pipeline.config.instance_roles:
            pipeline.terminate(name)
    recordings = sorted(folder.glob("*.jsonl"))
    assert len(recordings) == 2
    for path in recordings:
        found = replay(path)
        assert found.difference == "", f"{found.instance}: {found.difference}"
        assert found.rows >= 9 and found.effects > 0
    assert any(b'"scores":[[' in path.read_bytes() for path in recordings)
