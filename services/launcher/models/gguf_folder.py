"""Makes a folder in Hugging Face format around a GGUF file: its configuration, its tokenizer, and a link to it.

Called by the launcher where `--model` names a GGUF file, or a folder with one, and by hand where services start without
a launcher (`python -m cohort.services.launcher.models.gguf_folder FILE FOLDER`). All processes then serve a folder as
any other; the weights stay in the file, as they are. A tokenizer.json beside the file is taken before the one that the
metadata describe. Served are the architectures whose tensors the engine knows (`common/engine/weights/gguf_files.py`);
whatever else a file asks for is refused by name, never guessed.

The folder lies in the cache under a digest of the file's path, size and time, and appears by one rename. Imports torch
and transformers only in the process of its own that makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.common.engine.config.config_bounds import check_finite, check_sizes, shown
from cohort.common.engine.config.gguf_header import open_gguf
from cohort.common.errors import CohortError, ModelError
from cohort.common.hub.model_source import TOKENIZER_BESIDE_GGUF
from cohort.common.paths import GGUF_FILE, cache_dir
from cohort.services.launcher.models.default_model import tidy_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TIMEOUT_S = 600.0  # of the wall clock: a machine that is busy elsewhere takes its time
CPU_S = 60
"""Processor time of the process that reads a file: a vocabulary of 152,000 tokens takes 20 s on a core of Zen 5."""
MEMORY_BYTES = 4 << 30
"""Memory that it may write to: the same vocabulary takes 0.8 GB."""
ADDRESS_BYTES = 32 << 30
"""Address space of that process beside the file's mappings: PyTorch for CUDA maps libraries of several GB."""
_MEMORY = f"within {MEMORY_BYTES >> 30} GiB of memory"
_LARGEST_FIELD = 4096
"""Elements of a field that may matter to the configuration; lists of tokens are longer, and are read elsewhere."""


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that `path` names: itself, or the only one of a folder without a config.json; else None.

    Raises `ModelError` for a folder with several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:6])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}); name the one to serve: --model FILE")
    return files[0] if files else None


def folder_for(file: Path) -> Path:
    """Return the folder of this file; its last part is the file's name, which clients see."""
    file = Path(os.path.abspath(file))  # a link keeps its name and its neighbours: Hugging Face's cache is of links
    state = file.stat()
    digest = hashlib.sha256(f"{file}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_dir() / "gguf" / digest / file.stem


def served_folder(path: Path) -> Path:
    """Return `path` itself, or the folder around the GGUF file that it names; made if absent. Raises `ModelError`."""
    file = gguf_file(path)
    if file is None:
        return path
    folder = folder_for(file)
    if not folder.is_dir():
        command = [sys.executable, "-P", "-m", "cohort.services.launcher.models.gguf_folder", str(file), str(folder)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"{file}: its metadata were not read within {TIMEOUT_S:.0f} s") from None
        if done.returncode == -signal.SIGXCPU:
            raise ModelError(f"{file}: its metadata took more than {CPU_S} s of processor time")
        if done.returncode < 0:
            raise ModelError(f"{file}: its metadata could not be read ({_MEMORY}, signal {-done.returncode})")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise ModelError(lines[-1] if lines else f"{file}: its metadata could not be read")
    return folder


def make_folder(file: Path, folder: Path) -> None:
    """Raise `ModelError` naming the file and what is missing or not served."""
    file = Path(os.path.abspath(file))
    fields, tensors, factors = _metadata(file)
    try:
        config, generation = model_config(fields, tensors, factors), generation_config(fields)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{file}: its metadata are no model's: {error}") from error
    check_sizes(config, f"{file}: the configuration from its metadata")
    check_finite(config, f"{file}: the configuration from its metadata")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        for name, content in (("config.json", config), ("generation_config.json", generation)):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _tokenizer(file, partial)
        (partial / GGUF_FILE).symlink_to(file)
        if not folder.exists():  # another process may have made it meanwhile
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _metadata(file: Path) -> tuple[dict[str, Any], dict[str, list[int]], list[float]]:
    """Return all fields except long ones, the shape of every tensor, and the factors of its rotary frequencies."""
    reader = open_gguf(file)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= _LARGEST_FIELD}
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not a complete GGUF file: a list in its metadata is no UTF-8") from error
    tensors = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        return fields, tensors, []
    if factors.tensor_type.name != "F32" or len(factors.shape) != 1 or factors.n_elements > _LARGEST_FIELD:
        raise ModelError(f"{file}: rope_freqs.weight is no list of up to {_LARGEST_FIELD} numbers (F32)")
    return fields, tensors, factors.data.tolist()


