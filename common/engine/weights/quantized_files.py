"""The weights of a quantised checkpoint by name, for models that ask for them as if they were plain.

Opened by `weights.open_weights` where config.json says that the checkpoint is quantised. A module's weight is what its
parts say (codes, scales, zeros); a module that the configuration excludes, or that is stored plain, stays plain. What
is missing or has another shape is named. `matrix` decides what a product is made of. Which layout means what:
`quantized_formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import Quantization, WeightScheme
from cohort.common.engine.weights.quantized_formats import StoredWeight, awq, dequantize_into, gptq, packed, scaled
from cohort.common.engine.weights.weight_reader import place
from cohort.common.errors import ModelError

if TYPE_CHECKING:
    from cohort.common.engine.weights.weight_files import WeightFiles

_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAIN = {"scaled": "weight", "packed": "weight_packed", "awq": "qweight", "gptq": "qweight"}


class QuantizedFiles:
    """`Weights` over the files of a quantised checkpoint."""

    def __init__(self, files: WeightFiles, quantization: Quantization) -> None:
        self._files, self._quantization = files, quantization

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._files.__exit__(kind, *error)

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._scheme(name) is not None

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        return self._files.prefix(candidates, probe)

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once; of a quantised module each part that it needs."""
        needed: list[str] = []
        for name in names:
            scheme = self._scheme(name)
            needed += [name] if scheme is None else self._parts(_module(name), scheme)
        self._files.require(needed)

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.read_rows([name], [shape[0]], shape[1:], dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Read several tensors stacked; those of quantised modules dequantised to `dtype`, a few rows at a time."""
        self.require(names)
        if all(self._scheme(name) is None for name in names):
            for name in names:
                self._check_plain(name)
            return self._files.read_rows(names, rows, rest, dtype, device)
        fused = place((sum(rows), *rest), dtype, device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            target = fused[first : first + count]
            weight = self.read_quantized(name, count, rest[0], device)
            if weight is not None:
                dequantize_into(weight, target)
            else:
                self._check_plain(name)
                target.copy_(self.part(name, (count, *rest), None, device))
            first += count
        return fused

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> StoredWeight | None:
        """Read the weight `name` in its codes; None where it is plain. Raises `ModelError` naming the part that is
        missing or has another shape or dtype than the configuration says."""
        scheme = self._scheme(name)
        if scheme is None:
            return None
        self.require([name])
        module = _module(name)
        try:
            return _PartsReader(self, module, outputs, inputs, scheme, device).read()
        except ModelError as error:
            raise error if module in str(error) else ModelError(f"{module}: {error}") from error

    def part(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Read a tensor as it is stored, there on return. `shape` and `dtype`: what it must have; None = as it is."""
        stored = self._files.stored(name)
        stored.check()
        if dtype is not None and stored.dtype != dtype:
            raise ModelError(f"{self._files.where(name)}: tensor {name} has {stored.dtype}, its format needs {dtype}")
        if shape is not None:
            self._files.check_shape(name, shape)
        return self._files.read_stored(name, device)

    def has(self, name: str) -> bool:
        return name in self._files

    def _scheme(self, name: str) -> WeightScheme | None:
        """Return how the weight `name` is stored; None where it is no weight, or plain."""
        if not name.endswith(".weight"):
            return None
        module = _module(name)
        scheme = self._quantization.scheme_of(module)
        if scheme is None:
            return None
        if name not in self._files:  # its codes have another name; or nothing is there, which `require` tells
            # Scales without codes: a damaged module, not a plain one.
            parts = (_MAIN[scheme.layout], "scales", "weight_scale", "weight_scale_inv")
            return scheme if any(f"{module}.{part}" in self._files for part in parts) else None
        return scheme if scheme.layout == "scaled" and self._files.stored(name).dtype not in _PLAIN else None

    def _parts(self, module: str, scheme: WeightScheme) -> list[str]:
        match scheme.layout:
            case "scaled":
                parts = ["weight", self.scales_of(module)]
            case "packed":
                parts = ["weight_packed", "weight_scale"]
            case "awq" | "gptq":
                parts = ["qweight", "qzeros", "scales"]
        if scheme.layout in ("scaled", "packed") and not scheme.symmetric:
            parts.append("weight_zero_point")
        return [f"{module}.{part}" for part in parts]

    def scales_of(self, module: str) -> str:
        """Return the name of a module's scales. DeepSeek's tells how they came about; they multiply as others do."""
        blocks = self._quantization.method == "fp8" and any(s.block for s in self._quantization.schemes)
        inverse = f"{module}.weight_scale_inv" in self._files
        inverse = inverse or (blocks and f"{module}.weight_scale" not in self._files)
        return "weight_scale_inv" if inverse else "weight_scale"

    def _check_plain(self, name: str) -> None:
        """Raise `ModelError` for codes without a scheme, which would be read as if they were the weights."""
        stored = self._files.stored(name)
        if stored.dtype in _PLAIN:
            return
        raise ModelError(
            f"{self._files.where(name)}: tensor {name} has {stored.dtype} without a layout that is served: config.json "
            f"excludes {_module(name)} from quantisation, or its codes stand in no module of their own"
        )


class _PartsReader:
    """One module's parts, checked and put together."""

    def __init__(
        self, files: QuantizedFiles, module: str, outputs: int, inputs: int, scheme: WeightScheme, device: torch.device
    ) -> None:
        self._files, self._module, self._device = files, module, device
        self._outputs, self._inputs, self._scheme = outputs, inputs, scheme
        self._per_word = 32 // scheme.bits
        self._groups = -(-inputs // scheme.group) if scheme.group else 1

    def read(self) -> StoredWeight:
        match self._scheme.layout:
            case "scaled":
                return self._scaled()
            case "packed":
                return self._packed()
            case "awq":
                return self._awq()
            case "gptq":
                return self._gptq()

    def _scaled(self) -> StoredWeight:
        code = torch.float8_e4m3fn if self._scheme.floating else torch.int8
        codes = self._part("weight", (self._outputs, self._inputs), code)
        zeros = None if self._scheme.symmetric else self._part("weight_zero_point")
        return scaled(codes, self._part(self._files.scales_of(self._module)), zeros, self._scheme)

    def _packed(self) -> StoredWeight:
        if self._inputs * self._scheme.bits % 8:
            raise ModelError(f"an odd number of inputs ({self._inputs}) in codes of {self._scheme.bits} bits")
        words = self._part("weight_packed", (self._outputs, -(-self._inputs // self._per_word)), torch.int32)
        scales = self._part("weight_scale", (self._outputs, self._groups) if self._scheme.group else None)
        shape = (-(-self._outputs // self._per_word), self._groups)
        zeros = None if self._scheme.symmetric else self._part("weight_zero_point", shape, torch.int32)
        return packed(words, scales, zeros, self._own_groups("weight_g_idx"), self._inputs, self._scheme)

    def _awq(self) -> StoredWeight:
        per_row = self._of("outputs", self._outputs)
        words = self._part("qweight", (self._inputs, per_row), torch.int32)
        zeros = self._part("qzeros", (self._groups, per_row), torch.int32)
        return awq(words, self._part("scales", (self._groups, self._outputs)), zeros, self._scheme)

    def _gptq(self) -> StoredWeight:
        words = self._part("qweight", (self._of("inputs", self._inputs), self._outputs), torch.int32)
        zeros = self._part("qzeros", (self._groups, -(-self._outputs // self._per_word)), torch.int32)
        scales = self._part("scales", (self._groups, self._outputs))
        return gptq(words, scales, zeros, self._own_groups("g_idx"), self._scheme)

    def _own_groups(self, name: str) -> Tensor | None:
        """Return the group of every input, where the files say it: compressed-tensors writes -1 where it may be any."""
        if not self._files.has(f"{self._module}.{name}"):
            return None
        groups = self._part(name, (self._inputs,), torch.int32)
        return None if bool((groups == -1).any()) else groups

    def _of(self, what: str, count: int) -> int:
        """Return the number of words that hold `count` codes, which fill them."""
        if count % self._per_word:
            raise ModelError(f"{count} {what} do not fill words of {self._per_word} codes")
        return count // self._per_word

    def _part(self, part: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._files.part(f"{self._module}.{part}", shape, dtype, self._device)


def _module(name: str) -> str:
    return name.removesuffix(".weight")
