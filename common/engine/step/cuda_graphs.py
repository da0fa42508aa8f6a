"""Records steps as CUDA graphs: one launch replays the some three hundred kernels of a step.

Called at start through `recorded_steps`. The thin part that only a GPU can prove. A step is run twice as it is before
it is captured: kernels are compiled, libraries make their workspaces and NCCL its connections then, which a capture
would not allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cohort.common.engine.step.recorded_steps import Recorded, StepResult

_WARM_UPS = 2
_DRIVER_BYTES = 16 << 20
"""Bytes that the driver may use for a graph of some hundred kernels, in addition to the pool. Not measured: the
device's free memory changes with the other processes on it."""


class CudaGraphRecorder:
    """Recorder of steps as CUDA graphs: one launch replays the some three hundred kernels of a step. All graphs draw on
    one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        """`stream`: the torch stream on which steps are replayed."""
        self._device = device
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], StepResult]) -> Recorded:
        """Record a step; see `recorded_steps.Recorder`."""
        self.warm_up(step)
        return self.capture(step)

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
