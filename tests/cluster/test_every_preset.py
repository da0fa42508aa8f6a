"""Every preset in the virtual cluster, with its own policies and settings, tiny caches, and anything breaking.

Which requests come, how wrong their predictions are, what fails and when is drawn by hypothesis; the world checks every
slot of KV that is read, every plan and allocator, that each request ends once with exactly its tokens, and that nothing
is left anywhere.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.cases import OPTIONS, PRESETS, Case, cases, every_second
from tests.examples import of_worlds


@pytest.mark.parametrize("preset", PRESETS)
def test_as_it_is_configured_anything_may_break(preset: str) -> None:
    @of_worlds(0.1)
    @given(case=cases(preset))
    def check(case: Case) -> None:
        case.live()

    check()


@pytest.mark.parametrize("preset", every_second(1))
def test_with_other_options_and_placements_anything_may_break(preset: str) -> None:
    """Preemption, prefix caching, allocation, the paper's own switches; segments that meet at any position."""

    @of_worlds(0.1)
    @given(case=cases(preset, options=OPTIONS.get(preset, st.just({})), elsewhere=True))
    def check(case: Case) -> None:
        case.live()

    check()


FOUND = [
    pytest.param(
        Case(
            preset="bros",
            arrivals=[
                (0.7, 1, True, 6, "rt", 0.0),
                (0.7, 23, False, 4, "rt", 0.1),
                (0.0, 24, False, 10, "be", 1.0),
                (0.0, 9, True, 1, "rt", 0.5),
                (0.0, 20, False, 1, "be", 1.0),
                (0.0, 8, False, 6, "rt", 1.0),
                (0.0, 27, True, 4, "rt", 1.0),
            ],
            blocks=30,
            host_blocks=0,
            limit_s=40.0,
        ),
        id="bros, no host memory: three requests never end",
    ),
    pytest.param(
        Case(
            preset="bros",
            arrivals=[
                (1.5, 2, False, 29, "rt", 30.0),
                (0.1, 10, False, 6, "rt", 1.0),
                (0.3, 2, False, 26, "be", 2.0),
                (0.0, 19, True, 15, "rt", 0.5),
                (0.0, 12, True, 8, "be", 0.5),
            ],
            blocks=20,
            host_blocks=0,
            options={"engine": {"prefill_chunk": 3}},
            limit_s=40.0,
        ),
        id="bros, no host memory, chunks of three",
    ),
    pytest.param(
        Case(
            preset="alignedserve",
            arrivals=[
                (2.2, 36, True, 4, "be", 1.0),
                (2.5, 20, True, 20, "be", 0.5),
                (0.03, 34, True, 22, "rt", 0.0),
                (1.0, 17, False, 5, "be", 2.0),
                (2.9, 31, True, 18, "rt", 0.5),
                (0.5, 13, True, 2, "rt", 0.1),
                (0.5, 30, True, 12, "rt", 30.0),
                (0.0, 29, False, 30, "rt", 0.0),
                (3.0, 15, False, 3, "be", 1.0),
                (1.3, 24, False, 20, "rt", 2.0),
                (1.54, 15, True, 14, "be", 2.0),
                (5.960464477539063e-08, 23, True, 1, "be", 30.0),
                (0.3, 8, True, 18, "rt", 0.1),
                (1.3, 12, True, 4, "rt", 2.0),
            ],
            seed=4194303,
            faults=[("decode-0", 4.0, 1.9), ("prefill-0", 2.072, 2.475), ("leave", 3.48, 0.1), ("decode-0", 2.87, 0.7)],
            workers={"prefill": 2, "decode": 2},
            blocks=20,
            host_blocks=6,
            failures=0.0,
            delay_s=0.05,
            placement="",
            options={
                "engine": {"prefill_chunk": 3, "preemption": "swap"},
                "alignedserve": {"prefetch": True, "fill_memory": False, "aligned": True, "starvation_s": 0.2},
            },
            limit_s=60.0,
        ),
        id="alignedserve, bound and never moved",
    ),
    pytest.param(
        Case(preset="cohort", arrivals=[(0.0, 1, False, 3, "rt", 0.0)], seed=41424, host_blocks=0, repeat=0.1),
        id="a chunk of KV announced twice",
    ),
    pytest.param(
        Case(
            preset="alignedserve",
            arrivals=[
                (0.0, 21, False, 9, "rt", 0.0),
                (1.02, 4, False, 2, "rt", 0.0),
                (0.0, 24, False, 16, "rt", 0.0),
                (0.64, 33, False, 27, "rt", 0.0),
                (0.75, 30, False, 10, "rt", 0.0),
            ],
            seed=19937,
            workers={"prefill": 1, "decode": 1},
            host_blocks=0,
            delay_s=0.05,
            repeat=0.1,
        ),
        id="alignedserve, parked twice",
    ),
    pytest.param(
        Case(
            preset="alignedserve",
            arrivals=[
                (1.31, 28, False, 7, "rt", 30.0),
                (0.0, 11, True, 22, "rt", 30.0),
                (0.0, 4, False, 10, "be", 2.0),
                (0.0, 30, True, 8, "rt", 0.1),
                (0.0, 16, True, 11, "be", 0.0),
                (0.0, 8, True, 6, "be", 0.0),
                (0.0, 21, False, 5, "be", 30.0),
                (0.0, 22, False, 7, "rt", 30.0),
                (0.0, 21, True, 18, "rt", 0.1),
                (0.0, 23, False, 7, "be", 1.0),
                (0.0, 30, True, 19, "rt", 0.5),
                (0.17, 15, False, 15, "be", 2.0),
                (1.62, 1, True, 18, "rt", 2.0),
                (0.0, 12, False, 24, "be", 1.0),
                (0.0, 22, False, 5, "be", 0.5),
                (0.0, 31, True, 16, "rt", 30.0),
                (1.81, 25, True, 8, "rt", 0.1),
                (0.0, 10, True, 24, "rt", 0.0),
                (0.0, 4, True, 16, "be", 1.0),
                (0.0, 32, False, 25, "be", 30.0),
                (0.0, 40, True, 20, "be", 0.0),
                (0.93, 25, True, 2, "be", 0.1),
                (0.0, 27, False, 3, "be", 0.1),
                (0.46, 29, False, 29, "rt", 1.0),
                (1.0, 26, True, 18, "rt", 30.0),
                (0.0, 32, True, 6, "rt", 0.0),
                (1.81, 29, False, 2, "be", 30.0),
                (0.37, 3, False, 15, "rt", 0.0),
            ],
            seed=9600,
            faults=[("decode-1", 1.809, 2.747), ("cancel", 3.201, 1.194), ("manager", 2.345, 2.937)],
            workers={"prefill": 2, "decode": 2},
            blocks=20,
            host_blocks=6,
            stall_s=1e9,
            limit_s=60.0,
        ),
        id="alignedserve, parked while the manager was away",
    ),
]
"""What this suite has found and what was mended since, each as small as it got."""


@pytest.mark.parametrize("case", FOUND)
def test_found_before(case: Case) -> None:
    case.live()
