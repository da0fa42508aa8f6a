"""Which variants of the Triton kernels a worker warms up, and which its steps launch: run by `test_kernel_variants`.

Its arguments: FOLDER,DTYPE[,HEAD] of each model.

Triton decides at import whether it compiles, so this is a process of its own. Nothing is compiled: the hook that
Triton asks before it compiles notes the variant and declines, and then Triton does not launch it either. So the engine
runs its own steps on the processor, over numbers without meaning, and every launch of a kernel passes the hook.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime.driver import driver

from cohort.common.config import load_config
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.drafts.batch_drafts import DraftRow
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.models import lean_deepseek, lean_gpt_oss, lean_llama
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepBatch
from cohort.common.engine.weights import linear
from cohort.common.sampling_inputs import TokenHistory
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available, operators
from cohort.kernels.gpu.attention import prefill
from cohort.kernels.gpu.compile_offline import AbsentGpu
from cohort.kernels.ops.slots import gather_slots, scatter_slots
from tests.common.engine.driver import Driver, make_runner, random_prompts

MAX_ROWS = 37  # no power of two, and odd: standing buffers do not begin at multiples of 16 bytes
STEPS = 60
SEEDS = range(int(os.environ.get("COHORT_TEST_SEEDS", "1")))


class Variants:
    """The variants that Triton wanted to compile."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.launches: Counter[str] = Counter()

    def __call__(self, **facts: Any) -> bool:
        name = facts["fn"].name.rpartition(".")[2]
        self.seen.add((name, facts["compile"]["key"]))
        self.launches[name] += 1
        return True


def as_on_a_gpu(variants: Variants) -> None:
    driver.set_active(AbsentGpu(90))
    knobs.runtime.jit_cache_hook = variants
    native.ops_for = lambda tensor: None  # type: ignore[assignment]
    for form in (lean_llama, lean_gpt_oss, lean_deepseek):
        form.groups_on_host = lambda device: False  # type: ignore[attr-defined]
    linear.linear_form = lambda *shape: "plain"  # no packed weights, hence layer by layer
    available.ops_for = lambda tensor: operators  # type: ignore[assignment]
    prefill.flash_function = lambda: lambda query, *others: query  # type: ignore[assignment]


def step(driver_: Driver, plan: list[tuple[str, int]], sampling: dict[str, SamplingRow]) -> None:
    """As `Driver.step`, but with tokens of the test's: what a step samples here has no meaning."""
    plan = sorted(plan, key=lambda entry: entry[1] == 1)
    for name, _ in plan:
        request = driver_.requests[name]
        request.sampling = dataclasses.replace(sampling[name], position=len(request.tokens))
    batch = driver_.batch(plan)
    if driver_.runner.drafter is not None:
        batch = dataclasses.replace(batch, numbers=np.ones(batch.num_rows, dtype=np.int64))
    driver_.runner.execute(batch)
    for name, count in plan:
        driver_.requests[name].computed += count
    for row in batch.sample_rows.tolist():
        driver_.requests[plan[row][0]].tokens.append(5)


def mixed_workload(runner: Any, seed: int) -> None:
    """Prompts in chunks of any length beside decodes, any number of rows, both directions, all kinds of sampling."""
    draw = random.Random(seed)
    driver_ = Driver(runner, shuffle=seed, reverse=bool(seed % 2))
    kinds = (
        GREEDY,
        SamplingRow(seed=1, position=0, temperature=0.8, top_p=0.9, logprobs=3),
        SamplingRow(seed=2, position=0, top_k=5, presence_penalty=0.5, history=TokenHistory([3, 4], [5])),
        dataclasses.replace(GREEDY, logprobs=30),
    )
    sampling: dict[str, SamplingRow] = {}
    for number in range(STEPS):
        if len(driver_.requests) < MAX_ROWS:
            name = str(number)
            driver_.add(name, random_prompts([draw.randint(1, 40)], seed=number)[0])
            sampling[name] = draw.choice(kinds)
        names = draw.sample(sorted(driver_.requests), draw.randint(0, len(driver_.requests)))
        if names:
            step(driver_, [(name, draw.randint(1, min(17, driver_.remaining(name)))) for name in names], sampling)
            if runner.drafter is not None:
                drafted(driver_, draw.sample(names, min(len(names), 8)), draw)


def drafted(driver_: Driver, names: list[str], draw: random.Random) -> None:
    """Some drafts of each, by the runner's drafter."""
    rows = []
    for name in names:
        request, chain, drafts = driver_.requests[name], TokenChain(""), draw.randint(1, 4)
        chain.grow(request.tokens[: request.computed + 1])
        driver_.slot(request, len(chain) + drafts)
        sampling = tuple([SamplingRow(1, len(chain) + at, 0.8, 0.9) for at in range(drafts)])
        rows.append(DraftRow(chain, request.blocks, request.directions, sampling, 1))
    driver_.runner.drafter.propose_all(rows)


def with_head(runner: ModelRunner, model: Path, head: Path, variants: Variants) -> None:
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(head)}})
    plan = plan_draft(config, model, runner.geometry, dtype=runner.dtype, device=runner.device, degree=1)
    assert plan is not None
    plan = dataclasses.replace(plan, block_size=runner.block_size, graph_bytes=1 << 40)
    drafter: Any = load_draft(plan, config, runner)
    run = drafter._run

    def without_meaning(batch: StepBatch) -> list[int]:
        tokens = [5 for _ in run(batch)]
        variants.launches["drafts"] += len(tokens)
        return tokens

    drafter._run, runner.drafter = without_meaning, drafter


def main() -> None:
    """A line of JSON for each."""
    variants, flash_serves = Variants(), prefill.flash_serves
    as_on_a_gpu(variants)
    for model in sys.argv[1:]:
        folder, dtype, *head = model.split(",")
        variants.seen.clear()
        prefill.flash_serves = flash_serves
        print(json.dumps(found(variants, Path(folder), dtype, *map(Path, head))))


def found(variants: Variants, folder: Path, dtype: str, *head: Path) -> dict[str, Any]:
    runner = make_runner(
        folder, device_steps=True, dtype=dtype, max_rows=MAX_ROWS, num_blocks=400, share=DeviceShare(graphs=1 << 40)
    )
    if head:
        with_head(runner, folder, *head, variants)
    steps: Any = runner._device_steps
    steps.compile(threads=2)
    drafter: Any = runner.drafter
    if head:
        drafter._steps.compile(threads=2)
    named = set(variants.seen)
    runner.warm_up()
    warmed = set(variants.seen)
    variants.launches.clear()
    mixed_takes = steps.mixed.takes
    for flash, recorded in ((True, False), (False, False), (False, True)):
        prefill.flash_serves = lambda query, flash=flash: flash  # type: ignore[assignment, misc]
        steps.mixed.takes = mixed_takes if recorded else lambda batch: None
        for seed in SEEDS:
            mixed_workload(runner, seed)
    slots = torch.tensor(np.arange(5))
    tokens = torch.empty(5, *runner.kv.blocks.shape[1:4], runner.kv.blocks.shape[5], dtype=runner.kv.blocks.dtype)
    gather_slots(runner.kv.blocks, slots, tokens)
    scatter_slots(tokens, runner.kv.blocks, slots)
    return {
        "named": sorted(name for name, _ in named),
        "recorded_rows": list(steps.decode.classes),
        "recorded_mixed": len(steps.mixed.classes),
        "warmed_beyond_named": sorted(name for name, _ in warmed - named),
        "launched": variants.launches,
        "served_beyond_warmed": sorted(name for name, _ in variants.seen - warmed),
    }


if __name__ == "__main__":
    main()
