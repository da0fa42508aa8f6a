"""A draft model proposes what it would generate itself, whatever its slots were used for in between."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.config import load_config
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.drafts.batch_drafts import FILLED_AT_ONCE, DraftModel, DraftRow
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.runner.draft_loading import DraftPlan, check_vocabulary, load_draft, plan_draft
from cohort.common.engine.step.batch import GREEDY, SamplingRow
from cohort.common.errors import ConfigError
from tests.common.engine.drafts.test_eagle_head import head_folder
from tests.common.engine.driver import (
    VOCAB,
    Driver,
    Expected,
    make_runner,
    random_prompts,
    reference_generate,
    save_random_model,
)
from tests.engine_models import BLOCK_SIZE, CONFIGS
from tests.examples import another_of_its_kind
from tests.services.gateway.tiny_model import byte_level

ModelFolder = Callable[[str], Path]
BLOCKS = 64


def _loaded(folder: Path, *, device_steps: bool = False) -> DraftModel:
    """`device_steps`: recorded, over standing buffers and sampled by the batch, as on a GPU."""
    geometry = read_geometry(folder)
    plan = DraftPlan(folder, geometry, "float32", "float32", BLOCK_SIZE, VOCAB, graph_bytes=1 << 40)
    drafter = load_draft(plan, load_config(), make_runner(folder, num_blocks=BLOCKS, device_steps=device_steps))
    assert isinstance(drafter, DraftModel)
    drafter.warm_up()
    return drafter


class Rows:
    """Sequences in scattered blocks, some filled from the right."""

    def __init__(self, model: DraftModel, seed: int = 1) -> None:
        self.model, self.free = model, list(range(BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.chains: dict[str, TokenChain] = {}
        self.directions: dict[str, list[int] | None] = {}

    def ask(self, asked: dict[str, tuple[Sequence[int], int]], sampling: SamplingRow = GREEDY) -> dict[str, list[int]]:
        """Of each name so many tokens behind these."""
        rows = []
        for name, (tokens, drafts) in asked.items():
            blocks, chain = self.blocks.setdefault(name, []), self.chains.get(name)
            if chain is None or chain.tokens.tolist() != tokens[: len(chain)]:
                chain = self.chains[name] = TokenChain("")
            while len(blocks) * BLOCK_SIZE < len(tokens) + drafts:
                blocks.append(self.free.pop())
            turned = [index % 2 for index in range(len(blocks))] if name.startswith("turned") else None
            chain.grow(tokens)
            rows.append(DraftRow(chain, blocks, turned, (sampling,) * drafts))
        return dict(zip(asked, self.model.propose_all(rows).tokens, strict=True))


def _asked(expected: Expected, known: int, drafts: int) -> tuple[list[int], int]:
    return [*expected.prompt, *expected.tokens[:known]], drafts


@pytest.mark.parametrize("device_steps", [False, True])
@pytest.mark.parametrize(
    "name", ["llama", "deepseek2", *(pytest.param(name, marks=another_of_its_kind()) for name in ("qwen3", "gemma3"))]
)
def test_drafts_are_what_the_model_generates(model_folder: ModelFolder, name: str, device_steps: bool) -> None:
    folder = model_folder(name)
    rows = Rows(_loaded(folder, device_steps=device_steps))
    if device_steps:
        steps: Any = rows.model._steps
        assert steps.decode.classes == (1, 2, 4, 8) and steps.mixed.classes
    first, second, third = reference_generate(folder, random_prompts((5, 40, 17)), 16)
    found = rows.ask({"a": _asked(first, 0, 4), "turned": _asked(second, 0, 6)})
    assert found == {"a": first.tokens[:4], "turned": second.tokens[:6]}
    # Another text was in its slots from some position on, and one sequence joins.
    wrong = [*second.prompt, *second.tokens[:3], 1 + second.tokens[3] % 7]
    rows.ask({"turned": (wrong, 3)})
    found = rows.ask({"a": _asked(first, 2, 5), "turned": _asked(second, 7, 2), "c": _asked(third, 1, 3)})
    assert found == {"a": first.tokens[2:7], "turned": second.tokens[7:9], "c": third.tokens[1:4]}
    # Its blocks were another's for a while, as after a preemption or where they are lent.
    rows.blocks["d"] = rows.blocks["a"]
    rows.ask({"d": (random_prompts((11,), seed=5)[0], 4)})
    assert rows.ask({"a": _asked(first, 8, 4)}) == {"a": first.tokens[8:12]}
    # And other blocks, as after a swap; nobody says so.
    rows.blocks["c"] = [rows.free.pop() for _ in rows.blocks["c"]]
    assert rows.ask({"c": _asked(third, 6, 4)}) == {"c": third.tokens[6:10]}


def test_what_a_prefix_shares_is_computed_once(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(_loaded(model_folder("llama")))
    computed: list[int] = []
    compute = DraftModel._compute

    def counted(self: DraftModel, work: Any, *sampling: Any) -> list[int]:
        computed.append(sum(len(tokens) for _, tokens in work))
        return compute(self, work, *sampling)

    monkeypatch.setattr(DraftModel, "_compute", counted)
    (prompt,) = random_prompts((40,))
    rows.ask({"a": (prompt, 1)})
    rows.blocks["b"] = rows.blocks["a"][:4]  # of the prefix cache
    rows.ask({"b": ([*prompt[:32], 5, 6, 7], 1)})
    assert sum(computed) == 40 + 3


@pytest.mark.parametrize("device_steps", [False, True])
def test_a_draft_is_drawn_with_its_position_s_numbers(model_folder: ModelFolder, device_steps: bool) -> None:
    """A model that drafts for itself is always right, sampled too."""
    folder = model_folder("llama")
    driver, (prompt,) = Driver(make_runner(folder)), random_prompts((9,))
    drawn = {"seed": 3, "temperature": 0.9, "top_p": 0.95}
    driver.add("r", prompt)
    for position in range(9, 15):
        driver.requests["r"].sampling = SamplingRow(position=position, **drawn)  # type: ignore[arg-type]
        driver.step([("r", driver.remaining("r"))])
    chain, model = TokenChain(""), _loaded(folder, device_steps=device_steps)
    chain.grow(prompt)
    sampling = tuple([SamplingRow(position=position, **drawn) for position in range(9, 15)])  # type: ignore[arg-type]
    (found,) = model.propose_all([DraftRow(chain, [3, 1, 2], None, sampling)]).tokens
    assert found == driver.requests["r"].tokens[9:]


def test_a_long_gap_is_filled_over_several_steps(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama")
    monkeypatch.setattr("cohort.common.engine.drafts.batch_drafts.FILLED_AT_ONCE", 50)
    rows = Rows(_loaded(folder))
    (expected,) = reference_generate(folder, random_prompts((120,)), 4)
    for _ in range(2):
        assert rows.ask({"a": _asked(expected, 0, 4)}) == {"a": []}
    assert rows.ask({"a": _asked(expected, 0, 4)}) == {"a": expected.tokens}
    assert FILLED_AT_ONCE > 50


def test_what_it_cannot_say_anything_of(model_folder: ModelFolder) -> None:
    model, chain = _loaded(model_folder("llama")), TokenChain("")
    chain.grow([5] * 250)
    assert model.takes(chain, 6) and not model.takes(chain, 7), "its longest context"
    chain.grow([5] * 250 + [VOCAB])
    assert not model.takes(chain, 1), "a token beyond its tables"


def test_tokens_are_compared_by_name(tmp_path: Path) -> None:
    folders = {}
    for name, size in (("one", 300), ("other", 320), ("none", 0), ("neither", 0)):
        folders[name] = save_random_model(CONFIGS["llama"](), tmp_path / name)
        if size:
            byte_level(size).save(str(folders[name] / "tokenizer.json"))
    read = {name: read_geometry(folder) for name, folder in folders.items()}

    def check(first: str, second: str) -> None:
        check_vocabulary(folders[first], read[first], folders[second], read[second])

    check("one", "one")
    check("none", "neither")
    with pytest.raises(ConfigError, match=r"speculation.draft_model: other cannot draft for one: \d+ tokens differ"):
        check("one", "other")
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        check("one", "none")
    swapped = json.loads((folders["one"] / "tokenizer.json").read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folders["neither"] / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(ConfigError, match="2 tokens differ, the first of them 'a'"):
        check("one", "neither")


@pytest.mark.parametrize(
    ("folder", "device", "degree", "draft", "refused"),
    [
        ("llama", "cpu", 1, "", "needs the folder"),
        ("llama", "cpu", 1, "/nowhere", "no folder /nowhere"),
        ("llama", "cpu", 2, "llama", "worker of 2 ranks"),
        ("mistral-window", "cpu", 1, "llama", "the last 11 tokens alone"),
        ("llama", "cpu", 1, "gpt-neox", "run through transformers"),
    ],
)
def test_what_is_not_served_is_refused(
    model_folder: ModelFolder, folder: str, device: str, degree: int, draft: str, refused: str
) -> None:
    named = str(model_folder(draft)) if draft in CONFIGS else draft
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": named}})
    where = model_folder(folder)
    with pytest.raises(ConfigError, match=refused):
        plan_draft(config, where, read_geometry(where), dtype="float32", device=torch.device(device), degree=degree)


@pytest.mark.parametrize("head", [False, True])
def test_on_a_gpu_its_weights_and_steps_are_counted_beside_the_cache(
    model_folder: ModelFolder, tmp_path: Path, head: bool
) -> None:
    where = model_folder("llama")
    draft = head_folder(tmp_path / "head") if head else where
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(draft)}})
    plans = [
        plan_draft(config, where, read_geometry(where), dtype="float32", device=torch.device(device), degree=1)
        for device in ("cpu", "cuda:0")
    ]
    host, device = plans
    assert host is not None and device is not None and host.head == device.head == head
    assert host.device_bytes == host.graph_bytes == 0
    assert device.graph_bytes > 0 and device.device_bytes > device.graph_bytes + 4 * (1 if head else 3) * 48 * 48
    assert device.block_bytes == host.block_bytes
