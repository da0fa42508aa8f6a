"""What the engine's tests drive a model runner with: tiny random models, a minimal scheduler, and the comparison.

`Driver` gives each request blocks in an order and direction of its own choosing and runs the steps a test spells out.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepBatch, StepOutput
from cohort.common.paths import cache_dir
from tests.engine_models import BLOCK_SIZE, VOCAB, make_runner, save_random_model

__all__ = ["BLOCK_SIZE", "VOCAB", "make_runner", "save_random_model"]

NEAR_TIE = 1e-3


def compile_grammars(runner: ModelRunner, *texts: str) -> None:
    """Compile these before a test's first step, which does not wait for them."""
    runner.use_grammars()
    assert runner._grammars is not None
    for text in texts:
        runner._grammars._begin(text).exception()


def refusing(run: Callable[..., Any], most_rows: int) -> Callable[[Any], Any]:
    """`run` on a device without the memory for more rows than that."""

    def within_memory(batch: Any, *more: Any) -> Any:
        if batch.num_rows > most_rows:
            raise torch.OutOfMemoryError("no room")
        return run(batch, *more)

    return within_memory


@dataclass(slots=True)
class DrivenRequest:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    more: list[list[int]] = field(default_factory=list)
    """The tables of the groups of layers after the first."""
    directions: list[int] = field(default_factory=list)
    computed: int = 0
    sampling: SamplingRow = GREEDY
    adapter: str = ""


