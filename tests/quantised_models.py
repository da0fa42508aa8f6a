"""Writes tiny models as quantised checkpoints, each by its format's published layout, beside what they dequantise to.

The writers are plain loops over values, on purpose: they are what the readers are compared with. compressed-tensors'
formats are written, and dequantised, by its own library. `write` gives two folders: the checkpoint, and the same model
with its dequantised weights in float32, which transformers loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
Parts = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Parts, Tensor]]
"""A weight [out, in] → its parts by their names, and what they stand for in float32 [out, in]."""


@dataclass(frozen=True)
class Format:
    write: Writer
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    folder: Path
    dequantised: Path
    plain: frozenset[str]  # modules that stay plain

    @property
    def weights(self) -> dict[str, Tensor]:
        """float32, by their names."""
        return load_file(self.dequantised / "model.safetensors")


def write(source: Path, target: Path, name: str, *, plain: frozenset[str] = frozenset({"lm_head"})) -> Written:
    """`source`: a plain float32 model; `plain`: modules that are not quantised (the format must say so itself)."""
    form = FORMATS.get(name) or WIDE_GROUPS[name]
    folder, dequantised = target / name, target / f"{name}-dequantised"
    stored: Parts = {}
    wide: Parts = {}
    for full_name, tensor in load_file(source / "model.safetensors").items():
        module = full_name.removesuffix(".weight")
        if not module.endswith("_proj") or module in plain:
            stored[full_name] = wide[full_name] = tensor
            continue
        parts, dequantised_weight = form.write(tensor)
        wide[full_name] = dequantised_weight.contiguous()
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for path, tensors, settings in (
        (dequantised, wide, config),
        (folder, stored, {**config, "quantization_config": dict(form.config)}),
    ):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Written(folder, dequantised, plain)


# -- FP8 -----------------------------------------------------------------------------------------------------------


def autofp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().max() / 448.0
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def fp8_blocks(weight: Tensor, rows: int = 32, columns: int = 32) -> tuple[Parts, Tensor]:
    outputs, inputs = weight.shape
    codes, wide = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs, inputs)
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[block].abs().max() / 448.0
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            wide[block] = codes[block].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, wide


# -- compressed-tensors, by its own library --------------------------------------------------------------------------


def compressed(compressor: str, **weights: Any) -> Writer:
    def run(weight: Tensor) -> tuple[Parts, Tensor]:
        from compressed_tensors import compressors  # which a machine that only runs the kernels' tests may lack
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        by_format = getattr(compressors, compressor)
        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        scale, zero = _range(weight, arguments)
        state = {"weight": weight, "weight_scale": scale}
        if zero is not None:
            state["weight_zero_point"] = zero
        parts = by_format.compress(state, scheme)
        return parts, by_format.decompress(parts, scheme)["weight"].float()

    return run


def _range(weight: Tensor, arguments: Any) -> tuple[Tensor, Tensor | None]:
    outputs, inputs = weight.shape
    match arguments.strategy:
        case "tensor":
            grouped = weight.reshape(1, 1, -1)
        case "channel":
            grouped = weight.reshape(outputs, 1, inputs)
        case "group":
            grouped = weight.reshape(outputs, -1, arguments.group_size)
        case _:
            rows, columns = arguments.block_structure
            padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
            blocks = padded.reshape(-(-outputs // rows), rows, -(-inputs // columns), columns)
            return blocks.abs().amax(dim=(1, 3)) / 448.0, None
    if arguments.type == "float":
        return grouped.abs().amax(dim=-1).squeeze() / 448.0 if arguments.strategy == "tensor" else (
            grouped.abs().amax(dim=-1) / 448.0
        ), None
    steps = 2**arguments.num_bits - 1
    if arguments.symmetric:
        return grouped.abs().amax(dim=-1) * 2 / steps, None
    lowest, highest = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
    scale = (highest - lowest) / steps
    return scale, (-(2 ** (arguments.num_bits - 1)) - torch.round(lowest / scale)).to(torch.int8)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


# -- AWQ and GPTQ ----------------------------------------------------------------------------------------------------


def _asymmetric(weight: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales float16 [out, groups], zeros [out, groups], for inputs that name their groups."""
    count, steps = int(groups.max()) + 1, 2**bits - 1
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    scales, zeros = torch.zeros(len(weight), count).half(), torch.zeros(len(weight), count, dtype=torch.int64)
    for group in range(count):
        mine = weight[:, groups == group]
        lowest, highest = mine.amin(dim=1).clamp(max=0), mine.amax(dim=1).clamp(min=0)
        scales[:, group] = ((highest - lowest) / steps).half()
        zeros[:, group] = torch.round(-lowest / scales[:, group].float()).long().clamp(0, steps)
        steps_from_zero = torch.round(mine / scales[:, group : group + 1].float()).long()
        codes[:, groups == group] = (steps_from_zero + zeros[:, group : group + 1]).clamp(0, steps)
    return codes, scales, zeros


