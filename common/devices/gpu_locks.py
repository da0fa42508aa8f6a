"""The shares of this host's GPUs that workers have: one lock file per share, held for the worker's life.

Called once by every worker process on a GPU, before it allocates anything there. All workers of a host see all its GPUs
and the same folder; nothing else passes between them. The kernel releases a lock however its process ends.

    claims.lock            held while one worker looks for its share and takes it: one at a time
    GPU-<uuid>.0, .1 …     one per share; locked = taken. Its text names worker, role, number of sharers

The GPU with the fewest claims is taken, among those one without a worker of the same role, then the first. A GPU that
another worker has claimed as one of a different number of sharers counts as full: the two would divide its memory
differently.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from cohort.common.types import Role

_MOST_SHARES = 64


class ClaimableGpu(Protocol):
    @property
    def uuid(self) -> str: ...

    @property
    def name(self) -> str: ...


class Claim(msgspec.Struct, frozen=True):
    """Text of a claimed share's file."""

    pid: int
    instance: str
    role: Role
    sharers: int
    pipeline: str


@dataclass(frozen=True, slots=True)
class Held:
    """A claimed share: the GPU's index in the list given to `take`, the share's number, and the lock, which is held
    until the process ends or `release` is called."""

    gpu: int
    share: int
    role: Role
    descriptor: int

    def release(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """Wanted share of a GPU that `sharers` workers share. `role`: the worker's; or the planned ones of its pipeline's
    workers, of which it takes one that no living one has. `most_gpus`: the number of GPUs that the pipeline's workers
    may use; 0 = all."""

    sharers: int
    instance: str
    role: Role | Sequence[Role]
    pipeline: str = ""
    most_gpus: int = 0


class DeviceClaims:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def take(self, gpus: Sequence[ClaimableGpu], request: ShareRequest) -> Held | None:
        """Claim a share of one of `gpus`; None if none is free. Waits only for other workers' calls."""
        with (self._folder / "claims.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            claims = [self.claims(gpu.uuid) for gpu in gpus]
            role = request.role if isinstance(request.role, Role) else _lacking(request.role, claims, request.pipeline)
            for place in _in_order(claims, request, role):
                for share in range(request.sharers):
                    if (descriptor := _lock(self._path(gpus[place].uuid, share))) is not None:
                        claim = Claim(os.getpid(), request.instance, role, request.sharers, request.pipeline)
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, msgspec.json.encode(claim), 0)
                        return Held(place, share, role, descriptor)
        return None

    def claims(self, uuid: str) -> list[Claim]:
        """Return the claims of living workers on one GPU."""
        found = []
        for share in range(_MOST_SHARES):
            path = self._path(uuid, share)
            if not path.exists():
                break
            descriptor = _lock(path)
            if descriptor is None:
                found.append(_read(path))
            else:
                os.close(descriptor)
        return found

    def why_not(self, gpus: Sequence[ClaimableGpu], request: ShareRequest) -> str:
        """Describe why `take` finds nothing, and what would help."""
        taken = []
        for gpu in gpus:
            on_it = ", ".join(f"{claim.instance} (1 of {claim.sharers})" for claim in self.claims(gpu.uuid))
            taken.append(f"{gpu.name} {gpu.uuid}: {on_it or 'free'}")
        limit = f", of which this pipeline takes {request.most_gpus} (engine.gpus)" if request.most_gpus else ""
        return (
            f"no share of a GPU is left for this worker: {len(gpus)} GPU(s) visible{limit}, each for {request.sharers} "
            f"worker(s) [{'; '.join(taken)}]. Run fewer workers, give it more GPUs, or let more workers share one "
            f"(engine.workers_per_gpu={request.sharers + 1} for all of them: each then has less memory)"
        )

    def _path(self, uuid: str, share: int) -> Path:
        return self._folder / f"{'' if uuid.startswith(('GPU-', 'MIG-')) else 'GPU-'}{uuid}.{share}"


def _in_order(claims: Sequence[Sequence[Claim]], request: ShareRequest, role: Role) -> list[int]:
    """Return the indices of GPUs with a free share, best first."""
    ours = {place for place, on_it in enumerate(claims) if any(claim.pipeline == request.pipeline for claim in on_it)}
    bounded = request.most_gpus > 0 and len(ours) >= request.most_gpus
    able = [
        place
        for place, on_it in enumerate(claims)
        if len(on_it) < request.sharers
        and all(claim.sharers == request.sharers for claim in on_it)
        and (place in ours or not bounded)
    ]
    return sorted(able, key=lambda at: (len(claims[at]), any(claim.role is role for claim in claims[at]), at))


def _lacking(planned: Sequence[Role], claims: Sequence[Sequence[Claim]], pipeline: str) -> Role:
    """Return the first planned role that fewer workers have than planned. A worker beyond the plan decodes, if some do:
    that helps most."""
    have = Counter(claim.role for on_it in claims for claim in on_it if claim.pipeline == pipeline)
    for role, wanted in Counter(planned).items():
        if have[role] < wanted:
            return role
    return Role.DECODE if Role.DECODE in planned else planned[-1]


def _lock(path: Path) -> int | None:
    """Return the open descriptor of a lock that was free; None while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _read(path: Path) -> Claim:
    """Read a claim. A locked file without text yet counts as a claim that shares with nobody."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Claim)
    except (OSError, msgspec.MsgspecError):
        return Claim(0, "unknown", Role.UNIFIED, 0, "")
