"""Shapes of a running pipeline, simulated from its learned step times; and a cluster whose planner changes it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from cohort.common.config import dump_config, load_config
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.planning.settings import planner_settings
from cohort.common.planning.shape import Shape
from cohort.common.planning.simulation_jobs import Answer, Job, WorkerCost
from cohort.common.planning.traffic import Replayed, Timing, in_time
from cohort.common.policies.cost_model import StepWork
from cohort.common.types import KvGeometry, Role, Slo, StepTimes
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.advise.candidate_shapes import LearnedCost, foresee, model_of, replay
from cohort.services.simulator.advise.foresee import served_model
from cohort.services.simulator.advise.planned_day import Day, DayRow, PlannedCluster, all_shapes, planned_day
from cohort.services.simulator.core.traffic import morning_share, rate_at, synthetic_day
from tests.services.simulator import lab

TIMES = StepTimes(0.004, 0.001, 1e-4, 0.006, 1e-8, 1e-7, 0.1, 1e-7)
MODEL = model_of(KvGeometry(4, 2, 8, 4, 16), "tiny", 512)
SLO = Slo(ttft_s=0.5)


def unified(count: int) -> Shape:
    return Shape.of({(Role.UNIFIED, 1): count})


def job(*shapes: Shape, count: int = 60, every_s: float = 0.1, **more: object) -> Job:
    requests = tuple(Replayed(index * every_s, 40, 60, "rt", SLO) for index in range(count))
    options = {"judged_from": 0, "costs": {1: WorkerCost(TIMES, 400, 4)}, "worker_cost": 0.03, "bar": 0.02, **more}
    return Job(1, shapes, requests, best_effort_s=60.0, **options)  # type: ignore[arg-type]


def test_learned_times_are_those_of_the_closed_form():
    cost = LearnedCost(TIMES, MODEL)
    decode = StepWork(tokens=3, rows=3, sampled=3, decode_rows=3, decode_context=300, longest_context=120)
    linear = (((1e-4 * 3) ** 4) + 0.006**4) ** 0.25
    assert cost.step_s(decode) == pytest.approx(0.004 + 0.003 + linear + 300e-7)
    mixed = StepWork(tokens=11, rows=4, sampled=4, pairs=36, prefill_context=8, decode_rows=3, decode_context=300)
    linear = (((1e-4 * 11) ** 4) + 0.006**4) ** 0.25
    assert cost.step_s(mixed) == pytest.approx(1.1 * (0.004 + 0.004 + linear + 36e-8 + 300e-7))
    later = [msgspec.structs.replace(decode, decode_context=300 + 3 * step) for step in range(4)]
    assert cost.repeated_s(decode, 4) == pytest.approx([cost.step_s(each) for each in later])


def test_two_workers_serve_what_one_cannot():
    config = lab.config("unified", engine={"max_rows": 2})
    one, two = foresee(job(unified(1), unified(2), count=40), config, MODEL)
    shares = [sum(in_time(SLO, timing, 60.0) for timing in found.timings) for found in (one, two)]
    assert shares[0] < 0.6 * shares[1]
    assert all(timing.e2e_s >= timing.ttft_s > 0 for timing in two.timings)


def test_a_shape_that_cannot_win_is_left_out_unless_it_is_wanted():
    config = lab.config("unified")
    asked = job(unified(1), unified(2), unified(3), count=10, every_s=2.0)
    assert [found.shape for found in foresee(asked, config, MODEL)] == [unified(1)]
    kept = msgspec.structs.replace(asked, keep=(unified(3),))
    assert [found.shape for found in foresee(kept, config, MODEL)] == [unified(1), unified(3)]


@pytest.mark.parametrize(("every_s", "saves"), [(0.03, False), (0.08, True), (0.4, True)])
def test_what_is_left_out_or_broken_off_is_never_the_best(every_s: float, saves: bool):
    config = lab.config("unified", engine={"max_rows": 2})
    shapes = [unified(2), unified(1), unified(3), unified(4)]
    asked = job(*shapes, count=40, every_s=every_s, bar=0.0)

    def score(shape: Shape, timings: Iterable[Timing]) -> float:
        return sum(in_time(SLO, timing, 60.0) for timing in timings) / 40 - asked.worker_cost * shape.devices

    whole = {shape: score(shape, replay(asked, shape, config, MODEL)) for shape in shapes}
    spent: list[int] = []
    found = foresee(asked, config, MODEL, spent.append)
    scores = {each.shape: score(each.shape, each.timings) for each in found}
    assert max(scores.values()) == max(whole.values())
    assert scores == {shape: whole[shape] for shape in scores}
    assert (sum(spent) < 40 * len(shapes)) == saves


def test_prefill_beside_decode_and_shared_beginnings():
    config = lab.config("disaggregated")
    shape = Shape.of({(Role.PREFILL, 1): 1, (Role.DECODE, 1): 1})
    asked = job(shape, count=20)
    requests = tuple(msgspec.structs.replace(each, shared_tokens=32) for each in asked.requests)
    plain = replay(asked, shape, config, MODEL)
    shared = replay(msgspec.structs.replace(asked, requests=requests), shape, config, MODEL)
    assert all(timing.e2e_s > 0 for timing in (*plain, *shared))
    assert sum(timing.ttft_s for timing in shared) < sum(timing.ttft_s for timing in plain)


def test_workers_with_all_cores_each_compute_in_turn():
    config = lab.config("unified", engine={"max_rows": 2})
    asked = job(unified(2), count=30)
    alone = replay(asked, unified(2), config, MODEL)
    together = replay(msgspec.structs.replace(asked, cores=2, threads=2), unified(2), config, MODEL)
    assert sum(timing.e2e_s for timing in together) > 1.3 * sum(timing.e2e_s for timing in alone)


@pytest.mark.pipeline
def test_the_process_answers_at_the_lowest_priority(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "llama", "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 4, "eos_token_id": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    (model / "config.json").write_text(json.dumps({**shape, **heads, "max_position_embeddings": 512}))
    config = lab.config("unified", model={"path": str(model)})
    (tmp_path / "planner.yaml").write_text(dump_config(config))
    command = [
        sys.executable,
        "-m",
        "cohort.services.simulator.advise.foresee",
        "--config",
        str(tmp_path / "planner.yaml"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        for asked in (job(unified(1), count=5), job(Shape(), count=5)):
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            process.stdin.flush()
            answer = msgspec.json.decode(process.stdout.readline(), type=Answer)
            assert answer.cpu_s > 0.0
            if asked.shapes[0].groups:
                assert len(answer.foreseen[0].timings) == 5 and not answer.failure
                assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
                assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
            else:
                assert answer.failure, "no workers: said, and not the end of the process"
        with contextlib.suppress(PermissionError):  # its end takes its turn only where nothing else computes
            os.setpriority(os.PRIO_PROCESS, process.pid, 0)
        process.stdin.close()
        assert process.wait(20) == 0, "it ends with its input"
    finally:
        process.kill()


def test_the_day_rises_falls_and_changes():
    day = synthetic_day(2000.0, 2.0, seed=1, slo=SLO)
    assert day == synthetic_day(2000.0, 2.0, seed=1, slo=SLO)
    day.check()

    def of(low: float, high: float) -> list[WorkItem]:
        return [item for item in day.items if low * 2000.0 <= item.arrival_s < high * 2000.0]

    morning, night, evening = of(0.25, 0.35), of(0.95, 1.0), of(0.67, 0.77)
    assert len(morning) > 6 * len(night) and len(evening) > 5 * len(night)
    assert sum(i.prompt_tokens for i in morning) / len(morning) > 4 * sum(i.prompt_tokens for i in evening) / len(
        evening
    )
    assert 3 * sum(i.output_tokens for i in morning) / len(morning) < sum(i.output_tokens for i in evening) / len(
        evening
    )
    assert rate_at(0.3, 2.0) == pytest.approx(2.0) and morning_share(0.1) > 0.9 > 0.1 > morning_share(0.9)


def test_a_day_of_all_shapes_breaks_off_those_that_are_hopeless(monkeypatch: pytest.MonkeyPatch):
    """Two rows of some 0.2 s: 10 requests a second and worker, and these are 18."""
    planner = {"mode": "act", "max_workers": 2, "shapes": ["colocated"]}
    config = lab.config("unified", engine={"max_rows": 2}, planner=planner)
    items = tuple(WorkItem(index / 18.0, 50 + 37 * index % 501, 40 + 53 * index % 121, slo=SLO) for index in range(160))

    def day() -> tuple[dict[str, DayRow], list[str]]:
        told: list[str] = []
        settings = planner_settings(config)
        report = planned_day(
            Day(config, lab.cluster(1), lab.MODEL, Workload("load", items), settings),
            unified(1),
            start_s=2.0,
            progress=told.append,
        )
        assert [row.score for row in report.fixed] == sorted((row.score for row in report.fixed), reverse=True)
        return {row.name: row for row in report.fixed}, told

    rows, told = day()
    one, two = rows["1 unified"], rows["2 unified"]
    assert one.broken_off and not two.broken_off and one.in_time < 0.5 < two.in_time
    assert f"fixed, 1 unified: {one.in_time:.4f} in time at most" in told and told[0].startswith("planned")
    monkeypatch.setattr("cohort.services.simulator.advise.planned_day._HOPELESS", 1.0)
    whole = day()[0]
    assert whole["1 unified"].in_time <= one.in_time and whole["2 unified"] == two


def test_a_planned_cluster_grows_with_its_load_shrinks_after_it_and_loses_nothing():
    config = lab.config(
        "unified",
        engine={"max_rows": 2},
        planner={
            "mode": "act",
            "max_workers": 3,
            "shapes": ["colocated"],
            "settle_s": 20,
            "cpu_share": 1,
            "worker_cost": 0.05,
        },
        experiment={"planner": {"interval_s": 5, "window_s": 30, "max_requests": 100, "confirmations": 1}},
    )

    def item(index: int, at_s: float) -> WorkItem:  # of many lengths: step times are learned from unlike iterations
        return WorkItem(at_s, 50 + 37 * index % 501, 40 + 53 * index % 121, slo=Slo(ttft_s=0.5))

    # A worker serves two rows of some 0.16 s: 12 requests a second. These are 18, for 50 seconds.
    busy = [item(index, index / 18.0) for index in range(900)]
    quiet = [item(index, 50.0 + index * 5.0) for index in range(24)]
    workload = Workload("load", (*busy, *quiet))
    settings = planner_settings(config)
    planned = PlannedCluster(Day(config, lab.cluster(1), lab.MODEL, workload, settings), unified(1), start_s=2.0)
    planned.run()
    changes = [(str(each.before), str(each.after)) for each in planned.machine.decisions if each.action == "changed"]
    assert changes, planned.machine.counts
    grown = [after for before, after in changes if after > before]
    shrunk = [after for before, after in changes if after < before]
    assert grown and shrunk and planned.machine.shape == unified(1)
    finished = sum(stats.finished for stats in planned.sim.clients.classes.values())
    assert finished == len(workload.items), "no request was lost with a worker that went"
    assert len(all_shapes(settings.bounds)) == 3


def test_a_served_models_latents_weigh_what_they_do_live(tmp_path: Path) -> None:
    """Key and value in one: 576 numbers a token and layer."""
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 27, "num_experts_per_tok": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = served_model(load_config(overrides={"model": {"path": str(tmp_path)}}), 2)
    assert shape.kv_geometry(16).token_bytes == read_geometry(tmp_path).kv_token_bytes("bfloat16") == 27 * 576 * 2
