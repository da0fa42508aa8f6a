"""The deadlines of a request, as times of this worker's clock: when its next token is due, and whether it is late.

The one place where order, bound and victims look up deadlines. Knows requests, not queues. A token's due time comes
from the request's own SLO: the first token after TTFT, every later one a TPOT after the one before it was due; so a
request that is ahead of its schedule has slack and one that fell behind has none.
"""

from __future__ import annotations

from math import inf

from cohort.common.sequence import Sequence


def is_promised(sequence: Sequence) -> bool:
    """Real-time with a TTFT SLO. Best-effort requests, and those without an SLO, are served as capacity is left."""
    request = sequence.request
    return request.traffic_class == "rt" and request.slo.ttft_s > 0


def began_s(sequence: Sequence) -> float:
    """When its promise starts to count. A resubmitted request starts anew: by its first attempt's deadlines it would be
    late for good, and everything that is on time would be served before it."""
    return sequence.arrived_s + sequence.request.waited_s


def due_s(sequence: Sequence) -> float:
    """When its next token is due; infinite where nothing was promised. Tokens of former attempts earn no time."""
    if not is_promised(sequence):
        return inf
    request = sequence.request
    tokens = sequence.output_tokens - request.output_known
    return began_s(sequence) + request.slo.ttft_s + tokens * request.slo.tpot_s


def is_interrupted(sequence: Sequence) -> bool:
    """It lost its worker amid its output and has no token of this one yet: its client waits for the next token."""
    return 0 < sequence.request.output_known == sequence.output_tokens


def missed_first(now_s: float, sequence: Sequence) -> bool:
    """Its first token came, or can only come, after its TTFT."""
    if not is_promised(sequence):
        return False
    first_due_s = began_s(sequence) + sequence.request.slo.ttft_s
    if sequence.output_tokens == 0:
        return now_s > first_due_s
    return sequence.prefill_done_s is not None and sequence.prefill_done_s > first_due_s
