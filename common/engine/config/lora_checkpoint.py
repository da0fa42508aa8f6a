"""What a LoRA adapter's folder says: its settings, and which tensors of which shape it brings for which projection.

Called by the launcher and by every worker before a model is loaded, so that an adapter that cannot be served ends the
start with one sentence; hence no torch here. Format: PEFT's (adapter_config.json, adapter_model.safetensors). What an
adapter may change are the seven projections of a Llama-shaped layer; whatever else PEFT can train is refused by name.
Reads no tensor: that is `lora`'s business.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cohort.common.engine.config.config_bounds import check_pattern, shown
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.safetensors_header import read_header
from cohort.common.errors import ModelError
from cohort.common.json_files import read_json_object

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 64
_MOST = 1e6  # of a rank or an alpha, beyond which scales are no use
_DTYPES = ("F32", "F16", "BF16")
_SERVED = "served are plain LoRA adapters of q, k, v, o, gate, up and down projections"
_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?layers\.(\d{1,6})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin a training that move a part of the base weights into the adapter."""

Slot = Literal["qkv", "attention_out", "gate_up", "down"]
"""The products of a layer, in which some projections are fused."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Folders of a runner's adapters by name, and the number held at once."""

    adapters: Mapping[str, str]
    held: int


@dataclass(frozen=True, slots=True)
class Projection:
    """The place of a projection: outputs [first, first + outputs) of a product with `inputs` inputs."""

    slot: Slot
    first: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's change of one projection of a layer: scale · B · A, A [rank, inputs], B [outputs, rank]."""

    layer: int
    projection: Projection
    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An adapter that fits its base model. `stamp`: of the file as it was read; another one is another adapter."""

    name: str
    folder: Path
    parts: tuple[Part, ...]
    stamp: tuple[int, int]

    @property
    def file(self) -> Path:
        return self.folder / TENSOR_FILE


def stamped_name(checkpoint: Checkpoint) -> str:
    """Return the name for workers of an adapter that was not there at the start: another file has another name."""
    content = repr((str(checkpoint.folder), checkpoint.stamp)).encode()
    return f"{checkpoint.name}@{hashlib.blake2b(content, digest_size=6).hexdigest()}"


def read_added(stamped: str, folder: Path, geometry: ModelGeometry) -> Checkpoint:
    """Read an adapter that a request brings, under its stamped name. Raises `ModelError`, also for another file."""
    (found,) = check_lora({stamped.rpartition("@")[0]: str(folder)}, geometry)
    if stamped_name(found) != stamped:
        raise ModelError(f"{found.file} has changed since it was added; add it anew (load_inplace)")
    return replace(found, name=stamped)


def stamp_of(file: Path) -> tuple[int, int]:
    """Return the size and the time of the last change. Raises `ModelError`."""
    try:
        found = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def projections(geometry: ModelGeometry, layer: int) -> dict[str, Projection]:
    """Return the projections of a layer that an adapter may change, by the files' names."""
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    query, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    found = {"self_attn.o_proj": Projection("attention_out", 0, hidden, query)}
    if geometry.fused_weights:
        found["self_attn.qkv_proj"] = Projection("qkv", 0, query + 2 * kv, hidden)
    else:
        found["self_attn.q_proj"] = Projection("qkv", 0, query, hidden)
        found["self_attn.k_proj"] = Projection("qkv", query, kv, hidden)
        found["self_attn.v_proj"] = Projection("qkv", query + kv, kv, hidden)
    if geometry.experts is not None and geometry.experts.layers[layer]:
        return found
    found["mlp.down_proj"] = Projection("down", 0, hidden, inner)
    if geometry.fused_weights:
        found["mlp.gate_up_proj"] = Projection("gate_up", 0, 2 * inner, hidden)
    else:
        found["mlp.gate_proj"] = Projection("gate_up", 0, inner, hidden)
        found["mlp.up_proj"] = Projection("gate_up", inner, inner, hidden)
    return found


