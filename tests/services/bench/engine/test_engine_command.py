"""`cohort bench`: its commands, and `engine` end to end with a tiny model. How fast anything is, is not tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.services.bench.__main__ import COMMANDS, main
from cohort.services.bench.child import MeasurementFailed, run_child
from cohort.services.bench.engine.command import EngineBench, encode, engine_targets
from cohort.services.bench.engine.report import (
    AttentionPoint,
    Comparison,
    EngineReport,
    Machine,
    ModelFacts,
    StepPoint,
    StepShares,
    Timing,
)
from cohort.services.cli import __main__ as cli
from tests.examples import nightly


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not nightly(), reason="every measurement there is takes half a minute: scripts/test --nightly")
def test_the_engine_is_measured_end_to_end(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = tmp_path / "engine.json"
    arguments = ["engine", "--quick", "--model", str(tiny_llama), "--dtype", "float32", "--threads", "1"]
    assert main([*arguments, "--json", str(report)]) == 0
    shown = capsys.readouterr()
    for part in (
        "decode: products alone",
        "decode step",
        "prefill step",
        "where a decode step goes",
        "decode attention",
        "--quick",
    ):
        assert part in shown.out
    assert "1/6 decode, 1 rows" in shown.err

    found = json.loads(report.read_text())
    assert (found["mode"], found["quick"]) == ("engine", True)
    machine, model = found["engine"]["machine"], found["engine"]["model"]
    assert (machine["dtype"], machine["threads"], len(machine["load_1m"])) == ("float32", 1, 2)
    assert (model["layers"], model["vocabulary"]) == (2, 199)
    layer = (96 + 2 * 32) * 48 + 48 * 96 + 2 * 80 * 48 + 48 * 80
    assert (model["layer_parameters"], model["product_bytes"]) == (2 * layer, 4 * (2 * layer + 199 * 48))
    comparisons = found["engine"]["comparisons"]
    assert [(each["kind"], each["tokens"]) for each in comparisons] == [("decode", 1), ("decode", 4), ("prefill", 64)]
    assert all({"linear", "ours", "memory"} <= set(each["lower_bounds"]) for each in comparisons)
    assert all(set(step["ratios"]) == set(each["lower_bounds"]) for each in comparisons for step in each["steps"])
    assert [each["rows"] for each in found["engine"]["shares"]] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engine", "--threads", "0"], "--threads must be above 0"),
        (["links", "--sizes", "4", "-1"], "--sizes must be above 0"),
        (["engine", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["engine", "--json", "/nowhere/at/all/x.json"], "no folder"),
        (["kernel"], f"cohort bench kernel: no such measurement; there are {', '.join(COMMANDS)}"),
    ],
)
def test_options_that_make_no_sense_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "stray"),
    [
        (["engine", "--rate", "4"], "--rate"),
        (["engine", "--sizes", "1"], "--sizes"),
        (["links", "--dtype", "float32"], "--dtype"),
        (["--threads", "2"], "--threads"),
    ],
)
def test_options_of_another_measurement_are_refused(
    arguments: list[str], stray: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {stray}" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_measurement_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: cohort bench {name}" in capsys.readouterr().out


def test_a_measurement_under_another_name_explains_itself_by_that(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chaos", "--help"])
    assert "usage: cohort chaos " in capsys.readouterr().out


def test_the_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--concurrency" in shown and all(f"cohort bench {name}" in shown for name in COMMANDS)


def test_a_measuring_process_that_fails_says_why() -> None:
    with pytest.raises(MeasurementFailed, match="no_such_measurement"):
        run_child("no_such_measurement", [], lambda done, total, what: None)


def _report(**changes: Any) -> EngineReport:
    fields: dict[str, Any] = {
        "machine": Machine(
            processor="p",
            features=[],
            cores=2,
            threads=2,
            dtype="bfloat16",
            kernels="native",
            cohort="0",
            torch="2",
            python="3",
            omp_wait_policy="",
            load_1m=[0.0, 0.0],
        ),
        "model": ModelFacts(
            name="m",
            family="llama",
            layers=2,
            hidden=8,
            vocabulary=9,
            layer_parameters=1000,
            product_bytes=1,
            block_size=16,
            kv_blocks=4,
            kv_token_bytes=1,
        ),
        "comparisons": [],
        "shares": [],
        "attention": [],
        "notes": [],
    }
    return EngineReport(**{**fields, **changes})


def _comparison(kind: Any, tokens: int, steps: list[tuple[int, int, float, float]]) -> Comparison:
    """steps: rows, context, seconds, ratio to the prepacked products."""
    points = [
        StepPoint(
            rows=rows,
            tokens_per_row=tokens // rows,
            context=context,
            step=Timing(seconds, seconds, seconds),
            ratios={"prepacked": ratio},
        )
        for rows, context, seconds, ratio in steps
    ]
    return Comparison(
        kind=kind,
        tokens=tokens,
        sampled=1,
        rounds=1,
        lower_bound_layers=2,
        bandwidth=1.0,
        lower_bounds={},
        steps=points,
    )


def test_targets_are_judged_where_they_were_measured() -> None:
    report = _report(
        comparisons=[
            _comparison("decode", 16, [(16, 32, 1.0, 9.0), (16, 128, 1.0, 1.5)]),
            _comparison("decode", 64, [(64, 128, 1.0, 1.41)]),
            _comparison("prefill", 512, [(1, 512, 1.0, 1.2)]),
        ],
        shares=[
            StepShares(
                rows=rows,
                context=128,
                steps=1,
                step_s=1.0,
                clocked_s=1.0,
                parts_s={},
                outside_kernels=0.2,
                outside_execute=0.1,
            )
            for rows in (1, 16)
        ],
        attention=[
            AttentionPoint(
                rows=16,
                context=512,
                layers=1,
                read_bytes=1,
                paged=Timing(1.0, 1.0, 1.0),
                rate=1.0,
                bandwidth=1.0,
                share=0.61,
                reversed_ratio=1.0,
            )
        ],
    )
    targets = list(engine_targets(report))
    assert [(target.wanted, target.found, target.met) for target in targets] == [
        (1.5, 1.5, True),
        (1.4, 1.41, False),
        (1.25, 1.2, True),
        (0.15, 0.2, False),
        (0.6, 0.61, True),
    ]
    document = json.loads(encode(EngineBench(quick=False, engine=report, targets=targets, findings=[])))
    assert [target["met"] for target in document["targets"]] == [True, False, True, False, True]
