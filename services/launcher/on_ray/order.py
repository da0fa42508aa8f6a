"""Messages between the launcher and its agents, and a process's configuration for its node. Pure.

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
    joins_running: bool = False
    """Whether it joins others, whose memory it must not take."""
    orders_socket: str = ""
    """Launcher's socket for the monitor's orders, on the node that both share; "" if the planner does not act."""


class SharedConfig(msgspec.Struct, frozen=True):
    """Addresses, and the YAML of the configuration with the present workers. Sent to all processes, again after each
    change; the highest `edition` is valid."""

    edition: int
    book: AddressBook
    config: str


class Place(msgspec.Struct, frozen=True):
    """Location of an agent. Another `incarnation` is another agent, which knows nothing of the one before."""

    incarnation: int
    ip: str
    endpoint: str
    """Address of the process's inbox, if others dial it by its name; "" otherwise."""
    ready_url: str


class AgentState(msgspec.Struct, frozen=True):
    """Update on the process of an agent: its exit `code`, once it has ended. `log` are bytes of its log from the
    requested offset on, `log_end` where they end; `skipped` bytes before them were left out."""

    incarnation: int
    code: int | None
    log: bytes
    log_end: int
    skipped: int


def dialled_as(plan: ProcessPlan) -> str:
    """Return the name under which all processes dial this one; "" for one that announces its own address."""
    return plan.instance if plan.folder in _DIALLED_BY_NAME else ""


def on_node(config: Config, plan: ProcessPlan, ip: str, inbox_port: int, key_file: str) -> Config:
    """Return the configuration for a process on this node: it listens on the node's address and is known by it."""
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
    """Return the process's own entry in section `endpoints`."""
    name = dialled_as(plan)
    if name in STANDBY_MANAGERS:
        return {"standby_managers": with_standbys(config.endpoints.standby_managers, {name: endpoint})}
    return {name: endpoint} if name else {}


def passed_environment(api_keys: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables that `gateway.api_keys` names, for gateways on other nodes."""
    names = [entry.removeprefix("env:") for entry in api_keys if entry.startswith("env:")]
    return {name: environment[name] for name in names if name in environment}
