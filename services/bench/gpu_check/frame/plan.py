"""The two plans of `scripts/gpu_check`: which sections run, in which order, and how long each may take.

A machine with a GPU is often lent for minutes. So each plan fits in one command of nine minutes, and what tells most
stands first: plan A says whether it works and where the time goes, plan B holds the rest against its targets. Read by
`runner` (deadlines) and `__main__` (names). Standard library alone; decides nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

TOTAL_S = 540.0
SETUP_S = 20.0
"""Time before the first section: wheels unpacked, torch read from the disk for the first time."""

PLANS = {
    "A": {
        "device": 30,  # versions, and the rates that every bound is made of
        "smoke": 55,  # tests of two layers: if recording or sampling is wrong, no later figure means anything
        "kernels": 70,  # right before fast; the shapes that are served come first
        "pipeline": 125,  # the one end-to-end figure: it must not be what the deadline cuts off
        "model-8b": 140,  # one load: decode, gaps, sampler, mixed steps, prefill
        "products": 30,  # the matrix products alone; the model's memory is free again by then
        "golden": 70,  # tests token for token against transformers; smoke has caught what is gross
    },
    "B": {
        "attention": 60,  # every shape, and the cache's stride
        "coded-products": 30,  # weights of 8 and 4 bits, against the bound and 16 bits
        "coded-experts": 30,  # a mixture's experts in FP8, INT8, 4 bits and MXFP4, the same way
        "batch-invariant": 50,  # one model, loaded without the option and with it: its price
        "kv-transfer": 60,  # two processes, one device; broken links are found early
        "model-14b": 70,  # one load: decode, prefill, mixed steps, compilations
        "pipelines": 85,  # two workers on one device are time-sliced: a check, not a measurement
        "golden-presets": 45,  # tests of the presets whose rows lie differently in the cache
        "formats": 60,  # tests of every family and format, two or three layers each
        "tests": 30,  # all tests of kernels: as many as the time allows, and all with --only and --total-s
    },
}
"""Seconds by section."""
_SECONDS = {section: seconds for plan in PLANS.values() for section, seconds in plan.items()}
SECTIONS = tuple(_SECONDS)


def deadlines(sections: Sequence[str], total_s: float) -> list[tuple[str, float]]:
    """Return the sections in this order, each with the moment, counted from the start, at which it is ended. What
    earlier ones left over is its to use, and none of the later ones' time is; a whole plan's seconds, set-up included,
    are stretched or squeezed to `total_s`."""
    until_s, found = SETUP_S, []
    for section in sections:
        until_s += _SECONDS[section]
        found.append((section, until_s * total_s / TOTAL_S))
    return found


def sections_of(plan: str, only: Sequence[str] | None) -> list[str]:
    """Return a plan's sections, or the named ones (of either plan) in the plans' order."""
    return list(PLANS[plan]) if only is None else [section for section in SECTIONS if section in only]
