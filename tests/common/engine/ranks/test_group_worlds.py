"""Models with some full layers, in blocks of groups of layers, on a whole virtual cluster: transformers' tokens.

Contexts are several windows long, and the caches too small: sequences are preempted, handed over in the middle, sent
again, continued from a cached prefix, and drafted for, while blocks behind windows change hands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from tests.common.engine.driver import random_prompts, reference_generate
from tests.common.engine.model_engine import ModelEngine, check_answers
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED, total
from tests.common.machines.world import SplitAnywhere, World
from tests.examples import another_of_its_kind

OUTPUTS = 20
SCENARIOS: dict[str, dict[str, Any]] = {
    "one worker, swapped": {"roles": UNIFIED, "placement": Colocated, "blocks": 22, "preemption": "swap"},
    "one worker, computed again": {"roles": UNIFIED, "placement": Colocated, "blocks": 22},
    "prefill and decode, drafts": {
        "roles": PD,
        "placement": Disaggregated,
        "blocks": 40,
        "run_failure_rate": 0.05,
        "acceptance": 0.7,
    },
    "split anywhere": {"roles": PD_TWICE, "placement": partial(SplitAnywhere, 3), "blocks": 26, "preemption": "swap"},
}
BY_DEFAULT = [
    ("gemma2", "one worker, swapped", (0, 7, 7)),
    ("gpt-oss", "prefill and decode, drafts", (0, 7, 7)),
    ("gemma3", "split anywhere", (0, 7, 7)),
]
MODELS = {"gemma2": (0, 7, 7), "gemma3": (0, 7, 7), "gpt-oss": (0, 7, 7), "qwen2-window": (0, 9, 9)}
OTHERS = [(name, scenario, groups) for name, groups in MODELS.items() for scenario in SCENARIOS]


@pytest.mark.parametrize(
    ("name", "scenario", "groups"),
    [*BY_DEFAULT, *(pytest.param(*each, marks=another_of_its_kind()) for each in OTHERS if each not in BY_DEFAULT)],
)
def test_every_answer_is_the_reference(
    name: str, scenario: str, groups: tuple[int, ...], model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    prompts = random_prompts((61, 9, 34, 21, 50, 5, 17, 40), seed=6)
    for index in (2, 4, 7):
        prompts[index][:28] = prompts[0][:28]
    answers = reference_generate(folder, prompts, OUTPUTS)
    expected = {f"r{index}": one for index, one in enumerate(answers)}
    options = dict(SCENARIOS[scenario])
    roles, placement, acceptance = options.pop("roles"), options.pop("placement"), options.get("acceptance")
    world = World(7, roles, placement, groups=groups, host_blocks=40, **options)
    world.cluster.engine = ModelEngine(world, folder, expected, acceptance or 0.0)
    random = Random(2)
    for index, prompt in enumerate(prompts):
        world.at(random.random() * 0.15, partial(world.submit, f"r{index}", prompt, OUTPUTS))
    world.run(2.0)
    world.run_until_quiet()
    check_answers(world, expected)
    metrics = [node.machine.kv.metrics() for node in world.workers.values()]
    assert sum(each["window_blocks_total"] for each in metrics) > 40
    assert sum(each["prefix_hits_total"] for each in metrics) > 0
    if roles is UNIFIED:
        assert total(world, "preemptions") > 0
    else:
        assert total(world, "transfers_in") > 2
    if acceptance:
        assert sum(node.machine.counters.accepted_tokens["rt"] for node in world.workers.values()) > 10
