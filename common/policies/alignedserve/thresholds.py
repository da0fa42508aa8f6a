"""A4 · The two thresholds of a batch, from the configuration or from the device. Shared by placement and binding."""

from __future__ import annotations

from cohort.common.config import AlignedServeConfig
from cohort.common.types import WorkerCapacity

_ROWS_SHARE = 36 / 256
"""R_min is 36 where an iteration may have 256 rows, the usual bound on the paper's devices."""


class Thresholds:
    """Of `alignedserve`: `batch_share`, B_max as a share of a decode worker's blocks (the paper's 40 %), and
    `least_requests`, R_min; 0 = from the rows an iteration of the worker may have, in the paper's proportion (36 of
    256)."""

    def __init__(self, options: AlignedServeConfig) -> None:
        self._options = options

    def max_blocks(self, capacity: WorkerCapacity) -> int:
        """B_max in blocks."""
        return max(1, int(self._options.batch_share * capacity.num_blocks))

    def min_requests(self, capacity: WorkerCapacity) -> int:
        """R_min in requests."""
        return min(self._options.least_requests or max(1, round(_ROWS_SHARE * capacity.max_rows)), capacity.max_rows)
