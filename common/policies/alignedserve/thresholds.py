"""A4, A8 · B_max and R_min of a batch, from the configuration or from the device, and the starvation threshold of a
request in the KV pool. Pure; shared by placement and binding."""

from __future__ import annotations

from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import Request, WorkerCapacity

_BATCH_SHARE = 0.4
"""B_max, as in the paper: a batch's KV as a share of a decode worker's blocks."""
_ROWS_SHARE = 36 / 256
"""R_min is 36 where an iteration may have 256 rows, the usual bound on the paper's devices."""


class Thresholds:
    """B_max, a share of a decode worker's blocks, and R_min, the setting `least_requests`; if that is 0, R_min is in
    the paper's proportion to the worker's rows."""

    def __init__(self, options: AlignedServeSettings) -> None:
        self._options = options

    def max_blocks(self, capacity: WorkerCapacity) -> int:
        return max(1, int(_BATCH_SHARE * capacity.num_blocks))

    def min_requests(self, capacity: WorkerCapacity) -> int:
        return min(self._options.least_requests or max(1, round(_ROWS_SHARE * capacity.max_rows)), capacity.max_rows)


def patience_s(request: Request, *, share: float, longest_s: float, default_output: float) -> float:
    """A8 · AlignedServe §3.5: Return the request's starvation threshold.

    The wait falls between the first and second token, so it is `share` of the time that the TPOT target gives all
    expected tokens, at most `longest_s`; `longest_s` without an SLO. Differs from the paper: one threshold for all.
    """
    if request.slo.tpot_s <= 0.0:
        return longest_s
    expected = request.prediction.mean if request.prediction is not None else default_output
    tokens = min(expected, float(request.sampling.max_tokens)) - request.output_known
    return min(longest_s, share * request.slo.tpot_s * max(1.0, tokens))
