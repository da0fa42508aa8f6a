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
from cohort.common.types import Role, Slo
from cohort.common.workloads.items import WorkItem
from cohort.services.cli.__main__ import main
from cohort.services.launcher.options import add_arguments, overrides_of
from cohort.services.simulator.advise import advise, candidates, lab
from cohort.services.simulator.advise.advise import Found
from cohort.services.simulator.advise.candidates import DEFAULT_PRESET, Candidate, ceiling, groups
from cohort.services.simulator.advise.judgement import Judged, as_good, choose, distinct, final, ranked, shortlist
from cohort.services.simulator.advise.lab import Lab, Look, Tried
from cohort.services.simulator.core.capacity import Capacity
from cohort.services.simulator.core.setup import cluster_of, preset_names, simulation_options, traffic_of
from cohort.services.simulator.hardware.hardware import load_cluster, load_model
from cohort.services.simulator.options import add_advise_arguments

CLUSTER = load_cluster("a100-80:4")
SPLIT, ONE = {Role.PREFILL: 2, Role.DECODE: 2}, {Role.UNIFIED: 4}
SLO = Slo(ttft_s=1.0, tpot_s=0.2)


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search of capacities (`core/test_capacity.py`), here of fast clusters."""
    monkeypatch.setattr(Lab, "capacities", lambda self, asked, *rest: [Capacity(0.9, 5.0, []) for _ in asked])


def report(kept: float = 1.0, goodput: float = 100.0, busy: float = 0.5, ttft_p99_ms: float = 1.0) -> Any:
    slo = SimpleNamespace(kept_of_sent=kept, goodput_tokens_per_s=goodput)
    overall = SimpleNamespace(
        slo=slo, ttft_ms=SimpleNamespace(p99=ttft_p99_ms), tpot_ms=None, jct_ms=None, output_tokens_per_s=goodput
    )
    return SimpleNamespace(overall=overall, instances=[SimpleNamespace(busy=busy)], duration_s=600.0)


def trial(preset: str, roles: dict[Role, int], settings: Any = (), **figures: float) -> Tried:
    return Tried(Candidate(preset, CLUSTER, roles, tuple(settings)), report(**figures))


def judged(preset: str, *kept: float, roles: dict[Role, int] = ONE, settings: Any = (), **figures: float) -> Judged:
    reports = [report(share, **figures) for share in kept or (1.0, 1.0, 1.0)]
    return Judged(Candidate(preset, CLUSTER, roles, tuple(settings)), reports)


def chosen(*each: Judged, **capacities: float) -> tuple[str, str]:
    by_label = {one.candidate.label: capacities.get(one.candidate.preset.replace("-", "_"), 10.0) for one in each}
    choice = choose(each, by_label)
    assert set(choice.why_not) == {one.candidate.label for one in each} - {choice.best.candidate.label}
    return choice.best.candidate.label, choice.why


def test_alone_at_the_top_needs_no_tie_broken() -> None:
    label, why = chosen(judged("bros"), judged(DEFAULT_PRESET, 0.9, 0.9, 0.9))
    assert label.startswith("bros") and why == "no other keeps as much"


def test_capacity_then_cost_then_simplicity_decide_among_equals() -> None:
    simple, other = judged("unified"), judged("bros", roles=SPLIT)
    assert chosen(other, simple, unified=10.0, bros=20.0)[0].startswith("bros")
    cheap = judged("unified", busy=0.2)
    assert chosen(other, cheap)[0].startswith("unified") and "computes least" in chosen(other, cheap)[1]
    assert chosen(other, simple)[0].startswith("unified") and "simplest" in chosen(other, simple)[1]
    # Equally simple: the default preset before others.
    assert chosen(judged("bros"), judged(DEFAULT_PRESET))[0].startswith(DEFAULT_PRESET)
    settings = judged("unified", settings=["engine.prefill_chunk=512"])
    assert chosen(settings, simple)[0] == simple.candidate.label


def test_the_default_preset_is_simpler_than_others_and_they_by_what_they_set() -> None:
    assert chosen(judged("unified"), judged(DEFAULT_PRESET, roles=SPLIT))[0].startswith(DEFAULT_PRESET)
    assert chosen(judged("dynaserve"), judged("unified"))[0].startswith("unified")


def test_a_baseline_is_advised_only_if_it_beats_the_default_on_every_seed() -> None:
    default = judged(DEFAULT_PRESET, 0.90, 0.92, 0.94)
    assert chosen(default, judged("baseline-vllm", 0.93, 0.95, 0.96))[0].startswith("baseline-vllm")
    assert chosen(default, judged("baseline-vllm", 0.99, 0.99, 0.93))[0].startswith(DEFAULT_PRESET)
    assert chosen(default, judged("bros", 0.99, 0.99, 0.93))[0].startswith("bros")  # it need not
    # Equal to the default but with more capacity: still none to advise.
    equal = judged("baseline-vllm", 0.901, 0.921, 0.941)
    assert chosen(default, equal, baseline_vllm=100.0)[0].startswith(DEFAULT_PRESET)
    assert choose([default, equal], {}).why_not[equal.candidate.label].startswith("baseline")
    assert chosen(judged("baseline-vllm"), judged("unified", 0.9, 0.9, 0.9))[0].startswith("baseline-vllm")


def test_settings_that_a_preset_does_not_heed_are_no_candidates() -> None:
    plain, other = trial("a", ONE), trial("a", ONE, settings=["engine.prefill_chunk=512"])
    assert distinct([plain, Tried(other[0], plain[1]), trial("b", ONE, settings=["x.y=1"])]) != [plain]
    assert [candidate.label for candidate, _ in distinct([Tried(other[0], plain[1]), plain])] == [plain[0].label]
    assert len(distinct([plain, trial("a", ONE, goodput=50.0, settings=["engine.prefill_chunk=512"])])) == 2


def test_a_little_better_is_no_better() -> None:
    ahead, simple = judged("bros", goodput=101.0), judged("unified", 0.997, 0.997, 0.997, goodput=100.0)
    assert chosen(ahead, simple)[0].startswith("unified")
    assert as_good([ahead, judged("unified", 0.99, 0.99, 0.99)]) == [ahead]


def test_finalists_are_of_different_presets_and_the_default_is_one() -> None:
    many = [judged(name, roles=SPLIT, busy=0.1) for name in ("a", "b", "c", "d")]
    found = final([*many, judged("a", busy=0.1), judged(DEFAULT_PRESET, busy=0.9)])
    assert [each.candidate.preset for each in found] == [DEFAULT_PRESET, "a", "b"]
    assert found[1].candidate.roles == ONE


def test_who_keeps_most_is_first_then_who_has_most_to_spare() -> None:
    tight, spare = trial("a", ONE, ttft_p99_ms=900.0), trial("b", ONE, ttft_p99_ms=90.0)
    assert ranked([tight, spare, trial("c", ONE, kept=0.9)], SLO)[:2] == [spare, tight]


def test_every_look_holds_the_default_preset() -> None:
    found = shortlist([*(trial(f"p{number}", SPLIT) for number in range(12)), trial(DEFAULT_PRESET, SPLIT)], 8)
    assert len(found) == 9 and found[-1].candidate.preset == DEFAULT_PRESET
    splits = [trial("one", {Role.PREFILL: count, Role.DECODE: 4 - count}) for count in (1, 2, 3)]
    assert shortlist(splits, 8) == splits[:2]
    assert DEFAULT_PRESET in preset_names()


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_advise_arguments(parser)
    return parser.parse_args([*run(*words)[1:], "--cluster", "a100-80:2", "--model", "opt-2.7b"])


def test_ranking_seeds_do_not_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate is lucky on every seed that ranks, and no good on others."""
    seen: dict[str, set[int]] = {}

    def simulate(_: Lab, candidate: Candidate, look: Look) -> Any:
        seen.setdefault(candidate.preset, set()).add(look.seed)
        lucky = candidate.preset == "unified"
        if look.seed < advise._FIRST_HELD_OUT:
            return report(1.0 if lucky else 0.9)
        return report(0.4 if lucky else 0.9)

    monkeypatch.setattr(Lab, "simulate", simulate)
    monkeypatch.setattr(advise, "_LOOKS", ((100.0, 3), (100.0, 2), (100.0, 2)))
    found = advised(options_of(), ["unified", "bros", "disaggregated", "dynaserve", "ecoserve"])
    assert found.best.preset != "unified"
    lost = next(each for each in found.advice.trials if each.preset == "unified" and each.stage == "judged")
    assert lost.seeds == [0.4, 0.4, 0.4] and lost.why_not == "keeps 50.0 points less"
    assert seen["unified"] >= {0, 1, 2, 1000, 1001, 1002} and len(found.all) >= 5
    assert found.advice.best.capacity is not None and found.advice.best.capacity.rate_per_s == 5.0


