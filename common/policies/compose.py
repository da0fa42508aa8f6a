"""Configuration → policies. The only file that knows all systems; live services and the simulator both build here.

One table per policy interface: name → how it is built and what it cannot be combined with. Every process that decides
calls `check_names` at start, so a combination that would not do what it says is refused before any request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.policies import (
    alignedserve,
    baselines,
    bros,
    bucketserve,
    cohort,
    dynaserve,
    ecoserve,
    routers,
    settings,
)
from cohort.common.policies.baselines.pass_through import PassThrough
from cohort.common.policies.baselines.placements import Colocated, ColocatedInTurn, Disaggregated
from cohort.common.policies.fair_order import FairOrder
from cohort.common.policies.interface import Admission, IterationScheduler, LateBinding, Placement, PrefillOrder
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.types import KvGeometry

Builder = TypeVar("Builder")
Built = TypeVar("Built", covariant=True)
_ALONE_AHEAD = 4
"""Factor of `manager.dispatch_ahead_tokens`: a key's share at a worker while it is alone, where the order would send
everything: enough for the worker's own order to choose from, little enough for another key to wait for."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requirement on another option, by its dotted name: the values that are needed, or refused, and why."""

    option: str
    values: tuple[object, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Policy(Generic[Builder]):
    """Entry of a table. Not built unless all of `requires` and none of `refuses` hold."""

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
    "least_ttft": Policy(cohort.build_placement),
    "longest_match": Policy(routers.build_by_match),
    "block_cost": Policy(routers.build_by_cost),
    "weighted_scores": Policy(routers.build_by_scores),
}

PREFILL_ORDERS: Table[PrefillOrder] = {
    "fcfs": Policy(baselines.build_fcfs),
    "pass_through": Policy(lambda config: PassThrough()),
    "buckets": Policy(bucketserve.build_prefill_order),
    "pressure_gate": Policy(
        dynaserve.build_prefill_order,
        requires=(
            Rule("policies.iteration", ("slo_batching", "slack_packing"), "the gate goes by the step times they learn"),
        ),
    ),
}

ITERATIONS: Table[IterationScheduler] = {
    "continuous_batching": Policy(baselines.build_continuous_batching),
    "padded_prefill": Policy(bucketserve.build_iteration),
    "cohort_batching": Policy(cohort.build_iteration),
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

_ONE_TABLE = frozenset({"slack_packing", "time_synced"})
"""BROS and EcoServe, which take the length of a sequence's table for its blocks."""

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
    "aligned": Policy(
        alignedserve.build_late_binding,
        requires=(Rule("policies.placement", ("late_bound",), "no other placement leaves anything to be bound later"),),
    ),
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
    return chosen("admission", config.policies.admission, ADMISSIONS).build(config)


def placement(config: Config) -> Placement:
    return chosen("placement", config.policies.placement, PLACEMENTS).build(config)


def moves_kv(config: Config) -> bool:
    """Return whether the placement ever lets a worker go on where another one stopped."""
    return placement(config).moves_kv


def wants_step_times(config: Config) -> bool:
    """Return whether the manager decides by what workers' iterations take."""
    order = chosen("prefill_order", config.policies.prefill_order, PREFILL_ORDERS).build(config)
    return placement(config).wants_step_times or order.wants_step_times


def reads_queues(config: Config, placed_by: Placement) -> bool:
    """Return whether a policy of the manager may look at how far each sequence of a worker is."""
    order = chosen("prefill_order", config.policies.prefill_order, PREFILL_ORDERS).build(config)
    binding = late_binding(config)
    return placed_by.reads_queues or order.reads_queues or (binding is not None and binding.reads_queues)


def prefill_order(config: Config) -> PrefillOrder:
    """Build the configured order; where several API keys share the cluster, within each key's share."""
    order = chosen("prefill_order", config.policies.prefill_order, PREFILL_ORDERS).build(config)
    if not config.shares_fairly:
        return order
    ahead = config.manager.dispatch_ahead_tokens
    return FairOrder(
        order,
        ahead_tokens=ahead,
        alone_tokens=_ALONE_AHEAD * ahead if isinstance(order, PassThrough) else None,
        default_output=float(config.gateway.default_prediction_tokens),
    )


def late_binding(config: Config) -> LateBinding | None:
    return chosen("waiting_kv", config.policies.waiting_kv, WAITING_KV).build(config)


def iteration(config: Config) -> IterationScheduler:
    return chosen("iteration", config.policies.iteration, ITERATIONS).build(config)


def allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> KvAllocator:
    policy = chosen("allocation", config.policies.allocation, ALLOCATIONS)
    return policy.build(config, geometry, num_blocks, host_blocks)


def groups_layers(config: Config) -> bool:
    """Return whether KV blocks are of groups of layers with different windows: with policies that count a sequence's
    blocks in all of its tables, and no draft model, which has a block of its own for each of the model's."""
    policies = config.policies
    if config.speculation.mode == "model":
        return False
    return policies.allocation == "paged" and policies.iteration in ITERATIONS and policies.iteration not in _ONE_TABLE


def check_names(config: Config) -> None:
    """Raise `ConfigError` for an unknown policy or setting, else for the first broken rule, naming both options."""
    settings.check(config)
    names = {interface: str(getattr(config.policies, interface)) for interface in TABLES}
    entries = {interface: chosen(interface, name, TABLES[interface]) for interface, name in names.items()}
    for interface, policy in entries.items():
        subject = f"policies.{interface} {names[interface]}"
        for rule in policy.requires:
            if _value(config, rule) not in rule.values:
                needed = " or ".join(_shown(value) for value in rule.values)
                raise ConfigError(f"{subject} needs {rule.option} {needed}: {rule.why}")
        for rule in policy.refuses:
            if (value := _value(config, rule)) in rule.values:
                raise ConfigError(f"{subject} does not go with {rule.option} {_shown(value)}: {rule.why}")


def chosen(interface: str, name: str, table: Mapping[str, Policy[Builder]]) -> Policy[Builder]:
    """Return the entry of this name, or one for an import path. Raises `ConfigError` with the option and what is
    wrong."""
    if name in table:
        return table[name]
    if ":" in name:
        return Policy(cast(Builder, _imported(f"policies.{interface} {name}", *name.split(":", 1))))
    raise ConfigError(
        f"policies.{interface}: no policy named {name!r}; there are: {', '.join(table)}, "
        "and any import path module:function"
    )


def _imported(subject: str, module: str, attribute: str) -> object:
    try:
        found: object = getattr(import_module(module), attribute)
    except Exception as error:  # the module is not the project's: importing it may raise anything
        raise ConfigError(f"{subject}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{subject}: {attribute} is of type {type(found).__name__}, not a function")
    return found


def _value(config: Config, rule: Rule) -> object:
    return reduce(getattr, rule.option.split("."), config)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
