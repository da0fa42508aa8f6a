"""Section: the cache filled to its last block under load, with all the memory that is free; no step may be refused."""

from __future__ import annotations

import random
import time

import torch

from cohort.common.config import Config, load_config
from cohort.common.engine.worker_process import load_runner
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.shapes import shape_folder


def run(check: Check) -> None:
    model, shape = next(iter(check.shapes().items()))
    config = _config(check, str(shape_folder(check.folder / model, shape)))
    runner = load_runner(config, 0)
    runner.warm_up()
    engine = InProcessEngine(config, runner)
    capacity = len(runner.kv.blocks) * runner.block_size
    prompt, output = (7936, 160) if check.real else (96, 40)
    requests = capacity // (prompt + output // 2) + 3
    draw = random.Random(2)
    highest = runner.geometry.vocab_size - 1
    for index in range(requests):
        engine.submit(str(index), [draw.randint(3, highest) for _ in range(prompt)], output)
    started = time.perf_counter()
    done: set[str] = set()
    least_free, steps = len(runner.kv.blocks), 0
    while len(done) < requests:
        sampled = engine.step()
        steps += 1
        least_free = min(least_free, engine.free_blocks)
        done.update(sequence.request_id for sequence in sampled if sequence.output_tokens >= output)
        if steps > 400 and not least_free and len(done) > requests // 8 and check.real:
            break  # full, and going on: the rest would only repeat it
    seconds = time.perf_counter() - started
    found = check.found
    found.checked(
        "filled to the last block",
        least_free == 0,
        f"{len(runner.kv.blocks)} blocks, {runner.kv.block_bytes * len(runner.kv.blocks) >> 20} MiB; at the "
        f"fullest {least_free} free; {steps} steps in {seconds:.1f} s",
    )
    found.checked("no step was refused memory", runner.memory_retries == 0, f"{runner.memory_retries} ran in halves")
    found.checked("answers came while full", bool(done), f"{len(done)} of {requests} requests ended")
    if check.real:
        free, total = torch.cuda.mem_get_info(check.device)
        held = torch.cuda.max_memory_reserved(check.device)
        found.measured(
            "device memory left at the end",
            free / 2**30,
            "GiB",
            note=f"of {total / 2**30:.1f}; torch held {held / 2**30:.1f} at most",
        )


def _config(check: Check, folder: str) -> Config:
    real = check.real
    return load_config(
        preset="unified",
        overrides={
            "model": {"path": folder, "weights": "random", "dtype": "bfloat16" if real else "float32"},
            "engine": {
                "device": str(check.device),
                "max_rows": 256 if real else 8,
                "prefill_chunk": 8192 if real else 64,
                "max_step_tokens": 8192 if real else 128,
            },
            "kv": {"memory_bytes": 0 if real else 96 * 4096, "host_memory_bytes": 0, "prefix_caching": False},
        },
    )
