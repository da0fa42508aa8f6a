"""The measuring side of `cohort bench engine`: load the model as a worker would, measure, write an `EngineReport`.

A process of its own because the command line never loads torch; its one argument is what `_write` takes, in JSON. Says
on stderr what it is measuring, one line `progress DONE TOTAL WHAT` each; serves nothing. The CPU path is what is
measured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch

from cohort import __version__
from cohort.common import paths
from cohort.common.config import Config, load_config
from cohort.common.devices.cores import usable_cores
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.worker.worker_process import load_runner
from cohort.common.errors import CohortError
from cohort.common.hub.model_source import shown_name
from cohort.kernels.cpu import native
from cohort.services.bench.engine.inside import in_process
from cohort.services.bench.engine.inside.comparisons import (
    READ_BYTES,
    LowerBounds,
    compared,
    measure_attention,
    model_products,
)
from cohort.services.bench.engine.inside.in_process import InProcessEngine, StepClock, Target, clocked, engine_targets
from cohort.services.bench.engine.report import (
    KERNEL_PARTS,
    PARTS,
    AttentionPoint,
    Comparison,
    EngineReport,
    Machine,
    ModelFacts,
    Section,
    StepPart,
    StepShares,
)

_OUTSIDE_EXECUTE: frozenset[StepPart] = frozenset({"plan", "build", "completed", "glue"})
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
_FEWER_ROUNDS_FROM_TOKENS = 512  # a prefill of so many takes its time


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 7
    decode_rows: tuple[int, ...] = (1, 4, 16, 64, 256)
    contexts: tuple[int, ...] = (32, 128, 512, 2048)
    prefill_tokens: tuple[int, ...] = (64, 128, 512, 1024, 2048)
    shares_rows: tuple[int, ...] = (1, 16, 64)
    shares_context: int = 128
    shares_steps: int = 20
    attention: tuple[tuple[int, int], ...] = ((16, 512), (1, 2048))
    read_bytes: int = READ_BYTES


QUICK = Scale(
    rounds=2,
    decode_rows=(1, 4),
    contexts=(32, 64),
    prefill_tokens=(64,),
    shares_rows=(1, 4),
    shares_context=32,
    shares_steps=3,
    attention=((2, 64),),
    read_bytes=1 << 23,
)


@dataclass(slots=True)
class _Found:
    comparisons: list[Comparison] = field(default_factory=list)
    shares: list[StepShares] = field(default_factory=list)
    attention: list[AttentionPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(config: Config, threads: int, scale: Scale, sections: frozenset[Section]) -> EngineReport:
    """Measure everything in `sections`, in one process, one after the other."""
    load_before = os.getloadavg()[0]
    runner = load_runner(config, threads)
    runner.warm_up()
    found = _Found()
    dtype = runner.compute_dtype
    products = model_products(runner.geometry)
    if products is None:
        found.notes.append(f"no floors: a model of family {runner.geometry.family} does not say what it multiplies")
    compared = products is not None and sections & {"decode", "prefill"}
    lower_bounds = LowerBounds(products, dtype, available_bytes()) if products is not None and compared else None
    tasks = _tasks(config, runner, lower_bounds, scale, sections, found)
    for done, (what, task) in enumerate(tasks):
        sys.stderr.write(f"progress {done} {len(tasks)} {what}\n")
        sys.stderr.flush()
        gc.collect()  # between two tasks, not within one
        task()
    geometry = runner.geometry
    return EngineReport(
        machine=machine(threads, runner.dtype, load_before),
        model=ModelFacts(
            name=shown_name(Path(config.model.path) if config.model.path else paths.default_model_dir()),
            family=geometry.family,
            layers=geometry.num_layers,
            hidden=geometry.hidden_size,
            vocabulary=geometry.vocab_size,
            layer_parameters=products.layer_parameters if products is not None else 0,
            product_bytes=products.parameters * dtype.itemsize if products is not None else 0,
            block_size=runner.block_size,
            kv_blocks=len(runner.kv.blocks),
            kv_token_bytes=runner.kv.geometry.token_bytes,
        ),
        comparisons=found.comparisons,
        shares=found.shares,
        attention=found.attention,
        notes=found.notes,
    )


def _tasks(
    config: Config,
    runner: ModelRunner,
    lower_bounds: LowerBounds | None,
    scale: Scale,
    sections: frozenset[Section],
    found: _Found,
) -> list[tuple[str, Callable[[], None]]]:
    tasks: list[tuple[str, Callable[[], None]]] = []

    def decode(rows: int) -> None:
        found.comparisons.append(compared(runner, lower_bounds, rows, scale.contexts, scale.rounds, scale.read_bytes))

    def prefill(tokens: int) -> None:
        rounds = scale.rounds if tokens < _FEWER_ROUNDS_FROM_TOKENS else max(2, scale.rounds // 2)
        found.comparisons.append(
            compared(runner, lower_bounds, 1, (tokens,), rounds, scale.read_bytes, tokens_per_row=tokens)
        )

    def shares(rows: int) -> None:
        one = measure_shares(config, runner, rows, scale.shares_context, scale.shares_steps)
        if one is None:
            found.notes.append(f"no shares of a step of {rows} rows: more than the cache or a step can hold")
        else:
            found.shares.append(one)

    def attention(rows: int, context: int) -> None:
        found.attention.append(measure_attention(runner, rows, context, scale.rounds, scale.read_bytes))

    # Bounds on the steps of a worker of this configuration
    max_rows = min(config.engine.max_rows, config.engine.max_step_tokens)
    longest = min(config.engine.max_step_tokens, runner.geometry.max_positions)
    if "decode" in sections:
        tasks += [(f"decode, {n} rows", partial(decode, n)) for n in scale.decode_rows if n <= max_rows]
    if "prefill" in sections:
        tasks += [(f"prefill, {n} tokens", partial(prefill, n)) for n in scale.prefill_tokens if n <= longest]
    if "shares" in sections:
        tasks += [(f"where a step of {n} rows goes", partial(shares, n)) for n in scale.shares_rows]
    if "attention" in sections:
        tasks += [(f"attention, {r} x {c}", partial(attention, r, c)) for r, c in scale.attention]
    return tasks


def measure_shares(config: Config, runner: ModelRunner, rows: int, context: int, steps: int) -> StepShares | None:
    """Decode steps of the whole worker at `rows` sequences of `context` tokens and a few more: with clocks and without
    in turn. None where they do not fit."""
    spare = 2 * steps + 4
    blocks = rows * runner.kv.geometry.blocks_for(context + spare)
    if rows > config.engine.max_rows or blocks > 0.9 * len(runner.kv.blocks):
        return None
    if context + spare > runner.geometry.max_positions:
        return None
    engine = InProcessEngine(config, runner)
    draw = random.Random(rows)
    vocabulary = runner.geometry.vocab_size
    for index in range(rows):
        engine.submit(str(index), [draw.randrange(vocabulary) for _ in range(context)], spare + 2)
    sampled: Counter[str] = Counter()
    while len(sampled) < rows:
        sampled.update(sequence.request_id for sequence in engine.step())
    engine.step()
    targets = [
        *engine_targets(),
        *in_process.machine_targets(),
        Target(BatchBuilder, "build", "build"),
        Target(InProcessEngine, "step", "glue"),
    ]
    plain_s, parts = [], list[dict[StepPart, float]]()
    for _ in range(steps):
        begin_s = time.perf_counter()
        engine.step()
        plain_s.append(time.perf_counter() - begin_s)
        clock = StepClock()
        with runner.one_by_one(), clocked(clock, targets):
            engine.step()
        parts.append(dict(clock.seconds))
    whole_s = [sum(each.values()) for each in parts]

    def share_outside(inside: frozenset[StepPart]) -> float:
        shares = [
            1 - sum(each.get(part, 0.0) for part in inside) / whole for each, whole in zip(parts, whole_s, strict=True)
        ]
        return median(shares)

    return StepShares(
        rows=rows,
        context=context,
        steps=steps,
        step_s=median(plain_s),
        clocked_s=median(whole_s),
        parts_s={part: median(each.get(part, 0.0) for each in parts) for part in PARTS},
        outside_kernels=share_outside(frozenset(KERNEL_PARTS)),
        outside_execute=share_outside(frozenset(PARTS) - _OUTSIDE_EXECUTE),
    )


def available_bytes() -> int:
    """Return the memory of this host that a process can still have; 0 where /proc does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def machine(threads: int, dtype: str, load_before: float) -> Machine:
    name, flags = _processor()
    return Machine(
        processor=name,
        features=[feature for feature in _FEATURES if feature in flags],
        cores=usable_cores(),
        threads=threads,
        dtype=dtype,
        kernels=native.implementation(),
        cohort=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        load_1m=[load_before, os.getloadavg()[0]],
    )


def _processor() -> tuple[str, set[str]]:
    """Return name and instruction sets of the first core."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip().lower() in ("flags", "features"):
                    flags = set(value.split())
                elif not line.strip():
                    break
    except OSError:
        pass
    return name, flags


def main() -> int:
    try:
        _write(**json.loads(sys.argv[1]))
    except CohortError as error:
        sys.stderr.write(f"cohort bench: {error}\n")
        return 2
    return 0


def _write(config: str, threads: int, output: str, sections: list[Section], quick: bool) -> None:
    """Measure under this configuration file, and write the report."""
    report = measure(load_config([Path(config)]), threads, QUICK if quick else Scale(), frozenset(sections))
    Path(output).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    sys.exit(main())
