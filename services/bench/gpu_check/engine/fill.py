"""The cache of a loaded model filled to its last block under load; no step may be refused memory."""

from __future__ import annotations

import random
import time

import torch

from cohort.common.config import Config, load_config
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from cohort.services.bench.gpu_check.frame.context import Check


def run(check: Check, runner: ModelRunner, folder: str, seconds: float) -> None:
    check.guard.item("cache filled to its last block", lambda: _fill(check, runner, folder, seconds * 0.8), seconds)


def serving(check: Check, runner: ModelRunner, folder: str) -> Config:
    """The configuration under which a worker would have loaded this runner."""
    return load_config(
        preset="unified",
        overrides={
            "model": {"path": folder, "weights": "random", "dtype": check.dtype_name},
            "engine": {
                "device": str(check.device),
                "max_rows": runner.max_rows,
                "prefill_chunk": runner.max_step_tokens,
                "max_step_tokens": runner.max_step_tokens,
                "drain_s": 0.1,
            },
            "kv": {"host_memory_bytes": 0, "prefix_caching": False},
        },
    )


def _fill(check: Check, runner: ModelRunner, folder: str, seconds: float) -> None:
    engine = InProcessEngine(serving(check, runner, folder), runner)
    blocks = len(runner.kv.blocks)
    prompt, output = (7936, 160) if check.real else (96, 40)
    requests = blocks * runner.block_size // (prompt + output // 2) + 3
    draw = random.Random(2)
    highest = runner.geometry.vocab_size - 1
    for index in range(requests):
        engine.submit(str(index), [draw.randint(3, highest) for _ in range(prompt)], output)
    started = time.monotonic()
    done: set[str] = set()
    least_free, steps = blocks, 0
    while len(done) < requests and (not check.real or time.monotonic() - started < seconds):
        sampled = engine.step()
        steps += 1
        least_free = min(least_free, engine.free_blocks)
        done.update(sequence.request_id for sequence in sampled if sequence.output_tokens >= output)
        if check.real and steps > 200 and not least_free and len(done) > requests // 8:
            break  # full, and going on: the rest would only repeat it
    found, taken_s = check.found, time.monotonic() - started
    found.checked(
        "filled to the last block",
        least_free == 0,
        f"{blocks} blocks, {runner.kv.block_bytes * blocks >> 20} MiB; at the fullest {least_free} free; {steps} steps "
        f"in {taken_s:.1f} s",
    )
    found.checked("no step was refused memory", runner.memory_retries == 0, f"{runner.memory_retries} ran in halves")
    found.checked("requests completed while full", bool(done), f"{len(done)} of {requests}")
    if check.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(check.device)
        held = torch.cuda.max_memory_reserved(check.device)
        note = f"of {total / 2**30:.1f}; torch held {held / 2**30:.1f} at most"
        found.measured("device memory left at the end", free / 2**30, "GiB", note=note)
