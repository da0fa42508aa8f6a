"""Steps beside other programs: as many threads as these leave cores for, and all again when they have ended."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.worker.crowded_cores import CrowdedCores, Times, idle_core_seconds, own_thread_times

LOOK_S = 0.25


class Machine:
    """Cores shared fairly by a step's threads and by busy programs, as much of each as there are cores for."""

    def __init__(self, cores: int, busy: float, threads: int) -> None:
        self.now_s, self.cores, self.busy = 100.0, cores, busy
        self.times: Times = {threading.get_native_id() + number: (0, 0) for number in range(threads)}
        self.idle = 0.0
        self.computing_s = LOOK_S
        self.crowded = CrowdedCores(
            threads, range(cores), thread_times=lambda: dict(self.times), idle_s=self.idle_s, now_s=lambda: self.now_s
        )
        self.yields = False
        self.looks_with: list[int] = []

    def idle_s(self, cores: Collection[int]) -> float | None:
        assert list(cores) == list(range(self.cores))
        return self.idle

    def share(self, threads: int) -> float:
        return 1.0 if self.yields else min(1.0, self.cores / (threads + self.busy))

    def pass_by(self, looks: int) -> None:
        for _ in range(looks):
            threads = self.crowded.look()
            self.looks_with.append(threads)
            share = self.share(threads)
            for each in list(self.times)[:threads]:
                ran, waited = self.times[each]
                ran += int(1e9 * self.computing_s * share)
                self.times[each] = ran, waited + int(1e9 * self.computing_s * (1.0 - share))
            self.idle += LOOK_S * max(0.0, self.cores - self.busy - threads * self.computing_s / LOOK_S)
            self.now_s += LOOK_S

    def speed(self, threads: int) -> float:
        return threads**0.75 * self.share(threads) ** threads


@given(cores=st.integers(1, 16), busy=st.integers(0, 20), data=st.data())
def test_a_step_gets_the_threads_that_the_others_leave_cores_for_and_all_when_these_have_ended(
    cores: int, busy: int, data: st.DataObject
) -> None:
    threads = data.draw(st.integers(1, cores))
    machine = Machine(cores, busy, threads)
    machine.pass_by(20)
    settled = machine.crowded.look()
    assert 1 <= settled <= threads
    assert machine.speed(settled) >= 0.95 * max(machine.speed(each) for each in range(1, threads + 1))
    if busy <= cores - threads:
        assert settled == threads, "cores enough for everybody"
    assert bool(machine.crowded.warning()) == (settled < threads)
    machine.busy = 0.0
    machine.pass_by(threads + 2)
    assert machine.crowded.look() == threads
    assert machine.crowded.warning() == ""


def test_programs_that_give_way_take_no_thread_for_long_and_others_are_tried_seldom() -> None:
    machine = Machine(cores=2, busy=4, threads=2)
    machine.pass_by(4 * 600)
    assert machine.looks_with[-1] == 1
    assert 3 <= machine.looks_with.count(2) - 2 <= 8, "10, 20, 40 … seconds after one another"
    machine.yields = True
    machine.pass_by(4 * 300)
    assert machine.crowded.look() == 2


def test_what_takes_a_little_of_a_core_takes_no_thread() -> None:
    machine = Machine(cores=2, busy=0.3, threads=2)
    machine.pass_by(40)
    assert machine.crowded.look() == 2


def test_short_steps_are_judged_over_several_looks() -> None:
    machine = Machine(cores=2, busy=4, threads=2)
    machine.computing_s = 0.02  # of each quarter of a second
    machine.pass_by(3)
    assert machine.crowded.threads == 2, "40 ms"
    machine.pass_by(1)
    assert machine.crowded.threads == 1, "60 ms"


def test_after_a_rest_a_look_only_begins() -> None:
    machine = Machine(cores=2, busy=4, threads=2)
    machine.pass_by(1)
    machine.now_s += 5.0
    machine.pass_by(1)
    assert machine.crowded.threads == 2
    assert machine.crowded.look() == 1


def test_a_kernel_that_tells_nothing_changes_nothing() -> None:
    machine = Machine(cores=2, busy=4, threads=2)
    machine.times.clear()
    machine.pass_by(10)
    assert machine.crowded.look() == 2
    blind = CrowdedCores(2, (0, 1), thread_times=lambda: {}, idle_s=lambda _: None, now_s=iter(range(99)).__next__)
    assert {blind.look() for _ in range(9)} == {2}


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not tell")
def test_the_kernel_tells_of_this_thread_and_of_the_cores() -> None:
    me, told = threading.get_native_id(), list[tuple[int, int]]()
    deadline_s = time.monotonic() + 60.0
    while len(told) < 2 or told[-1][0] <= told[0][0]:  # the kernel counts at its ticks
        assert time.monotonic() < deadline_s
        if me in (times := own_thread_times()):  # nothing where another thread has ended meanwhile
            told.append(times[me])
    assert told[-1][1] >= told[0][1]
    idle_s = idle_core_seconds(os.sched_getaffinity(0))
    assert idle_s is not None
    assert math.isfinite(idle_s)
    assert idle_core_seconds(()) == 0.0
