"""`cohort compare --live` in full but for the pipelines: what is sent, what is told of it, and what is refused."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.comparison.comparison import cells
from cohort.common.comparison.comparison_spec import FOLDER, load_spec
from cohort.services.bench.live import measured
from cohort.services.bench.live.pipelines import ClientCommand
from cohort.services.cli.__main__ import main
from tests.common.comparison.test_comparison import trace, written

__all__ = ["trace"]

ROOT = Path(__file__).resolve().parents[4]
TIMES = {"mean": 10.0, "p50": 9.0, "p90": 12.0, "p99": 20.0, "max": 30.0}
METRICS = """\
cohort_schedule_seconds_sum{instance="decode-0"} 0.5
cohort_schedule_seconds_count{instance="decode-0"} 1000
cohort_iteration_gap_seconds_bucket{instance="decode-0",le="0.005"} 30
cohort_iteration_gap_seconds_bucket{instance="decode-0",le="+Inf"} 40
cohort_iteration_gap_seconds_bucket{instance="prefill-0",le="+Inf"} 9
"""


class Served:
    """Answers with the preset's length as the rate of tokens."""

    def __init__(self, preset: str, noted: list[Any]) -> None:
        self._preset, self._noted = preset, noted

    def load(self, clients: Sequence[ClientCommand]) -> dict[str, dict[str, Any]]:
        found = {}
        for client in clients:
            options = dict(word[2:].split("=", 1) for word in client.arguments)
            rows = Path(options.pop("trace")).read_text().splitlines()[1:]
            self._noted.append((client.name, client.after_s, options, [row.split(",")[1:3] for row in rows]))
            slo = {"kept_of_sent": 0.9, "attained": 9, "goodput_output_tokens_per_s": 2.0, "itl_share": None}
            found[client.name] = {
                "sent": len(rows),
                "completed": len(rows),
                "output_tokens_per_s": float(len(self._preset)),
                "prompt_tokens_per_s": 1.0,
                "requests_per_s": 2.0,
                "slo": slo if "slo-ttft-ms" in options else None,
                **{f"{name}_ms": TIMES for name in ("ttft", "tpot", "itl", "e2e", "normalised")},
            }
        return found

    def stats(self) -> dict[str, dict[str, float]]:
        worker = {"preemptions_total": 2.0, "padding_tokens_total": 1.0, "prefill_tokens_total": 3.0}
        return {"manager": {"finish_error": 0.5}, "unified-0": worker, "unified-1": worker}

    def metrics(self) -> str:
        return METRICS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []

    @contextmanager
    def pipeline(preset: str, overlay: Mapping[str, Any], port: int) -> Iterator[Served]:
        noted.append((preset, overlay, port))
        yield Served(preset, noted)

    monkeypatch.setattr(measured, "pipeline", pipeline)
    return noted


