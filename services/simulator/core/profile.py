"""What `cohort profile` would write for a simulated instance: the same shapes, timed by the cost model.

So that schedulers which learn iteration times start in a simulation from what they would start from live.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs

_CONTEXTS = (128, 512, 2048, 8192)
_CHUNKS = (16, 64, 256, 512, 1024, 2048)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def profile_points(cost: CostModel, max_context: int, max_rows: int, max_step_tokens: int) -> bytes:
    """JSON with `points`, as the live command's file has them; the shapes are those of `engine.profiler` but for mixed
    iterations: what mixing costs a scheduler learns while it runs."""
    points = [
        {"shape": {"rows": rows, "tokens_per_row": tokens, "context": context}, "median_s": cost.step_s(work)}
        for rows, tokens, context, work in _shapes(max_context, max_rows, max_step_tokens)
    ]
    return msgspec.json.encode({"points": points})


def _shapes(max_context: int, max_rows: int, max_tokens: int) -> Iterator[tuple[int, int, int, StepWork]]:
    contexts = [context for context in _CONTEXTS if context <= max_context]
    for tokens in _CHUNKS:
        if tokens <= min(max_tokens, max_context):
            for context in [tokens, *(context for context in contexts if context >= 2 * tokens)]:
                pairs = prefill_pairs(context - tokens, tokens)
                yield 1, tokens, context, StepWork(tokens, 1, 1, pairs, context)
    for rows in _ROWS:
        if rows <= min(max_rows, max_tokens):
            for context in contexts:
                yield rows, 1, context, StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
