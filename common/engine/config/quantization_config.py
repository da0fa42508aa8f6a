"""How a checkpoint's weights are quantised, as its config.json says: which method, which modules, in which layout.

Called by `model_config`; read by the readers of weights and by the sums of what fits. What is not served is refused
here by name, with what is. Knows no tensor: hence no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cohort.common.engine.config.config_bounds import check_pattern
from cohort.common.errors import ModelError
from cohort.kernels.code_units import packable, tiled

Method = Literal["fp8", "compressed-tensors", "awq", "gptq"]
Layout = Literal["scaled", "packed", "awq", "gptq"]
Bits = Literal[4, 8]

SERVED = (
    "fp8 (E4M3 with a scale of the tensor, the channel or blocks), compressed-tensors (float-quantized and "
    "int-quantized with 8 bits, pack-quantized with 4 or 8), awq (4 bits, gemm), gptq (4 or 8 bits)"
)
Rounding = Literal["int8", "int4"]
"""The codes that plain weights are rounded to at load."""
NAMES = ("auto", "none", *get_args(Method), *get_args(Rounding))
_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}  # vLLM's names of kernels for the same checkpoints
_FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"})
_MODULE_CLASS = "Linear"  # the one class of modules that targets may name


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The form in which modules of one kind are stored.

    "scaled": `weight` in codes of 8 bits beside `weight_scale` or `weight_scale_inv`; "packed": compressed-tensors'
    `weight_packed`; "awq" and "gptq": `qweight`, `qzeros` and `scales`, each in its own order.
    """

    layout: Layout
    bits: Bits
    floating: bool = False  # codes are E4M3, not integers
    group: int = 0  # inputs that share a scale; 0 = a whole row, or the tensor
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    symmetric: bool = True
    zero_is_one_less: bool = False  # GPTQ's first version stores zero - 1
    reordered: bool = False  # act-order: inputs of a group need not be neighbours
    targets: tuple[str, ...] = (_MODULE_CLASS,)

    def codes(self, inputs: int) -> CodeLayout:
        """Return the layout of a module with this number of inputs."""
        group = self.block[1] if self.block is not None else self.group
        return CodeLayout(self.bits, self.floating, group or inputs, inputs, not self.symmetric, self.reordered)


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The facts that decide whether a product reads a weight's codes as they are."""

    bits: int
    floating: bool  # E4M3, or E2M1 of 4 bits
    group: int  # inputs that share a scale
    inputs: int
    offsets: bool
    reordered: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one checkpoint. `excluded`: patterns of modules that stay plain; `activations`: whether the
    checkpoint's own arithmetic also quantises the products' inputs, "" where it does not."""

    method: Method
    schemes: tuple[WeightScheme, ...]
    excluded: tuple[str, ...]
    activations: Literal["", "static", "dynamic"] = ""

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return how this module's weight may be stored, by its name in the files; None: it is plain."""
        if any(self._excludes(pattern, module) for pattern in self.excluded):
            return None
        named = (s for s in self.schemes if any(_names(target, module) for target in s.targets))
        return next(named, next((s for s in self.schemes if _MODULE_CLASS in s.targets), None))

    def _excludes(self, pattern: str, module: str) -> bool:
        """Match a pattern: compressed-tensors means a whole name, the others any part of one between dots."""
        if self.method == "compressed-tensors":
            return _names(pattern, module)
        return _names(pattern, module) or f".{pattern}." in f".{module}."


MXFP4_GROUP = 32
"""Inputs of an MXFP4 weight that share a scale."""


def mxfp4_codes(inputs: int = MXFP4_GROUP) -> CodeLayout:
    """Return the layout of gpt-oss's experts, a power of two for each group of inputs; by default of a single group."""
    return CodeLayout(4, True, MXFP4_GROUP, inputs, False)


