"""Gaps between iterations under a clock that the test turns."""

from __future__ import annotations

from cohort.common.engine.worker.iteration_gaps import IterationGaps


class Turned:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.found: list[float] = []
        self.gaps = IterationGaps(lambda: self.now_s, self.found.append)

    def iteration(self, begins_s: float, ends_s: float) -> None:
        self.now_s = begins_s
        self.gaps.on_start()
        self.now_s = ends_s
        self.gaps.on_end()


def test_from_the_end_of_one_to_the_beginning_of_the_next() -> None:
    turned = Turned()
    for begins_s, ends_s in ((1.0, 2.0), (2.25, 3.0), (3.5, 4.0)):
        turned.iteration(begins_s, ends_s)
    assert turned.found == [0.25, 0.5]


def test_waiting_for_work_is_no_gap() -> None:
    turned = Turned()
    turned.iteration(1.0, 2.0)
    turned.gaps.out_of_work()
    turned.iteration(9.0, 10.0)
    assert turned.found == []
    turned.iteration(10.5, 11.0)
    assert turned.found == [0.5]


def test_rows_that_begin_behind_others_leave_no_gap() -> None:
    turned = Turned()
    turned.gaps.on_start()
    turned.gaps.on_start()
    turned.now_s = 1.0
    turned.gaps.on_end()
    turned.now_s = 2.0
    turned.gaps.on_end()
    turned.iteration(2.25, 3.0)
    assert turned.found == [0.0, 0.25]
