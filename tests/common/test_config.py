"""Configuration: layers, and errors that name file, key and what would be right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cohort.common.config import Config, dump_config, load_config, nested, parse_yaml
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.types import Role


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, "kv: {block_size: 32}\ngateway: {port: 9000, processes: 4}\n")
    config = load_config([path], preset="unified", overrides={"gateway": {"port": 9001}})
    assert (config.kv.block_size, config.gateway.port, config.gateway.processes) == (32, 9001, 4)
    assert config.instance_roles == {"unified-0": Role.UNIFIED}
    assert config.policies.placement == "colocated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv: {blok_size: 16}", r"my\.yaml: unknown option 'kv\.blok_size'; did you mean block_size\?"),
        ("engine: {max_model_len: 1}", r"unknown option 'engine\.max_model_len'; did you mean model\.max_model_len\?"),
        ("kv: {block_size: 17}", r"my\.yaml: kv\.block_size: Invalid enum value 17"),
        ("gateway: {port: '80'}", r"my\.yaml: gateway\.port: Expected `int`, got `str`"),
        ("workers: [{role: prefil}]", r"my\.yaml: workers\[0\]\.role: Invalid enum value 'prefil'"),
        ("workers: [{rol: prefill}]", r"unknown option 'workers\[0\]\.rol'; did you mean role\?"),
        ("kv: 3", r"kv must be a mapping, found int"),
        ("- a", r"expected a mapping of sections, found list"),
        ("a: [", r"not valid YAML"),
        ("model: {served_name: 2024-13-45}", r"my\.yaml: not valid YAML: month must be in 1\.\.12"),
        ("kv: {block_size: 16}\nlogging: {level: info}\nkv: {block_size: 32}", r"kv is given twice(.|\n)*line 3"),
        ("kv.block_size: 32\nkv: {block_size: 16}", r"my\.yaml: kv\.block_size is given twice"),
        ("name.of: x\nname: y", r"my\.yaml: name\.of: name is not a section"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([write(tmp_path, text)])


def test_a_file_may_name_options_by_section_and_name(tmp_path: Path) -> None:
    text = "gateway.port: 9000\ngateway: {processes: 4}\nkv.block_size: 32\nexperiment.cohort.ordered: false\n"
    config = load_config([write(tmp_path, text)])
    assert (config.gateway.port, config.gateway.processes, config.kv.block_size) == (9000, 4, 32)
    assert config.experiment == {"cohort": {"ordered": False}}


@pytest.mark.parametrize("degree", ["auto", 3])
def test_ranks_are_spread_over_hosts_evenly(tmp_path: Path, degree: object) -> None:
    group = f"workers: [{{role: decode, tensor_parallel: {degree}, hosts: 2}}]\n"
    with pytest.raises(
        ConfigError, match=f"hosts: 2: tensor_parallel is {degree}; write a number that divides by hosts"
    ):
        load_config([write(tmp_path, group)])
    config = load_config([write(tmp_path, "workers: [{role: decode, tensor_parallel: 8, hosts: 2, threads: 8}]\n")])
    assert config.workers[0].local_degree == 4
    assert config.rank_threads("decode-0", 64) == 2


def test_a_missing_file_or_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config([tmp_path / "nowhere.yaml"])
    with pytest.raises(ConfigError, match=r"no preset named 'x'; there are: .*cohort, .*disaggregated, .*unified"):
        load_config(preset="x")


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(preset="unified", overrides={"gateway": {"api_keys": ["a", "env:B"]}})
    assert load_config([write(tmp_path, dump_config(config))]) == config


def test_threads_are_shared_but_two_where_there_are_two() -> None:
    config = load_config(preset="disaggregated")
    assert [config.worker_threads("decode-0", cores) for cores in (1, 2, 4, 16)] == [1, 2, 2, 8]
    gathered = Config()
    assert [gathered.worker_threads("decode-0", cores) for cores in (1, 2, 4, 16)] == [1, 2, 4, 16]
    asked = load_config(overrides={"engine": {"threads": 3}, "workers": [{"role": "prefill", "threads": 5}]})
    assert asked.worker_threads("prefill-0", 2) == 5


def test_dotted_names_reach_options_inside_sections_of_sections() -> None:
    given = {"transfer.ucx.tls": "rc", "ecoserve.padding": 0.5, "kv.block_size": 32}
    config = load_config(overrides=nested(given, "--set"))
    assert (config.transfer.ucx.tls, config.ecoserve.padding, config.kv.block_size) == ("rc", 0.5, 32)
    assert config.transfer.ucx.net_devices == "", "what is not named keeps its default"
    with pytest.raises(ConfigError, match=r"--set kv\.block_size\.x: block_size is not a section"):
        nested({"kv.block_size": 32, "kv.block_size.x": 1}, "--set")
    with pytest.raises(ConfigError, match=r"unknown option 'transfer\.ucx\.tlz'; did you mean tls\?"):
        load_config(overrides={"transfer": {"ucx": {"tlz": "rc"}}})


def test_layers_merge_inside_sections_of_sections(tmp_path: Path) -> None:
    file = write(tmp_path, "transfer: {ucx: {tls: rc, net_devices: eth0}}\n")
    config = load_config([file], overrides={"transfer": {"ucx": {"net_devices": "eth1"}}})
    assert (config.transfer.ucx.tls, config.transfer.ucx.net_devices) == ("rc", "eth1")


INCOMPATIBLE: list[tuple[str, dict[str, object], str, str]] = [
    ("alignedserve", {"waiting_kv": "none"}, "policies.placement late_bound", "policies.waiting_kv aligned"),
    ("alignedserve", {"placement": "disaggregated"}, "policies.waiting_kv aligned", "policies.placement late_bound"),
    ("alignedserve", {"placement": "split"}, "policies.waiting_kv aligned", "policies.placement late_bound"),
    ("dynaserve", {"iteration": "vllm"}, "policies.prefill_order pressure_gate", "policies.iteration slo_batching or"),
    ("bros", {"iteration": "padded_prefill"}, "policies.allocation bidirectional", "policies.iteration padded_prefill"),
]


@pytest.mark.parametrize(("preset", "policies", "one", "other"), INCOMPATIBLE)
def test_policies_that_do_not_go_together_are_refused_by_both_names(
    preset: str, policies: dict[str, object], one: str, other: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{one} (needs|does not go with) {other}"):
        compose.check_names(load_config(preset=preset, overrides={"policies": policies}))


@pytest.mark.parametrize(
    "overrides",
    [
        {"policies": {"placement": "split"}, "workers": [{"role": "prefill"}, {"role": "decode"}]},
        {"policies": {"iteration": "aligned_batching"}},
        {"policies": {"iteration": "time_synced", "allocation": "max"}},
    ],
)
def test_unusual_policies_that_work_together_are_not_refused(overrides: dict[str, object]) -> None:
    compose.check_names(load_config(overrides=overrides))


@pytest.mark.parametrize(
    "interface", ["admission", "placement", "prefill_order", "iteration", "allocation", "waiting_kv"]
)
def test_unknown_policies_are_refused_at_start(interface: str) -> None:
    with pytest.raises(ConfigError, match=rf"policies\.{interface}: no policy named 'magic'; there are: "):
        compose.check_names(load_config(overrides={"policies": {interface: "magic"}}))


@pytest.mark.parametrize(
    "interface", ["admission", "placement", "prefill_order", "iteration", "allocation", "waiting_kv"]
)
@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("absent_policy:build", None, "cannot be imported: ModuleNotFoundError: No module named 'absent_policy'"),
        ("my_policy:build", "1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero"),
        ("my_policy:build", "", "cannot be imported: AttributeError: .*build"),
        ("my_policy:build", "build = 3\n", "build is of type int, not a function"),
        (":build", None, "cannot be imported: ValueError: Empty module name"),
    ],
)
def test_an_import_path_that_names_no_policy_is_refused_at_start(
    interface: str, path: str, source: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / "my_policy.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"^policies\.{interface} {path}: {why}"):
            compose.check_names(load_config(overrides={"policies": {interface: path}}))
    finally:
        sys.modules.pop("my_policy", None)


def test_a_policy_of_an_import_path_is_built_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
from cohort.common.policies.baselines.fcfs import Fcfs
def build(config): return Fcfs(dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens + 1)
"""
    (tmp_path / "my_queue.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(overrides={"policies": {"prefill_order": "my_queue:build"}})
    compose.check_names(config)
    assert type(compose.prefill_order(config)).__name__ == "Fcfs"


def test_off_is_a_word_and_true_a_boolean(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("speculation: {mode: off}\nplanner: {mode: off}\nkv: {prefix_caching: false}\n")
    config = load_config([file])
    assert (config.speculation.mode, config.planner.mode, config.kv.prefix_caching) == ("off", "off", False)
    assert [parse_yaml(text) for text in ("on", "no", "True", "FALSE", "off")] == ["on", "no", True, False, "off"]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "utf16.yaml"
    file.write_bytes("kv.block_size: 16".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"utf16\.yaml: not valid YAML"):
        load_config([file])
