"""Several ranks compute what one device computes: transformers' tokens, the same bits in every batch, the same KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.rank_shares import reduced_bytes
from cohort.common.engine.ranks.rank_memory import RankMemory
from cohort.common.engine.ranks.rank_orders import OpenLinks
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, ScoringRow
from cohort.common.machines.effects import Run
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.transport.zmq_link import ZmqLink
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.common.engine.groups import group_runner
from tests.common.engine.joint_ranks import joint_runner
from tests.common.engine.rank_ends import AgentEnd
from tests.common.engine.transfer_ends import until
from tests.engine_models import BLOCK_SIZE, CONFIGS, VOCAB, save_random_model
from tests.examples import another_of_its_kind

OUTPUTS = 16


def eight_heads(kv_heads: int, **options: Any) -> Any:
    """Divides by 4; 199 tokens do not, so the last rank has fewer of them."""
    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=80,
        max_position_embeddings=256,
        **options,
    )


def deepseek_of_eight() -> Any:
    """DeepSeek-V3's form, which divides by 8."""
    config = CONFIGS["deepseek3"]()
    config.num_attention_heads = config.num_key_value_heads = 8
    return config


@pytest.fixture(scope="module")
def folder_of(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    own = {
        "eight-heads": lambda: eight_heads(4, tie_word_embeddings=True),
        "deepseek-eight-heads": deepseek_of_eight,
        "eight-heads-kv2": lambda: eight_heads(2, attention_bias=True, mlp_bias=True),
    }

    def folder(name: str) -> Path:
        if name not in own:
            return model_folder(name)
        if name not in made:
            made[name] = save_random_model(own[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


CASES: list[Any] = [("qwen3", 2)]
WITHIN_ONE_PROCESS = [
    *(("llama-bias-llama3", 2), ("phi3", 2), ("mistral-window", 2), ("eight-heads", 4)),
    ("eight-heads-kv2", 4),  # two ranks have one KV head
]
NIGHTLY = [*WITHIN_ONE_PROCESS, ("qwen2-moe", 2), ("gpt-oss", 2), ("deepseek2-groups", 2), ("deepseek-eight-heads", 4)]
CASES += [pytest.param(each, marks=another_of_its_kind()) for each in NIGHTLY]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def group(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[tuple[ModelRunner, Path]]:
    name, degree = request.param
    folder = folder_of(name)
    with group_runner(folder, degree) as runner:
        yield runner, folder


def test_greedy_equals_transformers(group: tuple[ModelRunner, Path]) -> None:
    runner, folder = group
    expected = reference_generate(folder, random_prompts((1, 5, 16, 33, 50)), OUTPUTS)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
    assert check_schedule(runner, expected, run_together) <= 1


@pytest.mark.parametrize(("name", "degree"), WITHIN_ONE_PROCESS)
def test_other_forms_within_one_process(name: str, degree: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    expected = reference_generate(folder, random_prompts((1, 5, 16, 33, 50)), OUTPUTS)
    runner, _ = joint_runner(folder, degree)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
    assert check_schedule(runner, expected, run_together) <= 1


def test_a_row_computes_the_same_bits_in_every_batch(group: tuple[ModelRunner, Path]) -> None:
    """Its log-probabilities, alone and at several places among others."""
    runner, _ = group

    def run(before: int, behind: int, shuffle: int) -> tuple[list[int], list[Any]]:
        driver = Driver(runner, shuffle=shuffle)
        prompts = random_prompts([21, 4, 37, 9, 30, 17])
        names = [*(f"b{i}" for i in range(before)), "0", *(f"e{i}" for i in range(behind))]
        driver.add("0", prompts[0])
        for place, name in enumerate(name for name in names if name != "0"):
            driver.add(name, prompts[1 + place])
        found = []
        for _ in range(6):
            position = len(driver.requests["0"].tokens)
            driver.requests["0"].sampling = SamplingRow(seed=7, position=position, temperature=0.9, logprobs=4)
            plan = [(name, driver.remaining(name)) for name in names]
            output = driver.step(plan)
            order = [name for name, _ in sorted(plan, key=lambda entry: entry[1] == 1)]
            found.append(output.logprobs[order.index("0")])
        return driver.requests["0"].tokens, found

    alone = run(0, 0, 1)
    assert run(0, 3, 2) == alone
    assert run(3, 2, 3) == alone


def test_prompts_are_scored_by_all_ranks_together(group: tuple[ModelRunner, Path]) -> None:
    """More positions than logits exist at a time: several forwards of one step, on every rank."""
    runner, folder = group
    prompt = random_prompts([40])[0]

    def scores(of: ModelRunner) -> list[float]:
        driver = Driver(of)
        driver.add("0", prompt)
        batch = driver.batch([("0", 40)])
        batch = type(batch)(
            **{name: getattr(batch, name) for name in batch.__slots__ if name != "scoring"},
            scoring=(ScoringRow(0, 0, tuple(prompt[1:]), 0),),
        )
        return [score.logprob for score in of.execute(batch).scores[0]]

    assert scores(runner) == pytest.approx(scores(make_runner(folder)), abs=1e-3)


def test_swapped_blocks_come_back_on_every_rank(group: tuple[ModelRunner, Path]) -> None:
    """R9: the plan's copies are made by all ranks, before the rows that follow."""
    runner, folder = group
    expected = reference_generate(folder, random_prompts([20]), 8)[0]
    driver = Driver(runner)
    driver.add("0", expected.prompt)
    driver.step([("0", 20)])
    driver.step([("0", 1)])
    request = driver.requests["0"]
    gone, host = tuple(request.blocks), tuple(range(len(request.blocks)))
    other = tuple(block for block in range(len(runner.kv.blocks)) if block not in gone)[: len(gone)]
    blank = tuple(range(len(gone), 2 * len(gone)))
    copies = [
        KvCopy("out", "block", gone, host),
        KvCopy("in", "block", other, host),
        KvCopy("in", "block", gone, blank),
    ]
    for copy in copies:
        with runner.remote_copies([copy]):
            pairs = zip(copy.device, copy.host, strict=True)
            if copy.direction == "out":
                runner.kv.copy_out(list(pairs))
            else:
                runner.kv.copy_in([(host, device) for device, host in pairs])
    request.blocks = list(other)
    for _ in range(6):
        driver.step([("0", 1)])
    assert request.tokens[20:] == expected.tokens


def test_blocks_of_all_ranks_are_the_blocks_of_one_device(group: tuple[ModelRunner, Path], tmp_path: Path) -> None:
    """So a worker of any degree takes over: sent to one of one rank, the bytes are where that one computes them."""
    runner, folder = group
    alone, beside = make_runner(folder), make_runner(folder)
    prompt = random_prompts([3 * BLOCK_SIZE])[0]
    for each in (runner, alone):
        driver = Driver(each)
        driver.add("0", prompt)
        driver.step([("0", len(prompt))])
    blocks = driver.requests["0"].blocks
    asyncio.run(_move(runner, beside, [(block, block) for block in blocks], tmp_path))
    kept, sent = alone.kv.blocks[blocks], beside.kv.blocks[blocks]
    torch.testing.assert_close(sent, kept, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sent[:, 0, 0], kept[:, 0, 0], rtol=1e-5, atol=1e-5)

    # … and back again, to other blocks, and from there to one rank: the same bits.
    asyncio.run(_move(beside, runner, list(zip(blocks, (60, 50, 70), strict=True)), tmp_path))
    asyncio.run(_move(runner, beside, [(60, 6), (50, 7), (70, 8)], tmp_path))
    assert torch.equal(beside.kv.blocks[[6, 7, 8]], sent)


def test_a_worker_of_one_rank_goes_on_with_the_blocks_of_a_group(
    group: tuple[ModelRunner, Path], tmp_path: Path
) -> None:
    """And a group with those of a worker of one rank."""
    runner, folder = group
    expected = reference_generate(folder, random_prompts([29]), 12)[0]
    alone = make_runner(folder)
    for source, target in ((runner, alone), (alone, runner)):
        driver = Driver(source)
        driver.add("0", expected.prompt)
        for _ in range(4):
            driver.step([("0", driver.remaining("0"))])
        request = driver.requests["0"]
        asyncio.run(_move(source, target, [(block, block) for block in request.blocks], tmp_path))
        driver.runner = target
        for _ in range(8):
            driver.step([("0", driver.remaining("0"))])
        assert request.tokens[len(expected.prompt) :] == expected.tokens


def test_what_is_summed_is_what_is_planned_with(group: tuple[ModelRunner, Path]) -> None:
    runner, folder = group
    ranks, geometry = runner.ranks, read_geometry(folder)
    assert ranks is not None
    before = ranks.allreduce_bytes
    driver = Driver(runner)
    driver.add("0", random_prompts([13])[0])
    driver.step([("0", 13)])
    assert ranks.allreduce_bytes - before == geometry.num_layers * reduced_bytes(geometry, 4, 13)


async def _move(source: ModelRunner, target: ModelRunner, blocks: Sequence[tuple[int, int]], folder: Path) -> None:
    """From block to block, as two live workers do it."""
    ends = [await _end(runner, folder / name) for runner, name in ((source, "a.sock"), (target, "b.sock"))]
    a, b = ends
    a.other = b
    a.send_to(b, [Run(tag, first, second, 1) for tag, (first, second) in enumerate(blocks)])
    await until(lambda: len(b.received) == len(blocks) == len(a.sent) and not a.busy and not b.busy)
    assert a.sent == b.received == [None] * len(blocks)
    for end in ends:
        await end.agent.close()


async def _end(runner: ModelRunner, path: Path) -> AgentEnd:
    heads, others = (0, runner.block_geometry.num_kv_heads), []
    if runner.followers is not None and runner.ranks is not None:
        heads, others = runner.ranks.share.kv_heads, runner.followers.remote_ranks
        if not others[0].addresses:
            order = OpenLinks(0, ("zmq",), "", "", "", False, True)
            assert await runner.followers.open_links(order, on_network=False) == {"zmq"}
    links: dict[str, Any] = {"zmq": ZmqLink(f"ipc://{path}")}
    end = AgentEnd(RankTransfers(RankMemory(runner.kv, heads), links), others, runner.block_geometry)
    end.start()
    return end
