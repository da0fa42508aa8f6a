"""Limits of a key that hold over all gateways of a port: a `KeyBudget` whose state is a record of `key_table.py`.

Every call reads the record, decides and writes it under a lock, so nothing is granted twice. Before a refusal, what
dead gateways had open is given back. Made by `tenants.py` where several gateways share a port.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from cohort.common.config import KeyLimits
from cohort.common.types import TrafficClass
from cohort.services.gateway.keys.key_budget import KeyBudget, KeyLimited
from cohort.services.gateway.keys.key_table import KeyTable, Record


class SharedKeyBudget(KeyBudget):
    """Budget in the table that all gateways share. Raises `OSError` where the table cannot be written."""

    def __init__(
        self,
        table: KeyTable,
        key_id: str,
        name: str,
        traffic_class: TrafficClass,
        limits: KeyLimits,
        now_s: float,
        wall_s: float,
        used_today: int = 0,
    ) -> None:
        """`used_today`: where no gateway has used the key since the first one began."""
        super().__init__(name, traffic_class, limits, now_s, wall_s, used_today)
        self._table = table
        digest = hashlib.blake2b(
            f"{key_id}\0{traffic_class}".encode(), digest_size=16, person=b"cohort limits"
        ).digest()
        with table.locked():
            self._place = table.place(Record(digest, at_s=now_s, day=self.day.number, day_used=used_today))

    def relimit(self, limits: KeyLimits, now_s: float) -> None:
        with self._changing(now_s):
            super().relimit(limits, now_s)

    def check(self, now_s: float, wall_s: float) -> None:
        with self._changing(now_s) as record:
            self._check(record, now_s, wall_s)

    def admit(self, now_s: float, wall_s: float) -> None:
        with self._changing(now_s) as record:
            self._check(record, now_s, wall_s)
            super().enter(now_s)

    def read(self, now_s: float, count: int = 1) -> None:
        with self._changing(now_s):
            super().read(now_s, count)

    def enter(self, now_s: float) -> None:
        with self._changing(now_s):
            super().enter(now_s)

    def leave(self, now_s: float, *, counts: bool) -> None:
        with self._changing(now_s):
            super().leave(now_s, counts=counts)

    def reserve(self, now_s: float, wall_s: float, tokens: int) -> None:
        with self._changing(now_s) as record:
            try:
                super().reserve(now_s, wall_s, tokens)
            except KeyLimited:
                if not self._forget_dead(record):
                    raise
                super().reserve(now_s, wall_s, tokens)

    def settle(self, now_s: float, wall_s: float, reserved: int, used: int) -> None:
        with self._changing(now_s):
            super().settle(now_s, wall_s, reserved, used)

    def headers(self, now_s: float, wall_s: float) -> dict[str, str]:
        with self._table.locked():
            self._load(self._table.read(self._place))
        return super().headers(now_s, wall_s)

    @contextmanager
    def _changing(self, now_s: float) -> Iterator[Record]:
        """Lock the table and load the record into the state; store the state at the end, unless the block raises."""
        table, slot = self._table, self._table.slot
        with table.locked():
            record = table.read(self._place)
            self._load(record)
            yield record
            record.open[slot] = self.open - (sum(record.open) - record.open[slot])
            record.reserved[slot] += self.reserved
            record.requests_used, record.at_s = self.requests.used(now_s)
            record.tokens_used, _ = self.tokens.used(now_s)
            record.day, record.day_used = self.day.number, self.day.used
            table.write(self._place, record)

    def _load(self, record: Record) -> None:
        self.requests.restore(record.requests_used, record.at_s)
        self.tokens.restore(record.tokens_used, record.at_s)
        self.day.restore(record.day, record.day_used)
        self.open = sum(record.open)
        self.reserved = 0  # since the record was read

    def _check(self, record: Record, now_s: float, wall_s: float) -> None:
        try:
            super().check(now_s, wall_s)
        except KeyLimited:
            if not self._forget_dead(record):
                raise
            super().check(now_s, wall_s)

    def _forget_dead(self, record: Record) -> bool:
        """Write what dead gateways gave back at once, as the refusal may stand; return whether there was anything."""
        if not self._table.release_stale(record):
            return False
        self._table.write(self._place, record)
        self._load(record)
        return True