def _tokenizer(file: Path, folder: Path) -> None:
    if (file.parent / TOKENIZER_BESIDE_GGUF[0]).is_file():
        for name in TOKENIZER_BESIDE_GGUF:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers raises whatever its converters meet
        raise ModelError(
            f"{file}: no tokenizer could be made from its metadata ({type(error).__name__}: {error}); put the model's "
            "tokenizer.json and tokenizer_config.json into the same folder"
        ) from error
    tidy_tokenizer(folder)


# -- from the metadata of the file to config.json and generation_config.json; pure --------------------------------


def model_config(
    fields: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], rope_factors: Sequence[float] = ()
) -> dict[str, Any]:
    """Return config.json of the model.

    `fields`: metadata by their names; `tensors`: the shape of every tensor, outputs first; `rope_factors`: the tensor
    `rope_freqs.weight`, where there is one. Raises `ModelError` naming what is missing or not served.
    """
    arch = str(fields.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        raise ModelError(f"GGUF files of architecture {arch!r} are not served; served are {', '.join(ARCHITECTURES)}")

    def of(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"the GGUF file lacks {arch}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{arch}.{key} differs from layer to layer, which is not served")
            value = value[0]
        return value

    if of("expert_count", 0):
        raise ModelError(f"GGUF files of mixtures of experts are not served ({arch}.expert_count)")
    heads, hidden = int(of("attention.head_count")), int(of("embedding_length"))
    if not 0 < heads <= hidden:
        raise ModelError(f"{arch}.attention.head_count is {shown(heads)}, {arch}.embedding_length {shown(hidden)}")
    head_dim = int(of("attention.key_length", hidden // heads))
    if int(of("attention.value_length", head_dim)) != head_dim or int(of("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("heads whose keys, values and rotated parts differ in size are not served")
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file lacks tensor token_embd.weight")
    context = int(of("context_length"))
    config = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": int(of("block_count")),
        "intermediate_size": int(of("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(of("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(of("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": context,
        "vocab_size": tensors["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "rope_theta": float(of("rope.freq_base", 10000.0)),
        "attention_bias": _bias(arch, tensors),
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
    if scaling := _rope_scaling(fields, arch, context, rope_factors):
        config["rope_scaling"] = scaling
    for name in ("bos_token_id", "eos_token_id"):
        if f"tokenizer.ggml.{name}" in fields:
            config[name] = int(fields[f"tokenizer.ggml.{name}"])
    return config


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that end a generation: end of text and, where the file names it, end of turn."""
    ends = [fields.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    found = list(dict.fromkeys(int(end) for end in ends if end is not None))
    return {"eos_token_id": found} if found else {}


def _bias(arch: str, tensors: Mapping[str, Sequence[int]]) -> bool:
    """Return whether attention has biases: all four or none in `llama` and `qwen3`, of q, k and v in `qwen2`."""
    queries, output = "blk.0.attn_q.bias" in tensors, "blk.0.attn_output.bias" in tensors
    if arch == "qwen2":
        if not queries or output:
            raise ModelError("qwen2 is served with biases of q, k and v, and of these alone")
        return True
    if queries != output:
        raise ModelError(f"{arch} is served with biases of q, k, v and the output, or of none")
    return queries


def _rope_scaling(
    fields: Mapping[str, Any], arch: str, context: int, factors: Sequence[float]
) -> dict[str, Any] | None:
    """Return the configuration's `rope_scaling`. A factor for every frequency (Llama 3.1) becomes LongRoPE's form with
    a range that ends at the context."""
    kind = str(fields.get(f"{arch}.rope.scaling.type", "none"))
    if factors:
        return {
            "rope_type": "longrope",
            "short_factor": [float(factor) for factor in factors],
            "long_factor": [float(factor) for factor in factors],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    factor = fields.get(f"{arch}.rope.scaling.factor", fields.get(f"{arch}.rope.scale_linear"))
    if kind == "none" or (kind == "linear" and factor is None):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor is not None:
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        return scaling if original is None else {**scaling, "original_max_position_embeddings": int(original)}
    raise ModelError(f"{arch}.rope.scaling.type {kind!r} is not served; served are none, linear and yarn")


def limit_process(file_bytes: int) -> None:
    """Limit this process's memory and processor time for good. The file is mapped twice: here and by transformers."""
    for what, most in (
        (resource.RLIMIT_AS, ADDRESS_BYTES + 2 * file_bytes),
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, hard))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.launcher.models.gguf_folder",
        description="Make a model folder around a GGUF file, whose weights stay where they are.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to make")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        return 0
    try:
        limit_process(options.file.stat().st_size)
        make_folder(options.file, options.folder)
    except MemoryError:
        sys.stderr.write(f"{options.file}: its metadata could not be read ({_MEMORY})\n")
        return 1
    except (CohortError, OSError) as error:
        sys.stderr.write(f"{error}\n".replace("\n", " ").rstrip() + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
