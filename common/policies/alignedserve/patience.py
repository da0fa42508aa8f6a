"""A8 · How long a request may wait in the KV pool before its subtree goes first.

Asked by `AlignedBinding` when a request is parked. Pure arithmetic on the request's own SLO.
"""

from __future__ import annotations

from cohort.common.types import Request


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
