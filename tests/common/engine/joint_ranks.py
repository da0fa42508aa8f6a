"""A group of ranks within the test's process: what they compute without what they are started and connected by.

Every rank has its share of the model, a cache and a thread; one thread runs at a time, until it has something to
exchange. So whatever a test has put in the place of a kernel serves all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.model_files import Loading
from cohort.common.engine.models.model_forms import load_model
from cohort.common.engine.models.step_inputs import Model, StepInputs
from cohort.common.engine.ranks.ranks import RankComm, RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from tests.engine_models import make_runner

_CPU = torch.device("cpu")
_TIMEOUT_S = 60.0


class _Meeting:
    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=_TIMEOUT_S)
        self.turn = threading.Lock()
        self.parts: list[Tensor] = [torch.empty(0)] * degree


class _Rank(RankComm):
    def __init__(self, meeting: _Meeting, geometry: ModelGeometry, rank: int, degree: int) -> None:
        super().__init__(RankSettings(rank, degree, "", lambda: None), geometry, _CPU)
        self._meeting = meeting

    def _all_gather(self, part: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.parts[self.share.rank] = part.clone()
        meeting.turn.release()
        try:
            meeting.barrier.wait()
            everywhere = torch.stack(meeting.parts)
            meeting.barrier.wait()  # before another's next part takes the place of this one
        finally:
            meeting.turn.acquire()
        return everywhere

    def gather_logits(self, part: Tensor) -> Tensor:
        sent = part.new_zeros((len(part), self.share.vocabulary_part))
        sent[:, : part.shape[1]] = part
        return torch.cat(list(self._all_gather(sent)), dim=1)[:, : self.share.geometry.vocab_size]


class JointRanks:
    """All ranks as one `step_inputs.Model`."""

    sampled_states: Tensor | None = None

    def __init__(self, runner: ModelRunner, folder: Path, degree: int) -> None:
        self._meeting = _Meeting(degree)
        self.caches: list[Tensor] = []
        """Of every rank, from the first step on."""
        self.ranks = [_Rank(self._meeting, runner.geometry, rank, degree) for rank in range(degree)]
        loads = [
            Loading(
                folder,
                runner.geometry,
                device=_CPU,
                dtype=getattr(torch, runner.dtype),
                max_rows=runner.max_rows,
                max_step_tokens=runner.max_step_tokens,
                ranks=rank,
            )
            for rank in self.ranks
        ]
        self._models: Sequence[Model] = [load_model(load) for load in loads]
        self._threads = ThreadPoolExecutor(degree)

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """Not into `kv`, but as it is, with each rank's KV heads."""
        if not self.caches:
            first, behind = kv.shape[:3], kv.shape[4:]
            self.caches = [kv.new_zeros((*first, rank.share.own.num_kv_heads, *behind)) for rank in self.ranks]
        pairs = zip(self._models, self.caches, strict=True)
        running = [self._threads.submit(self._forward, model, step, cache) for model, cache in pairs]
        logits, *_ = [each.result(_TIMEOUT_S) for each in running]
        return logits

    def _forward(self, model: Model, step: StepInputs, kv: Tensor) -> Tensor:
        with self._meeting.turn, torch.inference_mode():
            try:
                return model.forward(step, kv)
            except BaseException:
                self._meeting.barrier.abort()
                raise


def joint_runner(folder: Path, degree: int, **options: Any) -> tuple[ModelRunner, JointRanks]:
    """Like `make_runner`; blocks cannot be copied."""
    runner = make_runner(folder, **options)
    joint = JointRanks(runner, folder, degree)
    runner._model = joint
    return runner, joint
