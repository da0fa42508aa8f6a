"""Whether a model fits a GPU, before anything is loaded: weights by the files' own headers, steps by `device_memory`.

Called by the launcher for the GPUs it divides, and by a worker for the one it has claimed. What does not fit is refused
with the bytes that lack and with what would fit. Estimates err on the small side: what passes here is measured again
when the weights are there.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cohort.common.config import Config
from cohort.common.engine.device_memory import step_bytes
from cohort.common.engine.model_config import DTYPE_BYTES, Dtype, ModelGeometry
from cohort.common.errors import ConfigError

_LEAST_BLOCKS = 3  # a cache of two, and the spare one
_MOST_HEADER_BYTES = 100 << 20
_BIN_ELEMENT_BYTES = 2  # of PyTorch files, whose headers need PyTorch: 16 bits unless config.json says 32
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker takes of its GPU at the least, in bytes."""

    weights: int
    steps: int
    graphs: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.graphs + self.cache


def gpu_dtype(config: Config) -> Dtype:
    """Of weights and KV on a GPU."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def need(config: Config, model_dir: Path, geometry: ModelGeometry) -> Need:
    dtype = gpu_dtype(config)
    element = DTYPE_BYTES[dtype]
    engine = config.engine
    return Need(
        parameters(model_dir, geometry, config.model.weights) * element,
        step_bytes(geometry, element, engine.max_rows, engine.max_step_tokens),
        0 if geometry.family in ("generic", "gpt_oss", "deepseek") else engine.cuda_graph_memory_bytes,
        _LEAST_BLOCKS * geometry.kv_geometry(dtype, config.kv.block_size).block_bytes,
    )


def share_bytes(config: Config, memory_bytes: int, sharers: int) -> int:
    """One worker's part of a GPU."""
    return int(config.kv.memory_fraction * memory_bytes / max(1, sharers))


def check_fit(config: Config, model: str, wanted: Need, gpu: str, memory_bytes: int, sharers: int) -> None:
    """Raises `ConfigError` where a worker with this need has too little of a GPU; memory 0 is not known and passes."""
    has = share_bytes(config, memory_bytes, sharers)
    if not memory_bytes or wanted.total <= has:
        return
    whole = share_bytes(config, memory_bytes, 1)
    remedies = []
    if sharers > 1 and wanted.total <= whole:
        remedies.append(f"one worker per GPU instead of {sharers} (fewer workers, or more GPUs)")
    if config.model.dtype == "float32" and wanted.total - wanted.weights // 2 <= whole:
        remedies.append("16 bits (model.dtype=bfloat16)")
    if wanted.weights <= has and wanted.graphs + wanted.steps:
        remedies.append("lower engine.max_step_tokens, engine.max_rows or engine.cuda_graph_memory_bytes")
    least = math.ceil(wanted.total / config.kv.memory_fraction / _GIB) if config.kv.memory_fraction else 0
    remedies.append(f"a GPU of {least} GiB or more")
    shared = f", shared by {sharers}" if sharers > 1 else ""
    raise ConfigError(
        f"model.path: {model} does not fit {gpu}: a worker needs {_gib(wanted.total)} (weights {_gib(wanted.weights)}, "
        f"steps {_gib(wanted.steps)}, graphs {_gib(wanted.graphs)}), its share is {_gib(has)} of {_gib(memory_bytes)}"
        f"{shared}: {_gib(wanted.total - has)} are missing. What would fit: {'; or '.join(remedies)}. A worker's model "
        "runs on one GPU, never across several"
    )


def parameters(model_dir: Path, geometry: ModelGeometry, kind: Literal["files", "random"] = "files") -> int:
    """Numbers that the weights consist of: from the files; of random weights, and where no file tells, from the shape.
    0 where neither can tell."""
    if kind == "files":
        try:
            files = _files(model_dir)
            if files and files[0].suffix == ".safetensors":
                return sum(_elements(shard) for shard in files)
            if files:
                element = DTYPE_BYTES.get(geometry.checkpoint_dtype, _BIN_ELEMENT_BYTES)
                return sum(file.stat().st_size for file in files) // element
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            return 0  # the engine says what is wrong with the files
    return 0 if geometry.family in ("generic", "moe", "gpt_oss", "deepseek") else _by_shape(geometry)


def _files(model_dir: Path) -> list[Path]:
    """Those that the engine reads (`engine/weights.py`): some folders hold the weights twice, in two forms."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (model_dir / index).is_file():
            shards = json.loads((model_dir / index).read_text(encoding="utf-8"))["weight_map"].values()
            return [model_dir / name for name in sorted(set(shards))]
        if (model_dir / single).is_file():
            return [model_dir / single]
    return []


def _elements(shard: Path) -> int:
    """A safetensors file begins with the length of its header (8 bytes, little-endian) and the header (JSON). MXFP4
    blocks hold two elements a byte."""
    with shard.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(shard.name)
        header = json.loads(file.read(length))
    return sum(
        math.prod(tensor["shape"]) * (2 if name.endswith("_blocks") and tensor["dtype"] == "U8" else 1)
        for name, tensor in header.items()
        if name != "__metadata__"
    )


def _by_shape(geometry: ModelGeometry) -> int:
    hidden, heads = geometry.hidden_size, geometry.num_heads + 2 * geometry.num_kv_heads
    attention = hidden * geometry.head_dim * (heads + geometry.num_heads)
    matrices = 2 if geometry.family == "opt" else 3
    layers = geometry.num_layers * (attention + matrices * hidden * geometry.intermediate_size)
    return layers + geometry.vocab_size * hidden * (1 if geometry.tie_embeddings else 2)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
