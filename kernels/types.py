"""What several kernels are given or asked by: records of tensors and which codes a product takes.

The ground of `ops/`, `cpu/`, `gpu/` and `reference.py`, so that none of them imports another for a type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.kernels import batch_invariance
from cohort.kernels.code_dtypes import E2M1, E4M3, MX_GROUP, bits_of, inputs_of
from cohort.kernels.code_units import tiled

CODES_OF_PRODUCTS = (torch.int8, torch.uint8, E4M3, E2M1)


@dataclass(frozen=True, slots=True)
class ServedProduct:
    """A product over codes as the kernel is compiled for it."""

    outputs: int
    inputs: int
    codes: torch.dtype
    group: int
    offsets: bool
    biased: bool
    experts: int = 0
    """Number of experts, whose rows are grouped; 0: the product is of all rows."""
    gathers: bool = False
    """Flag of experts: rows are tokens', in any order, else sorted already."""
    clamped: bool = False
    """Flag of experts: `ClampedSwiglu` follows the product, else SiLU."""
    fixed: bool = False
    """Tiles do not follow the number of rows (`batch_invariance`)."""


served_products: dict[ServedProduct, None] = {}


def products_made() -> tuple[ServedProduct, ...]:
    """Return the products of all weights of this process so far, each kind once, for compiling at start."""
    return tuple(served_products)


def takes(codes: torch.dtype, group: int, inputs: int) -> bool:
    """Return whether the kernel multiplies weights of these codes (see `code_dtypes`) in groups of `group` inputs."""
    if codes == E2M1:
        return group == MX_GROUP and inputs % MX_GROUP == 0
    return codes in CODES_OF_PRODUCTS and tiled(bits=bits_of(codes), group=group, inputs=inputs)


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """One product of every expert of a mixture: codes [experts, outputs, inputs], of nibbles [experts, outputs,
    inputs / 2]; scales and offsets float32 [experts, outputs, groups], of E2M1 scales in E8M0 and no offsets."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int

    def is_to_be_compiled(self, *, gathers: bool, biased: bool = False, clamped: bool = False) -> None:
        """Record this weight's product for `products_made`."""
        experts, outputs, _ = self.codes.shape
        shape = (outputs, inputs_of(self.codes), self.codes.dtype, self.group, self.offsets is not None)
        fixed = batch_invariance.in_force()
        served_products[ServedProduct(*shape, biased, experts, gathers, clamped, fixed)] = None


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The activation of gpt-oss's experts, whose gates and ups stand in turn."""

    alpha: float
    limit: float


EDIT_KINDS = 4


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters of S rows; tensors on the logits' device.

    `temperatures` below `GREEDY_BELOW` are greedy. `top_ks` 0, `top_ps` 1 and `min_ps` 0 switch themselves off.
    `wants`: -1 no log-probabilities, k >= 0 the sampled token's and those of the k likeliest.

    Edits are (id, value) entries in order of rows, and in a row of kinds: repetition (a logit above 0 is divided by the
    value, else multiplied), presence and frequency (the value is subtracted), bias (added), bans. Entries of kind k of
    row r are [edit_starts[4r + k], edit_starts[4r + k + 1]); within a kind ids differ, and ids outside the vocabulary
    are left out. `saved` has at least one element per entry, and is written.
    """

    seeds: Tensor  # int64 [S], the bits of unsigned numbers
    positions: Tensor  # int64 [S]
    top_ps: Tensor  # float64 [S]
    temperatures: Tensor  # float32 [S]
    min_ps: Tensor  # float32 [S]
    top_ks: Tensor  # int32 [S]
    wants: Tensor  # int32 [S]
    edit_starts: Tensor  # int32 [4S + 1]
    edit_ids: Tensor  # int32 [E]
    edit_values: Tensor  # float32 [E]
    saved: Tensor  # float32 [E]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of sampling; log-probabilities, from the raw logits, only of rows that want them."""

    tokens: Tensor  # int64 [S]
    logprobs: Tensor  # float32 [S]
    top_ids: Tensor  # int64 [S, most]
    top_logprobs: Tensor  # float32 [S, most]
    scratch: Tensor  # int32 [S, `scratch_cells`], the kernel's own

    @staticmethod
    def empty(rows: int, most: int, device: torch.device) -> SampledRows:
        """Return room for `rows` rows with `most` likeliest tokens each."""
        return SampledRows(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty((rows, most), dtype=torch.int64, device=device),
            torch.empty((rows, most), dtype=torch.float32, device=device),
            torch.empty((rows, SCRATCH_CELLS), dtype=torch.int32, device=device),
        )


SCRATCH_CELLS = 24 << 9
"""Cells of a row: distances that are searched for top_k's or top_p's last one, once few are left."""
