"""Which sequences have a row in an iteration, where more decode than an iteration has rows.

    a sequence that needs a token every 100 ms needs every other row of iterations of 50 ms
    ─▶ as long as all that decode together leave the headroom, a prompt on time need not wait until one of them ends
    ─▶ rows go to those whose next token is due first, a TPOT after the last one: no gap grows beyond that

A sequence without a TPOT has a row in every iteration. Where time lacks, rows of requests with many choices take turns
(`in_turn`), so that a plain request beside them waits for an iteration that is no longer than any. Pure functions;
`CohortBatching` asks only where rows or time lack.
"""

from __future__ import annotations

from collections.abc import Callable

from cohort.common.policies.cohort.running_table import RunningTable
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Sequence

MANY = 8
"""Choices of a request up to which each is served as a request of its own."""
_TURNS = 8
"""Iterations within which each of them has a row, however long others take."""


def is_one_of_many(sequence: Sequence) -> bool:
    """Return whether it is one of many choices of a request, which wait for plain ones."""
    return sequence.request.choices > MANY


def in_turn(decoding: list[Sequence], step_s: Callable[[BatchShape], float | None], within_s: float) -> list[Sequence]:
    """Return the sequences that decode in an iteration of max `within_s`: of requests with many choices only as many as
    fit, those that wait longest for their next token. `step_s`: estimate of an iteration's seconds."""
    many = [sequence for sequence in decoding if is_one_of_many(sequence)]
    whole_s = step_s(_decodes(decoding)) if many else None
    if whole_s is None or whole_s <= within_s:
        return decoding
    others = [sequence for sequence in decoding if not is_one_of_many(sequence)]
    many.sort(key=lambda s: (s.arrived_s if s.last_token_s is None else s.last_token_s, s.key))
    least, most = -(-len(many) // _TURNS), len(many)  # `least` has its rows whether it fits or not, `most` does not fit
    while most - least > 1:
        middle = (least + most) // 2
        fits = (step_s(_decodes([*others, *many[:middle]])) or 0.0) <= within_s
        least, most = (middle, most) if fits else (least, middle)
    chosen = {sequence.key for sequence in many[:least]}
    return [s for s in decoding if s.key in chosen or not is_one_of_many(s)]


def _decodes(decoding: list[Sequence]) -> BatchShape:
    return BatchShape.of_decodes(len(decoding), sum([sequence.known for sequence in decoding]))


def lasting_shape(running: RunningTable, rows: int) -> BatchShape:
    """Return a lasting iteration of `rows` of these at predicted lengths, with prompts alike of as many as end."""
    prompts, responses = running.lengths()
    count = max(1, len(running))
    tokens = int(rows * prompts / max(1.0, responses))
    pairs = tokens * prompts // (2 * count)
    return BatchShape(tokens, min(tokens, 1), pairs, rows, int(rows * (prompts + responses) / count))


def longest_shared_s(running: RunningTable, rows: int, step_s: float, headroom: float) -> float:
    """Return the longest iteration of `rows` after which all sequences keep their pace on average."""
    return rows * (1.0 - headroom) / running.tokens_per_s(step_s)


def admissible_rows(running: RunningTable, rows: int, step_s: float, headroom: float) -> int:
    """Return how many more sequences like these can decode in iterations of `step_s`, even without a row each."""
    free = max(0, rows - len(running))
    if not len(running) or step_s <= 0.0:
        return free
    wanted = running.tokens_per_s(step_s)
    spare = rows * (1.0 - headroom) / step_s - wanted
    return max(free, int(spare * len(running) / wanted))
