"""Names and addresses of a pipeline's processes, from the configuration and the run folder. Opens nothing.

Called by `service.py` for every process, and by code that plans or dials one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from cohort.common import paths
from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.http.exposure import is_loopback

_TCP = "tcp://"
HOST_VARIABLE = "COHORT_HOST"
EndpointName = Literal["manager", "predictor", "monitor", "gateway"]

MANAGER, PREDICTOR, MONITOR, GATEWAY = "manager", "predictor", "monitor", "gateway"
"""Names under which every process dials the others; also their instance names."""
STANDBY_MANAGERS = tuple(f"{MANAGER}-{index}" for index in range(1, 8))
"""Names of all managers that may stand by beside the first."""

ROLES: dict[str, str] = {
    "gateway": GATEWAY,
    "length_predictor": PREDICTOR,
    "bucketing_manager": MANAGER,
    "global_monitor": MONITOR,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
}
"""Roles (the folders under services/) and the instance name of a process that is started without one."""

ENDPOINTS: dict[str, EndpointName] = {
    "gateway": "gateway",
    "length_predictor": "predictor",
    "bucketing_manager": "manager",
    "global_monitor": "monitor",
}
"""Names of roles' inboxes in section `endpoints`; those of all others are `worker`."""


def gateway_names(config: Config) -> tuple[str, ...]:
    """Return names of the gateways that share a port; the first has the name of a single one."""
    return GATEWAY, *(f"{GATEWAY}-{index}" for index in range(1, config.gateway.processes))


def manager_names(config: Config) -> tuple[str, ...]:
    """Return names of the managers, in the order in which they lead; the first has the name of a single one."""
    return MANAGER, *STANDBY_MANAGERS[: config.manager.standbys]


def never_dialling(role: str) -> frozenset[str]:
    """Return names that never dial a role's inbox: it dials these processes, which answer over that connection, or they
    send it nothing. The monitor dials the manager; all processes dial the monitor."""
    match role:
        case "gateway" | "prefill_worker" | "decode_worker":
            return frozenset({MANAGER, *STANDBY_MANAGERS, PREDICTOR, MONITOR})
        case "length_predictor":
            return frozenset({MANAGER, *STANDBY_MANAGERS, MONITOR})
        case "bucketing_manager":
            return frozenset({MANAGER, *STANDBY_MANAGERS, PREDICTOR})
        case _:
            return frozenset()


def model_name(config: Config) -> str:
    return config.model.served_name or Path(config.model.path or paths.DEFAULT_MODEL_NAME).name


def endpoint_of(config: Config, name: EndpointName, run_dir: Path) -> str:
    """Return the configured endpoint, else a Unix socket in the run folder."""
    configured: str = getattr(config.endpoints, name)
    return configured or f"ipc://{run_dir / name}.sock"


def manager_endpoints(config: Config, run_dir: Path) -> dict[str, str]:
    """Return each manager's endpoint, by name. Raises `ConfigError` if the first has one and a standby none."""
    standbys = manager_names(config)[1:]
    configured = config.endpoints.standby_managers
    if config.endpoints.manager and len(configured) < len(standbys):
        raise ConfigError(
            f"endpoints.standby_managers: {len(standbys)} managers stand by (manager.standbys), "
            f"{len(configured)} have an endpoint"
        )
    found = {MANAGER: endpoint_of(config, "manager", run_dir)}
    for index, name in enumerate(standbys):
        found[name] = (configured[index : index + 1] or ("",))[0] or f"ipc://{run_dir / name}.sock"
    return found


def inbox_of(config: Config, role: str, instance: str, run_dir: Path) -> tuple[str, str]:
    """Return (bind, advertise) of a process's own inbox. Over TCP a process binds `endpoints.bind_host` and is dialled
    under the host that the configuration names."""
    name = ENDPOINTS.get(role)
    if name == "gateway" and instance in gateway_names(config)[1:]:  # the first has the configured endpoint
        host, _, _ = config.endpoints.gateway.rpartition(":")
        # Any free port of the same host, which peers get from the gateway itself.
        advertise = f"{host}:0" if host.startswith(_TCP) else f"ipc://{run_dir / instance}.sock"
    elif name == "manager":
        advertise = manager_endpoints(config, run_dir).get(instance) or endpoint_of(config, name, run_dir)
    elif name is not None:
        advertise = endpoint_of(config, name, run_dir)
    else:
        advertise = config.endpoints.worker or f"ipc://{run_dir / instance}.sock"
    return bind_address(advertise, config.endpoints.bind_host), advertise


def bind_address(endpoint: str, bind_host: str) -> str:
    if not endpoint.startswith(_TCP):
        return endpoint
    _, colon, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"endpoints: {endpoint!r} is no endpoint; write tcp://HOST:PORT")
    return f"tcp://{bind_host}:{port}"


def metrics_port(config: Config, role: str, instance: str) -> int:
    """Return the metrics port. From metrics.base_port on: predictor, manager, the configured workers in order, gateways
    if several share a port, managers that stand by; 0 (any) for others."""
    base = config.metrics.base_port
    if base == 0:
        return 0
    order = ["length_predictor", "bucketing_manager"]
    standbys = manager_names(config)[1:]
    if role in order and instance not in standbys:
        return base + order.index(role)
    gateways = gateway_names(config) if config.gateway.processes > 1 else ()
    rest = [*config.instance_roles, *gateways, *standbys]
    return base + len(order) + rest.index(instance) if instance in rest else 0


def named_host(host: str) -> str:
    """Return a host that others can dial: this machine's name for one that binds everywhere."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def own_host(config: Config) -> str:
    """Return the host under which others reach this process: `endpoints.host`, else $COHORT_HOST, else ""."""
    return config.endpoints.host or os.environ.get(HOST_VARIABLE, "")


def advertised_host(config: Config, listens: str) -> str:
    """Return the host to name for a server that listens on `listens`; one on loopback is reached by loopback alone."""
    own = own_host(config)
    return named_host(listens if not own or (is_loopback(listens) and not is_loopback(own)) else own)
