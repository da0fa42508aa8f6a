"""What travels between the launcher and its agents, and how a process is told which node it is on. Pure.

Orders and news go through Ray's own objects: the cluster's key and the values of API keys are in an `Order`, so they
are on no command line and in no environment but that of the process that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cohort.common.address_book import AddressBook, with_standbys
from cohort.common.addresses import STANDBY_MANAGERS
from cohort.common.config import Config
from cohort.services.launcher.plan import ProcessPlan

_DIALLED_BY_NAME = frozenset({"bucketing_manager", "length_predictor", "global_monitor"})
"""Folders whose processes all others dial; each bears the name that it is dialled by."""


class Order(msgspec.Struct, frozen=True):
    """One process to be kept running. `plan` is a `ProcessPlan` without its ports, which the node decides; `port` the
    pipeline's; `key` the content of the cluster's key file, "" = no encryption."""

    plan: ProcessPlan
    port: int
    key: str = ""
    environment: dict[str, str] = {}
    newcomer: bool = False
    """It comes to others, whose memory it must not take."""
    desk: str = ""
    """Of the monitor where the planner acts: the launcher's socket for its orders, on the node that both share."""


class Briefing(msgspec.Struct, frozen=True):
    """What all processes are told, and told anew when it has changed: addresses, and the YAML of the configuration,
    which names the workers that there are. Of two the one with the higher `edition` is true."""

    edition: int
    book: AddressBook
    config: str


class Place(msgspec.Struct, frozen=True):
    """Where an agent is. Another `incarnation` is another agent, which knows nothing of the one before."""

    incarnation: int
    ip: str
    endpoint: str
    """Of the process's inbox where others dial it by its name; "" otherwise."""
    ready_url: str


class News(msgspec.Struct, frozen=True):
    """Of the process that an agent has begun: its exit `code`, once it has ended. `log` are bytes of its log from the
    asked offset on, `log_end` where they end; `skipped` bytes before them were left out."""

    incarnation: int
    code: int | None
    log: bytes
    log_end: int
    skipped: int


def dialled_as(plan: ProcessPlan) -> str:
    """The name under which all processes dial this one; "" for one that is dialled by what it says itself."""
    return plan.instance if plan.folder in _DIALLED_BY_NAME else ""


def on_node(config: Config, plan: ProcessPlan, ip: str, inbox_port: int, key_file: str) -> Config:
    """The configuration as a process on this node reads it: it listens on the node's address and is known by it."""
    replace = msgspec.structs.replace
    endpoints = replace(
        config.endpoints,
        bind_host=ip,
        host=config.endpoints.host or ip,
        worker=f"tcp://{ip}:0",
        gateway=f"tcp://{ip}:0",
        **_own_endpoint(config, plan, own_endpoint(plan, ip, inbox_port)),
    )
    return replace(
        config,
        endpoints=endpoints,
        metrics=replace(config.metrics, host=ip),
        security=replace(config.security, curve_secret_key_file=key_file),
    )


def own_endpoint(plan: ProcessPlan, ip: str, inbox_port: int) -> str:
    return f"tcp://{ip}:{inbox_port}" if dialled_as(plan) else ""


def _own_endpoint(config: Config, plan: ProcessPlan, endpoint: str) -> dict[str, Any]:
    """As section `endpoints` has it."""
    name = dialled_as(plan)
    if name in STANDBY_MANAGERS:
        return {"standby_managers": with_standbys(config.endpoints.standby_managers, {name: endpoint})}
    return {name: endpoint} if name else {}


def passed_environment(api_keys: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the launcher's shell that `gateway.api_keys` names: a gateway elsewhere has another shell's."""
    names = [entry.removeprefix("env:") for entry in api_keys if entry.startswith("env:")]
    return {name: environment[name] for name in names if name in environment}
