"""A model's open files as its forms read them: tensors of one dtype on one device, and products of them.

`Loading` is made by the model runner and by who loads drafts; the lean models open it. Computes nothing for a step but
`WideNorm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.ranks.ranks import RankComm
from cohort.common.engine.ranks.sharded_weights import open_sharded
from cohort.common.engine.weights.linear import Embedding, GatedLinear, Linear, Matrix
from cohort.common.engine.weights.matrices import RoundedWeights, Rounding, matrix
from cohort.common.engine.weights.weights import WeightKind, Weights, open_weights
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.fused import wide_rms_norm


@dataclass(frozen=True, slots=True)
class Loading:
    """The folder and geometry of a model to load, and how it is to run."""

    folder: Path
    geometry: ModelGeometry  # of the whole model
    _: KW_ONLY
    dtype: torch.dtype
    device: torch.device
    max_rows: int = 0
    max_step_tokens: int = 0
    weights: WeightKind = "files"
    ranks: RankComm | None = None  # this is one rank of several, and holds its share alone
    rounding: Rounding | None = None  # of plain matrices, at load; None = they stay as they are

    @property
    def own(self) -> ModelGeometry:
        """The geometry of what this rank holds and computes."""
        return self.geometry if self.ranks is None else self.ranks.share.own

    @contextmanager
    def open(self) -> Iterator[ModelFiles]:
        """Open the files, of which a rank reads its share. Raises `ModelError`."""
        if self.ranks is None:
            opened = open_weights(self.folder, self.weights, self.geometry.quantization)
        else:
            opened = open_sharded(self.folder, self.weights, self.ranks.share)
        with opened if self.rounding is None else RoundedWeights(opened, self.rounding, self.dtype) as weights:
            files = ModelFiles(weights, self.dtype, self.device)
            yield files
        for norm in files.norms:
            norm.prepare()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's tensors, by the names of their modules; products are packed into one arena."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    arena: Arena = field(default_factory=Arena)
    norms: list[WideNorm] = field(default_factory=list)  # all that were read

    def vector(self, module: str, size: int) -> Tensor:
        return self.weights.read(f"{module}.weight", (size,), self.dtype, self.device)

    def bias(self, modules: Sequence[str], rows: Sequence[int]) -> Tensor:
        return self.weights.read_rows([f"{name}.bias" for name in modules], rows, (), self.dtype, self.device)

    def wide_norm(self, module: str, size: int, eps: float, *, shift: float = 0.0) -> WideNorm:
        self.norms.append(WideNorm(self.vector(module, size), eps, shift=shift))
        return self.norms[-1]

    def matrix(self, modules: Sequence[str], rows: Sequence[int], inputs: int) -> Matrix:
        """See `matrices.matrix`."""
        return matrix(self.weights, [f"{name}.weight" for name in modules], rows, inputs, self.dtype, self.device)

    def linear(self, modules: Sequence[str], rows: Sequence[int], inputs: int, *, bias: bool = False) -> Linear:
        """Read the product of several modules, their outputs one after the other."""
        weight, added = self.matrix(modules, rows, inputs), self.bias(modules, rows) if bias else None
        return Linear(weight, added, arena=self.arena, dtype=self.dtype)

    def gated(self, modules: Sequence[str], rows: Sequence[int], inputs: int, *, bias: bool = False) -> GatedLinear:
        """Read the first half of a gated MLP, gates before ups."""
        weight, added = self.matrix(modules, rows, inputs), self.bias(modules, rows) if bias else None
        return GatedLinear(weight, added, arena=self.arena, dtype=self.dtype)

    def outer(self, prefix: str, geometry: ModelGeometry) -> tuple[Embedding, Linear]:
        """Read the embedding and the product that makes logits: one matrix where the model ties both, or the files hold
        one."""
        vocab, hidden = geometry.vocab_size, geometry.hidden_size
        table = self.matrix([prefix + "embed_tokens"], [vocab], hidden)
        tied = geometry.tie_embeddings or "lm_head.weight" not in self.weights
        head = table if tied else self.matrix(["lm_head"], [vocab], hidden)
        lm_head = Linear(head, arena=self.arena, dtype=self.dtype)
        return Embedding(table, lm_head if tied else None, arena=self.arena, dtype=self.dtype), lm_head


class WideNorm:
    """x ↦ x / sqrt(mean(x²) + eps) · (shift + weight), the weight in float32 to the end: rounded once, unlike a Llama's
    (Gemma, gpt-oss)."""

    __slots__ = ("_eps", "_factor", "_shift")

    def __init__(self, weight: Tensor, eps: float, *, shift: float) -> None:
        self._factor, self._eps, self._shift = weight, eps, shift

    def prepare(self) -> None:
        """Convert the weight to float32, once, when the files are closed: on a GPU its bytes are not there before."""
        self._factor = self._shift + self._factor.float()

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write to `out`, which may be x; both may be strided views."""
        wide_rms_norm(x, self._factor, self._eps, out)


def split_heads(qkv: Tensor, geometry: ModelGeometry) -> tuple[Tensor, ...]:
    """Return queries, keys and values as views [T, heads, head dim] of qkv [T, …]."""
    parts = [geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads]
    return torch.split(qkv.view(len(qkv), -1, geometry.head_dim), parts, dim=1)
