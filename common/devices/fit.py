"""Whether a model fits a GPU or a host's memory, before anything is loaded: weights by the files' own headers, steps
by `device_memory`.

Called by the launcher for the GPUs it divides and for the host, and by a worker for the device it has. A refusal names
the bytes that lack and what would fit. Estimates err on the small side: what passes here is measured again when the
weights are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cohort.common.config import Config
from cohort.common.engine.config.device_memory import host_step_bytes, step_bytes
from cohort.common.engine.config.model_config import (
    DTYPE_BYTES,
    FP8,
    SCALE_BYTES,
    Dtype,
    ModelGeometry,
    kv_dtype,
    read_geometry,
)
from cohort.common.engine.config.model_shape import model_shape
from cohort.common.engine.config.quantization_config import CodeLayout, keeps_codes, mxfp4_codes, rounding_of
from cohort.common.engine.config.rank_shares import RankShare, exchange_bytes, why_not_divisible
from cohort.common.engine.config.safetensors_header import read_header, read_index
from cohort.common.errors import ConfigError, ModelError
from cohort.common.paths import GGUF_FILE
from cohort.common.policies.cost_model import ModelShape

_GGUF_PACKED = 1.25  # 4.5 bits in the file are 5 to 5.5 here, 6.6 are 9 (docs/models.md)
_ROUNDED_BITS = {"int8": 8.5, "int4": 5.5}  # scales, and the tables that stay at 8 bits, included
_CHECKPOINT_BITS = (("FP8 or INT8", 8.25), ("4 bits (AWQ, GPTQ)", 4.75))  # with scales, in groups of 128
_LEAST_TOKENS = 4096  # of KV, or the longest request: a cache that holds less serves nobody
_LEAST_BLOCKS = 3  # a cache of two, and the spare one
_BIN_ELEMENT_BYTES = 2  # of PyTorch files, whose headers need PyTorch: 16 bits unless config.json says 32
_GIB = 1 << 30
_SCALE_BYTES = 4  # of quantised weights, as they are kept
_WORDS = frozenset({"qweight", "weight_packed"})  # several codes in a number of 32 bits
_CODE_PARAMETERS = frozenset(
    {"qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"}
)
_UNREAD = frozenset(
    {"weight_shape", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_zero_point"}
)
_CODES_OF_8_BITS = frozenset({"F8_E4M3", "I8"})
_DEGREES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Need:
    """Least bytes that one worker takes of its device; `cache` is the KV of `kv_tokens`."""

    weights: int
    steps: int
    graphs: int
    cache: int
    kv_tokens: int = 0
    rounds: bool = False
    """Whether the weights could be rounded to fewer bits at load."""
    fp8_cache: int = 0
    """Bytes of the same KV in FP8; 0 where it is in FP8, or cannot be."""
    codes: tuple[tuple[str, int], ...] = ()
    """(Name, bytes) of checkpoints of the model in fewer bits; none where it has few already."""
    degrees: tuple[int, ...] = _DEGREES
    """Numbers of GPUs that one worker could divide the model over."""
    whole_cache: bool = False
    """Whether each of these GPUs would hold the whole cache: it is of latents."""

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.graphs + self.cache

    @property
    def summary(self) -> str:
        parts = [f"{_gib(self.weights)} for weights"]
        parts += [f"{_gib(self.cache)} for {self.kv_tokens:,} tokens of KV"] if self.cache else []
        parts += [f"{_gib(self.steps)} for steps"] if self.steps else []
        parts += [f"{_gib(self.graphs)} for graphs"] if self.graphs else []
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def gpu_dtype(config: Config) -> Dtype:
    """Return the dtype of weights and KV on a GPU."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def need(config: Config, model_dir: Path, geometry: ModelGeometry, degree: int = 1) -> Need:
    """Return the need of each of `degree` ranks on GPUs; the model must divide by `degree`."""
    dtype, engine = gpu_dtype(config), config.engine
    element = DTYPE_BYTES[dtype]
    own, steps = geometry, step_bytes(geometry, element, engine.max_rows, engine.max_step_tokens)
    share = None
    if degree > 1:
        share = RankShare(geometry, 0, degree)
        own, steps = share.own, step_bytes(share.working, element, engine.max_rows, engine.max_step_tokens)
        steps += exchange_bytes(geometry, element, engine.max_rows, engine.max_step_tokens)
    cache_dtype = kv_dtype(config.kv.cache_dtype, dtype, geometry, "cuda")
    tokens, cache = _least_cache(config, own, cache_dtype, config.kv.memory_bytes // degree)
    weights = weight_bytes(model_dir, geometry, element, config.model.weights, "cuda", dtype, share)
    weights += _draft_bytes(config, element, dtype)
    plain = geometry.family in ("llama", "moe", "gemma", "opt") and geometry.quantization is None and element == 2
    return Need(
        weights,
        steps,
        0 if geometry.family == "generic" else engine.cuda_graph_memory_bytes,
        cache,
        tokens,
        fp8_cache=_in_fp8(config, own, cache_dtype, tokens, "cuda"),
        codes=_in_codes(weights, geometry, degree) if plain else (),
        degrees=tuple(n for n in _DEGREES if not why_not_divisible(geometry, n)),
        whole_cache=geometry.latent is not None,
    )


def host_need(config: Config, model_dir: Path, geometry: ModelGeometry, *, computes_bfloat16: bool) -> Need:
    """Return the need of a worker on a processor. Matrices are widened to float32 where that does not multiply bfloat16
    itself."""
    own: Dtype = "bfloat16" if computes_bfloat16 else "float32"
    dtype = own if config.model.dtype == "auto" else config.model.dtype
    widened = dtype == "float16" or (dtype == "bfloat16" and not computes_bfloat16)
    element = 4 if widened else DTYPE_BYTES[dtype]
    weights = weight_bytes(model_dir, geometry, element, config.model.weights, "cpu", dtype)
    if widened:  # the table of the embedding stays as it is
        weights -= min(weights, geometry.vocab_size * geometry.hidden_size * (element - DTYPE_BYTES[dtype]))
    most = config.kv.cpu_bytes
    cache_dtype = kv_dtype(config.kv.cache_dtype, dtype, geometry, "cpu")
    tokens, cache = _least_cache(config, geometry, cache_dtype, most)
    engine = config.engine
    steps = host_step_bytes(geometry, DTYPE_BYTES[dtype], engine.max_rows, engine.max_step_tokens)
    plain = geometry.family == "llama" and geometry.quantization is None and not (model_dir / GGUF_FILE).exists()
    rounding = rounding_of(config.model.quantization)
    if rounding is not None and config.model.weights == "files":
        weights = int(weights * _ROUNDED_BITS[rounding] / (8 * element))
    weights += _draft_bytes(config, element, dtype)
    return Need(
        weights,
        steps,
        0,
        cache,
        tokens,
        rounds=plain and rounding is None,
        fp8_cache=_in_fp8(config, geometry, cache_dtype, tokens, "cpu"),
    )


def _draft_bytes(config: Config, element: int, dtype: Dtype) -> int:
    """Return the bytes of a draft model's weights; 0 for one that cannot be read, which its loading refuses. Its KV is
    part of the cache."""
    speculation = config.speculation
    folder = Path(speculation.draft_model).expanduser()
    if speculation.mode != "model" or not speculation.draft_model or not (folder / "config.json").is_file():
        return 0
    weights = weight_bytes(folder, read_geometry(folder), element, device_type="cpu", dtype=dtype)
    rounding = rounding_of(speculation.draft_quantization)
    return weights if rounding is None else int(weights * _ROUNDED_BITS[rounding] / (8 * element))


def check_host_fit(config: Config, model: str, wanted: Need, memory_bytes: int, workers: int) -> None:
    """Raise `ConfigError` if a host's memory is too small for `workers` of this need; 0 is not known and passes."""
    total = workers * wanted.total
    if not memory_bytes or total <= memory_bytes:
        return
    remedies = []
    if workers > 1 and wanted.total <= memory_bytes:
        remedies.append(f"{memory_bytes // wanted.total} of the {workers} workers (--preset unified has one)")
    if config.model.dtype == "float32" and workers * (wanted.total - wanted.weights // 2) <= memory_bytes:
        remedies.append("16 bits, on a processor that computes in bfloat16 (model.dtype=bfloat16)")
    remedies += _fewer_bits(wanted, memory_bytes, workers, "cpu")
    remedies += _smaller(wanted, memory_bytes, workers)
    remedies.append(f"{math.ceil(total / _GIB)} GiB of memory that are free")
    each = f" each of its {workers} workers" if workers > 1 else ""
    raise ConfigError(
        f"model.path: {model} does not fit this host:{each} needs {wanted.summary}, "
        f"{_gib(memory_bytes)} are available: {_gib(total - memory_bytes)} too much; {', or '.join(remedies)} would fit"
    )


def check_host_kv(config: Config, weights: int, memory_bytes: int, workers: int) -> None:
    """Raise `ConfigError` if the configured KV of `workers`, with weights of so many bytes each, exceeds a host's
    memory; 0 is not known and passes."""
    kv = config.kv
    total = workers * (weights + kv.cpu_bytes + kv.host_memory_bytes)
    if not memory_bytes or total <= memory_bytes:
        return
    left = memory_bytes * 9 // 10 // workers - weights - kv.host_memory_bytes
    cure = f"--set kv.memory_bytes={left >> 20 << 20}" if left >= 1 << 20 else "fewer workers, or a smaller model"
    of = f"{workers} workers want" if workers > 1 else "a worker wants"
    raise ConfigError(
        f"kv.memory_bytes, kv.host_memory_bytes: {of} {_gib(total)} for weights and KV, "
        f"{_gib(memory_bytes)} are available; {cure} would fit"
    )


def share_bytes(config: Config, memory_bytes: int, sharers: int) -> int:
    """Return one worker's share of a GPU's memory."""
    return int(config.kv.memory_fraction * memory_bytes / max(1, sharers))


def check_fit(config: Config, model: str, wanted: Need, gpu: str, memory_bytes: int, sharers: int) -> None:
    """Raise `ConfigError` if a GPU's share is too small for a worker of this need; memory 0 is not known and passes."""
    has = share_bytes(config, memory_bytes, sharers)
    if not memory_bytes or wanted.total <= has:
        return
    whole = share_bytes(config, memory_bytes, 1)
    remedies = []
    if sharers > 1 and wanted.total <= whole:
        remedies.append(f"one worker per GPU instead of {sharers} (fewer workers, or more GPUs)")
    if config.model.dtype == "float32" and wanted.total - wanted.weights // 2 <= whole:
        remedies.append("16 bits (model.dtype=bfloat16)")
    remedies += _fewer_bits(wanted, whole, 1, "cuda")
    remedies += _smaller(wanted, whole, 1)
    parted = wanted.weights + (0 if wanted.whole_cache else wanted.cache)
    divided = (n for n in wanted.degrees if wanted.total - parted * (n - 1) // n <= whole)
    if (degree := next(divided, 0)) and wanted.total > whole:
        remedies.append(f"tensor_parallel {degree} (workers: [{{role, tensor_parallel}}])")
    if wanted.weights <= has and wanted.graphs + wanted.steps:
        remedies.append("lower engine.max_step_tokens, engine.max_rows or engine.cuda_graph_memory_bytes")
    least = math.ceil(wanted.total / config.kv.memory_fraction / _GIB) if config.kv.memory_fraction else 0
    remedies.append(f"a GPU of {least} GiB or more")
    shared = f", shared by {sharers}" if sharers > 1 else ""
    raise ConfigError(
        f"model.path: {model} does not fit {gpu}: a worker needs {wanted.summary}, its share is {_gib(has)} of "
        f"{_gib(memory_bytes)}{shared}: {_gib(wanted.total - has)} too much; {', or '.join(remedies)} would fit"
    )


def _fewer_bits(wanted: Need, has: int, workers: int, device_type: str) -> list[str]:
    """Return the option for codes of 8 or 4 bits that fit, if products read them; scales are not counted."""
    if not wanted.rounds or not keeps_codes(device_type, "bfloat16", checkpoint=False):
        return []
    fitting = (
        f"--quantization {name}"
        for name, bits in (("int8", 8), ("int4", 4))
        if workers * (wanted.total - wanted.weights * (16 - bits) // 16) <= has
    )
    return list(fitting)[:1]


def _smaller(wanted: Need, has: int, workers: int) -> list[str]:
    """Return the least change that fits: KV in FP8, a checkpoint of fewer bits, or both; with a worker's need then."""
    cache = (("", wanted.cache), *((("--kv-cache-dtype fp8", wanted.fp8_cache),) if wanted.fp8_cache else ()))
    weights = (("", wanted.weights), *((f"a checkpoint in {name}", size) for name, size in wanted.codes))
    for of_weights, weight in weights:
        for of_cache, kv in cache:
            total = wanted.total - wanted.weights - wanted.cache + weight + kv
            if (of_weights or of_cache) and workers * total <= has:
                what = " with ".join(part for part in (of_weights, of_cache) if part)
                return [f"{what} ({_gib(total)} a worker)"]
    return []


def _in_fp8(config: Config, geometry: ModelGeometry, cache_dtype: str, tokens: int, device_type: str) -> int:
    """Return the bytes of `tokens` tokens of KV in FP8; 0 if it is stored so already, or cannot be."""
    if cache_dtype not in DTYPE_BYTES or cache_dtype in SCALE_BYTES or geometry.latent is not None:
        return 0
    fp8 = kv_dtype(FP8, cache_dtype, geometry, device_type)
    return tokens // config.kv.block_size * geometry.kv_geometry(fp8, config.kv.block_size).block_bytes


def _in_codes(weights: int, geometry: ModelGeometry, degree: int) -> tuple[tuple[str, int], ...]:
    """Return the bytes of 16-bit weights in codes. Published checkpoints leave embedding and output matrix alone."""
    tables = (1 if geometry.tie_embeddings else 2) * geometry.vocab_size * geometry.hidden_size * 2 // degree
    rest = max(0, weights - tables)
    return tuple((name, weights - rest + int(rest * bits / 16)) for name, bits in _CHECKPOINT_BITS if rest)


def _least_cache(config: Config, geometry: ModelGeometry, dtype: str, most_bytes: int) -> tuple[int, int]:
    """Return the least useful KV of a worker: tokens and bytes. `most_bytes`: its bound; 0 = none."""
    block = geometry.kv_geometry(dtype, config.kv.block_size)
    tokens = min(_LEAST_TOKENS, config.model.max_model_len or geometry.max_positions)
    blocks = max(_LEAST_BLOCKS, -(-tokens // config.kv.block_size))
    if most_bytes:
        blocks = min(blocks, max(_LEAST_BLOCKS, most_bytes // block.block_bytes))
    return blocks * config.kv.block_size, blocks * block.block_bytes


def weight_bytes(
    model_dir: Path,
    geometry: ModelGeometry,
    element: int,
    kind: Literal["files", "random"] = "files",
    device_type: str = "cuda",
    dtype: Dtype = "bfloat16",
    share: RankShare | None = None,
) -> int:
    """Return the bytes of the weights, plain ones in `element` bytes each, in a model of `dtype`; 0 if no file tells.
    `share`: of this rank alone."""
    if kind == "files" and (model_dir / GGUF_FILE).exists() and device_type == "cpu":
        return int((model_dir / GGUF_FILE).stat().st_size * _GGUF_PACKED)
    try:
        if geometry.family == "gpt_oss" and kind == "files" and keeps_codes(device_type, dtype, mxfp4_codes()):
            if all(file.suffix == ".safetensors" for file in _files(model_dir)):  # MXFP4 blocks and scales stay bytes
                return sum(
                    _of_rank(name, _count(tensor) * (1 if tensor["dtype"] == "U8" else element), share)
                    for name, tensor in _tensors(model_dir)
                )
        elif geometry.quantization is not None and kind == "files":
            tensors = dict(_tensors(model_dir))
            coded = {  # codes of attention over latents become numbers when they are read
                module: keeps_codes(device_type, dtype, codes)
                and not (geometry.latent is not None and ".self_attn." in module)
                for name in tensors
                if (module := name.rpartition(".")[0]) and (codes := _codes(module, tensors, geometry)) is not None
            }
            return sum(
                _of_rank(
                    name, _bytes_of(name, tensor, geometry, element, coded.get(name.rpartition(".")[0], False)), share
                )
                for name, tensor in tensors.items()
            )
    except (OSError, ModelError, IndexError):
        return 0  # the engine says what is wrong with the files
    return parameters(model_dir, geometry, kind, share) * element


def _of_rank(name: str, size: int, share: RankShare | None) -> int:
    """Return one rank's part of a tensor's bytes; some are whole on every rank. Scales go with their codes."""
    if share is None:
        return size
    module, _, kind = name.rpartition(".")
    part = share.part(name) or (None if kind == "bias" else share.part(f"{module}.weight"))
    return size if part is None else size * part.extent // part.of


def parameters(
    model_dir: Path, geometry: ModelGeometry, kind: Literal["files", "random"] = "files", share: RankShare | None = None
) -> int:
    """Return the number of weights: by the files; of random ones, and without files, by the shape; 0 if neither tells.
    `share`: of this rank alone, equal parts where the tensors are not known."""
    ranks = 1 if share is None else share.degree
    if kind == "files":
        try:
            files = _files(model_dir)
            if files and files[0].suffix == ".safetensors":
                tensors = _tensors(model_dir)
                return sum(_of_rank(name, _numbers(name, tensor, geometry), share) for name, tensor in tensors)
            if files:
                element = DTYPE_BYTES.get(geometry.checkpoint_dtype, _BIN_ELEMENT_BYTES)
                return sum(file.stat().st_size for file in files) // element // ranks
        except (OSError, ModelError, IndexError):
            return 0  # the engine says what is wrong with the files
    if geometry.family == "generic":
        return 0
    return ModelShape(**model_shape("", geometry, "float32")).parameters // ranks


def _files(model_dir: Path) -> list[Path]:
    """Return the files that the engine reads (`engine/weights`): some folders hold the weights in two forms."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (model_dir / index).is_file():
            return [model_dir / name for name in sorted(set(read_index(model_dir / index).values()))]
        if (model_dir / single).is_file():
            return [model_dir / single]
    return []


def _tensors(model_dir: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name, dtype and shape of each tensor."""
    for shard in _files(model_dir):
        with shard.open("rb") as file:
            header = read_header(shard, file)
        yield from ((name, entry._asdict()) for name, entry in header.items())


def _numbers(name: str, tensor: Mapping[str, Any], geometry: ModelGeometry) -> int:
    """Return the number of weights in a tensor of the files."""
    stored, part = _count(tensor), name.rpartition(".")[2]
    if geometry.quantization is None:  # MXFP4 blocks hold two weights a byte, and their scales none
        if tensor["dtype"] == "U8" and geometry.family == "gpt_oss":
            return stored * 2 if part.endswith("_blocks") else 0
        return stored
    if part in _WORDS:
        scheme = geometry.quantization.scheme_of(name.removesuffix(f".{part}"))
        return stored * 32 // (8 if scheme is None else scheme.bits)
    return 0 if part in _CODE_PARAMETERS | _UNREAD else stored


def _codes(module: str, tensors: Mapping[str, Mapping[str, Any]], geometry: ModelGeometry) -> CodeLayout | None:
    """Return how the module's weight is stored; None where it is plain, or there is none."""
    scheme = None if geometry.quantization is None else geometry.quantization.scheme_of(module)
    if scheme is None:
        return None
    match scheme.layout:
        case "scaled":
            stored = tensors.get(f"{module}.weight")
            if stored is None or stored["dtype"] not in _CODES_OF_8_BITS:
                return None
            return scheme.codes(int(stored["shape"][1]))
        case "packed":
            part, inputs_at, per_number = "weight_packed", 1, 32 // scheme.bits
        case "awq":
            part, inputs_at, per_number = "qweight", 0, 1
        case "gptq":
            part, inputs_at, per_number = "qweight", 0, 32 // scheme.bits
    stored = tensors.get(f"{module}.{part}")
    return None if stored is None else scheme.codes(int(stored["shape"][inputs_at]) * per_number)


def _bytes_of(name: str, tensor: Mapping[str, Any], geometry: ModelGeometry, element: int, coded: bool) -> int:
    """Return the bytes of a tensor of a quantised checkpoint, whose module stays in codes if `coded`."""
    part = name.rpartition(".")[2]
    if part in _UNREAD:
        return 0
    if part in _WORDS | _CODE_PARAMETERS:
        return _count(tensor) * _SCALE_BYTES if coded else _numbers(name, tensor, geometry) * element
    return _count(tensor) * (1 if coded and tensor["dtype"] in _CODES_OF_8_BITS else element)


def _count(tensor: Mapping[str, Any]) -> int:
    return math.prod(int(extent) for extent in tensor["shape"])


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.0f} MiB"
