"""One agent of NIXL with its UCX plugin: its memory, its metadata, its messages and its reads.

Called by `nixl_link` alone, on the event loop's thread; raises `TransferError` for everything that NIXL refuses.
Decides nothing about transfers. NIXL's own progress thread takes half a core while nothing happens, so it has none: UCX
gets on when it is asked for notifications or for the state of a read.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from cohort.common.errors import ConfigError, TransferError
from cohort.common.transport.buffers import Region
from cohort.common.transport.peer_process import ProcessIdentity
from cohort.common.transport.ucx_devices import UcxChoice, log_to_stderr

MODULES = ("nixl_cu12._api", "nixl_cu13._api")
PLUGIN = "UCX"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of some process. `device` -1: of the host."""

    pointer: int
    nbytes: int
    device: int

    @property
    def kind(self) -> str:
        return "DRAM" if self.device < 0 else "VRAM"

    @property
    def descriptor(self) -> tuple[int, int, int]:
        return self.pointer, self.nbytes, max(0, self.device)


@dataclass(slots=True)
class Read:
    """One-sided read under way. `lent`: the registration of its target, if that was not registered before."""

    handle: Any
    lent: Any


def nixl_api() -> Any:
    """Load NIXL's Python layer. Raises `TransferError` where it is not installed or does not load."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    log_to_stderr()
    failed = "not installed (pip install --no-deps nixl-cu12 or nixl-cu13)"
    for module in MODULES:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            failed = str(error)
    raise TransferError(f"nixl: {failed}")


class NixlAgent:
    """Agent that is open from the start; `reopen` replaces it by one of another name with the same memory."""

    def __init__(self, choice: UcxChoice, *, loopback_only: bool) -> None:
        """Raise `TransferError` where NIXL does not load or its plugin cannot start, `ConfigError` where UCX has
        nothing of `choice` here."""
        self._api = nixl_api()
        self._choice, self._loopback_only = choice, loopback_only
        self._identity = ProcessIdentity.own()
        self._generation = 0
        self._agent: Any = None
        self._known: list[tuple[Place, object]] = []
        """Places registered until the agent closes, with what keeps them alive."""
        self.address = b""
        self.reopen()

    @property
    def name(self) -> str:
        return f"{self._identity.nonce.hex()}-{self._generation}"

    @property
    def open(self) -> bool:
        return self._agent is not None

    @property
    def regions(self) -> int:
        return len(self._known)

    def reopen(self) -> None:
        self.close()
        self._generation += 1
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            agent = self._api.nixl_agent(self.name, config)
            with _environment(self._choice, self._loopback_only):
                agent.create_backend(PLUGIN, {"ucx_error_handling_mode": "peer"})
        except Exception as error:  # NIXL's binding raises types of its own, here and below
            options = self._choice.options
            if options:
                raise ConfigError(
                    f"transfer.ucx: NIXL's UCX cannot start with {options}: {_first_line(error)}"
                ) from error
            raise TransferError(f"nixl: its UCX plugin cannot start: {_first_line(error)}") from error
        self._agent = agent
        for place, _ in self._known:
            self._register(place)
        way = agent.get_partial_agent_metadata(self._nothing(), True, [PLUGIN])
        name = self.name.encode()
        self.address = self._identity.pack() + _LENGTH.pack(len(name)) + name + way

    def close(self) -> None:
        """End the agent: on return nothing is read or written through it. Every `Read` was dropped before."""
        self._agent = None  # the last reference: NIXL tears its UCX worker down before this returns

    def register(self, place: Place, owner: object) -> None:
        """Register a place until the agent closes."""
        self._register(place)
        self._known.append((place, owner))

    def knows(self, place: Place) -> bool:
        return any(
            known.device == place.device
            and known.pointer <= place.pointer
            and place.pointer + place.nbytes <= known.pointer + known.nbytes
            for known, _ in self._known
        )

    def _register(self, place: Place) -> Any:
        try:
            return self._agent.register_memory([(*place.descriptor, "")], place.kind, [PLUGIN])
        except Exception as error:
            raise TransferError(f"nixl: {place.nbytes} bytes cannot be registered: {_first_line(error)}") from error

    def local_metadata(self) -> bytes:
        """Return this agent's identity, its connection and the memory that may be read here."""
        parts = [self._identity.pack()]
        for kind in ("DRAM", "VRAM"):
            chosen = [(*place.descriptor, "") for place, _ in self._known if place.kind == kind]
            if chosen or kind == "DRAM":
                descriptors = self._agent.get_reg_descs(chosen, kind) if chosen else self._nothing()
                data = self._agent.get_partial_agent_metadata(descriptors, True, [PLUGIN])
                parts += [_LENGTH.pack(len(data)), data]
        return b"".join(parts)

    def meet(self, introduction: bytes) -> tuple[str, ProcessIdentity]:
        """Add the agent of an `introduction`. Return its name and process."""
        identity, at, name = ProcessIdentity.unpack(introduction), ProcessIdentity.SIZE, ""
        while at + _LENGTH.size <= len(introduction):
            (length,) = _LENGTH.unpack_from(introduction, at)
            at += _LENGTH.size
            name = self._add(introduction[at : at + length])
            at += length
        return name, identity

    def reach(self, address: bytes) -> ProcessIdentity:
        """Connect to the agent at an address, for messages. Return its process."""
        identity, name = ProcessIdentity.unpack(address), name_in(address)
        if name != self.name:
            self._add(address[ProcessIdentity.SIZE + _LENGTH.size + len(name) :])
        return identity

    def forget(self, name: str) -> None:
        if self._agent is not None:
            with suppress(Exception):  # NIXL may have dropped it already
                self._agent.remove_remote_agent(name)

    def send(self, name: str, message: bytes) -> None:
        try:
            self._agent.send_notif(name, message)
        except Exception as error:
            raise TransferError(f"nixl: the peer cannot be told: {_first_line(error)}") from error

    def received(self) -> list[tuple[str, bytes]]:
        """Return (sender's name, message) of every message since the last call."""
        try:
            found = self._agent.get_new_notifs([PLUGIN])
        except Exception as error:
            raise TransferError(f"nixl: its notifications cannot be read: {_first_line(error)}") from error
        return [(_text(name), bytes(message)) for name, messages in found.items() for message in messages]

    def _add(self, metadata: bytes) -> str:
        try:
            return _text(self._agent.add_remote_agent(metadata))
        except Exception as error:
            raise TransferError(f"nixl: no path to the peer: {_first_line(error)}") from error

    def _nothing(self) -> Any:
        return self._api.nixlBind.nixlRegDList(self._api.nixlBind.DRAM_SEG)

    def read(self, target: Place, name: str, source: Place, done: bytes) -> Read:
        """Begin to read from another agent's memory; that agent gets `done` once the bytes are here."""
        agent, lent, handle = self._agent, None, None
        try:
            if not self.knows(target):
                lent = self._register(target)
            local = agent.get_xfer_descs([target.descriptor], target.kind)
            remote = agent.get_xfer_descs([source.descriptor], source.kind)
            handle = agent.initialize_xfer("READ", local, remote, name, done)
            if agent.transfer(handle) == "ERR":
                raise TransferError("the read failed at once")
        except Exception as error:
            self.drop(Read(handle, lent))
            raise TransferError(f"nixl: cannot read: {_first_line(error)}") from error
        return Read(handle, lent)

    def state(self, read: Read) -> str:
        """Return "PROC", "DONE" or "ERR"."""
        try:
            return str(self._agent.check_xfer_state(read.handle))
        except Exception:
            return "ERR"

    def drop(self, read: Read) -> None:
        """Release a read that has ended, or whose agent is about to end."""
        with suppress(Exception):  # it may never have begun
            read.handle.release()
        if read.lent is not None and self._agent is not None:
            with suppress(Exception):
                self._agent.deregister_memory(read.lent)


def name_in(address: bytes) -> str:
    """Return the agent's name in an address of a NIXL link; "" for anything else."""
    try:
        (length,) = _LENGTH.unpack_from(address, ProcessIdentity.SIZE)
        at = ProcessIdentity.SIZE + _LENGTH.size
        return address[at : at + length].decode() if length <= 64 else ""
    except (struct.error, UnicodeDecodeError):
        return ""


def place_of(region: Region, buffer: Any) -> Place:
    device = int(buffer.get_device()) if hasattr(buffer, "get_device") else -1
    return Place(region.pointer, region.nbytes, device)


@contextmanager
def _environment(choice: UcxChoice, loopback_only: bool) -> Iterator[None]:
    """Set the variables that NIXL's UCX reads when it starts; inside the block only."""
    wanted = {f"UCX_{name}": value for name, value in choice.options.items()}
    if loopback_only and not choice.net_devices and not os.environ.get("UCX_NET_DEVICES"):
        wanted["UCX_NET_DEVICES"] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _first_line(error: BaseException) -> str:
    """Return the start of an error's text: NIXL's binding adds all bytes of wrong arguments."""
    return str(error).partition("\n")[0][:200]
