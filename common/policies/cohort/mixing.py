"""Whether prompts share an iteration with decodes where mixing itself has a price: at which size it pays, and what the
promises of those that decode can spare for it.

Without a price every iteration takes what fits its bound. With one, few tokens cost as much as many: prompts gather for
iterations of the size that gets most done for the time it adds, and decodes go alone until all whose TPOT can be kept
have won enough time for one. The mean TPOT is kept, not every gap between two tokens. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from cohort.common.policies.cohort.promise import due_s, is_promised, missed_first, tpot_s
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import StepTimes

FREE = 0.1
"""Share of an iteration below which mixing has no price: fits scatter by as much."""
HEADROOM = 0.05
"""Share of the strictest TPOT left free: iteration times are estimates."""
LEAST_PREFILL = 16
"""Prompt tokens in every iteration that prompts wait for, whatever decodes take: a block."""
_STRETCH = 0.1
"""Share of a TPOT by which an iteration may be longer for what its requests have won."""
_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)


def best_chunk(times: StepTimes, decodes: BatchShape, start: int, most: int) -> int:
    """Return the tokens of a prompt from `start`, max `most`, that add least time per token to these decodes."""
    alone_s = step_seconds(times, decodes)
    sizes = [size for size in _SIZES if size < most] + [most]
    return min(sizes, key=lambda size: (step_seconds(times, decodes.with_prefill(start, size)) - alone_s) / size)


def strictest_s(targets: Iterable[tuple[Sequence, float]], *, late: bool) -> float:
    """Return the least target in seconds. Targets from a deadline rest on a predicted length, and the least of many
    guesses is nearly always wrong: a quarter of these may fall behind, unless prompts are `late`."""
    guesses: list[float] = []
    least_s = inf
    for sequence, target_s in targets:
        if sequence.request.slo.tpot_s:
            least_s = min(least_s, target_s)
        else:
            guesses.append(target_s)
    if guesses:
        guesses.sort()
        least_s = min(least_s, guesses[0 if late else (len(guesses) - 1) // 4])
    return least_s


def spare_s(now_s: float, decoding: Iterable[Sequence], decodes_s: float, *, headroom: float) -> float:
    """Return the longest iteration after which all have kept their mean TPOT so far: a TPOT, and what their tokens came
    early. Requests whose promises are lost do not count; infinite if none is left. `decodes_s`: an iteration of decodes
    alone, in which time is won. `headroom`: share of a TPOT left free."""
    attainable = _attainable(now_s, decoding, decodes_s)
    return min([won_s + tpot_s(s) * (1.0 - headroom) for s, won_s in attainable], default=inf)


def stretched_s(
    now_s: float, decoding: Iterable[Sequence], decodes_s: float, *, headroom: float, late: bool = True
) -> float:
    """Return `spare_s` where every iteration may take prompts: a request spends max `_STRETCH` of a TPOT of what it has
    won at once, so that gaps stay even, and regains what it lacks in halves of one. `headroom` is kept once, not per
    iteration. If the first token is another worker's, nothing is won. `late`: as in `strictest_s`."""
    targets: list[tuple[Sequence, float]] = []
    for sequence, won_s in _attainable(now_s, decoding, decodes_s):
        target_s = tpot_s(sequence)
        if sequence.prefill_done_s is None:
            won_s = min(won_s, 0.0)
        stretched = min(won_s + target_s * (1.0 - headroom), target_s * (1.0 + _STRETCH))
        targets.append((sequence, max(stretched, 0.5 * target_s)))
    return strictest_s(targets, late=late)


def _attainable(now_s: float, decoding: Iterable[Sequence], decodes_s: float) -> Iterator[tuple[Sequence, float]]:
    """Yield sequences whose mean TPOT can still be kept, with the time that they have won."""
    for sequence in decoding:
        target_s = tpot_s(sequence)
        if not target_s or not is_promised(sequence) or missed_first(now_s, sequence):
            continue
        won_s = _won_s(now_s, sequence)
        to_come = max(1.0, sequence.predicted - sequence.output_tokens)
        if won_s + to_come * (target_s - decodes_s) >= 0.0:
            yield sequence, won_s


def _won_s(now_s: float, sequence: Sequence) -> float:
    """Return how early the last token came: by the mean TPOT since this worker's first, else by its due times."""
    request = sequence.request
    if sequence.prefill_done_s is None or not request.slo.ttft_s:
        return due_s(sequence) - tpot_s(sequence) - now_s
    tokens = max(0, sequence.output_tokens - request.output_known - 1)
    return sequence.prefill_done_s + tokens * tpot_s(sequence) - now_s
