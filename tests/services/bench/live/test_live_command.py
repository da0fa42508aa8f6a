"""`cohort bench live` in full but for the pipelines: order, seeds, what is written, and going on another time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.services.bench.__main__ import main
from cohort.services.bench.live import fidelity, overhead, runs
from cohort.services.bench.live.pipelines import Observed
from cohort.services.bench.live.spec import ClientCommand

from .test_spec import SMALL, written


class Served:
    """Answers with the preset's length and the seed, so that every value can be told by hand."""

    def __init__(self, preset: str) -> None:
        self._preset = preset

    def load(self, clients: Sequence[ClientCommand]) -> dict[str, Observed]:
        seed = float(clients[0].arguments[0].partition("=")[2])
        return {client.name: Observed({"output_tokens_per_s": len(self._preset) + seed}, []) for client in clients}

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def metrics(self) -> str:
        return ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    noted: list[tuple[Any, ...]] = []

    @contextmanager
    def pipeline(preset: str, config: Mapping[str, Any], port: int, settings: Sequence[str]) -> Iterator[Served]:
        noted.append((preset, config["kv"]["block_size"], port, tuple(settings)))
        yield Served(preset)

    monkeypatch.setattr(runs, "pipeline", pipeline)
    return noted


def small(folder: Path) -> str:
    document = {**SMALL, "table": {"tokens": "client.output_tokens_per_s", "late": 'highest("worker", "late")'}}
    return str(written(folder, document))


def test_systems_take_turns_in_every_load(
    tmp_path: Path, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--systems", "unified", "other", "--rounds", "2", "--port", "8399", "--set", "kv.block_size=4"]
    assert main(["live", small(tmp_path), *given]) == 0
    assert [each[:2] for each in started] == [("unified", 16), ("baseline-vllm", 32)] * 2 + [
        ("unified", 8),
        ("baseline-vllm", 32),
    ] * 2
    assert {each[2:] for each in started} == {
        (8399, ("speculation.mode=off", "kv.prefix_caching=false", "kv.block_size=4"))
    }
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "| load | system | rounds | tokens | late |",
        "|---|---|---:|---:|---:|",
        "| one | unified | 2 | 7.5 (7 to 8) | – |",
        "| one | other | 2 | 13.5 (13 to 14) | – |",
        "| two | unified | 2 | 7.5 (7 to 8) | – |",
        "| two | other | 2 | 13.5 (13 to 14) | – |",
    ]
    assert "2/8 one, round 1: other: tokens 13, late –" in shown.err


