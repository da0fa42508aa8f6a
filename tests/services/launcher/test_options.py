from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from cohort.common.command_line import Parser
from cohort.common.config import Config, load_config
from cohort.common.errors import ConfigError
from cohort.services.launcher.options import VLLM, add_arguments, keys_of, overrides_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "vllm.md"


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_nothing_given_overrides_nothing():
    assert overrides_of(parse(), set()) == {}


def test_the_port_takes_monitor_and_metrics_along():
    assert overrides_of(parse("--port", "9000"), set()) == {
        "gateway": {"port": 9000},
        "monitor": {"port": 9001},
        "metrics": {"base_port": 9010},
    }
    assert overrides_of(parse("--port", "0"), set()) == {
        "gateway": {"port": 0},
        "monitor": {"port": 0},
        "metrics": {"base_port": 0},
    }


def test_configured_ports_stay():
    assert overrides_of(parse("--port", "9000", "--set", "metrics.base_port=7000"), {"monitor.port"}) == {
        "gateway": {"port": 9000},
        "metrics": {"base_port": 7000},
    }


def test_options_reach_the_configuration():
    options = parse(
        "--model",
        "/m",
        "--served-name",
        "x",
        "--host",
        "0.0.0.0",
        "--set",
        "kv.block_size=32",
        "--set",
        "gateway.api_keys=[a, b]",
    )
    config = load_config(overrides=overrides_of(options, set()))
    assert (config.model.path, config.model.served_name, config.gateway.host) == ("/m", "x", "0.0.0.0")
    assert config.kv.block_size == 32
    assert config.gateway.api_keys == ("a", "b")


@pytest.mark.parametrize("assignment", ["kv.block_size", "=3", "kv.block_size={"])
def test_a_wrong_assignment_is_named(assignment):
    with pytest.raises(ConfigError, match="--set"):
        overrides_of(parse("--set", assignment), set())


@pytest.mark.parametrize(("given", "here"), [("--max-num-seqs=4", "engine.max_rows=N"), ("org/model", "--model MODEL")])
def test_an_option_of_vllm_is_answered_with_the_one_here(given: str, here: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(given)
    assert re.search(rf"{given}; in Cohort: (--set )?{here}$", capsys.readouterr().err.strip())


def test_options_of_vllm_name_what_there_is_and_are_on_their_page():
    named = [match for here in VLLM.values() for match in re.findall(r"--set (\w+)\.(\w+)", here)]
    assert len(named) > 15 and [each for each in named if not hasattr(getattr(Config(), each[0]), each[1])] == []
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() == VLLM.keys() - {""}
    words = re.compile(r"\w+\.\w+(?==)|--(?!set\b)[a-z-]+")
    assert {
        flag: here
        for flag, here in VLLM.items()
        if not all(word in rows.get(flag, here) for word in words.findall(here))
    } == {}


def test_an_unknown_option_is_named_with_a_hint():
    with pytest.raises(ConfigError, match=r"kv\.blok_size.*block_size"):
        load_config(overrides=overrides_of(parse("--set", "kv.blok_size=32"), set()))


def test_keys_that_files_set(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("monitor: {port: 1}\nname: x\n")
    broken = tmp_path / "b.yaml"
    broken.write_text("{")
    assert keys_of([file, broken, tmp_path / "absent.yaml"]) == {"monitor.port", "name"}


def test_adapters_by_name() -> None:
    """A name may hold dots and slashes; a folder is named as seen from here."""
    given = parse("--lora", "team/sql-v1.2=~/sql", "--lora", "poems=a=b", "--set", "model.dtype=float32")
    assert overrides_of(given, set()) == {
        "model": {
            "dtype": "float32",
            "lora": {"team/sql-v1.2": str(Path.home() / "sql"), "poems": str(Path.cwd() / "a=b")},
        }
    }
    config = load_config(overrides=overrides_of(given, set()))
    assert list(config.model.lora) == ["team/sql-v1.2", "poems"]


@pytest.mark.parametrize("given", [["sql"], ["=folder"], ["sql="], ["sql=a", "sql=b"]])
def test_an_adapter_without_name_or_folder_or_twice(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        overrides_of(parse(*[f"--lora={text}" for text in given]), set())