def check_lora(adapters: Mapping[str, str], geometry: ModelGeometry, base: str = "") -> list[Checkpoint]:
    """Check every adapter of `model.lora` against the base model, and return it. Raises `ModelError` naming option,
    file and tensor. `base`: the base model's name, which no adapter may have."""
    if adapters and geometry.family not in ("llama", "moe"):
        raise ModelError(
            f"model.lora: no adapters for {geometry.model_type} models (form {geometry.family}); {_SERVED} of "
            "Llama-shaped models (docs/models.md)"
        )
    for name in adapters:
        if not name or name != name.strip() or not name.isprintable() or len(name) > 128:
            raise ModelError(f"model.lora: {name!r} is no name for an adapter: 1 to 128 printable characters")
        if name == base:
            raise ModelError(f"model.lora: {name!r} is the base model's name; give the adapter another")
    return [read_checkpoint(name, Path(folder), geometry) for name, folder in adapters.items()]


def read_checkpoint(name: str, folder: Path, geometry: ModelGeometry) -> Checkpoint:
    """Read one adapter. Raises `ModelError` naming the file and the part that is not served or does not fit."""
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise ModelError(f"model.lora {name}: no folder {folder}; an adapter is a folder in PEFT format")
    settings = _Settings(folder / CONFIG_FILE)
    file = folder / TENSOR_FILE
    if not file.is_file():
        more = "; save it with safe_serialization=True" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelError(f"model.lora {name}: {folder} holds no {TENSOR_FILE}{more}")
    stamp, shapes = stamp_of(file), _shapes(file)
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    for tensor in shapes:
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise ModelError(f"{file}: tensor {tensor} is not served; {_SERVED}")
        layer, block, module, half = match.groups()
        pairs.setdefault((int(layer), f"{block}.{module}"), {})[half] = tensor
    if not pairs:
        raise ModelError(f"{file} holds no LoRA tensors")
    parts = [_part(file, *place, halves, shapes, settings, geometry) for place, halves in sorted(pairs.items())]
    for part in parts:
        if part.rank > MAX_RANK:
            raise ModelError(f"{file}: tensor {part.a} has rank {part.rank}; at most {MAX_RANK} is served")
    settings.check_complete(file, set(pairs), geometry)
    return Checkpoint(name, folder, tuple(parts), stamp)


def _part(
    file: Path,
    layer: int,
    module: str,
    halves: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    settings: _Settings,
    geometry: ModelGeometry,
) -> Part:
    if layer >= geometry.num_layers:
        raise ModelError(
            f"{file}: tensor {next(iter(halves.values()))} is of layer {layer}; the base model has layers 0 to "
            f"{geometry.num_layers - 1}"
        )
    served = projections(geometry, layer)
    if module not in served:
        raise ModelError(
            f"{file}: tensor {next(iter(halves.values()))} changes {module}; in layer {layer} of this base model "
            f"{', '.join(sorted(served))} can be changed"
        )
    if len(halves) < 2:
        (only,) = halves.values()
        other = only.replace(".lora_A.", ".lora_B.") if "A" in halves else only.replace(".lora_B.", ".lora_A.")
        raise ModelError(f"{file} lacks tensor {other}, which {only} needs")
    place, a, b = served[module], halves["A"], halves["B"]
    rank, scale = settings.rank_and_scale(f"model.layers.{layer}.{module}")
    for tensor, wanted in ((a, (rank, place.inputs)), (b, (place.outputs, rank))):
        if shapes[tensor] != wanted:
            raise ModelError(
                f"{file}: tensor {tensor} has shape {shapes[tensor]}; with rank {rank} as {CONFIG_FILE} says, this "
                f"base model needs {wanted}"
            )
    return Part(layer, place, a, b, rank, scale)


