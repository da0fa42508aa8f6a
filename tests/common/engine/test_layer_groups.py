"""Blocks of groups of layers: which layers share a block, and that it changes no bit of what a model computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.ranks.rank_messages import batch_of, step_of
from cohort.common.engine.step.batch import GREEDY, StepOutput
from cohort.common.kv.layer_groups import in_groups, layer_groups
from cohort.common.types import KvGeometry
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.examples import another_of_its_kind


@pytest.mark.parametrize(
    ("full", "sliding", "layers", "groups"),
    [
        (21, 21, 21, (1, 1)),  # Gemma 2 9B
        (4, 22, 4, (1, 6)),  # Gemma 3 1B
        (5, 29, 5, (1, 6)),  # Gemma 3 4B
        (8, 40, 8, (1, 5)),  # Gemma 3 12B
        (10, 52, 5, (2, 11)),  # Gemma 3 27B
        (12, 12, 12, (1, 1)),  # gpt-oss 20B
    ],
)
def test_groups_of_published_models(full: int, sliding: int, layers: int, groups: tuple[int, int]) -> None:
    found = layer_groups([512] * sliding + [0] * full)
    assert found is not None
    assert found.layers == layers
    assert found.windows == (0,) * groups[0] + (512,) * groups[1]


def test_layers_of_one_kind_are_in_no_groups() -> None:
    assert layer_groups([]) is None
    assert layer_groups([0] * 30) is None
    assert layer_groups([4096] * 32) is None


@given(st.lists(st.sampled_from([0, 7, 512]), min_size=2, max_size=60))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows: list[int]) -> None:
    found = layer_groups(windows)
    if found is None:
        assert len(set(windows)) == 1
        return
    assert len(set(found.places)) == len(windows)
    assert all(0 <= place < found.layers for _, place in found.places)
    assert [found.windows[group] for group, _ in found.places] == windows
    assert list(found.windows) == sorted(found.windows, key=lambda window: (window > 0, -window))
    for window, count in Counter(windows).items():
        room = found.windows.count(window) * found.layers
        assert room - count < found.layers
        assert (room - count) * 12 <= room


def test_the_weight_of_a_block(model_folder: Callable[[str], Path]) -> None:
    """Three layers, of which the second sees everything: three groups of one layer."""
    model = read_geometry(model_folder("gemma3"))
    whole = model.kv_geometry("float32", 8)
    one = in_groups(whole, model.sliding_windows)
    assert one.groups == (0, 7, 7)
    assert one.block_bytes == 2 * 2 * 16 * 4 * 8 == whole.block_bytes // 3
    assert one.token_bytes == whole.token_bytes
    assert one.blocks_for(17) == 9
    assert make_runner(model_folder("gemma3"), grouped=True).kv.geometry == one
    same = read_geometry(model_folder("mistral-window"))
    assert in_groups(same.kv_geometry("float32", 8), same.sliding_windows) == same.kv_geometry("float32", 8)


def test_the_sums_of_a_geometry_with_groups() -> None:
    geometry = KvGeometry(28, 1, 256, 2, 16, groups=(0, *(512,) * 6))  # Gemma 3 1B
    one = replace(geometry, num_layers=4, groups=(), window=512)
    for tokens in (0, 1, 16, 511, 512, 600, 2048, 8192):
        assert geometry.blocks_for(tokens) == 7 * one.blocks_for(tokens)
        assert geometry.blocks_held(tokens) == one.blocks_for(tokens) + 6 * one.blocks_held(tokens)
        full, sliding = tokens, one.most_held(tokens)
        assert geometry.most_held(tokens) == -(-(full + 6 * sliding) // 7)
    assert geometry.growth(0, 100, 50) == 150
    assert geometry.growth(8000, 0, 700) == 100  # what decodes grows in one group of seven
    assert geometry.growth(8000, 300, 700) == 300
    assert geometry.positions(7 * 512) == 8192


def outputs(folder: Path, *, grouped: bool, recorded: bool) -> list[StepOutput]:
    runner = make_runner(folder, num_blocks=160, grouped=grouped, device_steps=recorded)
    runner.warm_up()
    driver = Driver(runner, shuffle=3)
    for index, prompt in enumerate(random_prompts((40, 3, 21, 9), seed=5)):
        driver.add(f"r{index}", prompt, replace(GREEDY, logprobs=5))
    found = []
    for step in range(24):
        rows = [(name, min(13, driver.remaining(name))) for name in driver.requests]
        found.append(driver.step(rows[: 1 + step]))
    return found


@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=another_of_its_kind())])
@pytest.mark.parametrize(
    "name",
    ["gemma2", "qwen2-window", "gpt-oss", *(pytest.param(name, marks=another_of_its_kind()) for name in ("gemma3",))],
)
def test_groups_change_no_bit(name: str, recorded: bool, model_folder: Callable[[str], Path]) -> None:
    """Every group's KV in blocks of its own, shuffled: the log-probabilities are those of blocks of all layers."""
    folder = model_folder(name)
    plain, grouped = (outputs(folder, grouped=grouped, recorded=recorded) for grouped in (False, True))
    for one, other in zip(plain, grouped, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs == other.logprobs


def test_halves_and_followers_get_the_tables_of_all_groups(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("gemma2"), grouped=True)
    driver = Driver(runner, shuffle=1)
    for index, prompt in enumerate(random_prompts((12, 5, 9))):
        driver.add(f"r{index}", prompt)
    batch = driver.batch([("r0", 12), ("r1", 5), ("r2", 9)])
    assert batch.more_tables is not None and batch.more_slots is not None
    first, second = batch.split()
    for half, rows in ((first, slice(0, 1)), (second, slice(1, 3))):
        half.check()
        assert half.more_tables is not None and half.more_slots is not None
        assert (half.more_tables == batch.more_tables[:, rows]).all()
    assert (np.concatenate([first.more_slots, second.more_slots], axis=1) == batch.more_slots).all()  # type: ignore[list-item]
    again = batch_of(step_of(batch))
    assert again.more_tables is not None and again.more_slots is not None
    assert (again.more_tables == batch.more_tables).all()
    assert (again.more_slots == batch.more_slots).all()
