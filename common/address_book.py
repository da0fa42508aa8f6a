"""Addresses of managers, predictor and monitor, for pipelines whose processes may move to another host.

    a process moves ─▶ its keeper writes addresses.json into every process's run folder ─▶ each dials the new address

The file exists before a process starts, or the process does not look for it: on one machine, and where the endpoints
of the configuration do not change, there is none. It wins over section `endpoints`. Called by `service.py`, which
follows the file, and by keepers of processes on several hosts, which write it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cohort.common.addresses import MANAGER, MONITOR, PREDICTOR, STANDBY_MANAGERS
from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.keys.private_files import open_private

BOOK = "addresses.json"
POLL_S = 0.1
"""Time between two looks at the file; short beside the start of a moved process, seconds."""


class AddressBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Endpoints (tcp://HOST:PORT) of inboxes; "" = not known yet. `standbys`: managers that stand by, by name."""

    manager: str = ""
    predictor: str = ""
    monitor: str = ""
    standbys: dict[str, str] = {}

    def named(self) -> dict[str, str]:
        """Return the known endpoints, by the name under which processes dial them."""
        every = {MANAGER: self.manager, PREDICTOR: self.predictor, MONITOR: self.monitor, **self.standbys}
        return {name: endpoint for name, endpoint in every.items() if endpoint}

    def entered(self, name: str, endpoint: str) -> AddressBook:
        """Return a book with this endpoint."""
        if name in STANDBY_MANAGERS:
            return msgspec.structs.replace(self, standbys={**self.standbys, name: endpoint})
        return msgspec.structs.replace(self, **{name: endpoint})


def write_book(run_dir: Path, book: AddressBook) -> None:
    """Write the book atomically."""
    fresh = run_dir / f".{BOOK}.{os.getpid()}"
    with open_private(fresh, "wb") as file:
        file.write(msgspec.json.encode(book))
    fresh.replace(run_dir / BOOK)


def read_book(run_dir: Path) -> AddressBook | None:
    """Read the book; None without a file. Raises `ConfigError` for a file that is no address book."""
    try:
        return msgspec.json.decode((run_dir / BOOK).read_bytes(), type=AddressBook)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{run_dir / BOOK}: no readable address book: {error}") from error


def located(config: Config, run_dir: Path) -> Config:
    """Return the configuration with the endpoints of the run folder's book, if there is one."""
    book = read_book(run_dir)
    if book is None:
        return config
    ours = {name: endpoint for name, endpoint in book.named().items() if name not in STANDBY_MANAGERS}
    standbys = with_standbys(config.endpoints.standby_managers, book.standbys)
    endpoints = msgspec.structs.replace(config.endpoints, **ours, standby_managers=standbys)
    return msgspec.structs.replace(config, endpoints=endpoints)


def with_standbys(configured: tuple[str, ...], known: Mapping[str, str]) -> tuple[str, ...]:
    """Return the endpoints of the managers that stand by, in the order of their names; those of `known` win."""
    last = max((STANDBY_MANAGERS.index(name) + 1 for name in known), default=0)
    given = [*configured, *[""] * (last - len(configured))]
    return tuple(known.get(name, endpoint) for name, endpoint in zip(STANDBY_MANAGERS, given, strict=False))


async def follow_book(run_dir: Path, dial: Callable[[str, str], None]) -> None:
    """Call `dial(name, endpoint)` at every look until cancelled; it does nothing for a peer that is dialled there
    already, or not at all. At every look, because a process may dial its peers later than it reads its configuration.
    Returns at once without a book. A book that cannot be read counts as unchanged."""
    named: dict[str, str] = {}
    seen: tuple[int, int] | None = None
    if not (run_dir / BOOK).exists():
        return
    while True:
        try:
            status = (run_dir / BOOK).stat()
            if (status.st_ino, status.st_mtime_ns) != seen:
                book = read_book(run_dir)
                named = book.named() if book is not None else named
                seen = status.st_ino, status.st_mtime_ns
        except (OSError, ConfigError):
            pass
        for name, endpoint in named.items():
            dial(name, endpoint)
        await asyncio.sleep(POLL_S)
