"""A configuration's openings to other machines: those that an oversight leaves to strangers are refused at start.

Called by `service.py` for every process, by the gateway for its API, by the launcher before it starts anything, and by
workers that open KV links. Decides from the configuration alone and resolves no name: a host that is not plainly this
machine's loopback counts as reachable from elsewhere. Never opens or closes anything.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from cohort.common.config import Config
from cohort.common.errors import ConfigError

KEY_VARIABLE = "COHORT_API_KEY"
"""Variable in which people and the compose file put an API key; used only if `gateway.api_keys` names it."""

_TCP = "tcp://"
_ENDPOINTS = ("manager", "predictor", "monitor", "gateway", "worker", "ranks")


def is_loopback(host: str) -> bool:
    """Return whether a host is in 127.0.0.0/8, ::1 or localhost; False for "", which means all interfaces."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def check_api(config: Config) -> None:
    """Raise `ConfigError` if other machines could use the API without a key."""
    gateway = config.gateway
    if not (gateway.api_keys or config.keys.file or gateway.open or is_loopback(gateway.host)):
        raise ConfigError(
            f"gateway.host: {gateway.host or 'every interface'} can be reached from other machines and "
            f"gateway.api_keys is empty, as is keys.file; set gateway.api_keys=[env:{KEY_VARIABLE}] and that variable "
            "(in containers the variable alone does it), or gateway.open=true (in containers COHORT_OPEN=true) to "
            "serve without keys"
        )


def unused_key(config: Config, environment: Mapping[str, str]) -> bool:
    """Return whether an API key is set that no request needs."""
    return bool(environment.get(KEY_VARIABLE)) and not config.gateway.api_keys


def check_endpoints(config: Config) -> None:
    """Raise `ConfigError` for TCP beyond loopback without a CURVE key: control messages, prompts and tokens among them,
    would leave this machine in clear, and any peer would be trusted."""
    _check_ranks(config)
    if config.security.curve_secret_key_file or config.security.allow_plain:
        return
    for option, endpoint in _beyond(config):
        raise ConfigError(
            f"endpoints.{option}: {endpoint} leaves this machine and security.curve_secret_key_file is empty; make a "
            "key with `cohort keys FILE` and name that file there on every machine, or set security.allow_plain=true "
            "on a network without strangers"
        )


def _check_ranks(config: Config) -> None:
    """Check workers on several hosts: what their ranks exchange is not encrypted, though a key promises it."""
    if all(group.hosts == 1 for group in config.workers):
        return
    host, colon, port = config.endpoints.ranks.removeprefix(_TCP).rpartition(":")
    if not (config.endpoints.ranks.startswith(_TCP) and colon and port.isdecimal()):
        raise ConfigError(
            f"endpoints.ranks: {config.endpoints.ranks or 'nothing'} is not tcp://HOST:PORT, where the ranks of other "
            "hosts (workers: hosts) find rank 0"
        )
    security = config.security
    if security.curve_secret_key_file and not security.allow_plain_ranks and not is_loopback(host):
        raise ConfigError(
            "security.allow_plain_ranks: workers have ranks on several hosts, and neither gloo nor NCCL encrypts what "
            "these exchange in a step, from which prompts can be told; set it to true on a network without strangers"
        )


def is_one_machine(config: Config) -> bool:
    """Return whether all processes of the pipeline are on this machine: Unix sockets and loopback only."""
    return not any(_beyond(config))


def _beyond(config: Config) -> Iterator[tuple[str, str]]:
    """Yield options of section `endpoints` that reach other machines, with their values."""
    endpoints = config.endpoints
    named = [(name, str(getattr(endpoints, name))) for name in _ENDPOINTS]
    named += [("standby_managers", endpoint) for endpoint in endpoints.standby_managers]
    named += [("seeds", seed) for seed in endpoints.seeds]
    tcp = [(name, value) for name, value in named if value.startswith(_TCP)]
    for name, value in tcp:
        if not is_loopback(value.removeprefix(_TCP).rpartition(":")[0]):
            yield name, value
    if tcp and not is_loopback(endpoints.bind_host):
        yield "bind_host", endpoints.bind_host
