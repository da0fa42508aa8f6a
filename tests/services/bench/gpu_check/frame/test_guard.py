"""One broken item hides nothing: exceptions, memory, deadlines, and a device whose context is dead."""

from __future__ import annotations

import time

import torch

from cohort.services.bench.gpu_check.frame.guard import DoesNotFit, Guard, NotInstalled
from cohort.services.bench.gpu_check.frame.report import Findings

CPU = torch.device("cpu")


def fail(words: str) -> None:
    raise RuntimeError(words)


def told(found: Findings) -> list[tuple[str, str]]:
    return [(row.name, row.verdict) for row in found.rows]


def test_an_exception_hides_nothing() -> None:
    found = Findings("s", None)
    guard = Guard(found, CPU, 60)
    assert guard.item("first", lambda: 1) == 1
    assert guard.item("broken", lambda: fail("no such kernel\nsecond line")) is None
    assert guard.item("last", lambda: 3) == 3
    assert told(found) == [("broken", "fail")]
    assert found.rows[0].note == "RuntimeError: no such kernel" and not guard.dead


def test_what_does_not_fit_and_what_is_not_there_are_no_failures() -> None:
    found = Findings("s", None)
    guard = Guard(found, CPU, 60)
    for name, error in (
        ("blocks", DoesNotFit("3 of 2")),
        ("memory", torch.OutOfMemoryError("51 GiB")),
        ("tool", NotInstalled("the tool")),
    ):
        guard.item(name, lambda error=error: (_ for _ in ()).throw(error))  # type: ignore[misc]
    assert told(found) == [("blocks", "info"), ("memory", "info"), ("tool", "info")]
    assert "51 GiB" in found.rows[1].note and found.rows[1].note.startswith("does not fit")


def test_after_a_dead_context_the_rest_is_not_run_and_says_why() -> None:
    """An illegal access leaves a context in which every later call throws."""
    found = Findings("s", None)
    dead: list[str] = []

    def probe(_: torch.device) -> None:
        if dead:
            raise RuntimeError("an illegal memory access was encountered")

    guard = Guard(found, CPU, 60, probe=probe)
    guard.item("harmless", lambda: fail("a shape it does not take"))
    assert not guard.dead and guard.item("works", lambda: 2) == 2

    def breaks() -> None:
        dead.append("x")
        fail("launch failed")

    guard.item("illegal", breaks)
    ran: list[int] = []
    guard.item("later", lambda: ran.append(1))
    assert told(found) == [("harmless", "fail"), ("illegal", "fail"), ("later", "not run")]
    assert "illegal memory access" in found.rows[-1].note and "since: illegal" in found.rows[-1].note
    assert not ran


def test_an_item_past_its_deadline_is_left() -> None:
    found = Findings("s", None)
    guard = Guard(found, CPU, 60)
    guard.item("endless", lambda: time.sleep(60), 0.6)
    assert told(found) == [("endless", "fail")] and "not done after" in found.rows[0].note
    assert guard.item("next", lambda: 5) == 5


def test_no_item_begins_when_no_time_is_left() -> None:
    found = Findings("s", None)
    guard = Guard(found, CPU, 0.1)
    assert guard.item("late", lambda: 1) is None
    assert told(found) == [("late", "not run")]
