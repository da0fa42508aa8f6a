"""The two plans of `scripts/gpu_check`: which sections run, in which order, and how long each may take.

A machine with a GPU is often lent for minutes. So each plan fits in one command of nine minutes, and what tells most
stands first: plan A says whether it works and where the time goes, plan B holds the rest against its targets. Read by
`runner` (deadlines) and `__main__` (names). Standard library alone; decides nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PlanName = Literal["A", "B"]
Section = Literal[
    "device",
    "smoke",
    "kernels",
    "pipeline",
    "model-8b",
    "products",
    "golden",
    "attention",
    "coded-products",
    "coded-experts",
    "batch-invariant",
    "golden-presets",
    "kv-transfer",
    "model-14b",
    "pipelines",
    "memcheck",
    "tests",
]
TOTAL_S = 540.0
SETUP_S = 20.0
"""Before the first section: wheels unpacked, torch read from the disk for the first time."""


@dataclass(frozen=True, slots=True)
class Part:
    """A section, its seconds, and why it stands there."""

    section: Section
    seconds: float
    why: str


PLANS: dict[PlanName, tuple[Part, ...]] = {
    "A": (
        Part("device", 30, "versions, and the rates that every bound is made of"),
        Part("smoke", 55, "tests of two layers: if recording or sampling is wrong, no later figure means anything"),
        Part("kernels", 70, "right before fast; the shapes that are served come first"),
        Part("pipeline", 125, "the one end-to-end figure: it must not be what the deadline cuts off"),
        Part("model-8b", 140, "one load: decode, gaps, sampler, mixed steps, drafts, prefill, a head that drafts"),
        Part("products", 30, "the matrix products alone; the model's memory is free again by then"),
        Part("golden", 70, "tests token for token against transformers; smoke has caught what is gross"),
    ),
    "B": (
        Part("attention", 80, "every shape, the cache's stride, and the choice of tile, stages and warps"),
        Part("coded-products", 30, "weights of 8 and 4 bits, against the bound and 16 bits"),
        Part("coded-experts", 30, "a mixture's experts in FP8, INT8, 4 bits and MXFP4, the same way"),
        Part("batch-invariant", 50, "one model, loaded without the option and with it: its price"),
        Part("kv-transfer", 60, "two processes, one device; broken links are found early"),
        Part("model-14b", 90, "one load: decode, prefill, mixed steps, compilations, the cache filled"),
        Part("pipelines", 85, "two workers on one device are time-sliced: a check, not a measurement"),
        Part("golden-presets", 45, "tests of the presets whose rows lie differently in the cache"),
        Part("memcheck", 20, "only where the tool is installed, and slow"),
        Part("tests", 30, "all tests of kernels: as many as the time allows, and all with --only and --total-s"),
    ),
}
SECTIONS: tuple[Section, ...] = tuple(part.section for plan in PLANS.values() for part in plan)


@dataclass(frozen=True, slots=True)
class Deadline:
    """`seconds`: what the section may take if all before it took theirs. `until_s`: when it is ended, counted from the
    start; what earlier sections left over is its to use, and none of the later ones' time is."""

    section: Section
    seconds: float
    until_s: float


def deadlines(sections: Sequence[Section], total_s: float) -> list[Deadline]:
    """The sections in this order; a whole plan's seconds, set-up included, are stretched or squeezed to `total_s`."""
    known = {part.section: part.seconds for plan in PLANS.values() for part in plan}
    scale = total_s / TOTAL_S
    until_s = SETUP_S * scale
    found = []
    for section in sections:
        until_s += known[section] * scale
        found.append(Deadline(section, known[section] * scale, until_s))
    return found


def sections_of(plan: PlanName, only: Sequence[Section] | None) -> list[Section]:
    """A plan's sections, or the named ones (of either plan) in the plans' order."""
    if only is None:
        return [part.section for part in PLANS[plan]]
    return [section for section in SECTIONS if section in only]
