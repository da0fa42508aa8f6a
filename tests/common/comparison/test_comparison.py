"""`cohort compare`: what is run, what is kept of it, and the table that is made of it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cohort.common.comparison import comparison, comparison_tables
from cohort.common.comparison.comparison import CellResult
from cohort.common.comparison.comparison_spec import FOLDER, Part, Spec, TrafficSpec, load_spec
from cohort.common.comparison.comparison_traffic import traffic, traffic_by_part
from cohort.common.errors import ConfigError
from cohort.common.types import Slo
from cohort.services.simulator.__main__ import main
from cohort.services.simulator.core.run import measure


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    rows = [f'{{"timestamp": {1000 * n}, "input_length": {20 + 7 * n}, "output_length": {5 + n}}}' for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setenv("COHORT_TRACES", str(tmp_path))
    return "rows.jsonl"


def written(folder: Path, trace: str, **changes: Any) -> Path:
    part = {"trace": trace, "rate": 4, "ttft_s": 2, "tpot_s": 0.1}
    spec = {
        "description": "two systems",
        "model": "llama-2-7b",
        "cluster": "a100-80:2",
        "workloads": {
            "one": {"parts": [part]},
            "rt": {"judged": "rt", "parts": [part, {**part, "traffic_class": "be"}]},
        },
        "systems": {"unified": {"preset": "unified"}, "p-d": {"preset": "disaggregated"}},
        "loads": [0.5, 1],
        "seeds": [0, 1],
        "duration_s": 5,
        "horizon_s": 30,
        **changes,
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def test_a_workload_may_last_longer_than_the_others(trace: str, tmp_path: Path) -> None:
    parts = [{"trace": trace, "rate": 1, "ttft_s": 2, "tpot_s": 0.1}]
    workloads = {"short": {"parts": parts}, "long": {"parts": parts, "duration_s": 20, "horizon_s": 60}}
    asked = comparison.cells(load_spec(str(written(tmp_path, trace, workloads=workloads))), seeds=[0], loads=[1.0])
    lasts = {cell.workload: (cell.duration_s, cell.horizon_s) for cell in asked}
    assert lasts == {"short": (5, 30), "long": (20, 60)}
    sent = {found.workload: found.sent for found in comparison.run(asked, None, 1, lambda _: None, measure)}
    assert sent["long"] > 2 * sent["short"]


def test_every_cell_runs_once_and_counts_all_that_were_sent(trace: str, tmp_path: Path) -> None:
    spec = load_spec(str(written(tmp_path, trace)))
    asked = comparison.cells(spec)
    assert len(asked) == len({cell.digest for cell in asked}) == 2 * 2 * 2 * 2
    results = tmp_path / "results.jsonl"
    told: list[str] = []
    found = comparison.run(asked, results, 1, told.append, measure)
    assert [(one.workload, one.load, one.seed, one.system) for one in found] == [
        (cell.workload, cell.load, cell.seed, cell.system) for cell in asked
    ]
    assert all(0 < one.kept <= one.finished <= one.sent for one in found)
    # Both systems are given the same requests, and a load of 1 twice those of a half, but for chance.
    sent = {(one.workload, one.load, one.seed): one.sent for one in found}
    assert all(one.sent == sent[one.workload, one.load, one.seed] for one in found)
    again: list[str] = []
    assert comparison.run(asked, results, 1, again.append, measure) == found
    assert again == [f"{len(asked)} runs, {len(asked)} of them known"]
    assert len(results.read_text().splitlines()) == len(asked)


def test_a_changed_option_is_another_cell(trace: str, tmp_path: Path) -> None:
    before = {cell.digest for cell in comparison.cells(load_spec(str(written(tmp_path, trace))))}
    systems = {"unified": {"preset": "unified", "set": {"engine.max_rows": 8}}, "p-d": {"preset": "disaggregated"}}
    after = {cell.digest for cell in comparison.cells(load_spec(str(written(tmp_path, trace, systems=systems))))}
    assert len(before & after) == len(before) / 2


def test_a_wrong_setting_is_refused_before_anything_runs(trace: str, tmp_path: Path) -> None:
    spec = load_spec(str(written(tmp_path, trace)))
    with pytest.raises(ConfigError, match=r"unknown setting 'experiment\.bros\.drosp'; did you mean drops\?"):
        comparison.cells(spec, over={"experiment.bros.drosp": False})


def test_lengths_users_and_whole_answers_of_the_papers() -> None:
    users = Part(paper="bros-best-effort", users=3, traffic_class="be", scaled=False)
    whole = Part(paper="ecoserve-alpaca", rate=5.0, whole_s=(0.5, 0.1), max_output=100)
    made = traffic(TrafficSpec([whole, users]), load=1.0, duration_s=20.0, seed=3)
    assert made.items and all(
        item.slo == Slo(deadline_s=2 * (0.5 + 0.1 * item.output_tokens)) and item.output_tokens <= 100
        for item in made.items
    )
    (loop,) = made.closed_loop
    assert (loop.concurrency, loop.in_batches, loop.until_s, loop.start_s) == (3, True, 20.0, 0.0)
    assert all(item.traffic_class == "be" and 512 <= item.prompt_tokens <= 1024 for item in loop.items)


def test_lengths_of_its_own_so_many_requests_and_users_apart() -> None:
    drawn = Part(lengths="uniform:4-8 x 2", rate=5.0, requests=7, start_s=3.0)
    mixed = Part(lengths="0.5:8x4,0.5:80x2", at_once=True, requests=20)
    users = Part(lengths="8x4", users=3, together=False, requests=5, traffic_class="be")
    one, two, three = traffic_by_part(TrafficSpec([drawn, mixed, users]), load=1.0, duration_s=1.0, seed=3)
    assert len(one.items) == 7 and one.items[0].arrival_s == 3.0 and one.items[-1].arrival_s > 3.0
    assert {item.output_tokens for item in one.items} == {2}
    assert {(item.arrival_s, item.prompt_tokens, item.output_tokens) for item in two.items} == {(0, 8, 4), (0, 80, 2)}
    (loop,) = three.closed_loop
    assert (loop.concurrency, len(loop.items), loop.until_s, loop.in_batches) == (3, 5, math.inf, False)


def test_shipped_traces_go_by_name_and_others_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COHORT_TRACES", raising=False)
    load_spec(str(written(tmp_path, "azure2023_code")))
    load_spec("papers")
    spec = TrafficSpec([Part("azure2023_code", 4.0)])
    assert traffic(spec, load=1.0, duration_s=9.0, seed=1).items
    with pytest.raises(ConfigError, match="COHORT_TRACES names, nor one of azure2023_code, "):
        load_spec("combination")


def test_a_trace_may_be_scaled(trace: str) -> None:
    whole, half = (
        traffic(TrafficSpec([Part(trace, 4.0, scale=scale, max_prompt=100)]), load=1.0, duration_s=9.0, seed=1).items
        for scale in (1.0, 0.5)
    )
    assert [item.output_tokens for item in half] == [max(2, round(item.output_tokens / 2)) for item in whole]
    assert max(item.prompt_tokens for item in half) <= 100


def test_fields_that_are_unset_change_no_digest(trace: str, tmp_path: Path) -> None:
    """Of results that were kept before there were such fields."""
    cell, *_ = comparison.cells(load_spec(str(written(tmp_path, trace))))
    fields = json.loads(msgspec.json.encode(cell))
    assert fields.keys().isdisjoint({"live"}) and fields["traffic"].keys().isdisjoint({"usual"})
    assert fields.keys().isdisjoint({"variant"})
    assert fields["compared"].keys().isdisjoint({"variants", "clairvoyant"})
    new = {"name", "lengths", "scale", "requests", "at_once", "together", "tbt_s", "agents", "in_order"}
    assert fields["traffic"]["parts"][0].keys().isdisjoint(new)
    live, *_ = comparison.cells(load_spec(str(written(tmp_path, trace))), live=True)
    assert live.digest != cell.digest


def test_a_variant_is_chosen_on_some_seeds_and_judged_on_the_others(trace: str, tmp_path: Path) -> None:
    chunks = [{"engine.prefill_chunk": 64}, {"engine.prefill_chunk": 256}]
    systems = {"one": {"preset": "unified"}, "swept": {"preset": "unified", "variants": chunks}}
    spec = load_spec(str(written(tmp_path, trace, systems=systems, tuning_seeds=[0])))
    asked = comparison.cells(spec, workloads=["one"], loads=[1.0])
    assert len(asked) == 2 * (1 + 2) == len({cell.digest for cell in asked})
    assert [cell.options.get("engine.prefill_chunk") for cell in asked if cell.seed == 1] == [None, 64, 256]

    def result(seed: int, system: str, variant: int, kept: int, at_most: float | None) -> CellResult:
        groups = {"class": {"rt": [kept, 10]}}
        return CellResult("", "w", 1.0, seed, system, 10, 10, kept, 0.0, {}, at_most, 2.0 + seed, groups, variant)

    kept = {(0, 0): 3, (0, 1): 6, (1, 0): 9, (1, 1): 7, (2, 0): 9, (2, 1): 5}
    results = [result(seed, "swept", variant, each, 8.0) for (seed, variant), each in kept.items()]
    results += [result(seed, "one", 0, 4, 9.5 if seed else None) for seed in range(3)]
    (row,) = comparison.rows(results, [0])
    assert row.variants == {"swept": 1, "one": 0} and row.shares["swept"] == (0.6, 0.5, 0.7)
    assert row.at_most == pytest.approx(0.95) and row.longest_wait_s == {"swept": 4.0, "one": 4.0}
    assert row.groups == {"class": {"rt": {"swept": 0.6, "one": 0.4}}}
    (of_all,) = comparison.rows(results)
    assert of_all.variants["swept"] == 0 and of_all.shares["swept"][0] == pytest.approx(0.7)
    shown = comparison_tables.Comparison("d", [row])
    assert "| w | 1 | 95.0 | 60.0 (50-70) | 40.0 |" in comparison_tables.markdown(shown)
    assert [table.title for table in comparison_tables.group_tables(shown)] == [
        "longest wait for a first token, a refusal or the end, s"
    ]


def test_what_is_known_beforehand_is_left_out_of_a_clairvoyant_system(trace: str, tmp_path: Path) -> None:
    part = {"trace": trace, "rate": 90, "ttft_s": 0.1, "tpot_s": 0.05}
    systems = {"cohort": {"preset": "cohort"}, "clairvoyant": {"preset": "cohort", "clairvoyant": 0.7}}
    changes = {"systems": systems, "workloads": {"one": {"parts": [part]}}, "model": "llama-13b"}
    spec = load_spec(str(written(tmp_path, trace, **changes, cluster="a100-80:1")))
    asked = comparison.cells(spec, seeds=[0], loads=[1.0])
    ours, knowing = comparison.run(asked, None, 1, lambda _: None, measure)
    assert ours.sent == knowing.sent and ours.at_most == knowing.at_most
    assert ours.at_most is not None and max(ours.kept, knowing.kept) <= ours.at_most < ours.sent
    assert sum(sent for _, sent in knowing.groups["class"].values()) == knowing.sent
    assert not comparison.cells(spec, systems=["clairvoyant"], live=True)


def test_a_trace_in_its_order_begins_anywhere(trace: str) -> None:
    spec = TrafficSpec([Part(trace, 4.0, in_order=True)])
    first, second = (traffic(spec, load=1.0, duration_s=5.0, seed=seed).items for seed in (1, 2))
    for items in (first, second):
        outputs = [item.output_tokens for item in items]
        assert all((after - before) % 30 == 1 for before, after in itertools.pairwise(outputs))
    assert first[0].output_tokens != second[0].output_tokens


def test_columns_are_medians_and_stand_beside_those_of_another_run() -> None:
    def result(seed: int, rate: float, system: str = "a", **numbers: float) -> CellResult:
        return CellResult("", "w", 1.0, seed, system, 1, 1, 1, 0.0, {"rate": rate, **numbers})

    live = [result(0, 10.0), result(1, 12.0), result(2, 11.0), result(0, 5.0, "b", late=2.0)]
    assert comparison_tables.columns(live).splitlines() == [
        "| workload | load | figure | a | b |",
        "| --- | --- | --- | --- | --- |",
        "| w | 1 | rate | 11 (10 to 12) | 5 |",
        "| w | 1 | late | – | 2 |",
    ]
    assert comparison_tables.columns([result(0, 22.0)], live).splitlines()[2:] == [
        "| w | 1 | rate | 11 (10 to 12), 22, +100.0% |"
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"rate": 1}, "either a trace or a paper's lengths"),
        ({"paper": "bros-lmsys", "trace": "x", "rate": 1}, "either a trace or a paper's lengths"),
        ({"paper": "bros-unknown", "rate": 1}, "no workload named 'bros-unknown'"),
        ({"lengths": "8x", "rate": 1}, "expected 128"),
        ({"lengths": "8x4", "at_once": True}, "at_once needs a number of requests"),
        ({"trace": "rows.jsonl", "users": 2}, "users need lengths of their own"),
        ({"paper": "bros-lmsys"}, "either a rate or users"),
        ({"paper": "bros-lmsys", "rate": 1, "users": 2}, "either a rate or users"),
        ({"paper": "bros-lmsys", "rate": 1, "whole_s": [1, 1], "ttft_s": 1}, "stands for all SLOs"),
    ],
)
def test_parts_that_cannot_be_are_refused(tmp_path: Path, trace: str, part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(str(written(tmp_path, trace, workloads={"one": {"parts": [part]}})))


def test_a_workload_may_say_which_systems_can_run_and_on_how_many_devices(trace: str, tmp_path: Path) -> None:
    part = {"trace": trace, "rate": 4, "ttft_s": 2, "tpot_s": 0.1}
    path = written(
        tmp_path,
        trace,
        workloads={
            "one": {"parts": [part], "only": ["unified"], "cluster": "a100-80:1", "tensor_parallel": 2},
            "two": {"parts": [part], "only": ["unified"], "cluster": "a100-80:1"},
        },
    )
    asked = comparison.cells(load_spec(str(path)), loads=[1.0], seeds=[0])
    assert [(cell.workload, cell.system) for cell in asked] == [("one", "unified"), ("two", "unified")]
    on_two, on_one = comparison.run(asked, None, 1, lambda _: None, measure)
    assert on_two.numbers["TTFT p99, ms"] < on_one.numbers["TTFT p99, ms"]


def test_parts_are_on_when_they_say(trace: str) -> None:
    burst = Part(trace, 20.0, burst_s=2.0, period_s=5.0, start_s=1.0, end_s=14.0, tpot_s=[0.1, 0.2], ttft_s=[1.0, 2.0])
    whole = Part(trace, 5.0, traffic_class="be", deadline_s=9.0, scaled=False)
    made = {load: traffic(TrafficSpec([burst, whole]), load=load, duration_s=20.0, seed=3) for load in (1.0, 2.0)}
    items = made[1.0].items
    assert [item.arrival_s for item in items] == sorted(item.arrival_s for item in items)
    bursts = [item for item in items if item.traffic_class == "rt"]
    assert {int((item.arrival_s - 1.0) // 5.0) for item in bursts} == {0, 1, 2}
    assert all((item.arrival_s - 1.0) % 5.0 <= 2.0 for item in bursts)
    assert {(item.slo.ttft_s, item.slo.tpot_s) for item in bursts} == {(1.0, 0.1), (2.0, 0.2)}
    assert all(item.slo.deadline_s == 9.0 for item in items if item.traffic_class == "be")
    counts = {load: sum(item.traffic_class == "rt" for item in one.items) for load, one in made.items()}
    assert counts[2.0] > 1.5 * counts[1.0]
    best_effort = [[i.arrival_s for i in one.items if i.traffic_class == "be"] for one in made.values()]
    assert best_effort[0] == best_effort[1]


def test_the_command_prints_and_writes(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page, data = written(tmp_path, trace), tmp_path / "table.md", tmp_path / "table.json"
    words = ["compare", str(path), "--workloads", "one", "--loads", "0.5"]
    assert main([*words, "--markdown", str(page), "--json", str(data)]) == 0
    assert "unified" in capsys.readouterr().out
    assert "| one | 0.5 |" in page.read_text()
    assert json.loads(data.read_text())["rows"][0]["shares"].keys() == {"unified", "p-d"}


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, ["--workloads", "two"], "no workload named 'two'; there are: one, rt"),
        ({}, ["--systems", "x"], "no system named 'x'"),
        ({}, ["--loads", "much"], "--loads: 'much' is not a number"),
        ({}, ["--jobs", "0"], "--jobs 0"),
        ({"systems": {"s": {"preset": "nothing"}}}, [], "no preset named 'nothing'"),
        ({"systems": {"s": {"preset": "unified", "set": {"engine.x": 1}}}}, [], "engine.x"),
        ({"workloads": {"w": {"parts": []}}}, [], "workloads.w: has no parts"),
        ({"workloads": {"w": {"parts": [{"trace": "none.csv", "rate": 1}]}}}, [], "trace none.csv"),
        ({"loads": [-1]}, [], "loads"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    changes: dict[str, Any], words: list[str], said: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(written(tmp_path, trace, **changes)), *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_damaged_results_file_is_named(trace: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"results.jsonl:1: not a result"):
        comparison.read_results(results)


@pytest.mark.parametrize("name", ["combination", "papers"])
def test_the_comparisons_that_come_with_cohort_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for the traces that may not ship."""
    monkeypatch.setenv("COHORT_TRACES", str(tmp_path))
    spec = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for workload in spec["workloads"].values():
        for part in workload["parts"]:
            if "trace" in part:
                (tmp_path / part["trace"]).touch()
    asked: Spec = load_spec(name)
    systems = {workload: one.only or list(asked.systems) for workload, one in asked.workloads.items()}
    usual = sum(asked.systems[system].usual for here in systems.values() for system in here)
    assert len(comparison.cells(asked)) == usual * len(asked.loads) * 5
    every = sum(len(here) for here in systems.values())
    assert len(comparison.cells(asked, systems=list(asked.systems))) == every * 15
    assert comparison_tables.markdown(comparison_tables.Comparison("", []))