class Driver:
    """A worker's bookkeeping, reduced to what a forward needs."""

    def __init__(self, runner: ModelRunner, *, shuffle: int | None = None, reverse: bool = False) -> None:
        """`shuffle`: seed of a random block order; `reverse`: blocks alternate between the two directions."""
        self.runner = runner
        self.requests: dict[str, DrivenRequest] = {}
        self._free = list(range(len(runner.kv.blocks)))
        self._reverse = reverse
        self._taken = 0
        if shuffle is not None:
            random.Random(shuffle).shuffle(self._free)

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingRow = GREEDY, adapter: str = "") -> None:
        more: list[list[int]] = [[] for _ in range(self.runner.kv.geometry.num_groups - 1)]
        self.requests[name] = DrivenRequest(list(prompt), more=more, sampling=sampling, adapter=adapter)

    def slot(self, request: DrivenRequest, position: int) -> int:
        size = self.runner.block_size
        block, offset = divmod(position, size)
        while block >= len(request.blocks):
            for table in (request.blocks, *request.more):
                table.append(self._free.pop())
            request.directions.append(self._taken % 2 if self._reverse else 0)
            self._taken += 1
        if request.directions[block]:
            offset = size - 1 - offset
        return request.blocks[block] * size + offset

    def batch(self, plan: Sequence[tuple[str, int]]) -> StepBatch:
        """The batch that computes the next `count` tokens of each named request, prefill rows first."""
        plan = sorted(plan, key=lambda entry: entry[1] == 1)
        tokens, positions, slots, starts, sampled, sampling = [], [], [], [0], [], []
        for row, (name, count) in enumerate(plan):
            request = self.requests[name]
            span = range(request.computed, request.computed + count)
            tokens += [request.tokens[p] for p in span]
            positions += list(span)
            slots += [self.slot(request, p) for p in span]
            starts.append(len(tokens))
            if span.stop == len(request.tokens):
                sampled.append(row)
                sampling.append(request.sampling)
        requests = [self.requests[name] for name, _ in plan]
        width = max(len(request.blocks) for request in requests)
        tables = np.zeros((len(plan), width), dtype=np.int32)
        directions = np.zeros((len(plan), width), dtype=np.uint8)
        for row, request in enumerate(requests):
            tables[row, : len(request.blocks)] = request.blocks
            directions[row, : len(request.blocks)] = request.directions
        others = range(len(requests[0].more))
        size, rows = self.runner.block_size, np.repeat(np.arange(len(plan)), np.diff(starts))
        more_tables = np.zeros((len(others), len(plan), width), dtype=np.int32)
        for row, request in enumerate(requests):
            for group, table in enumerate(request.more):
                more_tables[group, row, : len(table)] = table
        more_slots = more_tables[:, rows, np.array(positions) // size].astype(np.int64) * size + np.array(slots) % size
        adapters = tuple(request.adapter for request in requests)
        batch = StepBatch(
            token_ids=np.array(tokens, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            query_start=np.array(starts, dtype=np.int32),
            context_lens=np.array([self.requests[name].computed + count for name, count in plan], dtype=np.int32),
            block_tables=tables,
            directions=directions if self._reverse else None,
            slot_mapping=np.array(slots, dtype=np.int64),
            sample_rows=np.array(sampled, dtype=np.int32),
            sampling=tuple(sampling),
            adapters=adapters if any(adapters) else (),
            more_tables=more_tables if others else None,
            more_slots=more_slots if others else None,
        )
        batch.check()
        return batch

    def step(self, plan: Sequence[tuple[str, int]]) -> StepOutput:
        """Run one step and append the sampled tokens."""
        plan = sorted(plan, key=lambda entry: entry[1] == 1)
        batch = self.batch(plan)
        output = self.runner.execute(batch)
        for name, count in plan:
            self.requests[name].computed += count
        for row, token in zip(batch.sample_rows.tolist(), output.tokens.tolist(), strict=True):
            self.requests[plan[row][0]].tokens.append(token)
        return output

    def remaining(self, name: str) -> int:
        request = self.requests[name]
        return len(request.tokens) - request.computed


Schedule = Callable[[Driver, Sequence[str], int], None]


def run_one_by_one(driver: Driver, names: Sequence[str], outputs: int) -> None:
    """Each request alone: its prompt in one go, then one token per step."""
    for name in names:
        for _ in range(outputs):
            driver.step([(name, driver.remaining(name))])


def run_together(driver: Driver, names: Sequence[str], outputs: int) -> None:
    """All prompts in one step, then all decode together."""
    for _ in range(outputs):
        driver.step([(name, driver.remaining(name)) for name in names])


def run_chunked(chunk: int) -> Schedule:
    """Prompts in chunks, one request joining after the other, while those before it decode."""

    def run(driver: Driver, names: Sequence[str], outputs: int) -> None:
        prompt = {name: len(driver.requests[name].tokens) for name in names}
        waiting, running = list(names), list[str]()
        while waiting or running:
            if waiting and (not running or driver.remaining(running[-1]) == 1):
                running.append(waiting.pop(0))
            driver.step([(name, min(chunk, driver.remaining(name))) for name in running])
            running = [name for name in running if len(driver.requests[name].tokens) < prompt[name] + outputs]

    return run


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers generates: the tokens, and at each the distance of the two best logits."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


def reference_generate(folder: Path, prompts: Iterable[Sequence[int]], outputs: int) -> list[Expected]:
    """Computed once per checkout: kept in pytest's cache folder under a key of everything it depends on."""
    asked = [list(prompt) for prompt in prompts]
    key = hashlib.sha256(repr(("by length", torch.__version__, transformers.__version__, asked, outputs)).encode())
    for file in sorted(folder.glob("*.*")):
        key.update(file.read_bytes())
    kept = Path(os.environ.get("COHORT_TEST_GOLDENS") or cache_dir() / "goldens") / f"{key.hexdigest()[:24]}.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(_generate(folder, asked, outputs)))
        fresh.replace(kept)
    return msgspec.json.decode(kept.read_bytes(), type=list[Expected])


def _generate(folder: Path, prompts: list[list[int]], outputs: int) -> list[Expected]:
    from tests.e2e.equality.golden import compute  # whose imports take a second

    goldens = compute(folder, prompts, outputs, attention="eager")
    return [Expected(list(golden.prompt), list(golden.output), list(golden.gaps)) for golden in goldens]


def count_near_ties(expected: Expected, tokens: Sequence[int], near_tie: float = NEAR_TIE) -> int:
    """0 when equal, 1 when the first difference is at a near-tie of the reference; anything else fails the test."""
    assert len(tokens) == len(expected.tokens)
    for position, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if ours != theirs:
            margin = expected.margins[position]
            assert margin < near_tie, (
                f"token {position} of the answer is {ours}, transformers says {theirs} by {margin:.4f}; "
                f"prompt of {len(expected.prompt)}"
            )
            return 1
    return 0


def check_schedule(runner: ModelRunner, expected: Sequence[Expected], schedule: Schedule, **driver_options: Any) -> int:
    """Run all prompts under a schedule and compare; the number of answers that left the reference at a near-tie."""
    driver = Driver(runner, **driver_options)
    names = [f"r{index}" for index in range(len(expected))]
    for name, one in zip(names, expected, strict=True):
        driver.add(name, one.prompt)
    schedule(driver, names, len(expected[0].tokens))
    return sum(
        count_near_ties(one, driver.requests[name].tokens[len(one.prompt) :])
        for name, one in zip(names, expected, strict=True)
    )


def sampled_states(runner: ModelRunner) -> torch.Tensor:
    """The last step's final states [sampled, hidden], as drafts by a head go on from them."""
    steps = runner._device_steps
    states = runner._model.sampled_states if steps is None else steps.sampled_states()
    assert states is not None
    return states


def random_prompts(lengths: Iterable[int], *, seed: int = 1, vocab: int = VOCAB) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, vocab) for _ in range(length)] for length in lengths]