class _Settings:
    """adapter_config.json."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            data = read_json_object(file)
        except FileNotFoundError:
            raise ModelError(f"{file.parent} holds no {CONFIG_FILE}: an adapter is a folder in PEFT format") from None
        self._data = data
        self._refuse_what_is_not_served()
        self._rank = self._number("r", 8)
        self._alpha = self._number("lora_alpha", 8)
        self._rslora = bool(data.get("use_rslora"))
        self._ranks, self._alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return rank and alpha / r, or alpha / √r (rsLoRA), as PEFT: patterns name modules by the ends of their
        names."""
        rank, alpha = _matched(self._ranks, module, self._rank), _matched(self._alphas, module, self._alpha)
        if rank != int(rank):
            raise ModelError(f"{self._file}: the rank of {module} is {rank}, no whole number")
        return int(rank), alpha / math.sqrt(rank) if self._rslora else alpha / rank

    def check_complete(self, file: Path, present: set[tuple[int, str]], geometry: ModelGeometry) -> None:
        """Raise `ModelError` where a layer lacks a listed module, unless the configuration leaves layers out."""
        targets = self._data.get("target_modules")
        if not isinstance(targets, list) or any(self._data.get(key) for key in _PARTIAL):
            return
        for layer in range(geometry.num_layers):
            for module in projections(geometry, layer):
                if module.partition(".")[2] in targets and (layer, module) not in present:
                    raise ModelError(
                        f"{file} lacks tensors of layers.{layer}.{module}, which {CONFIG_FILE} lists as target_modules"
                    )

    def _refuse_what_is_not_served(self) -> None:
        data, file = self._data, self._file
        if data.get("peft_type") != "LORA":
            raise ModelError(f"{file}: peft_type is {data.get('peft_type')!r}; {_SERVED}")
        for key, what in _REFUSED.items():
            if data.get(key):
                raise ModelError(f"{file}: {key} ({what}) is not served; {_SERVED}")
        if data.get("bias", "none") != "none":
            raise ModelError(f"{file}: bias {data['bias']!r} (trained biases) is not served; {_SERVED}")
        initial = data.get("init_lora_weights")
        if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
            raise ModelError(
                f"{file}: init_lora_weights {initial!r} changes the base weights; convert it to a plain adapter "
                "(PEFT's path_initial_model_for_weight_conversion)"
            )
        targets = data.get("target_modules")
        for target in targets if isinstance(targets, list) else ():
            if target in ("embed_tokens", "lm_head", "wte"):
                raise ModelError(f"{file}: target_modules has {target!r} (embeddings); {_SERVED}")

    def _number(self, key: str, default: int) -> float:
        value = self._data.get(key, default)
        if not _is_positive(value):
            raise ModelError(f"{self._file}: {key} is {shown(value)}, not a number above 0 and up to {_MOST:g}")
        return float(value)

    def _pattern(self, key: str) -> dict[str, float]:
        pattern = self._data.get(key) or {}
        if not isinstance(pattern, dict) or not all(_is_positive(value) for value in pattern.values()):
            raise ModelError(f"{self._file}: {key} is {shown(pattern)}, not numbers above 0 by module")
        for expression in pattern:
            try:
                check_pattern(expression)
            except ValueError as error:
                raise ModelError(f"{self._file}: {key} names no module: {error}") from None
        return dict(pattern)


_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of B",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "embeddings",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "target_parameters": "parameters that are no module's weight",
    "alora_invocation_tokens": "an adapter from some token on",
    "use_qalora": "QALoRA",
}
_PARTIAL = ("layers_to_transform", "layers_pattern", "exclude_modules")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST


def _matched(pattern: Mapping[str, float], module: str, default: float) -> float:
    for expression, value in pattern.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape, as the header says. Raises `ModelError`."""
    try:
        with file.open("rb") as stream:
            entries = read_header(file, stream)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{file}: tensor {name} has dtype {entry.dtype}; served are {', '.join(_DTYPES)}")
    return {name: entry.shape for name, entry in entries.items()}
