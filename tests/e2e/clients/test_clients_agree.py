"""`cohort bench` and GuideLLM, in turn against one pipeline whose engine takes the same time for every step: what both
of them measure is the same.

GuideLLM runs in an environment of its own and is skipped where there is none (`client_scripts.py`). To be run on a
machine that does nothing else: two clients on busy processors differ by their own delays.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cohort.services.bench.tokens.measuring import Load, configured, started
from tests.e2e.clients.client_scripts import FOLDERS, WITHOUT, environment_of, run_there

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.skipif(not os.environ.get(FOLDERS), reason=WITHOUT)]

ROUNDS = 3
STEP_S = 0.4
"""So long that some milliseconds of a busy processor are not 2 % of a first token's time."""
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16
REQUESTS_OF_A_USER = 4
WITHIN = 0.02


@pytest.mark.parametrize("users", [1, 8])
def test_guidellm_and_cohort_bench_measure_the_same(users: int, default_model: Path, tmp_path: Path) -> None:
    """Medians of the rounds; each client comes first in every other one."""
    environment_of("guidellm")
    load = Load(streams=users, tokens_per_s=users / STEP_S, seconds=1.0, workers=1, gateways=1)
    config = configured("unified", [], str(default_model), load, tmp_path)
    url = f"http://127.0.0.1:{config.gateway.port}"
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    with started(config, tmp_path, load.step_s) as processes:
        processes.wait_ready()
        for number in range(ROUNDS):
            for name in ("ours", "theirs")[:: -1 if number % 2 else 1]:
                measured = _ours if name == "ours" else _theirs
                rounds[name].append(measured(url, users, default_model, tmp_path))
    ours, theirs = (_medians(rounds[name]) for name in ("ours", "theirs"))
    assert theirs == pytest.approx(ours, rel=WITHIN), rounds


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median([found[figure] for found in rounds]) for figure in rounds[0]}


def _ours(url: str, users: int, model: Path, folder: Path) -> dict[str, float]:
    lengths = [
        f"--input-len={PROMPT_TOKENS}",
        f"--output-len={OUTPUT_TOKENS}",
        "--endpoint=chat",
        f"--tokenizer={model}",
    ]
    load = [f"--concurrency={users}", f"--num-requests={users * REQUESTS_OF_A_USER}", "--warmup=1"]
    command = [sys.executable, "-m", "cohort.services.bench", "--url", url, *lengths, *load, "--json=-"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["runs"][0]["overall"]
    assert found["output_tokens"] == users * REQUESTS_OF_A_USER * OUTPUT_TOKENS
    return {
        "output tokens/s": found["output_tokens_per_s"],
        "TTFT, ms": found["ttft_ms"]["p50"],
        "TPOT, ms": found["tpot_ms"]["p50"],
    }


def _theirs(url: str, users: int, model: Path, folder: Path) -> dict[str, float]:
    """What GuideLLM calls time per output token counts the first one in; its inter-token latency is our TPOT."""
    command = f"""guidellm run --backend kind=openai_http,target={url},model={model.name}
        --tokenizer kind=huggingface_auto,model={model}
        --data kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}
        --profile kind=concurrent,streams={users} --constraint kind=max_requests,count={users * REQUESTS_OF_A_USER}
        --output kind=json,path=theirs.json --disable-console-interactive"""
    run_there("guidellm", command.split(), folder)
    [run] = json.loads((folder / "theirs.json").read_text(encoding="utf-8"))["benchmarks"]
    assert len(run["requests"]["successful"]) == users * REQUESTS_OF_A_USER and not run["requests"]["errored"]
    metrics: dict[str, dict[str, dict[str, Any]]] = run["metrics"]
    return {
        "output tokens/s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "TTFT, ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "TPOT, ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }
