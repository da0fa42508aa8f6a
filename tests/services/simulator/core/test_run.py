"""Searching the capacity, replaying recordings, traffic from text, and the commands as a user types them."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from cohort.common.config import dump_config
from cohort.common.errors import ConfigError
from cohort.common.machines.recorder import Recorded, WorkerHeader
from cohort.common.machines.replayer import replay
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSetup
from cohort.common.types import Slo
from cohort.services.cli.__main__ import main
from cohort.services.simulator.core import capacity, deployment
from cohort.services.simulator.core.setup import configuration
from cohort.services.simulator.core.traffic import Traffic, parse_slo
from cohort.services.simulator.figures.figure import Kind
from cohort.services.simulator.reproduce.reproduce import all_figures, select
from tests.services.simulator.lab import cache_of, cluster, config, run, workload

CLUSTER = ["--cluster", "a100-80:2", "--model", "opt-2.7b"]


# -- replay ------------------------------------------------------------------------------------------------------


def record(monkeypatch: pytest.MonkeyPatch, folder: Path, **sections: Any) -> list[Path]:
    """Recordings of all workers of a small disaggregated run with preemptions."""
    chosen = config("disaggregated", kv=cache_of(70) | {"prefix_caching": False}, **sections)
    files: dict[str, Any] = {}

    def machine(setup: WorkerSetup, scheduler: Any, kv: Any, _: Random) -> WorkerMachine:
        file = files[setup.instance] = (folder / f"{setup.instance}.jsonl").open("wb")
        made = WorkerMachine(setup, scheduler, kv, Random(7))
        recorded = Recorded(made, WorkerHeader(setup, 7, dump_config(chosen)), file.write)
        monkeypatch.setattr(made, "handle", recorded.handle)
        return made

    monkeypatch.setattr(deployment, "WorkerMachine", machine)
    sim = run(chosen, cluster(2), workload(*((0.002 * i, 100, 120) for i in range(10))), jump=False)
    assert sim.clients.all.finished == 10
    for file in files.values():
        file.close()
    return sorted(folder.glob("*.jsonl"))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_recording_replays_to_the_same_decisions(monkeypatch: Any, tmp_path: Path, preemption: str):
    for path in record(monkeypatch, tmp_path, engine={"preemption": preemption}):
        found = replay(path)
        assert found.difference == ""
        assert found.calls > found.plans >= 10 and found.rows >= 10  # ten prompts, each planned on both workers
        assert found.effects > found.plans


def test_a_changed_decision_is_noticed(monkeypatch: Any, tmp_path: Path):
    path = record(monkeypatch, tmp_path)[0]
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "StartStep " in line)
    lines[at] = re.sub(r"(StartStep \S+ \[)\d+", r"\g<1>1", lines[at])
    path.write_text("\n".join(lines))
    found = replay(path)
    assert found.difference.startswith(f"line {at + 1}: recorded ")
    assert found.calls == at, "nothing after the difference was replayed"


def test_the_last_line_of_a_killed_process_may_be_half_written(monkeypatch: Any, tmp_path: Path):
    path = record(monkeypatch, tmp_path)[0]
    data = path.read_bytes()
    whole = replay(path)
    path.write_bytes(data[:-20])
    assert replay(path) == msgspec.structs.replace(whole, calls=whole.calls - 1, effects=ANY, plans=ANY, rows=ANY)
    lines = data.splitlines(keepends=True)
    lines[5] = lines[5][:-20] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=":6: not a call of a recording"):
        replay(path)


def test_no_recording_is_said(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="not a recording"):
        replay(path)


# -- traffic -----------------------------------------------------------------------------------------------------


def traffic(text: str, **options: Any) -> Traffic:
    given: dict[str, Any] = {
        "count": None,
        "duration_s": None,
        "time_scale": 1.0,
        "cv": 1.0,
        "seed": 0,
        "slo": Slo(),
        "best_effort": 0.0,
    }
    return Traffic(text, **(given | options))


def test_fixed_lengths_at_a_rate():
    load = traffic("30x4", count=50, slo=Slo(ttft_s=1.0)).workload(10.0)
    assert len(load.items) == 50
    assert {(i.prompt_tokens, i.output_tokens, i.slo.ttft_s) for i in load.items} == {(30, 4, 1.0)}
    assert load.rate_per_s == pytest.approx(10.0, rel=0.5)


def test_a_seed_is_a_part_of_a_trace_with_times_and_a_draw_at_a_rate(tmp_path: Path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{second},{second + 1},2\n" for second in range(1000))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    own = traffic(str(path), count=7)
    first, second = (own.lasting(100.0, seed=seed).workload().items for seed in (1, 2))
    assert 99 <= len(first) <= 100 and first[0].prompt_tokens != second[0].prompt_tokens
    for part in (first, second):
        assert [later.prompt_tokens - part[0].prompt_tokens for later in part] == list(range(len(part)))
        assert 0.0 <= part[0].arrival_s < 1.0 and part[-1].arrival_s < 100.0
    assert len(own.lasting(100.0, seed=1, most=30).workload().items) == 30
    assert len(own.lasting(5000.0, seed=1).workload().items) == 1000
    drawn = own.lasting(5000.0, seed=1).workload(2.0)
    assert drawn.items[-1].arrival_s > 4900.0 and drawn.items != own.lasting(5000.0, seed=2).workload(2.0).items
    assert len(own.sample()) == 7


def test_a_trace_keeps_its_times_or_takes_a_rate(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,2\n4,6,3\n6,7,4\n")
    own = traffic(str(path))
    assert [i.arrival_s for i in own.workload().items] == [0.0, 4.0, 6.0]
    assert own.own_rate_per_s == pytest.approx(1 / 3)
    assert len(traffic(str(path), duration_s=20.0).workload(5.0).items) > 50
    assert own.workload(concurrency=2).closed_loop[0].concurrency == 2


def test_shipped_traces_go_by_name():
    first = traffic("azure2023_code", count=3)
    assert [i.prompt_tokens for i in first.workload().items] == [4808, 3180, 110]
    assert traffic("azure2023_code").own_rate_per_s == pytest.approx(2.566, abs=1e-3)
    shared = traffic("mooncake_conversation", count=2).workload().items
    assert (shared[0].hash_block, len(shared[0].hash_ids)) == (512, 14)
    assert len(traffic("arxiv_summarization_4k", duration_s=20.0).workload(5.0).items) > 50
    with pytest.raises(ConfigError, match="nor one of day, azure2023_code, "):
        traffic("azure2024")


def test_servegen_has_its_peak_and_its_duration_from_the_options():
    load = traffic("servegen-deepseek-r1", duration_s=300.0)
    assert load.own_rate_per_s is None
    slow, fast = load.workload(5.0), load.workload(10.0)
    assert slow.span_s == pytest.approx(300.0, abs=10.0) and fast.span_s == pytest.approx(300.0, abs=10.0)
    assert len(fast.items) / len(slow.items) == pytest.approx(2.0, rel=0.2)
    assert load.workload(concurrency=4).closed_loop[0].concurrency == 4


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ("0,5,2\n1,-6,3\n", ":3: column 'prompt_tokens'"),
        ("5,5,2\n1,6,3\n", ":3: the arrival time 1 is before 5"),
        ("0,5,many\n", ":2: column 'output_tokens'"),
    ],
)
def test_bad_rows_are_named_by_line_and_column(tmp_path: Path, rows: str, where: str):
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    with pytest.raises(ConfigError, match=where):
        traffic(str(path))


def test_a_missing_column_is_named(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens\n0,5\n")
    with pytest.raises(ConfigError, match="output_tokens"):
        traffic(str(path))


@pytest.mark.parametrize("text", ["ttft=x", "colour=1", "ttft=-1"])
def test_wrong_slos_are_said(text: str):
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


# -- commands ----------------------------------------------------------------------------------------------------


def test_simulate_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    command = [
        "simulate",
        "--trace",
        "64x8",
        "--rate",
        "20",
        "--count",
        "40",
        *CLUSTER,
        "--preset",
        "disaggregated",
        "--slo",
        "ttft=1,tpot=0.1",
        "--json",
        str(out),
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "TTFT" in printed and "SLOs attained" in printed and "decode-0" in printed
    (report,) = json.loads(out.read_text())
    assert report["overall"]["finished"] == 40
    assert report["overall"]["slo"]["attainment"] == 1.0
    assert [i["instance"] for i in report["instances"]] == ["prefill-0", "decode-0"]


def test_a_sweep_is_a_line_per_value(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--trace", "64x8", "--count", "30", *CLUSTER, "--sweep", "rate=5,50"]) == 0
    firsts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [first for first in firsts if first in ("5", "50")] == ["5", "50"]
    command = [
        "simulate",
        "--trace",
        "64x8",
        "--count",
        "30",
        *CLUSTER,
        "--sweep",
        "preset=unified,disaggregated",
        "--json",
        "-",
    ]
    assert main(command) == 0
    assert [r["preset"] for r in json.loads(capsys.readouterr().out)] == ["unified", "disaggregated"]


@pytest.fixture
def short_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the points of a capacity's search (`test_capacity.py` has whole ones)."""
    for name, short in {"WINDOW_S": 2.0, "REQUESTS": 20, "MEAN_TIMES": 2.0}.items():
        monkeypatch.setattr(capacity, name, short)


@pytest.mark.usefixtures("short_points")
def test_the_capacity_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "capacity.json"
    command = ["simulate", "--trace", "512x4", *CLUSTER, "--preset", "unified", "--slo", "ttft=0.2"]
    assert main([*command, "--capacity", "0.9", "--json", str(out)]) == 0
    assert "capacity at 90% of SLOs kept, for " in capsys.readouterr().out
    found = json.loads(out.read_text())
    held = [point for point in found["tried"] if point["kept"] >= 0.9 and point["served"] >= 0.97]
    assert max(point["rate_per_s"] for point in held) == found["rate_per_s"] > 0
    assert all(point["window_s"] >= max(2, 2 * point["mean_s"]) for point in held)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing.csv", *CLUSTER], "--trace nothing.csv"),
        (["--trace", "8x8", "--cluster", "a100-80:2", "--model", "gpt-9"], "no model named"),
        (["--trace", "8x8", *CLUSTER, "--roles", "cook=2"], "--roles"),
        (["--trace", "8x8", *CLUSTER, "--roles", "unified=5"], "the cluster has 2"),
        (["--trace", "8x8", *CLUSTER, "--sweep", "colour=1"], "--sweep"),
        (["--trace", "8x8", *CLUSTER, "--capacity", "0.9"], "give --slo"),
        (["--trace", "8x8", *CLUSTER, "--set", "engine.colour=1"], "colour"),
        (["--trace", "8x8", *CLUSTER, "--rate", "0"], "--rate"),
        (["--trace", "8x8", *CLUSTER, "--scatter", "-0.1"], "--scatter"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_named_has_the_sizes_that_its_memory_gives_it_live():
    def tokens(*settings: str) -> int:
        options = argparse.Namespace(
            set=list(settings),
            config=[],
            cluster="a100-80:2",
            tensor_parallel=None,
            decode_attention=None,
            stack=None,
            pace=None,
        )
        return configuration(options, "unified").engine.max_step_tokens

    assert tokens("engine.device=cuda") == 8192
    assert tokens() == 2048  # what published comparisons were simulated with
    assert tokens("engine.device=cuda", "engine.max_step_tokens=777") == 777


@pytest.mark.usefixtures("short_points")
def test_advise_recommends_with_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "advice.json"
    command = [
        "advise",
        "--trace",
        "256x16",
        "--rate",
        "10",
        "--count",
        "40",
        "--jobs",
        "1",
        *CLUSTER,
        "--slo",
        "ttft=1,tpot=0.2",
        "--preset",
        "unified,disaggregated",
        "--json",
        str(out),
    ]
    assert main(command) == 0
    assert "Recommended: " in capsys.readouterr().out
    advice = json.loads(out.read_text())
    assert {trial["preset"] for trial in advice["trials"]} == {"unified", "disaggregated"}
    assert advice["trials"][0]["seeds"] == [1.0, 1.0, 1.0] and not advice["trials"][0]["why_not"]
    assert advice["trials"][0]["capacity"]["rate_per_s"] > 10
    assert all(trial["why_not"] for trial in advice["trials"][1:])


# -- reproduction ------------------------------------------------------------------------------------------------


def test_figures_have_unique_ids_and_numbers():
    figures = all_figures()
    assert len({figure.id for figure in figures}) == len(figures)
    # Ours are divided by it, but where the paper says only who wins; where it prints none it is no number.
    directions = (Kind.MORE, Kind.LESS)
    assert all(not math.isinf(figure.paper) for figure in figures)
    assert all(figure.paper != 0 or figure.kind in directions for figure in figures)
    assert select("baselines", "dynaserve-table1-code")[0].figure == "DynaServe Table 1"
    with pytest.raises(ConfigError, match="no such figure"):
        select("nobody", None)


def test_reproduce_lists(capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "--list", "--figure", "dynaserve-table1-code"]) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 6
