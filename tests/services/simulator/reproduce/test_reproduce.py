"""`cohort reproduce`: several seeds where chance has a part, one run where it has none, and going on after a stop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cohort.common.errors import ConfigError
from cohort.services.cli.__main__ import main
from cohort.services.simulator.core.report import SimReport, make_report
from cohort.services.simulator.figures.figure import Figure, Lab
from cohort.services.simulator.reproduce import reproduce as reproduce_
from cohort.services.simulator.reproduce.reproduce import Reproduced, digest, read_results, reproduce, select
from tests.services.simulator.lab import cluster, config, run, workload

LOAD = workload((0.0, 50, 3))
runs: list[tuple[str, int]] = []


def figure(name: str, measure: Any, paper: float = 4.0, system: str = "baselines") -> Figure:
    return Figure(name, system, "Fig. 1", "w", "b", "m", "ms", paper, measure, "why")


def drawn(lab: Lab) -> float:
    runs.append(("drawn", lab.seed))
    return 4.0 + 0.1 * lab.seed


def certain(lab: Lab) -> float:
    runs.append(("certain", lab.chosen_seed))
    return 5.0


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    runs.clear()


def quiet(_: str) -> None:
    pass


def test_a_row_has_the_median_and_the_spread_of_its_seeds() -> None:
    (row,) = reproduce([figure("x", drawn)], quiet, range(5))
    assert (row.ours, row.low, row.high, row.ratio) == pytest.approx((4.2, 4.0, 4.4, 1.05))
    assert (row.seeds, row.values, row.verdict) == (
        [0, 1, 2, 3, 4],
        pytest.approx([4, 4.1, 4.2, 4.3, 4.4]),
        "reproduced",
    )


def test_how_many_requests_used_the_mechanism_is_measured_beside_the_number(tmp_path: Path) -> None:
    file, split = tmp_path / "results.jsonl", replace(figure("x", drawn), exercised=lambda lab: 0.2 * lab.seed)
    (row,) = reproduce([split], quiet, range(3), results=file)
    assert (row.ours, row.exercised, row.verdict) == (pytest.approx(4.1), pytest.approx(0.2), "unexercised")
    assert reproduce([split], quiet, range(3), results=file) == [row] and len(runs) == 3
    (used,) = reproduce([replace(split, exercised=lambda lab: 30.0)], quiet, range(3))
    assert (used.exercised, used.verdict) == (30.0, "reproduced")


def test_what_never_asks_for_the_seed_runs_once() -> None:
    rows = reproduce([figure("x", certain), figure("y", drawn)], quiet, range(3))
    assert runs == [("certain", 0), ("drawn", 0), ("drawn", 1), ("drawn", 2)]
    assert (rows[0].ours, rows[0].seeds, rows[0].values) == (5.0, [], [5.0])


def test_chance_is_seen_through_runs_that_others_made() -> None:
    report = make_report(run(config(), cluster(), LOAD), "w", LOAD.facts)
    lab = Lab(2)

    def look(inner: Lab) -> float:
        return inner.run("one", lambda: msgspec.structs.replace(report, seed=inner.seed)).seed

    assert lab.measured(look) == (2.0, True)
    assert lab.measured(look) == (2.0, True)  # nothing ran, but what it saw was drawn
    assert lab.measured(lambda inner: inner.run("two", lambda: report).duration_s)[1] is False
    assert lab.measured(lambda inner: 1.0) == (1.0, False)


def test_a_run_that_ended_is_not_run_again(tmp_path: Path) -> None:
    report = make_report(run(config(), cluster(), LOAD), "w", LOAD.facts)

    def look(lab: Lab) -> float:
        def simulation() -> SimReport:
            runs.append(("run", lab.seed))
            return msgspec.structs.replace(report, duration_s=math.inf)

        return lab.run(("one", 2.5), simulation).duration_s

    for seed in (1, 1, 2):
        assert Lab(seed, folder=tmp_path).measured(look) == (math.inf, True)
    assert Lab(1, 0.1, tmp_path).measured(look) == (math.inf, True)
    assert runs == [("run", 1), ("run", 2), ("run", 1)]
    for kept in tmp_path.iterdir():
        kept.write_bytes(b"of another version")
    assert Lab(1, folder=tmp_path).measured(look) == (math.inf, True) and len(runs) == 4


def test_options_of_runs_have_seed_and_scatter() -> None:
    options = Lab(7, scatter=0.1).options(warmup_s=3.0)
    assert (options.seed, options.scatter, options.warmup_s) == (7, 0.1, 3.0)
    assert Lab().options().scatter is None


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"

    def fails(lab: Lab) -> float:
        if lab.seed == 1:
            raise KeyboardInterrupt
        return drawn(lab)

    with pytest.raises(KeyboardInterrupt):
        reproduce([figure("x", fails)], quiet, range(3), results=file)
    assert runs == [("drawn", 0)]
    with file.open("ab") as torn:
        torn.write(b'{"digest": "ab')  # a process that was killed while it wrote
    (row,) = reproduce([figure("x", drawn)], quiet, range(3), results=file)
    assert runs == [("drawn", 0), ("drawn", 1), ("drawn", 2)] and row.values == pytest.approx([4.0, 4.1, 4.2])
    assert reproduce([figure("x", drawn)], quiet, range(3), results=file) == [row]
    assert len(runs) == 3 and len(read_results(file)) == 3
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl:1: not a result"):
        read_results(file)


def test_what_a_number_depends_on_is_in_its_digest() -> None:
    one = figure("x", drawn)
    others = [digest(figure("y", drawn), 0, None), digest(one, 1, None), digest(one, 0, 0.1)]
    assert digest(one, 0, None) == digest(one, 0, None) and digest(one, 0, None) not in others


def test_a_number_that_is_not_finite_is_kept_as_such(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    (row,) = reproduce([figure("x", lambda lab: math.inf * (1 + lab.seed))], quiet, range(2), results=file)
    assert math.isnan(row.ours) and row.verdict == "unclear"
    assert [one.value for one in read_results(file).values()] == [None, None]


def test_processes_measure_the_same(tmp_path: Path) -> None:
    chosen = select("alignedserve", "alignedserve-ceiling-opt-2.7b-split_kv")
    alone = reproduce(chosen, quiet, range(2))
    assert reproduce(chosen, quiet, range(2), jobs=2, results=tmp_path / "r.jsonl") == alone
    assert all(row.seeds == [] for row in alone)


def test_the_command_tells_verdicts_and_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = (figure("x-1", drawn), replace(figure("x-2", certain, 40.0), note="another"))
    monkeypatch.setattr(reproduce_, "all_figures", lambda: figures)
    page = tmp_path / "page.md"
    assert main(["reproduce", "--seeds", "3", "--json", "--docs", str(page)]) == 0
    rows = msgspec.json.decode(capsys.readouterr().out, type=list[Reproduced])
    assert [(row.verdict, len(row.seeds)) for row in rows] == [("reproduced", 3), ("not", 0)]
    assert (
        "# Do we reproduce" in page.read_text()
        and '"id":"x-1","low":4.0,"median":4.1,"high":4.2,"seeds":3' in (tmp_path / "page.json").read_text()
    )
    runs.clear()
    assert main(["reproduce", "--list", "--docs", str(page)]) == 0
    assert "3 seeds" in capsys.readouterr().out and runs == []
    assert main(["reproduce", "--seeds", "1"]) == 0
    assert "one seed" in capsys.readouterr().out
    for wrong in (["--seeds", "0"], ["--jobs", "0"], ["--scatter", "-1"], ["--lacking"]):
        assert main(["reproduce", *wrong]) == 2
    assert json.loads(msgspec.json.encode(rows[0]))["low"] == pytest.approx(4.0)


def test_rows_that_a_page_lacks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = (figure("x-1", drawn), figure("x-2", certain), figure("x-3", drawn))
    monkeypatch.setattr(reproduce_, "all_figures", lambda: figures)
    page, file = str(tmp_path / "page.md"), str(tmp_path / "results.jsonl")
    assert main(["reproduce", "--seeds", "2", "--figure", "x-1", "--docs", page]) == 0
    assert main(["reproduce", "--seeds", "1", "--figure", "x-3", "--docs", page]) == 0
    runs.clear()
    assert main(["reproduce", "--seeds", "2", "--lacking", "--docs", page, "--results", file]) == 0
    assert runs == [("certain", 0), ("drawn", 0), ("drawn", 1)]
    runs.clear()
    assert main(["reproduce", "--seeds", "2", "--lacking", "--docs", page]) == 0
    assert runs == []
