"""How long a real-time request can still wait (R2, R15).

An answer is cut into token groups: group 1 is the first token and has the TTFT target, each later group of
`group_tokens` tokens has that many TPOT targets. Used by the packing and its queues.
"""

from __future__ import annotations

from cohort.common.sequence import Sequence
from cohort.common.types import Attempt


class TokenGroups:
    """Targets are the request's own, else the defaults. The paper names no group size; with 1 every token counts."""

    def __init__(self, *, group_tokens: int, default_ttft_s: float, default_tpot_s: float) -> None:
        self._group_tokens = group_tokens
        self._ttft_s = default_ttft_s
        self._tpot_s = default_tpot_s
        self._began: dict[Attempt, float] = {}

    @property
    def single(self) -> bool:
        """Whether every token after the first has a deadline of its own."""
        return self._group_tokens == 1

    def remaining(self, sequence: Sequence) -> int:
        """Return r_i, the tokens left in the current group."""
        output = sequence.output_tokens
        return 1 if output == 0 else self._group_tokens - (output - 1) % self._group_tokens

    def due_s(self, sequence: Sequence) -> float:
        """Return when the current group has to be complete."""
        slo = sequence.request.slo
        if sequence.request.waited_s and sequence.last_token_s is None:
            # Resubmitted: by its first attempt's deadlines it would be late for good. It has the time of a first token
            # from its arrival here on.
            return sequence.arrived_s + sequence.request.waited_s + (slo.ttft_s or self._ttft_s)
        output = len(sequence.tokens) - sequence.request.prompt_tokens
        if output == 0:
            return sequence.arrived_s + (slo.ttft_s or self._ttft_s)
        last_s = sequence.arrived_s if sequence.last_token_s is None else sequence.last_token_s
        if self._group_tokens == 1:
            return last_s + (slo.tpot_s or self._tpot_s)
        if (output - 1) % self._group_tokens == 0:
            self._began[sequence.key] = last_s
        return self._began.get(sequence.key, last_s) + (slo.tpot_s or self._tpot_s) * self._group_tokens

    def tpot_s(self, sequence: Sequence) -> float:
        return sequence.request.slo.tpot_s or self._tpot_s

    def residual_s(self, now_s: float, sequence: Sequence, average_s: float) -> float:
        """Return SLO_i − e_i − (r_i − 1) · T_avg of constraint (6): the longest the next iteration may take."""
        return self.due_s(sequence) - now_s - (self.remaining(sequence) - 1) * average_s

    def forget(self, sequence: Sequence) -> None:
        self._began.pop(sequence.key, None)
