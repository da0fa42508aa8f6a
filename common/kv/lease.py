"""Leases: blocks reserved for a transfer, freed when it does not come.

Pure bookkeeping, one table per worker. The receiver of a KV transfer grants a lease; chunks and renewals extend it;
`expire` names those whose deadline passed, once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.errors import InvariantViolated, LeaseExpired
from cohort.common.types import Attempt


def tag_of(lease_id: int, sequence: int) -> int:
    """Pack a 64-bit tag: 40 bits of lease id, 24 bits of run number within the lease."""
    if not 0 <= sequence < 1 << 24:
        raise ValueError(f"run number {sequence} does not fit 24 bits")
    return (lease_id & ((1 << 40) - 1)) << 24 | sequence


@dataclass(slots=True)
class Lease:
    lease_id: int
    holder: Attempt
    """Attempt that owns the blocks."""
    sender: str
    deadline_s: float


class LeaseTable:
    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._leases: dict[int, Lease] = {}
        self.granted = 0
        self.ended = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, now_s: float, lease_id: int, holder: Attempt, sender: str) -> Lease:
        if lease_id in self._leases:
            raise InvariantViolated(f"lease {lease_id} granted twice")
        lease = Lease(lease_id, holder, sender, now_s + self.duration_s)
        assert lease.deadline_s > now_s, f"lease {lease_id} is over at once"
        self._leases[lease_id] = lease
        self.granted += 1
        self._assert_counts()
        return lease

    def get(self, lease_id: int) -> Lease:
        """Return a lease. Raises `LeaseExpired` if it ended or never was."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"no lease {lease_id}")
        return lease

    def renew(self, now_s: float, lease_id: int) -> bool:
        """Extend a lease. Return whether it still existed."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.deadline_s = max(lease.deadline_s, now_s + self.duration_s)
        return True

    def end(self, lease_id: int) -> None:
        """End a lease, whether its transfer succeeded or not. Unknown ids are ignored."""
        if self._leases.pop(lease_id, None) is not None:
            self.ended += 1
        self._assert_counts()

    def expire(self, now_s: float) -> list[Lease]:
        """Remove the leases whose deadline has passed, and return them."""
        late = [lease for lease in self._leases.values() if lease.deadline_s <= now_s]
        for lease in late:
            del self._leases[lease.lease_id]
        self.expired += len(late)
        self._assert_counts()
        return late

    def _assert_counts(self) -> None:
        """Check that every granted lease ended, expired or is held."""
        assert self.granted - self.ended - self.expired == len(self._leases), (
            f"{self.granted} leases granted, {self.ended} ended, {self.expired} expired, {len(self._leases)} are there"
        )
