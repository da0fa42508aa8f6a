"""A GGUF file's tensors under the names of a Hugging Face checkpoint, in their codes.

Opened by `weights.open_weights` for a folder that holds `model.gguf`. A matrix in blocks comes as `QuantizedWeight`
without widening, F32, F16 and BF16 as plain tensors. llama.cpp stores the queries and keys of the architecture `llama`
with another order of rows (pairs of neighbouring elements are rotated there, halves of a head here); rows move back,
which changes no code. What the file's metadata say of the model is read elsewhere
(`services/launcher/models/gguf_folder.py`).

The blocks are ggml's (`ggml-quants.c`): the codes of a block stand beside its float16 scale, in the K types under a
scale of 256 inputs. Codes of 5 and 6 bits become int8; the others keep their size. A block of each type says:

    Q8_0  32 inputs, d · q                                 Q4_K  8 times 32 inputs, d · s · q - dmin · m
    Q4_0  32 inputs, d · (q - 8)                           Q5_K  as Q4_K with a fifth bit apart
    Q4_1  32 inputs, d · q + m                             Q6_K  16 times 16 inputs, d · s · (q - 32)
    Q5_0, Q5_1  as these with a fifth bit apart
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.config.config_bounds import MOST_HEADS, shown
from cohort.common.engine.config.gguf_header import open_gguf
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
    """Return the name that a tensor of a GGUF file has in a Hugging Face checkpoint; None where none of ours has it."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _OF_LAYER:
        return None
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"


