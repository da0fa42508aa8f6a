"""Traces with LoRA adapters run through the same machines: loads take their time, and placement saves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.workloads.arrivals import TraceTimes
from cohort.common.workloads.generate import FromTrace, generate
from cohort.common.workloads.items import WorkItem, Workload
from cohort.common.workloads.traces import read_trace
from tests.services.simulator.lab import cluster, config, run

ADAPTERS = ["", "one", "two", "three"]


def asked(count: int, gap_s: float = 0.4) -> Workload:
    items = [WorkItem(gap_s * index, 200, 8, adapter=ADAPTERS[index % len(ADAPTERS)]) for index in range(count)]
    return Workload("adapters", tuple(items))


def loads(sim: object) -> int:
    return sum(worker.machine.counters.adapter_loads for worker in sim.workers)  # type: ignore[attr-defined]


def test_the_first_request_of_an_adapter_waits_for_its_load() -> None:
    sim = run(config(), cluster(), asked(8), adapter_load_s=0.25)
    first = {index: sim.token_times[f"r{index}"][0] - 0.4 * index for index in range(8)}
    assert first[1] - first[0] == pytest.approx(0.25, abs=0.02)
    assert first[5] == pytest.approx(first[0], abs=0.02), "it is held by then"
    assert loads(sim) == 3
    assert sim.clients.all.finished == 8


@pytest.mark.parametrize("preset", ["cohort", "unified", "disaggregated"])
def test_more_adapters_than_slots_all_end(preset: str) -> None:
    sim = run(config(preset, engine={"max_loras": 1}), cluster(2), asked(40, 0.05))
    assert sim.clients.all.finished == 40
    assert loads(sim) >= 3


def test_jumping_over_steps_changes_nothing() -> None:
    by_jumps = run(config(), cluster(), asked(12, 0.1))
    one_by_one = run(config(), cluster(), asked(12, 0.1), jump=False)
    assert by_jumps.token_times == one_by_one.token_times


def test_placement_by_forecast_loads_each_adapter_once() -> None:
    """Two instances, three adapters, two slots each, and hardly any load."""
    sim = run(config("cohort", engine={"max_loras": 2}), cluster(2), asked(40), adapter_load_s=0.25)
    assert loads(sim) == 3


def test_a_trace_names_adapters(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,adapter\n0,10,2,sql\n1,10,2,\n")
    trace = read_trace(file)
    assert [row.adapter for row in trace.rows] == ["sql", ""]
    made = generate("t", FromTrace(trace, "file"), TraceTimes())
    assert [item.adapter for item in made.items] == ["sql", ""]
