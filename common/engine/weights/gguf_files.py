"""A GGUF file's tensors under the names of a Hugging Face checkpoint, in their codes.

Opened by `weights.open_weights` for a folder that holds `model.gguf`. A matrix in blocks comes as `QuantizedWeight`
(`gguf_blocks`), F32, F16 and BF16 as plain tensors. llama.cpp stores the queries and keys of the architecture `llama`
with another order of rows (pairs of neighbouring elements are rotated there, halves of a head here); rows move back,
which changes no code. What the file's metadata say of the model is read elsewhere
(`services/launcher/models/gguf_folder.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.weights.gguf_blocks import BLOCKS, decoded
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.errors import ModelError

PLAIN = ("F32", "F16", "BF16")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FROM_CONFIGURATION = frozenset({"rope_freqs.weight"})  # its numbers are in config.json
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HEADS = {"self_attn.q_proj": "attention.head_count", "self_attn.k_proj": "attention.head_count_kv"}


def served_name(name: str) -> str | None:
    """The name that a tensor of a GGUF file has in a Hugging Face checkpoint; None where none of ours has it."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _OF_LAYER:
        return None
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"


class GgufFiles:
    """`Weights` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` where the file is damaged, or holds tensors that are not served, by their names."""
        from gguf import GGUFReader

        self._path = path
        try:
            reader: Any = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path}: not a complete GGUF file: {error}") from error
        self._tensors: dict[str, Any] = {}
        unknown, kinds = [], set()
        for tensor in reader.tensors:
            if (served := served_name(tensor.name)) is not None:
                self._tensors[served] = tensor
            elif tensor.name not in _FROM_CONFIGURATION:
                unknown.append(tensor.name)
            kinds.add(tensor.tensor_type.name)
        if unknown:
            raise ModelError(f"{path} holds tensors that are not served: {', '.join(unknown[:5])}")
        if refused := sorted(kinds - BLOCKS.keys() - set(PLAIN)):
            known = ", ".join((*BLOCKS, *PLAIN))
            raise ModelError(f"{path}: tensors of type {', '.join(refused)} are not served; served are {known}")
        self._heads = {}
        architecture = reader.fields["general.architecture"].contents()
        if architecture == "llama":
            queries = reader.fields["llama.attention.head_count"].contents()
            keys = reader.fields.get("llama.attention.head_count_kv")
            counts = (queries, queries if keys is None else keys.contents())
            self._heads = dict(zip(_HEADS, counts, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()  # and the mapping of the file with them

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        for candidate in candidates:
            if candidate + probe in self:
                return candidate
        raise ModelError(f"{self._path} lacks tensor {candidates[0]}{probe}")

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once."""
        if missing := [name for name in names if name not in self]:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelError(f"{self._path} lacks {len(missing)} tensors that its architecture needs: {shown}")

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.read_rows([name], [shape[0]], shape[1:], dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Several tensors stacked, as numbers: blocks are dequantised."""
        self.require(names)
        fused = torch.empty((sum(rows), *rest), dtype=dtype, device=device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self._check_shape(name, (count, *rest))
            weight = self._coded(name)
            fused[first : first + count] = self._plain(name) if weight is None else weight.dequantized().to(dtype)
            first += count
        return fused

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> QuantizedWeight | None:
        """A matrix in its codes, on the host; None where it is plain."""
        self.require([name])
        self._check_shape(name, (outputs, inputs))
        return self._coded(name)

    def _coded(self, name: str) -> QuantizedWeight | None:
        tensor = self._tensors[name]
        if (kind := tensor.tensor_type.name) in PLAIN:
            return None
        return decoded(kind, self._in_order(name, torch.from_numpy(np.array(tensor.data))))

    def _plain(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values = torch.from_numpy(np.array(tensor.data))
        if tensor.tensor_type.name == "BF16":
            values = values.view(torch.bfloat16)
        return self._in_order(name, values)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of queries and keys as a checkpoint has them: first of all rotated pairs, then their second ones."""
        heads = next((count for module, count in self._heads.items() if f".{module}." in name), 0)
        if not heads:
            return rows
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(int(size) for size in reversed(self._tensors[name].shape))
        if found != shape:
            raise ModelError(f"{self._path}: tensor {name} has shape {found}, its metadata say {shape}")
