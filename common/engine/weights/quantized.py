"""A weight matrix in few bits, as every checkpoint format of it is read: codes, and how codes become numbers.

Made by the readers of checkpoint formats; packed by the quantised products of `linear`. A format's own layout (which
nibble stands where, scales per tensor, channel, group or tile) ends here: what goes on is one row of codes an output.
Computes nothing for a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import CodeLayout
from cohort.common.errors import InvariantViolated

Code = Literal["int8", "uint4", "e4m3"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = scales[o, i // group] · value(codes[o, i]) + offsets[o, i // group].

    codes: "int8" int8 [out, in]; "uint4" uint8 [out, in / 2], input 2j in the low nibble of byte j and 2j + 1 in the
    high one, value 0 to 15; "e4m3" float8_e4m3fn [out, in]. scales, offsets: float32 [out, ceil(in / group)]; a format
    with zero points has offsets -scale · zero, a symmetric one has none.
    """

    code: Code
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    """Inputs that share a scale; a whole row's scale has the number of inputs here."""

    def __post_init__(self) -> None:
        """Raise `InvariantViolated` where the parts do not fit one another."""
        outputs, inputs = self.shape
        if self.group < 1 or self.scales.shape != (outputs, -(-inputs // self.group)):
            raise InvariantViolated(f"scales {tuple(self.scales.shape)} for {self.shape} in groups of {self.group}")
        if self.offsets is not None and self.offsets.shape != self.scales.shape:
            raise InvariantViolated(f"offsets {tuple(self.offsets.shape)} beside scales {tuple(self.scales.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        outputs, stored = self.codes.shape
        return outputs, stored * 2 if self.code == "uint4" else stored

    @property
    def layout(self) -> CodeLayout:
        bits = 4 if self.code == "uint4" else 8
        return CodeLayout(bits, self.code == "e4m3", self.group, self.shape[1], self.offsets is not None)

    def on(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on this device; itself where it is there."""
        if self.codes.device == device:
            return self
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets)

    def dequantized(self) -> Tensor:
        """Return the numbers, float32 [out, in]."""
        outputs, inputs = self.shape
        if self.code == "uint4":
            values = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(outputs, inputs).float()
        else:
            values = self.codes.float()
        groups = torch.arange(inputs, device=self.codes.device) // self.group
        values *= self.scales[:, groups]
        return values if self.offsets is None else values + self.offsets[:, groups]


def stacked(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Join weights of the same inputs, code and group, outputs one after the other (a fused projection).

    Raises `InvariantViolated` where they are not of one kind.
    """
    first = parts[0]
    if any((part.code, part.group, part.shape[1]) != (first.code, first.group, first.shape[1]) for part in parts):
        kinds = ", ".join(f"{part.code}/{part.group} of {part.shape[1]}" for part in parts)
        raise InvariantViolated(f"weights of different kinds cannot stand in one product: {kinds}")
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
    return QuantizedWeight(
        first.code,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        offsets,
        first.group,
    )
