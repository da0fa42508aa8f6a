"""Sequences with promises, made by hand."""

from __future__ import annotations

import msgspec

from cohort.common.sequence import Sequence
from cohort.common.types import Slo, TrafficClass
from tests.common.policies.baselines.drive import sequence


def promised(
    name: str,
    prompt: int,
    *,
    ttft_s: float = 1.0,
    tpot_s: float = 0.1,
    arrived_s: float = 0.0,
    traffic_class: TrafficClass = "rt",
    priority: int = 0,
    max_tokens: int = 100,
    known: int = 0,
    waited_s: float = 0.0,
    choices: int = 1,
) -> Sequence:
    """`prompt`: tokens; with `known` more, which a former attempt has sampled before `waited_s` had passed."""
    made = sequence(
        name, prompt, arrived_s=arrived_s, max_tokens=max_tokens, priority=priority, traffic_class=traffic_class
    )
    made.tokens += [1] * known
    made.request = msgspec.structs.replace(
        made.request,
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        tokens=list(made.tokens),
        waited_s=waited_s,
        choices=choices,
    )
    return made
