"""Configuration: layers, and errors that name file, key and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.config import Config, dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.types import Role


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, "kv: {block_size: 32}\ngateway: {port: 9000, max_n: 4}\n")
    config = load_config([path], preset="unified", overrides={"gateway": {"port": 9001}})
    assert (config.kv.block_size, config.gateway.port, config.gateway.max_n) == (32, 9001, 4)
    assert config.instance_roles == {"unified-0": Role.UNIFIED}
    assert config.policies.placement == "colocated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv: {blok_size: 16}", r"my\.yaml: unknown option 'kv\.blok_size'; did you mean 'block_size'\?"),
        ("kv: {block_size: 17}", r"my\.yaml: kv\.block_size: Invalid enum value 17"),
        ("gateway: {port: '80'}", r"my\.yaml: gateway\.port: Expected `int`, got `str`"),
        ("workers: [{role: prefil}]", r"my\.yaml: workers\[0\]\.role: Invalid enum value 'prefil'"),
        ("workers: [{rol: prefill}]", r"unknown option 'workers\[0\]\.rol'; did you mean 'role'\?"),
        ("kv: 3", r"kv must be a mapping, found int"),
        ("- a", r"expected a mapping of sections, found list"),
        ("a: [", r"not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([write(tmp_path, text)])


def test_a_missing_file_or_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config([tmp_path / "nowhere.yaml"])
    with pytest.raises(ConfigError, match=r"no preset named 'x'; there are: .*cohort, disaggregated, .*unified"):
        load_config(preset="x")


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(preset="unified", overrides={"gateway": {"api_keys": ["a", "env:B"]}})
    assert load_config([write(tmp_path, dump_config(config))]) == config


def test_threads_are_shared_but_two_where_there_are_two() -> None:
    config = Config()
    assert [config.worker_threads("decode-0", cores) for cores in (1, 2, 4, 16)] == [1, 2, 2, 8]
    asked = load_config(overrides={"engine": {"threads": 3}, "workers": [{"role": "prefill", "threads": 5}]})
    assert asked.worker_threads("prefill-0", 2) == 5


@pytest.mark.parametrize("seat", ["admission", "placement", "prefill_order", "iteration", "allocation", "waiting_kv"])
def test_unknown_policies_are_refused_at_start(seat: str) -> None:
    with pytest.raises(ConfigError, match=rf"policies\.{seat}: no policy named 'magic'; there are: "):
        compose.check_names(load_config(overrides={"policies": {seat: "magic"}}))
