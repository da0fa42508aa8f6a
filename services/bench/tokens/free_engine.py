"""An engine that costs nothing: every step lasts a given time, without work, and samples tokens of a fixed list.

For `cohort bench token-cost` alone, which measures what is around an engine. The worker loop takes it for a
`ModelRunner`; it has neither weights nor a model's cache, and its blocks are a few bytes each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.models.lora import LoraStore
from cohort.common.engine.runner.model_runner import Done, ModelRunner
from cohort.common.engine.step.batch import StepBatch, StepOutput
from cohort.common.types import KvGeometry

_ONE_BYTE_PER_TOKEN = (1, 1, 1, 1)
"""Layers, KV heads, head dimension, bytes of a number: K and V are two of them."""


class FreeEngine(ModelRunner):
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
        self.memory_retries = 0
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
        """On the engine thread. Sleeping takes no processor time, and leaves the interpreter to the event loop."""
        time.sleep(self._step_s)
        sampled = self._tokens[batch.context_lens[batch.sample_rows] % len(self._tokens)]
        return Done(StepOutput(sampled, (None,) * len(sampled)))
