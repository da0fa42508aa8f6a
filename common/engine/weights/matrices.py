"""The weight matrices of a model, plain or in codes, as `linear` takes them.

Called by the lean models for every projection and table. What a checkpoint holds in codes stays codes where this
device multiplies them; plain weights become codes where `model.quantization` asks for it: rounded to nearest, group
by group, from the numbers the model would have computed with. Never reads a file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import Rounding as Rounding
from cohort.common.engine.config.quantization_config import keeps_codes
from cohort.common.engine.weights.linear import Matrix, packs_codes
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.quantized_formats import StoredWeight, dequantize_into
from cohort.common.engine.weights.weight_reader import place
from cohort.common.engine.weights.weights import Weights
from cohort.kernels.cpu import native

GROUP = 32
"""Inputs that share a scale in weights that are rounded at load."""


@runtime_checkable
class CodedWeights(Protocol):
    """Weights of which some are codes."""

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> StoredWeight | None:
        """Read the codes of a matrix; None where it is plain."""


def matrix(
    files: Weights, names: Sequence[str], rows: Sequence[int], inputs: int, dtype: torch.dtype, device: torch.device
) -> Matrix:
    """Read a projection's weight, several modules' outputs one after the other: codes where all of them are kept
    (`keeps_codes`), else a tensor of `dtype`. On a processor nothing is read twice."""
    number, checkpoint = str(dtype).removeprefix("torch."), isinstance(files, QuantizedFiles)
    if (
        not isinstance(files, CodedWeights)
        or not keeps_codes(device.type, number, checkpoint=checkpoint)
        or (device.type == "cpu" and native.operators() is None)
    ):
        return files.read_rows(names, rows, (inputs,), dtype, device)
    parts = [files.read_quantized(name, outputs, inputs, device) for name, outputs in zip(names, rows, strict=True)]
    coded = [
        placed
        for part in parts
        if isinstance(part, QuantizedWeight)
        and keeps_codes(device.type, number, part.layout, checkpoint=checkpoint)
        and packs_codes(placed := part.on(device))
    ]
    if len(coded) == len(parts):
        return coded
    if device.type != "cpu":  # by way of staging memory
        return files.read_rows(names, rows, (inputs,), dtype, device)
    return _numbers(files, parts, names, rows, inputs, dtype, device)


def _numbers(
    files: Weights,
    parts: list[StoredWeight | None],
    names: Sequence[str],
    rows: Sequence[int],
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the parts as numbers of `dtype` [sum of rows, inputs]; plain ones, which are None, are read now."""
    if all(part is None for part in parts):
        return files.read_rows(names, rows, (inputs,), dtype, device)
    whole, first = place((sum(rows), inputs), dtype, device), 0
    for index, (name, count) in enumerate(zip(names, rows, strict=True)):
        part, target = parts[index], whole[first : first + count]
        if part is None:
            target.copy_(files.read(name, (count, inputs), dtype, device))
        else:
            dequantize_into(part, target)
            parts[index] = None  # its memory goes before the next part is widened
        first += count
    return whole


class RoundedWeights:
    """`Weights` of which every matrix comes in codes: round-to-nearest of plain weights.

    int8: symmetric, scale |w|max / 127. int4: 16 levels between a group's least and largest weight; embedding and
    output matrix in 8 bits. Vectors, and matrices with an odd number of inputs in 4 bits, stay plain.
    """

    def __init__(self, files: Weights, rounding: Rounding, dtype: torch.dtype) -> None:
        """`dtype`: the model's, which weights are rounded to first."""
        self._files, self._rounding, self._dtype = files, rounding, dtype

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._files.__exit__(kind, *error)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        return self._files.prefix(candidates, probe)

    def require(self, names: Iterable[str]) -> None:
        self._files.require(names)

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._files.read(name, shape, dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self._files.read_rows(names, rows, rest, dtype, device)

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> QuantizedWeight | None:
        """Read one matrix, rounded."""
        outer = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if self._rounding == "int4" and not outer and inputs % 2:
            return None
        weight = self._files.read(name, (outputs, inputs), self._dtype, device)
        return rounded(weight, "int8" if outer else self._rounding)


def rounded(weight: Tensor, rounding: Rounding) -> QuantizedWeight:
    """Round weight [out, in] to codes with scales (int4: and offsets) of groups of `GROUP` inputs. A weight moves by at
    most half a scale, and a scale's rounding to float16. Raises `ValueError` for 4 bits of an odd number of inputs."""
    outputs, inputs = weight.shape
    if rounding == "int4" and inputs % 2:
        raise ValueError(f"codes of 4 bits come in pairs, and there are {inputs} inputs")
    groups = -(-inputs // GROUP)
    device = weight.device
    codes = torch.empty((outputs, inputs), dtype=torch.int8 if rounding == "int8" else torch.uint8, device=device)
    scales, offsets = (torch.empty((outputs, groups), device=device) for _ in range(2))
    for first in range(0, outputs, step := max(1, (1 << 22) // inputs)):  # float32 copies stay small
        part = slice(first, first + step)
        padding = groups * GROUP - inputs  # repeats the last input, so that no group's range changes
        wide = torch.nn.functional.pad(weight[None, part].float(), (0, padding), mode="replicate")[0]
        wide = wide.view(-1, groups, GROUP)
        if rounding == "int8":
            scales[part] = wide.abs().amax(dim=2) / 127
            low: Tensor | float = 0.0
            least, most = -127, 127
        else:
            low, high = wide.amin(dim=2), wide.amax(dim=2)
            scales[part], offsets[part] = (high - low) / 15, low
            low = low[:, :, None]
            least, most = 0, 15
        steps = scales[part, :, None].clamp(min=torch.finfo(torch.float32).tiny)
        code = ((wide - low) / steps).round_().clamp_(least, most)
        codes[part] = code.view(len(wide), -1)[:, :inputs].to(codes.dtype)
    if rounding == "int8":
        return QuantizedWeight("int8", codes, scales, None, GROUP)
    return QuantizedWeight("uint4", codes[:, 0::2] | (codes[:, 1::2] << 4), scales, offsets, GROUP)
