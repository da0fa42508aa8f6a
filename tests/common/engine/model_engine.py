"""A virtual cluster whose workers compute a real model: every token that its machines deliver is the model's own.

Workers have a cache each; plans, copies and runs of blocks between them are performed on tensors, in virtual time, by
a live worker's code. Steps planned ahead take their tokens from the step before, as on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from cohort.common.engine.cache.kv_copies import KvCopier
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Sampled
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.sequence import Row
from cohort.common.sequence import Sequence as Running
from cohort.common.types import Attempt
from cohort.common.virtual_cluster.plugins import Flight, WorkerNode
from tests.common.engine.driver import NEAR_TIE, Expected
from tests.common.machines.digest_engine import BLOCK, STOP_TOKEN, Begun, DigestEngine
from tests.common.machines.world import World
from tests.engine_models import make_runner

_GARBAGE = 77


class ModelMemory:
    """One worker's cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = self.device = runner
        self._copier = KvCopier(runner.kv)

    def move(self, copy: KvCopy) -> None:
        with self._copier.around([replace(copy, concurrent=False)]):
            pass


class ModelEngine(DigestEngine):
    def __init__(self, world: World, folder: Path, expected: Mapping[str, Expected], acceptance: float) -> None:
        """`expected` by request; a drafted token is the right one with the chance `acceptance`."""
        super().__init__(world.cluster, Random(1), 1, 1, acceptance=acceptance)
        self._folder, self._expected = folder, expected
        self._caches: dict[WorkerNode, ModelMemory] = {}
        self._builders: dict[WorkerNode, BatchBuilder] = {}
        self._built: dict[Begun, tuple[StepBatch, list[Running], list[Running]]] = {}

    def memory(self, node: WorkerNode) -> ModelMemory:  # type: ignore[override]
        if node not in self._caches:
            kv = node.worker.kv
            runner = make_runner(
                self._folder,
                block_size=BLOCK,
                num_blocks=kv.total_blocks,
                host_blocks=kv.host_blocks,
                grouped=kv.geometry.num_groups > 1,
            )
            assert runner.kv.geometry.windows == kv.geometry.windows
            runner.kv.blocks.fill_(float(_GARBAGE))
            self._caches[node] = ModelMemory(runner)
        return self._caches[node]

    def begin(self, node: WorkerNode, step: StartStep) -> None:
        device = self._devices.get(node)
        before = device.steps[-1] if device is not None and device.steps else None
        super().begin(node, step)
        begun = self._devices[node].steps[-1]
        builder = self._builders.setdefault(node, BatchBuilder(node.worker.kv))
        behind = self._built[before][1] if step.ahead and before is not None else []
        proposals = [begun.drafts.get(row.sequence.key, []) for row in step.plan.rows] if begun.drafts else None
        batch, sampled = builder.build(step.plan, behind if step.ahead else None, proposals)
        batch.check()
        self._built[begun] = batch, sampled, list(behind)

    def died(self, node: WorkerNode) -> None:
        super().died(node)
        self._caches.pop(node, None)

    def copy(self, flight: Flight) -> None:
        assert flight.sender is not None and flight.receiver is not None
        source, target = (self.memory(node).runner.kv for node in (flight.sender, flight.receiver))
        for sent, posted in zip(flight.sent, flight.posted, strict=True):
            view = source.run_view(sent.source, sent.num_blocks, host=flight.from_host)
            target.run_view(posted.target, posted.num_blocks).copy_(view)

    def corrupt(self, flight: Flight) -> None:
        assert flight.receiver is not None
        for run in flight.posted:
            self.memory(flight.receiver).runner.kv.run_view(run.target, run.num_blocks).fill_(_GARBAGE)

    def _drafts(self, row: Row) -> list[int]:
        guesses, known = self._guesses, len(row.sequence.tokens)
        one = self._expected[row.sequence.request.request_id]
        right = [*one.prompt, *one.tokens][known : known + guesses.choice([0, row.drafts])]
        return [token if guesses.random() < self._acceptance else token + 1 for token in right]

    def _rows(  # type: ignore[override]
        self, node: WorkerNode, begun: Begun, runner: ModelRunner, before: dict[Attempt, int]
    ) -> tuple[list[Sampled], list[Attempt]]:
        batch, sequences, behind = self._built.pop(begun)
        if batch.token_source is not None:
            batch = batch.after(np.array([before[each.key] for each in behind], dtype=np.int64))
        output = runner.execute(replace(batch, sampling=(GREEDY,) * len(batch.sampling)))
        tokens, counts = iter(output.tokens.tolist()), output.counts or (1,) * len(sequences)
        return [
            Sampled(each.key, next(tokens)) for each, count in zip(sequences, counts, strict=True) for _ in range(count)
        ], []


def check_answers(world: World, expected: Mapping[str, Expected]) -> None:
    """Each is transformers' up to the stop token; of all at most one leaves it, at a near-tie."""
    ties = 0
    for name, one in expected.items():
        found = world.owned[name].tokens[len(one.prompt) :]
        wanted = until_stop(one.tokens)
        parted = next((index for index, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), None)  # noqa: B905
        if parted is not None:
            assert one.margins[parted] < NEAR_TIE, f"{name}: token {parted} is {found[parted]}, not {wanted[parted]}"
            ties += 1
        else:
            assert found == wanted, name
    assert ties <= 1


def until_stop(tokens: Sequence[int]) -> list[int]:
    end = tokens.index(STOP_TOKEN) + 1 if STOP_TOKEN in tokens else len(tokens)
    return list(tokens[:end])
