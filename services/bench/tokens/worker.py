"""A worker process as any other but for its engine: `python -m cohort.services.bench.tokens.worker`.

Real worker loop, machine, policies and bus over a `FreeEngine`. Started by `measuring.py`, which names the engine's
step time in the environment.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from cohort.common.addresses import MANAGER
from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.models.lora import LoraStore
from cohort.common.engine.runner.model_runner import Done, ModelRunner
from cohort.common.engine.step.batch import StepBatch, StepOutput
from cohort.common.engine.worker.engine_threads import device_of
from cohort.common.engine.worker.learned_state import LearnedState
from cohort.common.engine.worker.worker_loop import WorkerLoop
from cohort.common.engine.worker.worker_process import capacity_of
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.policies import compose
from cohort.common.process import garbage
from cohort.common.process.service import ServiceContext, service_main
from cohort.common.types import KvGeometry
from cohort.services.bench.tokens.measuring import STEP_VARIABLE

CONTEXT_TOKENS = 1 << 21
"""Tokens of the cache; its memory is a few bytes each."""
_SWITCH_INTERVAL_S = 2e-4
"""Interval of every worker: `worker_process.py`."""
_WORDS = 512
_ONE_BYTE_PER_TOKEN = (1, 1, 1, 1)
"""Layers, KV heads, head dimension, bytes of a number: K and V are two of them."""


class FreeEngine(ModelRunner):
    """An engine that costs nothing: every step lasts a given time, without work, and samples tokens of a fixed list. It
    has neither weights nor a model's cache, and its blocks are a few bytes each."""

    def __init__(
        self,
        model_dir: Path,
        *,
        step_s: float,
        tokens: Sequence[int],
        block_size: int,
        num_blocks: int,
        max_rows: int,
        max_step_tokens: int,
    ) -> None:
        """`step_s`: the time of a step, whatever is in it. `tokens`: sampled in turn, by a row's position."""
        compiled_kernels.keep_in_cache()
        self.geometry = read_geometry(model_dir)
        self.device = torch.device("cpu")
        self.dtype = self.kv_dtype = "float32"
        self.batch_invariant = False
        self.ranks = self.followers = self.drafter = None
        self._group = self._places = self._device_steps = self._grammars = self._sampled = None
        self.block_size = block_size
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.oom_retries = 0
        self.lora = LoraStore((), self.geometry, torch.float32, self.device)
        self.kv = KvTensors(
            KvGeometry(*_ONE_BYTE_PER_TOKEN, block_size),
            num_blocks=num_blocks,
            host_blocks=0,
            dtype=torch.uint8,
            device=self.device,
        )
        self._step_s = step_s
        self._tokens = np.asarray(tokens, dtype=np.int64)

    def launch(self, batch: StepBatch) -> Done:
        """Sleep for a step on the engine thread: no processor time, and the event loop has the interpreter."""
        time.sleep(self._step_s)
        sampled = self._tokens[batch.context_lens[batch.sample_rows] % len(self._tokens)]
        return Done(StepOutput(sampled, (None,) * len(sampled)))


async def serve(context: ServiceContext) -> None:
    config = context.config
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    model = Path(config.model.path)
    block_size = config.kv.block_size
    runner = FreeEngine(
        model,
        step_s=float(os.environ[STEP_VARIABLE]),
        tokens=words_of(Tokenizer.from_file(str(model / "tokenizer.json"))),
        block_size=block_size,
        num_blocks=CONTEXT_TOKENS // block_size,
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
    )
    role = config.instance_roles[context.instance]
    capacity = capacity_of(config, role, runner, context.model_name, threads=1, instance=context.instance)
    kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    settings = WorkerSettings.of(config, ())
    setup = WorkerSetup(context.instance, context.incarnation, context.bus.endpoint, MANAGER, capacity, settings)
    machine = WorkerMachine(setup, compose.iteration(config), kv, random.Random(0))
    learned: LearnedState | None = None  # what such an engine teaches is of use to no other
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine:
        loop = WorkerLoop(context, device_of(runner), {}, machine, machine, learned, engine)
        garbage.freeze_heap()
        await loop.run()


def words_of(tokenizer: Tokenizer) -> list[int]:
    """Return ids of tokens that are words of ASCII, after a space or not: each becomes text of its own at once."""
    special = set(tokenizer.get_added_tokens_decoder())
    found = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id]).strip() if token_id not in special else ""
        if text.isascii() and text.isalpha():
            found.append(token_id)
        if len(found) == _WORDS:
            break
    return found


if __name__ == "__main__":
    service_main("decode_worker", serve)
