"""Section: a mixture's experts in codes: their time against the bound and against 16 bits.

That they are right is shown by tests/kernels/gpu/test_served_shapes.py. Shapes are those of Qwen3-30B-A3B and of
gpt-oss-20b, whose activation is clamped and whose products have biases. The bound is the bytes of the experts that the
drawn routing takes, read once, and what goes in and out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.kernels.code_dtypes import E2M1, E4M3, E8M0
from cohort.kernels.ops.experts import expert_outputs
from cohort.kernels.types import ClampedSwiglu, ExpertCodes
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.kernels.matrices import random_codes

_MOST_COPIES = 4
_ITEM_S = 10
_GPT_OSS = ClampedSwiglu(alpha=1.702, limit=7.0)


@dataclass(frozen=True, slots=True)
class Mixture:
    """`clamped`: as gpt-oss has it."""

    model: str
    count: int
    per_token: int
    hidden: int
    inner: int
    clamped: bool = False


_QWEN3 = Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768)
_OSS = Mixture("gpt-oss-20b", 32, 4, 2880, 2880, clamped=True)
_TINY = Mixture("tiny", 4, 2, 64, 32)


@dataclass(frozen=True, slots=True)
class Layout:
    """`group` inputs share a scale; 0 = a whole row."""

    name: str
    codes: torch.dtype
    group: int
    mixture: Mixture
    offsets: bool = False


_LAYOUTS = (
    Layout("FP8, blocks of 128", E4M3, 128, _QWEN3),
    Layout("INT8 by channel", torch.int8, 0, _QWEN3),
    Layout("4 bits, groups of 128", torch.uint8, 128, _QWEN3, offsets=True),
    Layout("MXFP4", E2M1, 32, _OSS),
)


def run(check: Check) -> None:
    torch.manual_seed(17)
    for layout in layouts(check.real):
        for tokens in (1, 16, 64, 256) if check.real else (1,):
            name = f"{layout.name}: {layout.mixture.model}, {tokens} tokens"
            check.guard.item(name, partial(_measure, check, name, layout, tokens), _ITEM_S)


def layouts(real: bool) -> tuple[Layout, ...]:
    """Return the layouts, tiny ones where no GPU is measured."""
    return _LAYOUTS if real else tuple(_tiny(layout) for layout in _LAYOUTS)


def _tiny(layout: Layout) -> Layout:
    clamped = layout.mixture.clamped
    mixture = Mixture(_TINY.model, _TINY.count, _TINY.per_token, _TINY.hidden, _TINY.inner, clamped)
    return Layout(layout.name, layout.codes, min(layout.group, 32), mixture, layout.offsets)


@dataclass(frozen=True, slots=True)
class Weights:
    gate_up: Tensor | ExpertCodes
    down: Tensor | ExpertCodes
    biases: tuple[Tensor, Tensor] | None
    clamped: ClampedSwiglu | None

    def outputs(self, x: Tensor, chosen: Tensor) -> Tensor:
        return expert_outputs(x, chosen, self.gate_up, self.down, self.biases, self.clamped)

    @property
    def num_bytes(self) -> int:
        return _bytes(self.gate_up) + _bytes(self.down)


def _bytes(weight: Tensor | ExpertCodes) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.codes.nbytes + weight.scales.nbytes + (0 if weight.offsets is None else weight.offsets.nbytes)


def make_weights(layout: Layout, device: torch.device, dtype: torch.dtype, *, plain: bool = False) -> Weights:
    m = layout.mixture
    shapes = ((m.count, 2 * m.inner, m.hidden), (m.count, m.hidden, m.inner))
    gate_up, down = (
        torch.empty(shape, device=device, dtype=dtype).normal_() if plain else make_codes(layout, *shape, device)
        for shape in shapes
    )
    biases = None
    if m.clamped:
        first, second = (torch.randn(shape[:2], device=device).to(dtype) for shape in shapes)
        biases = (first, second)
    return Weights(gate_up, down, biases, _GPT_OSS if m.clamped else None)


def make_codes(layout: Layout, experts: int, outputs: int, inputs: int, device: torch.device) -> ExpertCodes:
    """Return random codes, and scales that leave sums of the order of 1."""
    if layout.codes == E2M1:  # a code is 2.6 in the mean of squares
        codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=device)
        size = 127 - round(0.5 * torch.tensor(float(inputs)).log2().item() + 1.4)
        shape = (experts, outputs, inputs // layout.group)
        scales = torch.randint(size - 1, size + 2, shape, dtype=torch.uint8, device=device)
        return ExpertCodes(codes.view(E2M1), scales.view(E8M0), None, layout.group)
    shape = (experts, outputs, inputs)
    return ExpertCodes(*random_codes(layout.codes, layout.group, layout.offsets, shape, device))


def routed(mixture: Mixture, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows, and evenly drawn experts of each, ascending."""
    scores = torch.rand(tokens, mixture.count, device=device)
    chosen = scores.topk(mixture.per_token, dim=1).indices.sort(dim=1).values
    return torch.randn(tokens, mixture.hidden, device=device).to(dtype), chosen


def _measure(check: Check, name: str, layout: Layout, tokens: int) -> None:
    m, element = layout.mixture, check.dtype.itemsize
    x, chosen = routed(m, tokens, check.device, check.dtype)
    make, call = partial(make_weights, layout, check.device, check.dtype), lambda each: each.outputs(x, chosen)
    first = make()
    coded_bytes = first.num_bytes
    taken_s = check.over_copies_s(first, coded_bytes, make, call, most=_MOST_COPIES)
    del first
    plain = make(plain=True)
    plain_s = check.over_copies_s(plain, plain.num_bytes, make, call, most=1)
    experts, rows = len(set(chosen.flatten().tolist())), tokens * m.per_token
    moved = coded_bytes * experts // m.count + (tokens * m.hidden + rows * (4 * m.inner + m.hidden)) * element
    ceilings = check.ceilings()
    least_s = ceilings.least_s(moved, 2.0 * rows * 3 * m.inner * m.hidden)
    check.found.measured(
        name,
        taken_s / least_s,
        "x the bound",
        note=f"{taken_s * 1e6:.0f} us, {experts} experts; 16 bits take {plain_s * 1e6:.0f} us, "
        f"{plain_s / taken_s:.2f} times as long",
    )