def advised(options: argparse.Namespace, presets: list[str]) -> Found:
    return advise.advise(
        options,
        presets,
        cluster_of(options, options.cluster),
        load_model(options.model),
        traffic_of(options),
        simulation_options(options),
        lambda done, total: None,
    )


def test_devices_that_cannot_keep_the_slo_even_idle_are_not_simulated() -> None:
    model = load_model("llama-2-70b")
    items = [WorkItem(0.0, 1000, 100, slo=Slo(tpot_s=tpot_s)) for tpot_s in (0.001, 10.0)]
    assert ceiling(load_cluster("a100-80:2"), model, items, drafts=False) == 0.5
    assert ceiling(load_cluster("a100-80:2"), model, items, drafts=True) == 1.0
    late = [WorkItem(0.0, 4000, 1, slo=Slo(ttft_s=0.001)), WorkItem(0.0, 4000, 1, slo=Slo(ttft_s=0.001), session="a")]
    assert ceiling(load_cluster("a100-80:2"), model, late, drafts=False) == 0.5


def test_processes_change_nothing() -> None:
    options = options_of("--count", "20")
    options.slo = "ttft=1,tpot=0.2"
    made = Lab(options, load_model("opt-2.7b"), traffic_of(options), simulation_options(options))
    two = [Candidate(preset, cluster_of(options, "a100-80:2"), {Role.UNIFIED: 2}) for preset in ("unified", "bros")]
    alone = made.look(two, Look(3, 60.0))
    with made.processes(2):
        assert [each.report.overall for each in made.look(two, Look(3, 60.0))] == [e.report.overall for e in alone]
    assert lab._lab is None and made.done == made.planned > 0
    assert made.requests(Look(0, 600.0)) == 20 and made.requests(Look(0, 600.0, work=1.0)) == 20
    options.count = None
    assert made.requests(Look(0, 600.0)) is None and made.requests(Look(0, 600.0, work=116_000.0)) == 1000


