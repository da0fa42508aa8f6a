"""Whether prompts share an iteration with decodes where mixing itself has a price: at which size it pays.

Without a price every iteration takes what fits its bound. With one, few tokens cost as much as many: prompts gather for
iterations of the size that gets most done for the time it adds, and decodes go alone until all whose TPOT can be kept
have won enough time for one. The mean TPOT is kept, not every gap between two tokens. Pure functions.
"""

from __future__ import annotations

from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes

FREE = 0.1
"""Share of an iteration below which mixing has no price: fits scatter by as much."""
HEADROOM = 0.05
"""Share of the strictest TPOT left free: iteration times are estimates."""
LEAST_PREFILL = 16
"""Prompt tokens in every iteration that prompts wait for, whatever decodes take: a block."""
_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)


def best_chunk(times: StepTimes, decodes: BatchShape, start: int, most: int) -> int:
    """Return the tokens of a prompt from `start`, max `most`, that add least time per token to these decodes."""
    alone_s = step_seconds(times, decodes)
    sizes = [size for size in _SIZES if size < most] + [most]
    return min(sizes, key=lambda size: (step_seconds(times, decodes.with_prefill(start, size)) - alone_s) / size)
