"""Sequences wait for their LoRA adapters without holding others up; adapters come and go by use, within their slots."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.machines.effects import LoadAdapter, Send, StartStep
from cohort.common.machines.events import (
    AdapterFailed,
    AdapterLoaded,
    LinkAddresses,
    Received,
    ReportDue,
    Sampled,
    StepEnded,
    Tick,
)
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import Cancel, KvOffer, Registered, StartSegment, TokenBatch, WorkerReport
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.types import Attempt, FinishReason, Role
from tests.common.machines.small_worker import BLOCKS, GEOMETRY, PROMPT, segment, setup, whole

Slots = st.integers(1, 3)


def asked(name: str, adapter: str, max_tokens: int = 8, of: StartSegment | None = None) -> Received:
    message = of or whole(name, max_tokens)
    request = msgspec.structs.replace(message.request, adapter=adapter)
    return Received("manager", msgspec.structs.replace(message, request=request))


class Run:
    """A worker told by hand; a step takes 10 ms and samples token 7."""

    def __init__(self, slots: int, role: Role = Role.UNIFIED) -> None:
        scheduler = ContinuousBatching(max_rows=16, max_step_tokens=64, prefill_chunk=64, preemption="recompute")
        kv = PagedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=True)
        self.machine = WorkerMachine(setup(role, 0, max_loras=slots), scheduler, kv, Random(0))
        self.now_s = 0.0
        self.loads: list[LoadAdapter] = []
        self.failed: dict[str, str] = {}
        self.sent: list[Any] = []
        self.tell(LinkAddresses({"link": b"here"}), Received("manager", Registered(1)))

    def tell(self, *events: Any) -> None:
        for effect in self.machine.handle(self.now_s, *events):
            match effect:
                case LoadAdapter():
                    self.loads.append(effect)
                case Send(message=TokenBatch(updates=updates)):
                    for update in updates:
                        if update.finish is FinishReason.FAILED:
                            self.failed[update.attempt.request_id] = update.error
                case Send(message=message):
                    self.sent.append(message)
                case StartStep(plan=plan):
                    held = set(self.machine.adapters.adapters)
                    assert {row.sequence.request.adapter for row in plan.rows} - {""} <= held
        self.machine.check()

    @property
    def rows(self) -> list[str]:
        plan = self.machine.state.in_flight
        return [] if plan is None else [row.sequence.request_id for row in plan.rows]

    def step(self, seconds: float = 0.01) -> None:
        plan = self.machine.plan_in_flight
        self.now_s += seconds
        sampled = [
            Sampled(row.sequence.key, 7, None) for row in plan.rows if row.start + row.count == row.sequence.known
        ]
        self.tell(StepEnded(sampled, seconds))

    def taken(self) -> list[LoadAdapter]:
        loads, self.loads = self.loads, []
        return loads


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    run = Run(slots=2)
    run.tell(asked("a", "sql"), asked("b", ""))
    assert run.taken() == [LoadAdapter("sql")]
    assert run.rows == ["b"]
    run.step()
    assert run.rows == ["b"]
    run.now_s += 0.3
    run.tell(AdapterLoaded("sql"))
    run.step()
    assert sorted(run.rows) == ["a", "b"]
    assert run.taken() == []


def test_of_taken_slots_the_one_unused_for_longest_goes() -> None:
    run = Run(slots=2)
    for name, adapter in (("1", "one"), ("2", "two"), ("3", "one")):
        run.tell(asked(name, adapter, max_tokens=1))
        for load in run.taken():
            run.tell(AdapterLoaded(load.adapter))
        run.step()
    assert run.machine.idle
    run.tell(asked("4", "three"))
    assert run.taken() == [LoadAdapter("three", "two")]


def test_an_adapter_that_a_row_computes_with_stays_until_its_step_has_ended() -> None:
    run = Run(slots=1)
    run.tell(asked("a", "one"))
    run.taken()
    run.tell(AdapterLoaded("one"))
    run.tell(asked("b", "two"), Received("manager", Cancel([Attempt("a", 1)])))
    assert run.rows == ["a"] and run.taken() == []
    run.step()
    assert run.taken() == [LoadAdapter("two", "one")]
    run.tell(AdapterLoaded("two"))
    assert run.rows == ["b"]


def test_held_adapters_let_an_older_request_pass_that_finds_no_slot() -> None:
    run = Run(slots=1)
    run.tell(asked("a0", "one", 100))
    run.tell(AdapterLoaded("one"))
    run.taken()
    run.tell(asked("b", "two"))
    run.now_s = 1.0
    run.tell(asked("a1", "one", 3))
    run.step()
    assert sorted(run.rows) == ["a0", "a1"], "not yet for long"
    run.now_s = 3.0
    run.tell(asked("a2", "one"), asked("c", ""))
    run.step()
    assert sorted(run.rows) == ["a0", "a1", "c"]
    run.tell(Received("manager", Cancel([Attempt("a0", 1), Attempt("a1", 1)])))
    run.step()
    assert run.taken() == [LoadAdapter("two", "one")]
    run.tell(AdapterLoaded("two"))
    run.step()
    assert sorted(run.rows) == ["b", "c"]
    run.tell(Received("manager", Cancel([Attempt("b", 1)])))
    run.step()
    assert run.taken() == [LoadAdapter("one", "two")], "it waited its turn"


def test_requests_of_many_adapters_all_end_in_one_slot() -> None:
    run = Run(slots=1)
    names = [f"r{index}" for index in range(12)]
    for index, name in enumerate(names):
        run.tell(asked(name, f"adapter {index % 5}", max_tokens=3))
    for _ in range(400):
        for load in run.taken():
            run.tell(AdapterLoaded(load.adapter))
        if run.machine.state.in_flight is None:
            run.now_s += 0.1
            run.tell(Tick())
        if run.machine.state.in_flight is not None:
            run.step()
    assert run.machine.idle
    assert run.machine.counters.finished == {"length": 12}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=20), Slots)
def test_a_request_costs_one_load_at_most(arrivals: list[tuple[int, int, int]], slots: int) -> None:
    """Whatever adapters come in whatever order: what lets them in is a request, which its key pays for."""
    run, loads = Run(slots), 0

    def turn() -> None:
        nonlocal loads
        for load in run.taken():
            loads += 1
            run.tell(AdapterLoaded(load.adapter))
        if run.machine.state.in_flight is not None:
            run.step()

    for index, (adapter, tokens, turns) in enumerate(arrivals):
        run.tell(asked(f"r{index}", f"adapter {adapter}", max_tokens=tokens))
        assert len(run.machine.adapters.adapters) <= slots
        for _ in range(turns):
            turn()
    while not run.machine.idle:
        turn()
        run.now_s += 0.1
        run.tell(Tick())
    assert loads <= len(arrivals)


def test_a_load_that_fails_answers_who_waits_and_is_tried_again_for_the_next() -> None:
    run = Run(slots=1)
    run.tell(asked("a", "one"), asked("b", "one"), asked("c", "two"), asked("d", ""))
    assert run.taken() == [LoadAdapter("one")]
    run.tell(AdapterFailed("one", "its file has changed"))
    assert run.failed == dict.fromkeys("ab", "LoRA adapter one: its file has changed")
    assert run.taken() == [LoadAdapter("two")]
    run.tell(AdapterLoaded("two"))
    run.step()
    assert sorted(run.rows) == ["c", "d"]
    run.tell(asked("e", "one"), Received("manager", Cancel([Attempt("c", 1)])))
    run.step()
    assert run.taken() == [LoadAdapter("one", "two")]


def test_kv_that_waits_keeps_no_adapter_and_loads_it_ahead() -> None:
    run = Run(slots=1, role=Role.DECODE)
    run.tell(asked("r", "one", of=segment(1)))
    assert run.taken() == [LoadAdapter("one")], "while its prompt is computed elsewhere"
    run.tell(AdapterLoaded("one"))
    run.tell(Received("prefill", KvOffer("prefill", Attempt("r", 1), 7, PROMPT)))
    run.tell(asked("other", "two"))
    assert run.taken() == [LoadAdapter("two", "one")]
    run.tell(AdapterLoaded("two"))
    assert run.rows == ["other"]


def test_reports_name_the_adapters_and_what_loading_takes() -> None:
    run = Run(slots=2)
    run.tell(asked("a", "one"))
    run.now_s = 0.4
    run.tell(AdapterLoaded("one"), asked("b", "two"))
    run.sent.clear()
    run.tell(ReportDue(0))
    [report] = [message for message in run.sent if isinstance(message, WorkerReport)]
    assert report.stats.adapters == ["one", "two"]
    assert report.stats.adapter_load_s == pytest.approx(0.4)
    assert report.stats.waiting + report.stats.running == 2


def test_equal_prompts_of_two_adapters_share_no_cached_prefix() -> None:
    run = Run(slots=3)
    for name, adapter, cached in (("a", "", 0), ("b", "one", 0), ("c", "two", 0), ("d", "one", 8), ("e", "", 8)):
        run.tell(asked(name, adapter, max_tokens=1))
        for load in run.taken():
            run.tell(AdapterLoaded(load.adapter))
        [sequence] = run.machine.sequences()
        assert sequence.cached_tokens == cached, name
        run.step()
