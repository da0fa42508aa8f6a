"""Configuration → policies. The only file that knows all systems; live services and the simulator both build here.

One table per policy interface: name → how it is built (by its own package) and what it cannot be combined with. Every
process calls `check_names` at start, so a combination that would not do what it says is refused before any request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.policies import alignedserve, baselines, bros, bucketserve, dynaserve, ecoserve
from cohort.common.policies.baselines.pass_through import PassThrough
from cohort.common.policies.baselines.placements import Colocated, ColocatedInTurn, Disaggregated
from cohort.common.policies.interface import (
    Admission,
    IterationScheduler,
    KvAllocator,
    LateBinding,
    Placement,
    PrefillOrder,
)
from cohort.common.types import KvGeometry


@dataclass(frozen=True, slots=True)
class Rule:
    """About another option, by its dotted name: the values that are needed, or those that are refused, and why."""

    option: str
    values: tuple[object, ...]
    why: str


Builder = TypeVar("Builder")
Built = TypeVar("Built", covariant=True)


@dataclass(frozen=True, slots=True)
class Policy(Generic[Builder]):
    build: Builder
    requires: tuple[Rule, ...] = ()
    refuses: tuple[Rule, ...] = ()


Table = Mapping[str, Policy[Callable[[Config], Built]]]

ADMISSIONS: Table[Admission] = {"bounded": Policy(baselines.build_admission)}

PLACEMENTS: Table[Placement] = {
    "colocated": Policy(lambda config: Colocated()),
    "colocated_in_turn": Policy(lambda config: ColocatedInTurn()),
    "disaggregated": Policy(lambda config: Disaggregated()),
    "late_bound": Policy(
        alignedserve.build_placement,
        requires=(Rule("policies.waiting_kv", ("aligned",), "no other policy binds what this one leaves open"),),
    ),
    "split": Policy(dynaserve.build_placement),
}

PREFILL_ORDERS: Table[PrefillOrder] = {
    "fcfs": Policy(baselines.build_first_come),
    "pass_through": Policy(lambda config: PassThrough()),
    "buckets": Policy(bucketserve.build_prefill_order),
    "pressure_gate": Policy(dynaserve.build_prefill_order),
}

ITERATIONS: Table[IterationScheduler] = {
    "continuous_batching": Policy(baselines.build_continuous_batching),
    "padded_prefill": Policy(bucketserve.build_iteration),
    "slo_batching": Policy(dynaserve.build_iteration),
    "slack_packing": Policy(bros.build_iteration),
    "time_synced": Policy(ecoserve.build_iteration),
    "aligned_batching": Policy(alignedserve.build_iteration),
    "chunked_prefill": Policy(baselines.build_chunked_prefill),
    "vllm": Policy(baselines.build_vllm),
    "orca": Policy(baselines.build_orca),
    "srtf": Policy(baselines.build_srtf),
    "mlfq": Policy(baselines.build_mlfq),
    "multires": Policy(baselines.build_multires),
    "round_robin": Policy(baselines.build_round_robin),
    "predicted_batches": Policy(baselines.build_predicted_batches),
}

_OVERWRITES = "padding would overwrite the other request's slots"
ALLOCATIONS: Mapping[str, Policy[Callable[[Config, KvGeometry, int, int], KvAllocator]]] = {
    "paged": Policy(baselines.build_paged),
    "max": Policy(baselines.build_reserved),
    "predicted": Policy(baselines.build_reserved),
    "nested": Policy(ecoserve.build_allocation),
    "bidirectional": Policy(
        bros.build_allocation,
        refuses=(
            Rule("kv.prefix_caching", (True,), "blocks are shared by slots, their content identifies nothing"),
            Rule("policies.iteration", ("padded_prefill",), _OVERWRITES),
            Rule("baselines.padded", (True,), _OVERWRITES),
        ),
    ),
}

WAITING_KV: Table[LateBinding | None] = {
    "none": Policy(lambda config: None),
    "aligned": Policy(alignedserve.build_late_binding),
}

TABLES: Mapping[str, Mapping[str, Policy[Any]]] = {
    "admission": ADMISSIONS,
    "placement": PLACEMENTS,
    "prefill_order": PREFILL_ORDERS,
    "iteration": ITERATIONS,
    "allocation": ALLOCATIONS,
    "waiting_kv": WAITING_KV,
}


def admission(config: Config) -> Admission:
    return _chosen("admission", config.policies.admission, ADMISSIONS).build(config)


def placement(config: Config) -> Placement:
    return _chosen("placement", config.policies.placement, PLACEMENTS).build(config)


def prefill_order(config: Config) -> PrefillOrder:
    return _chosen("prefill_order", config.policies.prefill_order, PREFILL_ORDERS).build(config)


def late_binding(config: Config) -> LateBinding | None:
    return _chosen("waiting_kv", config.policies.waiting_kv, WAITING_KV).build(config)


def iteration(config: Config) -> IterationScheduler:
    return _chosen("iteration", config.policies.iteration, ITERATIONS).build(config)


def allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> KvAllocator:
    chosen = _chosen("allocation", config.policies.allocation, ALLOCATIONS)
    return chosen.build(config, geometry, num_blocks, host_blocks)


def check_names(config: Config) -> None:
    """Raises `ConfigError` for an unknown policy, and for policies and options that do not go together."""
    chosen = {f"policies.{interface}": getattr(config.policies, interface) for interface in TABLES}
    policies = {name: _chosen(name.removeprefix("policies."), chosen[name], TABLES[name[9:]]) for name in chosen}
    for name, policy in policies.items():
        for rule in (*policy.requires, *policy.refuses):
            value = reduce(getattr, rule.option.split("."), config)
            needed = rule in policy.requires
            if (value in rule.values) is not needed:
                relation = "needs" if needed else "does not go with"
                values = " or ".join(_shown(value) for value in rule.values)
                given = f", not {_shown(value)}" if needed else ""
                raise ConfigError(f"{name} {chosen[name]} {relation} {rule.option} {values}{given}: {rule.why}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _chosen(interface: str, name: str, table: Mapping[str, Policy[Builder]]) -> Policy[Builder]:
    if name not in table:
        raise ConfigError(f"policies.{interface}: no policy named {name!r}; there are: {', '.join(table)}")
    return table[name]
