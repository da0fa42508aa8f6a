"""`cohort advise`: what is tried, what decides among equals, what is said of what cannot run, and what to type."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.common.config import load_config
from cohort.common.engine.config.quantization_config import MXFP4_GROUP
from cohort.common.errors import ConfigError
from cohort.common.types import Role
from cohort.services.cli.__main__ import main
from cohort.services.launcher.options import add_arguments, overrides_of
from cohort.services.simulator.advise import advise
from cohort.services.simulator.advise.advise import (
    DEFAULT_PRESET,
    Candidate,
    Tried,
    choose,
    distinct,
    final,
    groups,
    shortlist,
)
from cohort.services.simulator.core.setup import preset_names
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

CLUSTER = load_cluster("a100-80:4")
SPLIT, ONE = {Role.PREFILL: 2, Role.DECODE: 2}, {Role.UNIFIED: 4}


def trial(
    preset: str,
    roles: dict[Role, int],
    *,
    kept: float = 1.0,
    goodput: float = 100.0,
    busy: float = 0.5,
    settings: Any = (),
) -> Tried:
    slo = SimpleNamespace(kept_of_sent=kept, goodput_tokens_per_s=goodput)
    overall = SimpleNamespace(slo=slo, ttft_ms=SimpleNamespace(p99=1.0), output_tokens_per_s=goodput)
    report: Any = SimpleNamespace(overall=overall, instances=[SimpleNamespace(busy=busy)])
    return Tried(Candidate(preset, CLUSTER, roles, tuple(settings)), report)


def chosen(*trials: Tried, **capacities: float) -> tuple[str, str]:
    by_label = {candidate.label: capacities.get(candidate.preset.replace("-", "_"), 10.0) for candidate, _ in trials}
    best, why = choose(trials, by_label)
    return best.label, why


def test_alone_at_the_top_needs_no_tie_broken() -> None:
    label, why = chosen(trial("bros", ONE), trial(DEFAULT_PRESET, SPLIT, kept=0.9))
    assert label.startswith("bros") and why == "no other candidate keeps as much"


def test_capacity_then_cost_then_simplicity_decide_among_equals() -> None:
    simple, other = trial("unified", ONE), trial("baseline-round-robin", SPLIT)
    assert chosen(other, simple, unified=10.0, baseline_round_robin=20.0)[0].startswith("baseline-round-robin")
    cheap = trial("unified", ONE, busy=0.2)
    assert chosen(other, cheap)[0].startswith("unified") and "computes least" in chosen(other, cheap)[1]
    assert chosen(other, simple)[0].startswith("unified") and "simplest" in chosen(other, simple)[1]
    # Equally simple: the default preset before others.
    assert chosen(trial("bros", SPLIT), trial(DEFAULT_PRESET, SPLIT))[0].startswith(DEFAULT_PRESET)
    settings = ["engine.prefill_chunk=512"]
    assert chosen(trial("unified", ONE, settings=settings), simple)[0] == simple[0].label


def test_the_default_preset_is_simpler_than_others_and_they_by_what_they_set() -> None:
    assert chosen(trial("unified", ONE), trial(DEFAULT_PRESET, SPLIT))[0].startswith(DEFAULT_PRESET)
    assert chosen(trial("dynaserve", ONE), trial("unified", ONE))[0].startswith("unified")


def test_settings_that_a_preset_does_not_heed_are_no_candidates() -> None:
    plain, other = trial("a", ONE), trial("a", ONE, settings=["engine.prefill_chunk=512"])
    assert distinct([plain, Tried(other[0], plain[1]), trial("b", ONE, settings=["x.y=1"])]) != [plain]
    assert [candidate.label for candidate, _ in distinct([Tried(other[0], plain[1]), plain])] == [plain[0].label]
    assert len(distinct([plain, trial("a", ONE, goodput=50.0, settings=["engine.prefill_chunk=512"])])) == 2


def test_a_little_better_is_no_better() -> None:
    ahead, simple = trial("bros", SPLIT, kept=1.0, goodput=101.0), trial("unified", ONE, kept=0.997, goodput=100.0)
    assert chosen(ahead, simple)[0].startswith("unified")


def test_finalists_are_of_different_presets_and_the_default_is_one() -> None:
    many = [trial(name, SPLIT, busy=0.1) for name in ("a", "b", "c", "d", "e")]
    found = final([*many, trial("a", ONE, busy=0.1), trial(DEFAULT_PRESET, SPLIT, busy=0.9)])
    assert [candidate.preset for candidate, _ in found] == ["a", "b", "c", "d", DEFAULT_PRESET]
    assert found[0][0].roles == ONE


def test_the_second_look_holds_the_default_preset() -> None:
    ranked = [Candidate(f"p{number}", CLUSTER, SPLIT) for number in range(12)]
    found = shortlist([*ranked, Candidate(DEFAULT_PRESET, CLUSTER, SPLIT)])
    assert len(found) == 9 and found[-1].preset == DEFAULT_PRESET
    splits = [Candidate("one", CLUSTER, {Role.PREFILL: count, Role.DECODE: 4 - count}) for count in (1, 2, 3)]
    assert shortlist(splits) == splits[:2]
    assert DEFAULT_PRESET in preset_names()


def test_devices_are_grouped_as_host_and_heads_allow() -> None:
    eight, model = load_cluster("a100-80:8"), load_model("llama-2-70b")
    found = groups(eight, model, fixed=False)
    assert [(each.tensor_parallel, each.instances) for each in found] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [each.tensor_parallel for each in groups(load_cluster("a100-80:6"), model, fixed=False)] == [1, 2]
    hosts = groups(load_cluster("h200-2x8"), model, fixed=False)
    assert [(each.instances, each.per_host) for each in hosts] == [(16, 8), (8, 4), (4, 2), (2, 1)]
    assert groups(eight, model, fixed=True) == [eight]
    assert advise._COLUMNS_OF_CODES == MXFP4_GROUP
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v2-lite"):  # 4 KV heads; 90 groups; latents
        assert [each.tensor_parallel for each in groups(eight, load_model(name), fixed=False)] == [1, 2, 4, 8], name
    assert [each.tensor_parallel for each in groups(eight, load_model("smollm2-135m"), fixed=False)] == [1]
    assert groups(load_cluster("cpu-2x1"), load_model("smollm2-135m"), fixed=False) == [load_cluster("cpu-2x1")]


def run(*options: str) -> list[str]:
    return ["advise", "--trace", "256x16", "--rate", "10", "--slo", "ttft=1,tpot=0.2", *options]


def test_a_reason_that_all_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run("--cluster", "a100-80:8", "--model", "llama-2-70b", "--tensor-parallel", "1")) == 2
    said = capsys.readouterr().err
    assert said.count("GB of weights") == 1 and len(said) < 400


def test_a_reason_that_some_share_is_said_once_with_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "advice.json"
    where = ("--cluster", "a100-80:4", "--model", "llama-2-70b", "--preset", "unified,disaggregated,bros,baseline-vllm")
    assert main(run(*where, "--requests", "4", "--capacity", "0.5", "--json", str(out))) == 0
    said, advice = capsys.readouterr().out, json.loads(out.read_text())
    (reason,) = [reason for reason in advice["impossible"] if "GB of weights" in reason]
    assert set(advice["impossible"][reason]) == {"unified", "disaggregated", "bros", "baseline-vllm"}
    assert said.count("GB of weights") == 1 and "cannot run: 4 candidates" in said
    assert {trial["tensor_parallel"] for trial in advice["trials"]} == {2, 4}
    assert "devices each" in said and "{role: unified, count: 1, tensor_parallel: 4}" in said


def test_what_no_live_worker_divides_is_not_recommended_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--cluster", "a100-80:4", "--model", "opt-66b", "--preset", "unified", "--requests", "4")
    assert main(run(*where)) == 2
    said = capsys.readouterr().err
    assert "GB of weights" in said and "not Llama-shaped, which live workers do not divide" in said
    assert main(run(*where, "--tensor-parallel", "4", "--capacity", "0.5")) == 0
    said = capsys.readouterr().out
    assert "Simulated only: opt-66b is not Llama-shaped" in said and "cohort serve" not in said


def test_a_mixture_that_one_device_does_not_hold_is_recommended_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--cluster", "a100-80:4", "--model", "mixtral-8x7b", "--preset", "unified", "--requests", "4")
    assert main(run(*where, "--capacity", "0.5")) == 0
    said = capsys.readouterr().out
    assert "cohort serve" in said and "tensor_parallel: " in said and "Simulated only" not in said


def test_ten_rows_or_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(advise, "_FINALISTS", 1)
    where = (
        "--cluster",
        "a100-80:4",
        "--model",
        "opt-2.7b",
        "--preset",
        "disaggregated,baseline-distserve,bucketserve,unified,cohort",
    )
    few = run(*where, "--requests", "3", "--tensor-parallel", "1")
    assert main(few) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "%" in line and ": " in line and "Recommended" not in line]
    assert len(rows) == 10 and "more candidates were tried" in said
    assert main([*few, "--all"]) == 0
    said = capsys.readouterr().out
    assert "more candidates" not in said
    assert len([line for line in said.splitlines() if "%" in line and ": " in line]) > 11


def test_the_command_starts_what_is_recommended() -> None:
    options = argparse.Namespace(config=["my.yaml"], set=["kv.block_size=32"])
    best = Candidate("bros", CLUSTER, {Role.PREFILL: 1, Role.DECODE: 3}, ("engine.prefill_chunk=2048",))
    words = shlex.split(advise.command(options, best, "tiny"))
    assert words[:2] == ["cohort", "serve"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(words[2:])
    assert str(given.model) == "~/models/tiny"
    assert (given.preset, [str(file) for file in given.config]) == ("bros", ["my.yaml"])
    config = load_config(preset=given.preset, overrides=overrides_of(given, set()))
    assert list(config.instance_roles.values()) == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    assert (config.engine.prefill_chunk, config.kv.block_size) == (2048, 32)


def test_nothing_that_runs_is_an_error_with_each_reason() -> None:
    with pytest.raises(ConfigError, match="2 candidate"):
        raise ConfigError(advise._nothing_runs({"too large": ["a", "b"], "no such role": ["c"]}))