def test_devices_are_grouped_as_host_and_heads_allow() -> None:
    eight, model = load_cluster("a100-80:8"), load_model("llama-2-70b")
    found = groups(eight, model, fixed=False)
    assert [(each.tensor_parallel, each.instances) for each in found] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [each.tensor_parallel for each in groups(load_cluster("a100-80:6"), model, fixed=False)] == [1, 2]
    hosts = groups(load_cluster("h200-2x8"), model, fixed=False)
    assert [(each.instances, each.per_host) for each in hosts] == [(16, 8), (8, 4), (4, 2), (2, 1)]
    assert groups(eight, model, fixed=True) == [eight]
    assert candidates._COLUMNS_OF_CODES == MXFP4_GROUP
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v2-lite"):  # 4 KV heads; 90 groups; latents
        assert [each.tensor_parallel for each in groups(eight, load_model(name), fixed=False)] == [1, 2, 4, 8], name
    assert [each.tensor_parallel for each in groups(eight, load_model("smollm2-135m"), fixed=False)] == [1]
    assert groups(load_cluster("cpu-2x1"), load_model("smollm2-135m"), fixed=False) == [load_cluster("cpu-2x1")]


def run(*options: str) -> list[str]:
    return ["advise", "--trace", "256x16", "--rate", "10", "--slo", "ttft=1,tpot=0.2", "--jobs", "1", *options]


def test_a_reason_that_all_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run("--cluster", "a100-80:8", "--model", "llama-2-70b", "--tensor-parallel", "1")) == 2
    said = capsys.readouterr().err
    assert said.count("GB of weights") == 1 and len(said) < 400


def test_a_reason_that_some_share_is_said_once_with_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "advice.json"
    where = ("--cluster", "a100-80:4", "--model", "llama-2-70b", "--preset", "unified,disaggregated,bros,baseline-vllm")
    assert main(run(*where, "--count", "4", "--capacity", "0.5", "--json", str(out))) == 0
    said, advice = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())
    (reason,) = [reason for reason in advice["impossible"] if "GB of weights" in reason]
    assert set(advice["impossible"][reason]) == {"unified", "disaggregated", "bros", "baseline-vllm"}
    assert said.count("GB of weights") == 1 and "cannot run: 4 candidates" in said
    assert {trial["tensor_parallel"] for trial in advice["trials"]} == {2, 4}
    assert "devices each" in said and "{role: unified, count: 1, tensor_parallel: 4}" in said


def test_what_no_live_worker_divides_is_not_recommended_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--cluster", "a100-80:4", "--model", "opt-66b", "--preset", "unified", "--count", "4")
    assert main(run(*where)) == 2
    said = capsys.readouterr().err
    assert "GB of weights" in said and "not Llama-shaped, which live workers do not divide" in said
    assert main(run(*where, "--tensor-parallel", "4", "--capacity", "0.5")) == 0
    said = capsys.readouterr().out
    assert "Simulated only: opt-66b is not Llama-shaped" in said and "cohort serve" not in said


def test_a_mixture_that_one_device_does_not_hold_is_recommended_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--cluster", "a100-80:4", "--model", "mixtral-8x7b", "--preset", "unified", "--count", "4")
    assert main(run(*where, "--capacity", "0.5")) == 0
    said = capsys.readouterr().out
    assert "cohort serve" in said and "tensor_parallel: " in said and "Simulated only" not in said


def test_forty_lines_of_eighty_columns_or_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of("--count", "3")
    made = Lab(options, load_model("opt-2.7b"), traffic_of(options), simulation_options(options))
    simulated = made.simulate(Candidate("unified", CLUSTER, ONE), Look(0, 60.0))
    monkeypatch.setattr(Lab, "simulate", lambda self, candidate, look: simulated)
    picture = tmp_path / "advice.svg"
    few = run("--cluster", "a100-80:8", "--model", "llama-3.3-70b")
    assert main([*few, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    command = next(line for line in said if "cohort serve" in line)  # to be copied: in one line
    assert len(said) <= 40 and all(len(line) <= 80 for line in said if line != command)
    assert any("more lost in a look" in line for line in said) and any("recommended" in line for line in said)
    assert picture.read_text().startswith("<svg")
    assert main([*few, "--all"]) == 0
    whole = capsys.readouterr().out
    assert len(whole.splitlines()) > 50 and "more lost" not in whole
    assert main([*few, "--plot", "advice.png"]) == 2
    assert "pictures are SVG" in capsys.readouterr().err


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
