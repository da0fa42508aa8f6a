"""Claims by lock, in one process and in several that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.common.devices.gpu_locks import DeviceClaims, Held, ShareRequest
from cohort.common.types import Role
from tests.common.devices.fakes import gpus


def wish(name: str, sharers: int = 1, role: Role | tuple[Role, ...] = Role.UNIFIED, **more: object) -> ShareRequest:
    return ShareRequest(sharers, name, role, **more)  # type: ignore[arg-type]


def test_the_gpu_with_the_fewest_claims_is_taken(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(2)
    held = [claims.take(cards, wish(str(number), 2)) for number in range(4)]
    assert [(each.gpu, each.share) for each in held if each is not None] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert claims.take(cards, wish("5", 2)) is None
    assert held[2] is not None
    held[2].release()
    again = claims.take(cards, wish("6", 2))
    assert again is not None and (again.gpu, again.share) == (0, 1)


def test_of_two_equal_gpus_the_one_without_the_same_role(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(2)
    for name, role, gpu in (("p0", Role.PREFILL, 0), ("d0", Role.DECODE, 1), ("d1", Role.DECODE, 0)):
        held = claims.take(cards, wish(name, 2, role))
        assert held is not None and held.gpu == gpu, name


def test_workers_that_divide_a_gpu_differently_do_not_share_it(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(1)
    first = claims.take(cards, wish("half", 2))
    assert first is not None
    assert claims.take(cards, wish("whole", 1)) is None
    assert claims.take(cards, wish("third", 3)) is None
    assert claims.take(cards, wish("other half", 2)) is not None


def test_why_there_is_none_and_what_helps(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(1)
    assert claims.take(cards, wish("unified-0")) is not None
    told = claims.why_not(cards, wish("unified-1"))
    for part in ("unified-0 (1 of 1)", cards[0].uuid, "fewer workers", "more GPUs", "engine.workers_per_gpu=2"):
        assert part in told


def test_a_planned_role_is_taken_by_one_living_worker(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(8)
    plan = (Role.PREFILL, Role.DECODE, Role.DECODE)
    held = [claims.take(cards, wish(str(number), 1, plan, pipeline="a")) for number in range(4)]
    roles = [each.role for each in held if each is not None]
    assert roles == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]  # one more than planned decodes
    assert held[0] is not None
    held[0].release()
    back = claims.take(cards, wish("back", 1, plan, pipeline="a"))
    assert back is not None and back.role is Role.PREFILL
    elsewhere = claims.take(cards, wish("b0", 1, plan, pipeline="b"))  # another pipeline has a plan of its own
    assert elsewhere is not None and elsewhere.role is Role.PREFILL


def test_a_pipeline_keeps_to_its_number_of_gpus(tmp_path: Path) -> None:
    claims, cards = DeviceClaims(tmp_path), gpus(4)
    taken = [claims.take(cards, wish(str(number), 1, most_gpus=2, pipeline="a")) for number in range(3)]
    assert [each is not None for each in taken] == [True, True, False]
    assert "takes 2 (engine.gpus)" in claims.why_not(cards, wish("2", 1, most_gpus=2, pipeline="a"))
    other = claims.take(cards, wish("0", 1, most_gpus=2, pipeline="b"))
    assert other is not None and other.gpu == 2


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cards=st.integers(1, 4), sharers=st.integers(1, 3), steps=st.lists(st.integers(0, 9), max_size=30))
def test_no_share_is_ever_held_twice(tmp_path: Path, cards: int, sharers: int, steps: list[int]) -> None:
    """Workers come (even) and go (odd) in any order."""
    claims = DeviceClaims(tmp_path / f"{cards}-{sharers}-{'.'.join(map(str, steps))}")
    living: list[Held] = []
    for step in steps:
        if step % 2 and living:
            living.pop(step % len(living)).release()
            continue
        held = claims.take(gpus(cards), wish(str(step), sharers))
        assert (held is None) is (len(living) == cards * sharers)
        if held is not None:
            loads = [sum(each.gpu == gpu for each in living) for gpu in range(cards)]
            assert loads[held.gpu] == min(loads)
            living.append(held)
        assert len({(each.gpu, each.share) for each in living}) == len(living)
    for held in living:
        held.release()


def _hold(folder: Path, told: Connection) -> None:
    held = DeviceClaims(folder).take(gpus(4), ShareRequest(2, f"worker-{os.getpid()}", Role.UNIFIED))
    told.send(None if held is None else (held.gpu, held.share))
    told.recv()  # for ever


def test_processes_that_start_together_share_out_evenly_and_leave_nothing_when_killed(tmp_path: Path) -> None:
    start = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for _ in range(4):
        ours, theirs = start.Pipe()
        process = start.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        taken = [pipe.recv() for pipe in pipes]
        assert sorted(gpu for gpu, _ in taken) == [0, 1, 2, 3]
        claims = DeviceClaims(tmp_path)
        assert [len(claims.claims(gpu.uuid)) for gpu in gpus(4)] == [1] * 4
        dead = taken.index((0, 0))
        os.kill(processes[dead].pid or 0, signal.SIGKILL)
        processes[dead].join(timeout=30)
        assert claims.claims(gpus(4)[0].uuid) == []
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=30)
