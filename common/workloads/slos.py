"""The SLOs of each paper: rules item → `Slo`, for `changes.promise`.

Pure. A rule sees the true output length, because E9 is defined by it; policies see the SLO only.
"""

from __future__ import annotations

from collections.abc import Callable

from cohort.common.types import Slo
from cohort.common.workloads.items import NO_SLO, WorkItem

SloRule = Callable[[WorkItem], Slo]


def per_token(ttft_s: float, tpot_s: float) -> SloRule:
    """Return a rule of TTFT and TPOT. BucketServe (§V-B) prints no targets: the caller must choose and state them."""
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    return lambda item: slo


def bros(item: WorkItem) -> Slo:
    """Return TTFT 0.4 s and TPOT 0.2 s for real-time requests (BROS §7.1), nothing for best-effort ones."""
    return Slo(ttft_s=0.4, tpot_s=0.2) if item.traffic_class == "rt" else NO_SLO


def dynaserve(item: WorkItem) -> Slo:
    """Return 100 ms between tokens for every model size (DynaServe §6.1), which has no target for the first token."""
    return Slo(tpot_s=0.1)


def ecoserve(prompt_s: float, token_s: float, *, scale: float = 2.0) -> SloRule:
    """E9 · EcoServe §4: Return a rule of the whole answer: within scale · (t_p + t_g · l_g) of its arrival.

    t_p → `prompt_s`, the data set's mean prompt latency; t_g → `token_s`, its mean latency per generated token, both
    measured without contention; l_g → the item's true output length. Scale 2 is the paper's default.
    """
    return lambda item: Slo(deadline_s=scale * (prompt_s + token_s * item.output_tokens))
