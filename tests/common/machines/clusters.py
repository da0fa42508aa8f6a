"""Worlds as tests want them: built from a configuration, offered a stream of requests, broken, run to their end.

The one place that turns a `Config` into a `World`: whatever that class comes to ask for is given here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from cohort.common.config import Config, load_config
from cohort.common.policies import compose
from cohort.common.policies.interface import Placement
from cohort.common.policies.settings import placed
from cohort.common.types import IfLate, Role, Slo, TrafficClass
from tests.common.machines.faults import Fault
from tests.common.machines.world import NO_SLO, VOCABULARY, World

UNIFIED = {"unified-0": Role.UNIFIED}
UNIFIED_TWICE = {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}
PD = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
PD_TWICE = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}

SMALL: Mapping[str, Mapping[str, Any]] = {
    "engine": {"max_rows": 8, "max_step_tokens": 32, "prefill_chunk": 8},
    "gateway": {"default_prediction_tokens": 8, "rt_ttft_slo_s": 0.3, "rt_tpot_slo_s": 0.08},
    "model": {"max_model_len": 128},
    "manager": {"dispatch_ahead_tokens": 64},
    "baselines": {"batch_size": 4, "queue_starvation_s": 2.0},
    "bucketserve": {"max_batch": 6, "activation_bytes": 0, "offline_delay_s": 2.0, "priority_step_s": 1.0},
    # The world's iterations take about 10 ms each, whatever is in them: only a tight bound ever binds.
    "dynaserve": {
        "tbt_slo_s": 0.012,
        "least_segment": 3,
        "least_prefill": 4,
        "margin_tokens": 2,
        "kv_transfer_s": 0.0,
        "await_arrivals": False,
    },
    "alignedserve": {"least_requests": 2, "leaf_tokens": 4, "starvation_s": 2.0},
    "ecoserve": {"group_tokens": 4, "waiting_share": 0.3, "patience_s": 2.0},
    "bros": {"first_batch": 4, "batch_step": 2, "rt_starvation_s": 1.0, "be_starvation_s": 2.0},
}
"""Limits for requests of some ten tokens and caches of some ten blocks of four; policies stay the preset's own."""


@dataclass(frozen=True)
class Asked:
    """A request to come. `predicted` 0 = the workers' default."""

    prompt: list[int]
    max_tokens: int
    traffic_class: TrafficClass = "rt"
    predicted: float = 0.0
    slo: Slo = NO_SLO
    if_late: IfLate = ""
    adapter: str = ""


Stream = Callable[[Random], Iterator[Asked]]
"""Requests without end, drawn from a generator of their own."""


def small(preset: str = "", *overrides: Mapping[str, Any]) -> Config:
    """A preset at the world's size; later overrides win. Settings stand beside options. What a preset says itself about
    dispatch is kept."""
    own = load_config(preset=preset) if preset else load_config()
    merged: dict[str, Any] = _over({}, SMALL)
    if own.manager.dispatch_ahead_tokens != load_config().manager.dispatch_ahead_tokens:
        del merged["manager"]
    for more in overrides:
        merged = _over(merged, more)
    config = load_config(preset=preset, overrides=placed(merged))
    compose.check_names(config)
    return config


def _over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Nested options, those of `upper` first; anything but a mapping is replaced whole."""
    merged = dict(lower)
    for name, value in upper.items():
        merged[name] = _over(merged.get(name, {}), value) if isinstance(value, Mapping) else value
    return merged


def of_config(
    seed: int,
    config: Config,
    roles: Mapping[str, Role] | None = None,
    placement: Callable[[], Placement] | None = None,
    *,
    kind: type[World] = World,
    **options: Any,
) -> World:
    """A world of a configuration's own policies; `roles` = its workers, `placement` = another one instead of its own.

    `options` are the world's: blocks, host_blocks, run_failure_rate, message_delay_s.
    """
    return kind(
        seed,
        dict(roles or config.instance_roles),
        placement or (lambda: compose.placement(config)),
        order=lambda: compose.prefill_order(config),
        late_binding=lambda: compose.late_binding(config),
        scheduler=lambda: compose.iteration(config),
        allocator=lambda geometry, device, host: compose.allocation(config, geometry, device, host),
        step=(config.engine.max_rows, config.engine.max_step_tokens),
        **options,
    )


def tokens(random: Random, length: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(length)]


def offer(world: World, count: int, stream: Stream, *, over_s: float = 2.0) -> None:
    """The first `count` requests of a stream, r0, r1 …, at random times of the first `over_s` seconds."""
    random = Random(world.random.getrandbits(32))
    for index, asked in enumerate(islice(stream(random), count)):
        submit_at(world, random.random() * over_s, f"r{index}", asked)


def submit_at(world: World, at_s: float, name: str, asked: Asked, choices: int = 1) -> None:
    """`choices`: as of `World.submit`."""
    more = {"slo": asked.slo, "if_late": asked.if_late, "choices": choices, "adapter": asked.adapter}
    ask = partial(world.submit, name, asked.prompt, asked.max_tokens, asked.traffic_class, asked.predicted, **more)
    world.at(at_s, ask)


def strike(world: World, faults: Sequence[Fault], **options: Any) -> None:
    for kind, at_s, back_s in faults:
        world.at(at_s, partial(world.inflict, kind, back_s, **options))


def finish(world: World, until_s: float = 4.0) -> None:
    """Run past the last arrival and fault, until nothing is left; every answer is the expected one."""
    world.run(until_s)
    world.run_until_quiet()
    world.check_outputs()


def total(world: World, counter: str) -> int:
    """Sum over the workers of one of their counters."""
    return sum(int(getattr(node.machine.counters, counter)) for node in world.workers.values())