def keeps_codes(device_type: str, dtype: str, codes: CodeLayout | None = None, *, checkpoint: bool = True) -> bool:
    """Return whether a weight stays in its codes on this kind of device in a model of this precision; else it is
    dequantised at load. The one rule: of `matrices.matrix`, which reads weights, and of the sums of what fits. `codes`
    None: some layout.

    On a processor products over integer codes round their inputs, so a quantised checkpoint (`checkpoint`) that is
    served in float32 is widened, and computes exactly what its codes mean; what was rounded for these products (GGUF
    files, rounding at load) stays as it is in any precision; MXFP4 is widened. On a GPU all in float32 is widened. The
    compiled kernels, which all of this needs, are not asked for here.
    """
    exact = dtype == "float32" and (checkpoint or device_type == "cuda")
    if device_type not in ("cpu", "cuda") or exact:
        return False
    if codes is None:
        return True
    mxfp4 = codes.floating and codes.bits == 4
    if codes.reordered or (mxfp4 and device_type == "cpu"):
        return False
    if device_type == "cuda":
        return tiled(bits=codes.bits, group=codes.group, inputs=codes.inputs)
    return packable(
        bits=codes.bits, floating=codes.floating, group=codes.group, inputs=codes.inputs, offsets=codes.offsets
    )


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Read the quantisation from config.json's contents; None where the weights are plain. `where`: named in errors.

    Raises `ModelError` for what is not served, naming what is.
    """
    text = config.get("text_config")
    levels, keys = (config, text if isinstance(text, Mapping) else {}), ("quantization_config", "compression_config")
    found = next((level[key] for level in levels for key in keys if level.get(key)), None)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"{where}: quantization_config is no JSON object")
    method = str(found.get("quant_method") or ("compressed-tensors" if "config_groups" in found else "unknown"))
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
    try:
        if method not in readers:
            raise _Refused(f"quantised weights by the method {method[:80]}")
        read = readers[method](found)
        for pattern in (*read.excluded, *(target for scheme in read.schemes for target in scheme.targets)):
            if pattern.startswith("re:"):
                check_pattern(pattern[3:])
        return read
    except _Refused as refused:
        raise ModelError(f"{where}: {refused} are not served; served are {SERVED}, and plain weights") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{where}: quantization_config ({method}) cannot be read: {error!r}") from error


def check_wanted(wanted: str, found: Quantization | None, model: str) -> None:
    """Raise `ModelError` where `model.quantization` is unknown, or not what the checkpoint is."""
    name = _ALIASES.get(wanted, wanted)
    if name not in NAMES:
        raise ModelError(
            f"model.quantization: {wanted!r} is not served; write one of {', '.join(NAMES)}. Served are {SERVED}"
        )
    actual = "none" if found is None else found.method
    if name in ("auto", actual) or (found is None and rounding_of(name) is not None):
        return
    is_ = "its weights are plain" if found is None else f"it is quantised by {actual}"
    hint = "; at load, plain weights are rounded to int8 or int4" if found is None else ""
    raise ModelError(
        f"model.quantization: {wanted}, but config.json of {model} says that {is_}{hint}; leave it at auto"
    )


def rounding_of(wanted: str) -> Rounding | None:
    """Return the codes that `model.quantization` rounds plain weights to at load; None = they stay plain."""
    return next((kind for kind in get_args(Rounding) if kind == wanted), None)


class _Refused(Exception):
    """A quantisation that is not served, as the subject of a sentence."""


def _fp8(found: Mapping[str, Any]) -> Quantization:
    """Read AutoFP8's (a scale of each tensor) and the one of DeepSeek and Qwen (of blocks)."""
    if (kind := found.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _Refused(f"fp8 weights in {kind}")
    size = found.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    scheme = WeightScheme("scaled", 8, floating=True, block=block)
    scheme_name = found.get("activation_scheme", "dynamic")
    excluded = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    return Quantization("fp8", (scheme,), _strings(excluded), "static" if scheme_name == "static" else "dynamic")


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    sparsity = found.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _Refused(f"compressed-tensors weights with sparsity ({sparsity['format']})")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise _Refused("compressed-tensors weights with transforms of their inputs (transform_config)")
    schemes: list[WeightScheme] = []
    activations: Literal["", "static", "dynamic"] = ""
    for group in found["config_groups"].values():
        weights = group.get("weights")
        if weights is None:
            continue
        schemes.append(_of_group(group, weights, str(group.get("format") or found.get("format"))))
        if inputs := group.get("input_activations"):
            activations = "dynamic" if inputs.get("dynamic") else "static"
    if not schemes:
        raise _Refused("compressed-tensors checkpoints without quantised weights")
    return Quantization("compressed-tensors", tuple(schemes), _strings(found.get("ignore") or ()), activations)


def _of_group(group: Mapping[str, Any], weights: Mapping[str, Any], stored: str) -> WeightScheme:
    if stored not in _FORMATS:
        raise _Refused(f"compressed-tensors weights in the format {stored}")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    packed = stored == "pack-quantized"
    if (packed and (bits not in (4, 8) or kind != "int")) or (not packed and bits != 8):
        raise _Refused(f"compressed-tensors {stored} weights of {bits} bits ({kind})")
    targets = _strings(group["targets"])
    if other := [each for each in targets if each[:1].isupper() and each != _MODULE_CLASS and "." not in each]:
        raise _Refused(f"compressed-tensors weights of {', '.join(other)} modules")
    strategy = weights.get("strategy")
    size = weights.get("block_structure")
    if strategy == "block" and isinstance(size, str):
        size = size.split("x")
    return WeightScheme(
        "packed" if packed else "scaled",
        4 if bits == 4 else 8,
        floating=kind == "float",
        group=max(0, int(weights.get("group_size") or 0)),
        block=(int(size[0]), int(size[1])) if strategy == "block" and size else None,
        symmetric=bool(weights.get("symmetric", True)),
        reordered=packed and weights.get("actorder") in ("group", True),
        targets=targets,
    )


def _awq(found: Mapping[str, Any]) -> Quantization:
    bits = found.get("bits", found.get("w_bit", 4))
    if bits != 4:
        raise _Refused(f"awq weights of {bits} bits")
    if (version := str(found.get("version", "gemm")).lower()) != "gemm":
        raise _Refused(f"awq weights in the layout {version}")
    group = max(0, int(found.get("group_size", found.get("q_group_size", 128))))
    excluded = _strings(found.get("modules_to_not_convert") or ())
    return Quantization("awq", (WeightScheme("awq", 4, group=group, symmetric=False),), excluded)


def _gptq(found: Mapping[str, Any]) -> Quantization:
    bits = found["bits"]
    if bits not in (4, 8):
        raise _Refused(f"gptq weights of {bits} bits")
    stored = "marlin" if found.get("is_marlin_format") else str(found.get("checkpoint_format") or "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise _Refused(f"gptq weights in the format {stored}")
    # GPTQModel: "-:pattern" excludes modules, which are plain in the files; "+:pattern" may change what others have.
    changed = [
        pattern
        for pattern, change in (found.get("dynamic") or {}).items()
        if not pattern.startswith("-:")
        and any(key in change and change[key] != found.get(key) for key in ("bits", "group_size"))
    ]
    if changed:
        raise _Refused(f"gptq weights with bits or groups of their own for some modules ({', '.join(changed)})")
    scheme = WeightScheme(
        "gptq",
        4 if bits == 4 else 8,
        group=max(0, int(found.get("group_size", 128))),
        symmetric=bool(found.get("sym", True)),
        zero_is_one_less=stored == "gptq",
        reordered=bool(found.get("desc_act")) and not found.get("static_groups") and found.get("group_size", 128) > 0,
    )
    return Quantization("gptq", (scheme,), _strings(found.get("modules_to_not_convert") or ()))


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


def _strings(values: Any) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