def _symmetric(weight: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    count, middle = int(groups.max()) + 1, 2 ** (bits - 1)
    codes, scales = torch.zeros(weight.shape, dtype=torch.int64), torch.zeros(len(weight), count).half()
    for group in range(count):
        mine = weight[:, groups == group]
        scales[:, group] = (mine.abs().amax(dim=1) * 2 / (2**bits - 1)).half()
        steps = torch.round(mine / scales[:, group : group + 1].float()).long()
        codes[:, groups == group] = (steps + middle).clamp(0, 2**bits - 1)
    return codes, scales, torch.full_like(scales, middle).long()


def _wide(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales[:, groups].float()


def _words(values: Tensor, bits: int, order: list[int]) -> Tensor:
    """int32 [rows, columns / n] of values [rows, columns]: value `order[i]` of each n stands i · bits up."""
    numbers, count = values.numpy().astype(np.uint32), 32 // bits
    words = np.zeros((len(numbers), numbers.shape[1] // count), dtype=np.uint32)
    for column in range(words.shape[1]):
        for place in range(count):
            words[:, column] |= numbers[:, column * count + order[place]] << np.uint32(bits * place)
    return torch.from_numpy(words.astype(np.int32))


def awq(weight: Tensor, group: int = GROUP) -> tuple[Parts, Tensor]:
    groups = torch.arange(weight.shape[1]) // group
    codes, scales, zeros = _asymmetric(weight, groups, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": _words(codes.t(), 4, order), "qzeros": _words(zeros.t(), 4, order), "scales": scales.t()}
    return parts, _wide(codes, scales, zeros, groups)


def gptq(bits: int, *, group: int = GROUP, symmetric: bool = True, reorder: bool = False, version: int = 1) -> Writer:
    def run(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group < 0 else group)
        if reorder:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        codes, scales, zeros = (_symmetric if symmetric else _asymmetric)(weight, groups, bits)
        in_order = list(range(32 // bits))
        stored_zeros = (zeros - int(version == 1)) % 2**bits
        parts = {
            "qweight": _words(codes, bits, in_order).t(),  # inputs of one output in a word
            "qzeros": _words(stored_zeros.t(), bits, in_order),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        return parts, _wide(codes, scales, zeros, groups)

    return run


def gptq_config(bits: int, group: int = GROUP, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **more}


_FLOAT = {"num_bits": 8, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}
_INT4 = {"num_bits": 4, "type": "int"}
_OF_GROUPS = {"strategy": "group", "group_size": GROUP}
_OF_32 = {"strategy": "group", "group_size": 32}
_OF_64 = {"strategy": "group", "group_size": 64}
_OF_8 = {"strategy": "group", "group_size": 8}
_FP8_BLOCKS = {**_FLOAT, "strategy": "block", "block_structure": [32, 32]}


def _ct(form: str, compressor: str, weights: dict[str, Any]) -> Format:
    return Format(compressed(compressor, **weights), compressed_config(form, **weights))


FORMATS: dict[str, Format] = {
    "fp8-tensor": Format(
        autofp8, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    ),
    "fp8-blocks": Format(
        fp8_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "fp8-even-blocks": Format(
        lambda weight: fp8_blocks(weight, 16, 16),
        {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
    ),
    "ct-fp8-tensor": _ct("float-quantized", "FloatQuantizationCompressor", {**_FLOAT, "strategy": "tensor"}),
    "ct-fp8-channel": _ct("float-quantized", "FloatQuantizationCompressor", {**_FLOAT, "strategy": "channel"}),
    "ct-fp8-blocks": _ct("float-quantized", "FloatQuantizationCompressor", _FP8_BLOCKS),
    "ct-int8-channel": _ct("int-quantized", "IntQuantizationCompressor", {**_INT8, "strategy": "channel"}),
    "ct-int8-asymmetric": _ct(
        "int-quantized", "IntQuantizationCompressor", {**_INT8, "strategy": "channel", "symmetric": False}
    ),
    "ct-packed-4": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT4, **_OF_GROUPS}),
    "ct-packed-4-asymmetric": _ct(
        "pack-quantized", "PackedQuantizationCompressor", {**_INT4, **_OF_GROUPS, "symmetric": False}
    ),
    "ct-packed-4-channel": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT4, "strategy": "channel"}),
    "ct-packed-8": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT8, **_OF_GROUPS}),
    "ct-packed-8-asymmetric": _ct(
        "pack-quantized", "PackedQuantizationCompressor", {**_INT8, "strategy": "channel", "symmetric": False}
    ),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq-4": Format(gptq(4), gptq_config(4)),
    "gptq-4-asymmetric": Format(gptq(4, symmetric=False), gptq_config(4, sym=False)),
    "gptq-4-act-order": Format(gptq(4, symmetric=False, reorder=True), gptq_config(4, sym=False, desc_act=True)),
    "gptq-4-one-group": Format(gptq(4, group=-1), gptq_config(4, group=-1)),
    "gptq-4-v2": Format(gptq(4, symmetric=False, version=2), gptq_config(4, sym=False, checkpoint_format="gptq_v2")),
    "gptq-8": Format(gptq(8), gptq_config(8)),
    "gptq-8-act-order": Format(gptq(8, symmetric=False, reorder=True), gptq_config(8, sym=False, desc_act=True)),
}

WIDE_GROUPS: dict[str, Format] = {
    "awq-32": Format(lambda weight: awq(weight, 32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "awq-64": Format(lambda weight: awq(weight, 64), {"quant_method": "awq", "bits": 4, "group_size": 64}),
    "gptq-4-32": Format(gptq(4, group=32), gptq_config(4, 32)),
    "gptq-4-64-asymmetric": Format(gptq(4, group=64, symmetric=False), gptq_config(4, 64, sym=False)),
    "gptq-8-32-asymmetric": Format(gptq(8, group=32, symmetric=False), gptq_config(8, 32, sym=False)),
    "gptq-4-32-act-order": Format(
        gptq(4, group=32, symmetric=False, reorder=True), gptq_config(4, 32, sym=False, desc_act=True)
    ),
    "ct-int8-groups": _ct("int-quantized", "IntQuantizationCompressor", {**_INT8, **_OF_32}),
    "ct-packed-4-32": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT4, **_OF_32}),
    "ct-packed-4-64-asymmetric": _ct(
        "pack-quantized", "PackedQuantizationCompressor", {**_INT4, **_OF_64, "symmetric": False}
    ),
    "ct-packed-8-64": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT8, **_OF_64}),
    "ct-packed-4-8": _ct("pack-quantized", "PackedQuantizationCompressor", {**_INT4, **_OF_8}),
}
"""Groups that fill the rows of models with multiples of 64 inputs; those of 8 are too short to be packed."""