class GgufFiles:
    """`Weights` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `ModelError` where it is damaged, or holds tensors that are not served, by their
        names."""
        self._path = path
        reader = open_gguf(path)
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
        self._heads: dict[str, int] = {}
        architecture = reader.fields.get("general.architecture")
        if architecture is not None and architecture.contents() == "llama":
            queries = self._head_count(reader, "llama.attention.head_count", 0)
            counts = (queries, self._head_count(reader, "llama.attention.head_count_kv", queries))
            self._heads = dict(zip(_HEADS, counts, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
        """Read several tensors stacked, as numbers: blocks are dequantised."""
        self.require(names)
        fused = torch.empty((sum(rows), *rest), dtype=dtype, device=device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self._check_shape(name, (count, *rest))
            part = self._stored(name)
            fused[first : first + count] = part if isinstance(part, Tensor) else part.dequantized().to(dtype)
            first += count
        return fused

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> QuantizedWeight | None:
        """Read a matrix in its codes, on the host; None where it is plain."""
        self.require([name])
        self._check_shape(name, (outputs, inputs))
        stored = self._stored(name)
        return None if isinstance(stored, Tensor) else stored

    def _stored(self, name: str) -> Tensor | QuantizedWeight:
        tensor = self._tensors[name]
        kind, values = tensor.tensor_type.name, torch.from_numpy(np.array(tensor.data))
        if kind == "BF16":
            values = values.view(torch.bfloat16)
        rows = self._in_order(name, values)
        return rows if kind in PLAIN else decoded(kind, rows)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of queries and keys in a checkpoint's order: all first rows of rotated pairs, then the second."""
        heads = next((count for module, count in self._heads.items() if f".{module}." in name), 0)
        if not heads:
            return rows
        if len(rows) % (2 * heads):
            raise ModelError(f"{self._path}: tensor {name} has {len(rows)} rows, which {heads} heads do not divide")
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _head_count(self, reader: Any, name: str, default: int) -> int:
        field = reader.fields.get(name)
        counts = default if field is None else field.contents()
        found = set(counts) if isinstance(counts, list) else {counts}
        count = found.pop() if len(found) == 1 else 0
        if type(count) is not int or not 0 < count <= MOST_HEADS:
            raise ModelError(f"{self._path}: {name} is {shown(counts)}, no whole number from 1 to {MOST_HEADS}")
        return count

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(int(size) for size in reversed(self._tensors[name].shape))
        if found != shape:
            raise ModelError(f"{self._path}: tensor {name} has shape {found}, its metadata say {shape}")


class BlockType(NamedTuple):
    """A block of `inputs` numbers in `stored` bytes."""

    inputs: int
    stored: int
    decode: Callable[[Tensor], QuantizedWeight]
    """The function from uint8 [outputs, blocks, stored] to codes."""


def _halves(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 at byte `first` of every block, as float32 [outputs, blocks]."""
    return blocks[:, :, first : first + 2].contiguous().view(torch.float16)[:, :, 0].float()


def _nibbles(low_high: Tensor) -> Tensor:
    """Return uint8 [..., 32]: sixteen bytes hold inputs 0 to 15 in their low nibbles, 16 to 31 in their high ones."""
    return torch.cat((low_high & 15, low_high >> 4), dim=-1)


def _paired(codes: Tensor) -> Tensor:
    """Pack uint8 [outputs, ...] of all inputs in order to [outputs, inputs / 2], two neighbouring inputs a byte."""
    flat = codes.reshape(len(codes), -1)
    return flat[:, 0::2] | (flat[:, 1::2] << 4)


def _fifth_bits(bits: Tensor) -> Tensor:
    """Return uint8 [outputs, blocks, 32] of 0 and 16, from the four bytes of every block that hold them."""
    each = torch.arange(8, dtype=torch.uint8)
    return ((bits[..., None] >> each & 1) << 4).flatten(-2)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    codes = blocks[:, :, 2:].reshape(len(blocks), -1).view(torch.int8)
    return QuantizedWeight("int8", codes, _halves(blocks, 0), None, 32)


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    scales = _halves(blocks, 0)
    return QuantizedWeight("uint4", _paired(_nibbles(blocks[:, :, 2:])), scales, scales * -8, 32)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    codes = _paired(_nibbles(blocks[:, :, 4:]))
    return QuantizedWeight("uint4", codes, _halves(blocks, 0), _halves(blocks, 2), 32)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    codes = (_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])).view(torch.int8) - 16
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), _halves(blocks, 0), None, 32)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    codes = (_nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])).view(torch.int8)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), _halves(blocks, 0), _halves(blocks, 2), 32)


def _small_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales d · s and the offsets -dmin · m of the K types' eight groups, float32 [outputs, blocks · 8].

    Their twelve bytes hold 6 bits of each: the first four groups in the low bits of bytes 0 to 3 (s) and 4 to 7 (m);
    of the others the low 4 bits in bytes 8 to 11, the upper two above those of the first.
    """
    s, m, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat((s & 63, (rest & 15) | (s >> 6 << 4)), dim=-1).float()
    offsets = torch.cat((m & 63, (rest >> 4) | (m >> 6 << 4)), dim=-1).float()
    scales = scales * _halves(blocks, 0)[:, :, None]
    offsets = offsets * -_halves(blocks, 2)[:, :, None]
    return scales.flatten(1), offsets.flatten(1)


def _k_nibbles(stored: Tensor) -> Tensor:
    """Return uint8 [outputs, blocks, 8, 32]: 32 bytes hold a group in their low nibbles and the next in the high."""
    pairs = stored.reshape(*stored.shape[:2], 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(2, 3)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _small_scales(blocks)
    return QuantizedWeight("uint4", _paired(_k_nibbles(blocks[:, :, 16:])), scales, offsets, 32)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _small_scales(blocks)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> groups & 1) << 4
    codes = (_k_nibbles(blocks[:, :, 48:]) | fifth).view(torch.int8)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), scales, offsets, 32)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """Decode twice 128 inputs: of 64 bytes the nibbles are the low bits of four runs of 32, of 32 bytes the pairs of
    bits the upper ones."""
    bytes_of = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)  # half, two runs of 32
    low = torch.cat((bytes_of & 15, bytes_of >> 4), dim=-1).view(*blocks.shape[:2], 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3) << 4
    codes = (low | high).view(torch.int8) - 32
    small = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    scales = (small * _halves(blocks, 208)[:, :, None]).flatten(1)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), scales, None, 16)


BLOCKS: Mapping[str, BlockType] = {
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}


def decoded(kind: str, rows: Tensor) -> QuantizedWeight:
    """Decode rows of blocks, uint8 [outputs, bytes of a row], of the type `kind`, one of `BLOCKS`."""
    block = BLOCKS[kind]
    return block.decode(rows.view(len(rows), -1, block.stored))
