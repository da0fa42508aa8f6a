"""The deadlines of a request, as times of this worker's clock: when its next token is due, and whether it is late.

A token's due time comes from the request's own SLO: the first token after TTFT, every later one a TPOT after the one
before was due; so a request ahead of its schedule has slack and one that fell behind has none.
"""

from __future__ import annotations

from math import inf

from cohort.common.sequence import Sequence
from cohort.common.types import Slo

_DECODING = 0.75
"""Share of a deadline that is left to the tokens after the first one."""


def targets(slo: Slo, tokens: float) -> tuple[float, float]:
    """Return TTFT and TPOT in seconds; 0 = none. A deadline gives what is not named, by the response's `tokens`."""
    if not slo.deadline_s:
        return slo.ttft_s, slo.tpot_s
    ttft_s = slo.ttft_s or (1.0 - _DECODING) * slo.deadline_s
    return ttft_s, slo.tpot_s or max(0.0, slo.deadline_s - ttft_s) / max(1.0, tokens)


def ttft_s(sequence: Sequence) -> float:
    slo = sequence.request.slo
    return slo.ttft_s if not slo.deadline_s else targets(slo, sequence.predicted)[0]


def tpot_s(sequence: Sequence) -> float:
    """Return the TPOT; with a deadline, by what was left of it at the first token."""
    slo = sequence.request.slo
    if not slo.deadline_s or slo.tpot_s or sequence.prefill_done_s is None:
        return slo.tpot_s if not slo.deadline_s else targets(slo, sequence.predicted)[1]
    remaining_s = began_s(sequence) + slo.deadline_s - sequence.prefill_done_s
    return max(0.0, remaining_s) / max(1.0, sequence.predicted - 1.0)


def is_promised(sequence: Sequence) -> bool:
    """Return whether it is real-time with a TTFT SLO or a deadline. Others get the capacity that is left."""
    request = sequence.request
    return request.traffic_class == "rt" and (request.slo.ttft_s > 0 or request.slo.deadline_s > 0)


def began_s(sequence: Sequence) -> float:
    """Return when the promise starts to count. A resubmitted request starts anew: by its first attempt's deadlines it
    would be late for good, and go behind everything on time."""
    return sequence.arrived_s + sequence.request.waited_s


def due_s(sequence: Sequence) -> float:
    """Return when the next token is due; infinite if nothing was promised. Tokens of former attempts earn no time."""
    if not is_promised(sequence):
        return inf
    request = sequence.request
    tokens = sequence.output_tokens - request.output_known
    if sequence.prefill_done_s is not None and not request.slo.ttft_s:
        return sequence.prefill_done_s + tokens * tpot_s(sequence)
    return began_s(sequence) + ttft_s(sequence) + tokens * tpot_s(sequence)


def is_interrupted(sequence: Sequence) -> bool:
    """Return whether the sequence lost its worker amid its output and has no token of this one yet."""
    return 0 < sequence.request.output_known == sequence.output_tokens
