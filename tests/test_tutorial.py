"""The tutorial's code and commands, taken from its page: plans, the virtual cluster, a simulation, a live pipeline."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

from cohort.common.config import Config, load_config
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationScheduler
from cohort.common.sequence import Phase
from cohort.services.cli.__main__ import main
from cohort.services.launcher import options as launcher
from tests.common.machines.clusters import (
    PD_TWICE,
    UNIFIED,
    Asked,
    finish,
    of_config,
    offer,
    small,
    strike,
    tokens,
    total,
)
from tests.common.machines.faults import Fault
from tests.common.machines.world import SplitAnywhere
from tests.common.policies.baselines.drive import cache, decide, names, rows, sequence, step

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "tutorials" / "your-own-scheduler.md").read_text(encoding="utf-8")
MODULE = "shortest_prefill"
OWN = f"{MODULE}:build"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The arguments of every command of the page that runs this program."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines]
    return [words[1:] for words in found if words and words[0].endswith(program)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the page's module is, and Python finds it: as the page asks, in this process and in those it starts."""
    (code,) = blocks("python")
    (tmp_path / f"{MODULE}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    yield tmp_path
    sys.modules.pop(MODULE, None)


def own(**engine: int) -> IterationScheduler:
    limits = {"max_rows": 4, "max_step_tokens": 16, "prefill_chunk": 8, **engine}
    return compose.iteration(load_config(overrides={"policies": {"iteration": OWN}, "engine": limits}))


# -- plans -------------------------------------------------------------------------------------------------------------


def test_the_shortest_prompt_goes_first_until_another_is_overdue() -> None:
    policy, kv = own(max_step_tokens=8), cache(64)
    policy.add(0.0, sequence("long", 30))
    policy.add(0.1, sequence("short", 5, arrived_s=0.1))
    assert rows(decide(policy, kv, 0.1)) == [("short", 0, 5), ("long", 0, 3)]
    policy, kv = own(max_step_tokens=8), cache(64)
    policy.add(0.0, sequence("long", 30))
    policy.add(5.1, sequence("short", 5, arrived_s=5.1))
    assert rows(decide(policy, kv, 5.2)) == [("long", 0, 8)]


def test_least_remaining_not_least_in_total() -> None:
    policy, kv = own(max_step_tokens=8), cache(64)
    begun = sequence("begun", 20)
    policy.add(0.0, begun)
    step(policy, kv)
    step(policy, kv)
    policy.add(0.2, sequence("new", 6, arrived_s=0.2))
    assert begun.uncomputed == 4
    assert rows(decide(policy, kv, 0.2)) == [("begun", 16, 4), ("new", 0, 4)]


def test_priority_is_before_length() -> None:
    policy, kv = own(max_step_tokens=8), cache(64)
    policy.add(0.0, sequence("batch", 4, priority=1))
    policy.add(0.0, sequence("online", 30))
    assert names(decide(policy, kv, 9.0)) == ["online"]


def test_decode_rows_come_before_prompts_and_stand_last_in_the_plan() -> None:
    policy, kv = own(), cache(64)
    policy.add(0.0, sequence("a", 4))
    step(policy, kv)
    policy.add(0.1, sequence("b", 30, arrived_s=0.1))
    assert rows(decide(policy, kv, 0.1)) == [("b", 0, 8), ("a", 4, 1)]


def test_the_youngest_gives_way_and_the_oldest_advances() -> None:
    policy, kv = own(), cache(4)
    old, young = sequence("old", 8), sequence("young", 8, arrived_s=0.1)
    policy.add(0.0, old)
    policy.add(0.1, young)
    step(policy, kv, 0.1)
    plan = decide(policy, kv, 0.2)
    assert rows(plan) == [("old", 8, 1)] and [each.sequence for each in plan.preempted] == [young]
    assert young.phase is Phase.WAITING and kv.held(young.key) == 0


def test_a_prompt_that_finds_no_blocks_is_not_overtaken() -> None:
    policy, kv = own(), cache(4)
    policy.add(0.0, sequence("running", 8))
    step(policy, kv)
    policy.add(0.1, sequence("large", 12, arrived_s=0.1))
    policy.add(6.0, sequence("small", 3, arrived_s=6.0))
    assert names(decide(policy, kv, 6.1)) == ["running"]


# -- the virtual cluster -----------------------------------------------------------------------------------------------


def requests(random: Random) -> Iterator[Asked]:
    for index in count():
        yield Asked(tokens(random, random.randint(1, 40)), random.randint(1, 20), "be" if index % 3 else "rt")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("blocks", [20, 64])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_right_in_a_small_cache(seed: int, blocks: int, preemption: str) -> None:
    config = small("unified", {"policies": {"iteration": OWN}, "engine": {"preemption": preemption}})
    world = of_config(seed, config, UNIFIED, blocks=blocks)
    offer(world, 30, requests)
    finish(world)
    assert blocks == 64 or total(world, "preemptions") > 0


@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_right_when_segments_meet_anywhere_and_processes_die(seed: int) -> None:
    config = small("", {"policies": {"iteration": OWN}})
    world = of_config(seed, config, PD_TWICE, lambda: SplitAnywhere(seed), blocks=40)
    offer(world, 30, requests)
    faults: list[Fault] = [("decode-0", 0.8, 0.5), ("manager", 1.2, 0.3), ("prefill-1", 1.6, 1.0)]
    strike(world, faults)
    finish(world)
    assert world.attempts_lost > 0, "the faults met nothing"


# -- the page's commands -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_simulation_agrees_with_the_page(folder: Path) -> None:
    printed = {
        words[0]: [float(number) for number in words[1:]]
        for words in re.findall(r"^\| `([\w:]+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    }
    given = commands("cohort")
    assert [command[-1].partition("=")[2] for command in given] == list(printed) == ["continuous_batching", OWN]
    for command, expected in zip(given, printed.values(), strict=True):
        assert main([*command, "--json", str(folder / "report.json")]) == 0
        (report,) = json.loads((folder / "report.json").read_text())
        times = report["overall"]["ttft_ms"]
        ours = [times[name] for name in ("mean", "p50", "p90", "max")]
        assert ours == pytest.approx(expected, rel=0.01)


def served() -> Config:
    """What the page's command asks for."""
    (given,) = commands("scripts/serve")
    parser = ArgumentParser()
    launcher.add_arguments(parser)
    options = parser.parse_args(given)
    config = load_config(preset=options.preset, overrides=launcher.overrides_of(options, set()))
    compose.check_names(config)
    return config


def test_the_serve_command_asks_for_it() -> None:
    assert served().policies.iteration == OWN and served().policies.prefill_order == "pass_through"


@pytest.mark.pipeline
@pytest.mark.slow
def test_it_serves(tmp_path: Path) -> None:
    import torch

    from tests.e2e.equality.golden import compute, near_ties
    from tests.e2e.pipeline import Pipeline
    from tests.e2e.tiny_models import qwen2, save
    from tests.services.gateway.tiny_model import byte_level

    torch.manual_seed(11)
    model = tmp_path / "SmolLM2-135M-Instruct"  # the page's request names it
    save(qwen2(), model)
    byte_level(400).save(str(model / "tokenizer.json"))
    prompts = [[(i * j) % 390 + 5 for j in range(1, 4 + 9 * i)] for i in range(1, 14)]
    goldens = compute(model, prompts, 20)
    policies = {"iteration": OWN, "prefill_order": served().policies.prefill_order}
    overrides = {"policies": policies, "engine": {"prefill_chunk": 24}, "kv": {"memory_bytes": 4 << 20}}
    with Pipeline(tmp_path, model, overrides, preset="unified") as pipeline:
        greedy = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answers = pipeline.complete_all([{"prompt": list(golden.prompt), **greedy} for golden in goldens])
        assert [answer.error for answer in answers] == [""] * len(goldens)
        assert sum(near_ties(g, a.tokens) for g, a in zip(goldens, answers, strict=True)) <= 1
        (curl,) = commands("curl")
        (first,) = pipeline.complete_all([json.loads(curl[curl.index("-d") + 1])])
        assert not first.error and first.finish in ("length", "stop")
        pipeline.assert_nothing_left()
