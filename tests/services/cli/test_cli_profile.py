"""What `cohort profile` reads out of its own file, and the files that `--save` makes of a faked measurement."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml

from cohort.common.engine.worker.profile_process import Profile, StepPoint, StepShape
from cohort.services.cli import profile
from cohort.services.cli.__main__ import main
from cohort.services.cli.profile import forward_size
from cohort.services.simulator.hardware.hardware import load_cluster, load_device, load_model
from tests.services.bench.fit import test_machine as made


def test_the_target_forward_size_of_a_profile(tmp_path: Path) -> None:
    def point(rows: int, tokens: int, context: int, seconds: float, decodes: int = 0) -> StepPoint:
        return StepPoint(StepShape(rows, tokens, context, decodes, 128 if decodes else 0), seconds, seconds, 5)

    points = [
        point(1, 64, 64, 0.064),
        point(1, 256, 256, 0.128),
        point(1, 512, 512, 0.240),
        point(1, 1024, 1024, 0.520),
        point(1, 256, 2048, 9.0),  # behind a long context: another question
        point(64, 1, 128, 0.001),  # answers are not prompts
        point(1, 64, 64, 0.001, decodes=4),  # nor is a prompt beside them
    ]
    file = tmp_path / "points.json"
    file.write_bytes(msgspec.json.encode(Profile("m", "x86", "cpu", "float32", 2, points)))
    assert forward_size(file) == 256  # 2,000 of at most 2,133 tokens a second


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No engine and no pipeline: times that known constants make. What the command asked for is noted."""
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("cohort.services.cli.profile.usable_cores", lambda: 2)
    asked: dict[str, Any] = {"shape": {}, "live": 0, "busy": 0.0, "noise": Random(0)}

    def run_engine(config: Any, output: Path, **options: Any) -> int:
        asked.update(options)
        shape = {name: getattr(made.MODEL, name) for name in type(made.MODEL).__slots__}
        points = [
            StepPoint(shape_, point.seconds * asked["noise"].gauss(1.0, asked["busy"]) ** 2, point.seconds, 5)
            for shape_, point in zip(made.default_shapes(1024, 32, 512), made.points(), strict=True)
        ]
        found = Profile(
            options["model_name"],
            "x86",
            "cpu",
            "bfloat16",
            options["threads"],
            points,
            str(tmp_path),
            {**shape, "name": options["model_name"], **asked["shape"]},
            8_000_000_000,
            options["threads"],
        )
        output.write_bytes(msgspec.json.encode(found))
        return 0

    def live(*_: Any) -> list[made.Phase]:
        asked["live"] += 1
        return made.live(0.1)

    monkeypatch.setattr(profile, "run_engine", run_engine)
    monkeypatch.setattr(profile, "live", live)
    monkeypatch.setattr(profile, "live_together", lambda *_: made.slices(0.2, 0.5))
    return asked


def test_a_machine_in_one_command(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--save", "here"]) == 0
    said = capsys.readouterr().out
    assert all(f"{of} {kind}" in " ".join(said.split()) for of in ("engine", "live") for kind in ("prefill", "mixed"))
    assert "cohort simulate --cluster here --model smollm2-135m" in said and "warning" not in said
    assert (measured["threads"], measured["live"], measured["budget_s"]) == (1, 1, 30.0)
    cluster = load_cluster("here")
    assert (cluster.instances, cluster.cores, cluster.cpu) == (2, 2, True)
    assert cluster.service_step_s == pytest.approx(made.SERVICE_STEP_S, rel=0.05)
    assert cluster.scatter == pytest.approx(0.1, abs=0.02)
    assert (cluster.core_contention, cluster.memory_contention) == pytest.approx((0.2, 0.5), abs=0.2)
    note = cluster.profile
    assert note is not None and (note.model, note.threads) == ("smollm2-135m", 1)
    traffic = ["--trace", "64x8", "--rate", "2", "--count", "5", "--model", "smollm2-135m"]
    assert main(["simulate", "--cluster", "here", *traffic]) == 0
    assert "warning" not in capsys.readouterr().err


def test_instances_with_threads_of_their_own_share_nothing(measured: dict[str, Any]) -> None:
    assert main(["profile", "--save", "wide", "--instances", "1"]) == 0
    cluster = load_cluster("wide")
    assert measured["threads"] == 2
    assert (cluster.instances, cluster.cores, cluster.service_step_s) == (1, 0, 0.0)


def test_the_engine_alone_starts_no_pipeline(measured: dict[str, Any]) -> None:
    assert main(["profile", "--save", "engine", "--engine-only"]) == 0
    assert measured["live"] == 0 and load_cluster("engine").scatter == 0.0


def test_a_machine_that_was_busy_is_told(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    measured["busy"] = 0.6
    assert main(["profile", "--save", "busy"]) == 0
    assert "warning: half of the points held out" in capsys.readouterr().out


def test_files_elsewhere_are_named_by_path(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--save", "far", "--to", str(tmp_path / "out")]) == 0
    path = tmp_path / "out" / "clusters" / "far.yaml"
    assert f"--cluster {path}" in capsys.readouterr().out
    assert load_cluster(str(path)).device.name == "far"
    head = (tmp_path / "out" / "devices" / "far.yaml").read_text().splitlines()[:12]
    assert any("mixed" in line and "median" in line for line in head)


def test_a_model_without_a_shape_brings_its_own(measured: dict[str, Any], tmp_path: Path) -> None:
    measured["shape"] = {"layers": 12}
    assert main(["profile", "--save", "here", "--model", str(tmp_path / "Tiny-Model")]) == 0
    assert (load_model("tiny-model").layers, load_model("tiny-model").hidden) == (12, made.MODEL.hidden)


def test_a_known_model_in_another_precision_is_another_model(measured: dict[str, Any]) -> None:
    measured["shape"] = {"weight_bytes": 4, "kv_bytes": 4}
    assert main(["profile", "--save", "here"]) == 0
    assert load_model("smollm2-135m-32bit").weight_bytes == 4 and load_model("smollm2-135m").weight_bytes == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--save NAME makes"),
        (["--save", "a100-80"], "has that name already"),
        (["--to", "x", "--output", "y"], "give --save"),
        (["--save", "here", "--repeats", "0"], "--repeats"),
        (["--save", "here", "--model-name", "opt-13b"], "that model has other layers"),
    ],
)
def test_what_cannot_be_measured_is_said(
    measured: dict[str, Any], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_written_files_are_plain_yaml(measured: dict[str, Any], tmp_path: Path) -> None:
    assert main(["profile", "--save", "here"]) == 0
    device = yaml.safe_load((tmp_path / "cache" / "profiles" / "devices" / "here.yaml").read_text())
    assert list(device["stacks"]) == ["cohort"] and device["kind"] == "cpu"
    assert load_device("here")[1].profile is not None
