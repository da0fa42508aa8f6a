"""Settings of mechanisms: only `experiment` changes them, and a mistake there is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.config import Config, load_config, nested
from cohort.common.config.policies import BrosConfig
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.policies.settings import KINDS, BrosSettings, placed, settings_of


def test_options_and_settings_are_one_record() -> None:
    given = {"bros.best_effort_share": 0.5, "experiment.bros.drops": False, "experiment.bros.first_batch": 4}
    found = settings_of(load_config(overrides=nested(given, "--set")), BrosSettings)
    assert found == BrosSettings(best_effort_share=0.5, drops=False, first_batch=4)


def test_layers_merge_inside_experiment(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("experiment: {bros: {drops: false, first_batch: 4}}\n", encoding="utf-8")
    found = settings_of(load_config([file], overrides={"experiment": {"bros": {"drops": True}}}), BrosSettings)
    assert (found.drops, found.first_batch) == (True, 4)


@pytest.mark.parametrize("mechanism", KINDS)
def test_nothing_given_is_the_records_default(mechanism: str) -> None:
    assert settings_of(Config(), KINDS[mechanism]) == KINDS[mechanism]()


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ({"bross": {"drops": False}}, r"unknown mechanism 'experiment\.bross'; did you mean bros\?"),
        ({"bros": {"drosp": False}}, r"unknown setting 'experiment\.bros\.drosp'; did you mean drops\?"),
        ({"bros": {"x": 1}}, r"unknown setting 'experiment\.bros\.x'; known: group_tokens, first_batch"),
        ({"bros": {"drops": 1}}, r"experiment\.bros\.drops: Expected `bool`, got `int`"),
        ({"bros": {"first_batch": 0}}, r"experiment\.bros\.first_batch: Expected `int` >= 1"),
        ({"bros": {"best_effort_share": 0.5}}, r"it is an option: bros\.best_effort_share"),
    ],
)
def test_mistakes_are_named_at_start(experiment: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.check_names(load_config(overrides={"experiment": experiment}))


def test_each_value_is_placed_where_it_belongs() -> None:
    given = {"bros": {"best_effort_share": 0.5, "drops": False}, "kv": {"block_size": 32}}
    config = load_config(overrides=placed(given))
    assert config.bros == BrosConfig(best_effort_share=0.5)
    assert (config.experiment, config.kv.block_size) == ({"bros": {"drops": False}}, 32)