def test_the_usual_systems_alone_and_json(
    tmp_path: Path, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["live", small(tmp_path), "--loads", "one", "--rounds", "1", "--json", "-", "--param", "rate=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["spec"], found["parameters"]["rate"]) == ("live", "small", 3)
    assert found["runs"] == [{"load": "one", "system": "unified", "round": 0, "values": {"tokens": 7.0, "late": None}}]
    (summary,) = found["summary"]
    assert summary["values"] == {"tokens": {"median": 7.0, "min": 7.0, "max": 7.0, "values": [7.0]}}
    assert len(started) == 1


def test_a_comparison_goes_on_another_time(
    tmp_path: Path, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    usual = ["live", small(tmp_path), "--loads", "one", "--rounds", "1", "--json", str(file)]
    assert main(usual) == 0
    assert main([*usual, "--resume", "--first-round", "3"]) == 0
    assert "| one | unified | 2 | 8.5 (7 to 10) | – |" in capsys.readouterr().out
    assert [run["round"] for run in json.loads(file.read_text())["runs"]] == [0, 3]
    assert main(["live", "small-cache", "--resume", "--json", str(file)]) == 2
    assert "is of small, not of small-cache" in " ".join(capsys.readouterr().err.split())
    assert main([*usual[:-2], "--resume"]) == 2
    assert len(started) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rounds", "0"], "--rounds must be above 0"),
        (["--systems", "unifid"], "no system 'unifid'"),
        (["--loads", "three"], "no load 'three'"),
        (["--param", "rate"], "expected NAME=VALUE"),
        (["--json", "/nowhere/at/all/x.json"], "no folder"),
    ],
)
def test_nothing_starts_with_a_wrong_option(
    tmp_path: Path, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["live", small(tmp_path), *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and started == []


def test_settings_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", small(tmp_path), "--list", "--param", "lengths=7"]) == 2  # of the wrong kind
    assert main(["live", small(tmp_path), "--list"]) == 0
    shown = capsys.readouterr().out
    assert "other                baseline-vllm (only when named)" in shown and "  lengths=uniform:4-8" in shown


def test_differences_are_taken_within_rounds() -> None:
    rounds = [overhead.Round(12.0, 90.0, 10.0, 100.0), overhead.Round(40.0, 30.0, 35.0, 40.0)]
    found = overhead.summarise(1, rounds)
    assert (found.added_ttft_ms.median, found.kept_throughput.values) == (3.5, [0.9, 0.75])


def test_live_and_simulated_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The live pipeline and the simulator get the same trace; lengths are scaled and bounded. Of several seeds the
    median is compared."""
    seen: list[str] = []
    clusters: list[str] = []

    def overall(factor: float) -> dict[str, Any]:
        times = {"mean": 10.0 * factor, "p50": 9.0 * factor, "p90": 12.0 * factor, "p99": 20.0 * factor}
        return {"tpot_ms": times, "ttft_ms": times, "output_tokens_per_s": 50.0 * factor}

    class Pipeline:
        def load(self, clients: Sequence[ClientCommand]) -> dict[str, Observed]:
            seen.append(Path(clients[0].arguments[0].partition("=")[2]).read_text())
            return {"client": Observed(overall(0.8 if len(seen) == 8 else 1.0), [])}

    @contextmanager
    def pipeline(preset: str, config: Mapping[str, Any], port: int) -> Iterator[Pipeline]:
        assert config["predictor"]["min_observations"] > 1e8, "training is simulated nowhere"
        yield Pipeline()

    def cohort(*arguments: str) -> None:
        seen.append(Path(arguments[arguments.index("--trace") + 1]).read_text())
        clusters.append(arguments[arguments.index("--cluster") + 1])
        config = Path(arguments[arguments.index("--config") + 1])
        assert yaml.safe_load(config.read_text())["kv"] == {"prefix_caching": False}
        seed = int(arguments[arguments.index("--seed") + 1])
        Path(arguments[-1]).write_text(json.dumps([{"overall": overall(1.0 + 0.1 * seed)}]))

    monkeypatch.setattr(fidelity, "pipeline", pipeline)
    monkeypatch.setattr(fidelity, "cohort", cohort)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,80,16\n1,9000,2\n")
    report = tmp_path / "fidelity.json"
    given = ["--trace", str(trace), "--rates", "2", "--arrangements", "colocated", "--json", str(report)]
    given += ["--seeds", "3"]
    assert main(["fidelity", *given]) == 0
    assert (
        len(set(seen)) == 1
        and len(seen) == 4
        and [line.split(",")[1:] for line in seen[0].splitlines()[1:]] == [["10", "2"], ["1024", "2"]]
    )
    assert "| colocated, 2 | 10.0, 11.0 (10.0 to 12.0), +10.0% |" in capsys.readouterr().out
    assert main(["fidelity", *given, "--reuse", str(report)]) == 0
    assert len(seen) == 7 and "| 50.0, 55.0 (50.0 to 60.0), +10.0% |" in capsys.readouterr().out
    assert main(["fidelity", *given, "--reuse", str(report), "--runs", "2"]) == 0
    assert len(seen) == 11, "one more live run, and the simulations"
    assert "| 45.0 (40.0 to 50.0), 55.0 (50.0 to 60.0), +22.2% |" in capsys.readouterr().out
    assert main(["fidelity", *given, "--reuse", str(report), "--runs", "2", "--cluster", "before", "after"]) == 0
    assert len(seen) == 17 and clusters[-6:] == ["before"] * 3 + ["after"] * 3
