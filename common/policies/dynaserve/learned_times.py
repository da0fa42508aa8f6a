"""D5 · What SLO-bounded batching learns of its machine: the profile table, and how late iterations come.

Owned by `SloBatching`, which fills both; the host keeps the exported state over a restart, and reports carry the fitted
step times to the placement (D4).
"""

from __future__ import annotations

import msgspec

from cohort.common.policies.dynaserve.lateness import Lateness
from cohort.common.policies.dynaserve.profile_table import ProfileTable
from cohort.common.policies.interface import Learned
from cohort.common.types import StepTimes

_PERCENTILE = 0.99
"""The bound is one on P99 (§3.1)."""


class _Kept(msgspec.Struct, tag_field="kind", tag="dynaserve-batching"):
    """State kept over a restart: the profile table as it exports itself, and the lateness of iterations."""

    version: int
    table: msgspec.Raw
    lateness: tuple[float, int]


class LearnedTimes(Learned):
    def __init__(self) -> None:
        self.table = ProfileTable()
        self.lateness = Lateness(_PERCENTILE)

    def step_times(self) -> StepTimes | None:
        return self.table.step_times

    def export_state(self) -> bytes:
        if self.table.step_times is None:
            return b""
        return msgspec.json.encode(_Kept(1, msgspec.Raw(self.table.export()), self.lateness.keep()))

    def import_state(self, data: bytes) -> None:
        try:
            kept = msgspec.json.decode(data, type=_Kept)
        except msgspec.ValidationError:
            self.table.load(data)  # a profile, or a table alone
            return
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        lateness = Lateness(_PERCENTILE)
        lateness.resume(kept.lateness)
        self.table.load(bytes(kept.table))
        self.lateness = lateness
