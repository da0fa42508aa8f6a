"""A mixture of experts on a GPU (Mixtral, Qwen, gpt-oss, DeepSeek): routed, sorted and multiplied on the device.

Called by the lean models once per layer and step. Beside `experts` for what differs there: all experts' weights
stand in two tensors, the host never learns how many rows an expert has, and so a recorded step serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ExpertsGeometry, ModelGeometry
from cohort.common.engine.models.experts import (
    PlainSharedExpert,
    Routing,
    SharedExpert,
    read_beside,
    read_device_weights,
    read_expert_codes,
)
from cohort.common.engine.weights.weights import Weights
from cohort.kernels.batch_invariance import in_force
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.experts import add_weighted, expert_outputs
from cohort.kernels.types import ClampedSwiglu, ExpertCodes


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """x ↦ Σ weight · expert(x) over a token's experts, and the shared expert's part where there is one."""

    router: Routing
    gate_up: Tensor | ExpertCodes  # [experts, 2 · inner, hidden]
    down: Tensor | ExpertCodes  # [experts, hidden, inner]
    shared: SharedExpert | PlainSharedExpert | None = None
    biases: tuple[Tensor, Tensor] | None = None  # [experts, 2 · inner], [experts, hidden]
    clamped: ClampedSwiglu | None = None  # the activation, of gates and ups in turn; None = SiLU, gates over ups
    fixed: bool = field(default_factory=in_force)  # tiles do not follow the number of rows

    def __post_init__(self) -> None:
        for weight, gathers in ((self.gate_up, True), (self.down, False)):
            if isinstance(weight, ExpertCodes):
                weight.is_to_be_compiled(
                    gathers=gathers, biased=self.biases is not None, clamped=self.clamped is not None
                )

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """residual [T, hidden] += the mixture of x [T, hidden]; `activated` is not used."""
        chosen, weights = self.router.route(x)
        parts = expert_outputs(x, chosen, self.gate_up, self.down, self.biases, self.clamped, fixed=self.fixed)
        add_weighted(parts, weights, None if self.shared is None else self.shared(x), residual)


def read_device_experts(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> DeviceExperts:
    """A layer's mixture from its tensors, each read straight into its place."""
    gate_up, down = read_device_products(files, prefix, geometry, mixture, dtype, device)
    arena = Arena()  # of products that are packed: none is, on a GPU
    router, shared = read_beside(files, prefix, geometry, mixture, dtype, arena, device)
    return DeviceExperts(router, gate_up, down, shared)


def read_device_products(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor] | tuple[ExpertCodes, ExpertCodes]:
    """The two weights of `DeviceExperts`; codes stay codes where all experts' are kept."""
    if (codes := read_expert_codes(files, prefix, geometry, mixture, dtype, device)) is not None:
        return codes
    return read_device_weights(files, prefix, geometry, mixture, dtype, device)
