"""What is told apart in the recordings of workers under load."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from cohort.services.bench.fit.live_cycles import Iteration, slices

ROWS = ((119, 120),)
Run = list[tuple[int, int]]
"""Begin and end of each iteration, in 1024ths of a second: a twentieth of one is a twentieth in floats, too."""


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """One engine's iterations: none runs beside another of its own."""
    edges = draw(st.lists(st.integers(0, 120), min_size=2, max_size=14, unique=True).map(sorted))
    return [(begin, end) for begin, end in pairwise(edges) if draw(st.booleans())]


def recorded(run: Run) -> list[Iteration]:
    return [Iteration(begin / 1024, end / 1024, ROWS) for begin, end in run]


@given(st.lists(runs(), min_size=1, max_size=4))
@example([[(101, 102)], [(82, 102)]])
def test_a_lone_iteration_is_one_that_no_other_engine_shares_a_twentieth_of(engines: list[Run]) -> None:
    (found,) = slices([[recorded(run) for run in engines]])
    assert found.runs == [recorded(run) for run in engines]
    for at, run in enumerate(engines):
        others = [
            {moment for begin, end in other for moment in range(begin, end)}
            for other in engines[:at] + engines[at + 1 :]
        ]
        lone = [one for one in run if all(20 * len(other & set(range(*one))) < one[1] - one[0] for other in others)]
        assert found.alone[at] == recorded(lone)
