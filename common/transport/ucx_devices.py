"""The transports and network devices that UCX has here, and whether the chosen ones are among them.

Called by `ucx_link` when it opens and by `cohort doctor`. Asks UCX itself, by opening contexts, so its names for groups
of transports ("ib", "sm") and its lists with "^" work. UCX silently leaves out what it does not find as long as
anything else is left; here that is an error.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from cohort.common.errors import ConfigError, TransferError

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s+(\S+/\S+)")
_NO_DEVICE = "none-of-this-name"
_LOG = {"UCX_LOG_LEVEL": "error", "UCX_LOG_FILE": "stderr", "UCX_WARN_UNUSED_ENV_VARS": "n"}


@dataclass(frozen=True, slots=True)
class UcxChoice:
    """`transfer.ucx`: lists as UCX takes them in UCX_TLS and UCX_NET_DEVICES; "" leaves the choice to UCX."""

    tls: str = ""
    net_devices: str = ""

    @property
    def options(self) -> dict[str, str]:
        """Options of a UCX context; they win over the environment's."""
        named = {"TLS": self.tls, "NET_DEVICES": self.net_devices}
        return {name: value for name, value in named.items() if value}


def log_to_stderr() -> None:
    """Make UCX log errors alone, unless the environment asks for more. Called before any UCX is loaded."""
    for key, value in _LOG.items():
        os.environ.setdefault(key, value)


def ucxx_library() -> Any:
    """Load ucxx's binding of UCX. Raises `TransferError` where it is not installed."""
    log_to_stderr()
    try:
        import ucxx._lib.libucxx as ucxx
    except ImportError as error:
        raise TransferError("ucxx is not installed (pip install ucxx-cu12 or ucxx-cu13)") from error
    return ucxx


def resources(context: Any) -> list[str]:
    """Return "transport/device" of everything that a context of ucxx may use."""
    return _RESOURCE.findall(context.info)


def local_resources(choice: UcxChoice, ucxx: Any = None) -> list[str]:
    """Return `resources` of this machine that `choice` allows. Raises `TransferError` where UCX cannot start."""
    ucxx = ucxx or ucxx_library()
    try:
        return resources(ucxx.UCXContext(choice.options, feature_flags=(ucxx.Feature.TAG, ucxx.Feature.WAKEUP)))
    except Exception as error:  # ucxx raises many types of its own
        raise TransferError(f"UCX cannot start: {error}") from error


def resources_of(choice: UcxChoice) -> list[str]:
    """Check a choice and return its `local_resources`. Raises as both do."""
    ucxx = ucxx_library()
    check_choice(choice, ucxx)
    return local_resources(choice, ucxx)


def check_choice(choice: UcxChoice, ucxx: Any = None) -> None:
    """Raise `ConfigError` if UCX lacks an item of `choice` here: it names option, item and what UCX does find."""
    if not choice.options:
        return
    ucxx = ucxx or ucxx_library()
    for item in _items(choice.tls):
        if item != "self" and not _without_self(UcxChoice(item), ucxx):
            transports = {name.partition("/")[0] for name in local_resources(UcxChoice(), ucxx)}
            raise _missing("transfer.ucx.tls", item, transports)
    memory = _without_self(UcxChoice(choice.tls, _NO_DEVICE), ucxx)
    for item in _items(choice.net_devices):
        if item != "all" and not _without_self(UcxChoice(choice.tls, item), ucxx) - memory:
            network = _without_self(UcxChoice(choice.tls), ucxx) - memory
            raise _missing("transfer.ucx.net_devices", item, {name.partition("/")[2] for name in network})
    if not local_resources(choice, ucxx):
        raise ConfigError(f"transfer.ucx: UCX has nothing here that {choice.options} leaves")


def _without_self(choice: UcxChoice, ucxx: Any) -> set[str]:
    """Return what a choice finds. With "self" beside it UCX always starts, and logs no error of its own."""
    tls = choice.tls if choice.tls.startswith("^") or not choice.tls else f"{choice.tls},self"
    return {name for name in local_resources(UcxChoice(tls, choice.net_devices), ucxx) if name != "self/memory"}


def _items(names: str) -> list[str]:
    """Return the items that must exist; none for a list that begins with "^", which names what not to use."""
    return [] if names.startswith("^") else [item.strip() for item in names.split(",") if item.strip()]


def _missing(option: str, item: str, found: set[str]) -> ConfigError:
    available = ", ".join(sorted(found)) or "nothing"
    return ConfigError(f"{option}: UCX has no {item!r} here; it has {available}")
