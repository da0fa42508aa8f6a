"""The time of an iteration as a live worker has learned it, in the place of the cost model.

`StepTimes` of a worker's reports are the constants of a closed form (`step_cost.py`): no profile, no data sheet and no
model's arithmetic is needed. Called by `foresee.py`, and by whoever simulates a pipeline from what it says of itself.
"""

from __future__ import annotations

from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork
from cohort.common.policies.step_times.step_cost import BatchShape, linear_seconds, step_seconds
from cohort.common.types import KvGeometry, StepTimes

_ENDLESS_BYTES = 1 << 60
"""Memory is what a worker says of its blocks, not what a device has."""
_ANY = 1.0


class LearnedCost(CostModel):
    """Seconds of an iteration by learned constants; copies to host memory by the learned time of a position."""

    def __init__(self, times: StepTimes, model: ModelShape) -> None:
        super().__init__(model, learned_device(), StackShape("learned", 0.0, 0.0, 0.0))
        self._times = times
        self._copied_byte_s = times.copy_s / model.kv_geometry(1).token_bytes

    def step_s(self, work: StepWork) -> float:
        if work.rows == 0:
            return 0.0
        prefill_tokens, prefill_rows = work.tokens - work.decode_rows, work.rows - work.decode_rows
        shape = BatchShape(prefill_tokens, prefill_rows, work.pairs, work.decode_rows, work.decode_context)
        return step_seconds(self._times, shape)

    def repeated_s(self, work: StepWork, steps: int) -> list[float]:
        times, context, rows = self._times, work.decode_context, work.decode_rows
        fixed = times.step_s + times.row_s * work.rows + linear_seconds(times, work.tokens)
        position_s = times.position_s
        return [fixed + position_s * each for each in range(context, context + steps * rows, rows)]

    def swap_s(self, swapped_bytes: int) -> float:
        return swapped_bytes * self._copied_byte_s

    def flops(self, work: StepWork) -> float:
        """Utilisation means nothing without the device's peak."""
        return 0.0


def learned_device() -> DeviceShape:
    """A device of which nothing is known."""
    return DeviceShape("learned", _ANY, _ANY, _ENDLESS_BYTES, _ANY, _ANY, _ANY, 1, _ANY, _ANY, 0.0, _ANY)


def model_of(geometry: KvGeometry, name: str, max_positions: int) -> ModelShape:
    """For the sizes of KV; what else a model's shape says is in the learned times."""
    return ModelShape(
        name,
        geometry.num_layers,
        geometry.head_dim,
        geometry.num_kv_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.head_dim,
        False,
        1,
        True,
        max_positions,
        1,
        geometry.dtype_bytes,
        geometry.window,
    )
