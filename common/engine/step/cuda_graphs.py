"""Steps recorded as CUDA graphs: the thin part that only a GPU can prove. Called at start through `recorded_steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cohort.common.engine.step.recorded_steps import PlainRecorder, Recorded, StepResult

_WARM_UPS = 2
_DRIVER_BYTES = 16 << 20
"""Bytes that the driver may use for a graph of some hundred kernels, in addition to the pool. Not measured: the
device's free memory changes with the other processes on it."""


class CudaGraphRecorder(PlainRecorder):
    """Recorder of steps as CUDA graphs, some 300 kernels each. All draw on one memory pool: only one runs at a time."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], StepResult]) -> None:
        """Run the step twice; see `group_steps.TwoPhases`. Kernels are compiled, libraries make their workspaces and
        NCCL its connections then, which a capture would not allow."""
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                step()
        self._stream.synchronize()

    def capture(self, step: Callable[[], StepResult]) -> Recorded:
        """Capture the step; see `group_steps.TwoPhases`. An exchange is only recorded, whatever the other ranks do."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph: Any = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        # thread_local: the transfer links' threads may use the device meanwhile, and NCCL's watchdog does
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()
        torch.cuda.synchronize(self._device)
        cost = torch.cuda.memory_reserved(self._device) - before + _DRIVER_BYTES

        def replay() -> StepResult:
            graph.replay()
            return output

        return Recorded(replay, max(0, cost))