def test_a_part_is_sent_by_a_client_with_its_class_and_its_slo(tmp_path: Path, trace: str, started: list[Any]) -> None:
    parts = [
        {"name": "users", "lengths": "8x4", "users": 2, "requests": 3, "together": False, "traffic_class": "be"},
        {
            "trace": trace,
            "scale": 0.5,
            "rate": 4,
            "requests": 5,
            "start_s": 2,
            "ttft_s": 2,
            "tpot_s": 0.1,
            "tbt_s": 0.2,
        },
    ]
    path = written(tmp_path, trace, workloads={"w": {"judged": "rt", "parts": parts, "set": {"kv.block_size": 8}}})
    cell, *_ = cells(load_spec(str(path)), loads=[1.0], live=True, over={"kv.prefix_caching": False})
    found = measured.measure(cell, 8399)
    (_, overlay, port), users, timed = started
    assert overlay == {"speculation": {"mode": "off"}, "kv": {"block_size": 8, "prefix_caching": False}}
    assert port == 8399
    assert users == (
        "users",
        0.0,
        {"seed": "0", "class-mix": "be=1", "warmup": "4", "concurrency": "2"},
        [["8", "4"]] * 3,
    )
    name, after_s, options, rows = timed
    assert (name, after_s, len(rows)) == ("rt 1", 2.0, 5)
    assert json.loads(options.pop("extra-body")) == {"cohort": {"ttft_slo_ms": 2000.0, "tpot_slo_ms": 100.0}}
    limits = {"slo-ttft-ms": "2000", "slo-tpot-ms": "100", "slo-itl-ms": "200"}
    assert options == {"seed": "0", "class-mix": "rt=1", "warmup": "0", "time-scale": "1", **limits}
    assert (found.sent, found.finished, found.kept, found.kept_tokens_per_s) == (5, 5, 9, 2.0)
    assert "users: kept, %" not in found.numbers and found.numbers["rt 1: kept, %"] == 90.0
    shown = {title: value for title, value in found.numbers.items() if ": " not in title}
    assert shown == {
        "preemptions": 4.0,
        "error of predicted ends": 0.5,
        "padding, %": 25.0,
        "decision, us": 500.0,
        "iteration gaps within 5 ms, %": 75.0,
    }


@pytest.mark.parametrize("changes", [{"tpot_s": [0.1, 0.2]}, {"rate": 0, "users": 2, "lengths": "8x4", "trace": ""}])
def test_what_only_a_simulation_can_do_is_refused(
    tmp_path: Path, trace: str, started: list[Any], changes: dict[str, Any]
) -> None:
    part = {"trace": trace, "rate": 4, "ttft_s": 2, "requests": 9, **changes}
    path = written(tmp_path, trace, workloads={"w": {"parts": [part]}})
    cell, *_ = cells(load_spec(str(path)), live=True)
    with pytest.raises(measured.ConfigError, match="a live part has"):
        measured.measure(cell, 8399)
    assert started == []


def test_live_and_simulated_side_by_side(
    tmp_path: Path, trace: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = str(written(tmp_path, trace)), str(tmp_path / "live.jsonl")
    words = ["compare", path, "--workloads", "one", "--loads", "0.5", "--systems", "unified,p-d"]
    assert main([*words, "--live", "--port", "8399", "--results", results, "--set", "kv.block_size=8"]) == 0
    assert [each[0] for each in started[::2]] == ["unified", "disaggregated"] * 2, "systems take turns in every round"
    shown = capsys.readouterr()
    assert "| one | 0.5 | output tokens/s | 7 | 13 |" in shown.out and "7 output tokens/s" in shown.err
    assert main([*words, "--live", "--results", results, "--set", "kv.block_size=8"]) == 0
    assert len(started) == 8, "what is known is not run again"
    capsys.readouterr()
    assert main([*words, "--against", results]) == 0
    assert "| one | 0.5 | output tokens/s | 7, " in capsys.readouterr().out
    assert main([*words, "--live", "--jobs", "2"]) == 2


LIVE = ("alignment", "arrangements", "buckets", "fidelity", "mixed-classes", "promises", "small-cache", "splits")


@pytest.mark.parametrize("name", LIVE)
def test_comparisons_of_cohort_can_be_run_live(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["cohort"]
    assert any(fnmatch(f"configs/comparisons/{name}.yaml", pattern) for pattern in patterns)
    for workload in yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["workloads"].values():
        for part in workload["parts"]:
            if "trace" in part:
                (tmp_path / part["trace"]).write_text("arrival_s,prompt_tokens,output_tokens\n0,80,16\n1,90,20\n")
    monkeypatch.setenv("COHORT_TRACES", str(tmp_path))
    spec = load_spec(name)
    asked = cells(spec, workloads=list(spec.workloads), systems=list(spec.systems), loads=[1.0], seeds=[0], live=True)
    for cell in asked:
        assert measured.measure(cell, 8399).sent > 0
