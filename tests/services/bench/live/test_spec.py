"""Specifications: those that come with Cohort are right, and what is wrong in one is named before anything starts."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.errors import ConfigError
from cohort.services.bench.live import spec

ROOT = Path(__file__).resolve().parents[4]
SMALL: dict[str, Any] = {
    "description": "two of them",
    "parameters": {"rate": 2.0, "rows": 8, "lengths": "uniform:4-8"},
    "common": {
        "config": {"engine": {"max_rows": "${rows}"}, "kv": {"block_size": 8}},
        "set": ["kv.prefix_caching=false"],
    },
    "systems": {
        "unified": {},
        "other": {"preset": "baseline-vllm", "config": {"kv": {"block_size": 32}}, "usual": False},
    },
    "loads": {
        "one": {
            "config": {"kv": {"block_size": 16, "host_memory_bytes": 4096}},
            "clients": {
                "client": {
                    "options": {"rate": "${rate * 2}", "num-requests": "${round(1.5 * rows)}", "all-at-once": False}
                }
            },
        },
        "two": {
            "clients": {
                "client": {"options": {"all-at-once": True, "input-len": "${lengths}"}},
                "late": {"options": {"concurrency": 1, "seed": "${1000 + seed}"}, "after_s": "${rate / 4}"},
            }
        },
    },
    "table": {"tokens": "client.output_tokens_per_s"},
}


def written(folder: Path, document: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def changed(keys: str, value: Any) -> dict[str, Any]:
    """SMALL with another value at a dotted place."""
    document: dict[str, Any] = yaml.safe_load(yaml.safe_dump(SMALL, sort_keys=False))
    node = document
    *path, last = keys.split("/")
    for key in path:
        node = node.setdefault(key, {})
    node[last] = value
    return document


@pytest.mark.parametrize("name", spec.known())
def test_specs_of_cohort_are_right(name: str) -> None:
    comparison = spec.read(spec.find(name))
    assert any(system.usual for system in comparison.spec.systems.values())
    assert any(load.usual for load in comparison.spec.loads.values())


def test_specs_of_cohort_are_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["cohort"]
    assert len(spec.known()) == 7
    for name in spec.known():
        assert any(fnmatch(f"configs/benchmarks/{name}.yaml", pattern) for pattern in patterns)


def test_layers_parameters_and_rounds(tmp_path: Path) -> None:
    comparison = spec.read(written(tmp_path, SMALL), {"rate": 3.0})
    case = comparison.case("one", "other", 4)
    assert case.preset == "baseline-vllm"
    assert case.config == {"engine": {"max_rows": 8}, "kv": {"block_size": 32, "host_memory_bytes": 4096}}
    assert case.settings == ("kv.prefix_caching=false",)
    (client,) = case.clients
    assert client.arguments == ("--seed=4", "--rate=6.0", "--num-requests=12")
    assert comparison.case("one", "unified", 0).config["kv"] == {"block_size": 16, "host_memory_bytes": 4096}
    first, late = comparison.case("two", "unified", 4).clients
    assert (first.arguments, first.after_s) == (("--seed=4", "--all-at-once", "--input-len=uniform:4-8"), 0.0)
    assert (late.arguments, late.after_s) == (("--seed=1004", "--concurrency=1"), 0.75)


def test_a_preset_that_is_not_among_the_systems_gets_the_common_settings(tmp_path: Path) -> None:
    case = spec.read(written(tmp_path, SMALL)).case("two", "bros", 0)
    assert (case.preset, case.config["kv"]) == ("bros", {"block_size": 8})


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ("sytems", {}, "unknown field `sytems`"),
        ("systems/other/prest", "x", "unknown field `prest`"),
        ("loads/one/client", {}, "unknown field `client`"),
        ("loads/two/clients/late/after", 1, "unknown field `after`"),
        ("rounds", "three", "rounds"),
        ("systems", {}, "systems: nothing there"),
        ("loads/one/clients", {}, "table.tokens: 'client.output_tokens_per_s': no client 'client'"),
        ("systems/other/preset", "baseline-vlm", "systems.other under loads.one: no preset named 'baseline-vlm'"),
        ("systems/other/config", {"kv": {"block_sise": 4}}, "block_sise"),
        ("systems/other/set", ["kv.block_size"], "expected SECTION.OPTION=VALUE"),
        ("loads/one/clients/client/options/rat", 3, "clients.client.options: unrecognized arguments: --rat=3"),
        ("loads/one/clients/client/options/rate", -1, "--rate must be above 0"),
        ("loads/one/clients/client/options/json", "x", "--json=x: not for a specification to say"),
        ("loads/one/clients/client/options/rate", "${rat}", "options.rate: 'rat': no parameter 'rat'"),
        ("table/tokens", "client.output_tokens_per_second", "table.tokens: "),
        ("parameters/seed", 1, "parameters.seed"),
    ],
)
def test_a_fault_is_named_with_its_file(tmp_path: Path, keys: str, value: Any, said: str) -> None:
    path = written(tmp_path, changed(keys, value))
    with pytest.raises(ConfigError) as refused:
        spec.read(path)
    assert str(refused.value).startswith(f"{path}: ") and said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"), [({"rats": 1.0}, "no parameter 'rats'"), ({"rate": "fast"}, "is not of the kind of 2.0")]
)
def test_parameters_are_checked(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec.read(written(tmp_path, SMALL), given)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    comparison = spec.read(written(tmp_path, SMALL))
    with pytest.raises(ConfigError, match="no load 'three'; there are one, two"):
        comparison.case("three", "unified", 0)
    with pytest.raises(ConfigError, match="no system 'unifid'"):
        comparison.case("one", "unifid", 0)
    with pytest.raises(ConfigError, match="none of alignment, arrangements, buckets"):
        spec.find("alignmnt")
