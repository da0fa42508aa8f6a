"""The plans of `scripts/gpu_check`: which sections run, in which order or side by side, and how long each may take.

A machine with a GPU is often lent for minutes, its start included. So each plan fits in one short command: plan A says
whether everything works, plan B how fast what users see is, plan C holds the rest against its bounds. What is not begun
or not done in its time is a row that says so. Read by `runner` (deadlines) and `__main__` (names). Standard library
alone; decides nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SETUP_S = 15.0
"""Time before the first section: wheels unpacked, kernels of an earlier call, torch read from the disk."""
CLOSING_S = 10.0
"""Time after the last section: processes ended, logs and kernels packed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` by section. `together`: side by side, as many as there are cores, each from the set-up on: right or
    wrong, and no speed. Otherwise one after the other, each alone on the device."""

    total_s: float
    seconds: Mapping[str, float]
    together: bool = False


PLANS = {
    "A": Plan(
        180,
        {
            "device": 40,  # versions, tools, memory
            # the longest first: they are under way while others wait for a core
            "pipeline": 155,  # the default preset end to end, 64 users: what `docker compose up` gives
            "pipeline-disaggregated": 155,  # two workers on the device: KV must travel
            "kernels": 155,  # the shapes that are served, against the reference
            "families": 155,  # of each family a tiny model: transformers' tokens
            "families-16-bits": 155,  # and the precision that is served
            "formats": 155,  # of each format of checkpoint one
            "golden-presets": 155,  # presets whose rows lie differently in the cache
            "smoke": 120,  # recorded steps against others, sampling against the processor's
            "golden": 120,  # token for token against transformers
            "kv-transfer": 90,  # two processes, each link
        },
        together=True,
    ),
    "B": Plan(
        240,
        {
            "device": 15,  # the rates that every bound is made of
            "pipeline": 75,  # the default preset: the figure to hold against another server; whole or not at all
            "pipeline-unified": 45,  # one queue, one worker
            "model-8b": 65,  # one load: decode, gaps, sampler, mixed steps, prefill; item by item
            "products": 15,  # the matrix products alone
        },
    ),
    "C": Plan(
        240,
        {
            "library-products": 55,  # ours against torch's on the same card: what is worth keeping
            "attention": 40,  # every shape, and the cache's stride
            "coded-products": 20,  # weights of 8 and 4 bits, against the bound and 16 bits
            "coded-experts": 20,  # a mixture's experts in FP8, INT8, 4 bits and MXFP4, the same way
            "batch-invariant": 30,  # one model, loaded without the option and with it: its price
            "model-14b": 40,  # one load: decode, prefill, mixed steps, compilations
            "tests": 10,  # all tests of kernels: as many as the time allows, and all with --only and --total-s
        },
    ),
}
SECTIONS = tuple(dict.fromkeys(section for plan in PLANS.values() for section in plan.seconds))


def plan_of(name: str, only: Sequence[str] | None) -> Plan:
    """Return a plan, or the named sections (of any plan), in the plans' order, one after the other."""
    if only is None:
        return PLANS[name]
    seconds = {
        section: max(plan.seconds.get(section, 0.0) for plan in PLANS.values())
        for section in SECTIONS
        if section in only
    }
    return Plan(SETUP_S + sum(seconds.values()) + CLOSING_S, seconds)


def deadlines(plan: Plan, total_s: float) -> list[tuple[str, float]]:
    """Return the plan's sections, each with the moment, counted from the start, at which it is ended: stretched or
    squeezed to `total_s`. One after the other, what earlier ones left over is a section's to use, and none of the later
    ones' time is."""
    until_s, found = SETUP_S, []
    for section, seconds in plan.seconds.items():
        until_s = (SETUP_S if plan.together else until_s) + seconds
        found.append((section, until_s * total_s / plan.total_s))
    return found
