"""The time of an iteration, from a few constants in closed form; and the inverse: how much prefill fits a time.

Asked by schedulers (through the profile table) and by placements, which get the constants with every report.
"""

from __future__ import annotations

from typing import NamedTuple

from cohort.common.types import StepTimes

CORNER = 4.0
"""Sharpness of the corner between reading the weights and computing, as in `cost_model`."""


class BatchShape(NamedTuple):
    """Iteration in the numbers of Alg. 2: prefill tokens (plen), decode rows (dnum) and the KV positions they read
    together (ctx · dnum), and the query-key pairs of the prefill part, which long prompts make dear. `copied`:
    positions copied between device and host memory before the rows. Differs from the paper: it has neither pairs (there
    a chunk costs the same wherever in its prompt it lies) nor copies."""

    prefill_tokens: int
    prefill_rows: int
    prefill_pairs: int
    decodes: int
    decode_context: int
    copied: int = 0

    @classmethod
    def of_decodes(cls, rows: int, context: int) -> BatchShape:
        return cls(0, 0, 0, rows, context)

    @property
    def mixed(self) -> bool:
        """Flag: prompt chunks and decodes share the iteration."""
        return self.prefill_tokens > 0 and self.decodes > 0

    @property
    def mean_context(self) -> float:
        """Positions a row attends to: of the decodes, or of the prefill tokens where no row decodes."""
        if self.decodes:
            return self.decode_context / self.decodes
        return self.prefill_pairs / self.prefill_tokens if self.prefill_tokens else 0.0

    def with_prefill(self, start: int, count: int) -> BatchShape:
        """Add `count` tokens of one prompt from position `start` on."""
        pairs = count * start + count * (count + 1) // 2
        return BatchShape(
            self.prefill_tokens + count,
            self.prefill_rows + 1,
            self.prefill_pairs + pairs,
            self.decodes,
            self.decode_context,
            self.copied,
        )


def step_seconds(times: StepTimes, shape: BatchShape) -> float:
    """Return the seconds of an iteration; 0 for an empty one."""
    rows = shape.prefill_rows + shape.decodes
    copy_s = times.copy_s * shape.copied
    if not rows:
        return copy_s
    rows_s = (
        times.step_s
        + times.row_s * rows
        + linear_seconds(times, shape.prefill_tokens + shape.decodes)
        + times.pair_s * shape.prefill_pairs
        + times.position_s * shape.decode_context
    )
    return copy_s + (rows_s * (1.0 + times.mixed_share) if shape.mixed else rows_s)


def linear_seconds(times: StepTimes, tokens: float) -> float:
    """Return the seconds of the matrix products, bound by reading the weights or by the tokens."""
    return float(((times.token_s * tokens) ** CORNER + times.floor_s**CORNER) ** (1.0 / CORNER))


def tokens_within(times: StepTimes, seconds: float) -> float:
    """Return the most tokens whose matrix products fit; 0 if the weights cannot even be read in that time."""
    if seconds <= times.floor_s or times.token_s <= 0.0:
        return 0.0
    return float((seconds**CORNER - times.floor_s**CORNER) ** (1.0 / CORNER)) / times.token_s
