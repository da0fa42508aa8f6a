"""`cohort serve` on boxes that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cohort.common.config import Config, load_config
from cohort.common.devices import host_memory
from cohort.common.devices.inventory import Gpu
from cohort.common.errors import ConfigError
from cohort.services.cli.__main__ import main as cohort
from cohort.services.launcher.box import on_box, summary
from cohort.services.launcher.plan import StopStage, plan, resolve
from tests.common.devices.fakes import GIB, fake_driver, gpus
from tests.common.devices.test_fit import shard

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The outside of an 8B model: its configuration, and headers of weights that are not there, all of which divide."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shard(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("BF16", [8_030_261_248])})
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def served(config: Config, cards: list[Gpu], model: Path, *, workers_given: bool = False) -> Config:
    return on_box(config, cards, workers_given=workers_given, model=model)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_default_preset_has_a_worker_for_everything_on_each_gpu(model: Path, count: int) -> None:
    config = served(load_config(preset="cohort"), gpus(count), model)
    assert config.engine.device == "cuda" and config.engine.workers_per_gpu == 1
    settled = resolve(config, model=model, cores=64, free_port=lambda: 1)
    workers = [process for process in plan(settled, 64) if process.stage is StopStage.WORKERS]
    assert [worker.instance for worker in workers] == [f"unified-{number}" for number in range(count)]
    assert f"{count} x unified, 1 per GPU" in summary(config, gpus(count))


def test_a_model_too_large_for_a_gpu_is_divided_over_as_many_as_it_takes(model: Path) -> None:
    auto = [{"role": "prefill", "tensor_parallel": "auto"}, {"role": "decode", "tensor_parallel": "auto"}]
    config = load_config(preset="disaggregated", overrides={"workers": auto})
    cards = gpus(4, 16, "NVIDIA T4")
    found = served(config, cards, model)
    assert [(group.role.value, group.count, group.tensor_parallel) for group in found.workers] == [
        ("prefill", 1, 2),
        ("decode", 1, 2),
    ]
    assert found.engine.workers_per_gpu == 1
    assert "1 x prefill of 2 GPUs, 1 x decode of 2 GPUs, 1 per GPU" in summary(found, cards)
    assert [group.tensor_parallel for group in served(config, gpus(4), model).workers] == [1, 1]
    assert [group.tensor_parallel for group in served(config, [], model).workers] == [1, 1]


def test_a_degree_that_the_heads_do_not_divide_by_is_refused_before_anything_starts(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    groups = tmp_path / "groups.yaml"
    groups.write_text(yaml.safe_dump({"workers": [{"role": "unified", "tensor_parallel": 3}]}))
    assert cohort(["serve", "--model", str(model), "--config", str(groups), "--preset", "unified"]) == 2
    said = capsys.readouterr().err
    assert "tensor_parallel: 3: llama-8b: 32 query heads do not divide by 3; degrees for this model: 1, 2, 4" in said


def test_a_file_that_names_workers_is_kept(model: Path) -> None:
    config = served(load_config(preset="cohort"), gpus(1), model, workers_given=True)
    assert list(config.instance_roles) == ["prefill-0", "decode-0"]
    assert config.engine.workers_per_gpu == 2  # named for both: they divide the GPU alike


def test_nothing_changes_without_a_gpu(model: Path) -> None:
    config = load_config(preset="cohort")
    assert served(config, [], model) == config
    assert summary(config, []) == ""
    cpu = load_config(preset="cohort", overrides={"engine": {"device": "cpu"}})
    assert served(cpu, gpus(8), model) == cpu


def test_a_model_that_fits_no_gpu_is_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match="llama-8b does not fit NVIDIA T4"):
        served(load_config(), gpus(4, 16, "NVIDIA T4"), model)
    with pytest.raises(ConfigError, match="one worker per GPU instead of 2"):
        served(load_config(preset="disaggregated"), gpus(1, 24, "NVIDIA L4"), model)
    assert len(served(load_config(preset="disaggregated"), gpus(2, 24, "NVIDIA L4"), model).instance_roles) == 2


def test_a_box_of_different_gpus_uses_those_that_the_model_fits(model: Path) -> None:
    mixed = [*gpus(2, 80), Gpu("GPU-small", "NVIDIA T4", 16 * GIB)]
    assert len(served(load_config(), mixed, model).instance_roles) == 2


def test_print_config_shows_what_would_be_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_driver(tmp_path, monkeypatch, gpus(8, 141, "NVIDIA H200"))
    command = ["serve", "--model", str(model), "--preset", "disaggregated", "--print-config"]
    assert cohort([*command, "--set", "engine.max_rows=77"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert [(group["role"], group["count"]) for group in shown["workers"]] == [("prefill", 4), ("decode", 4)]
    engine = shown["engine"]
    assert (engine["device"], engine["max_step_tokens"], engine["max_rows"]) == ("cuda", 8192, 77)
    assert cohort([*command, "--set", "engine.device=cpu"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["engine"]["max_step_tokens"] == 2048 and [group["count"] for group in shown["workers"]] == [1, 1]


def test_auto_on_the_command_line_divides_like_the_default(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_driver(tmp_path, monkeypatch, gpus(3))
    command = ["serve", "--model", str(model), "--preset", "disaggregated", "--print-config"]
    shown = []
    for more in ([], ["--set", "workers=auto"]):
        assert cohort([*command, *more]) == 0
        shown.append(yaml.safe_load(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert [group["count"] for group in shown[0]["workers"]] == [1, 2]
    kept = tmp_path / "kept.yaml"
    kept.write_text(yaml.safe_dump(shown[0]))  # what was printed is a configuration, and says the same again
    assert cohort([*command, "--config", str(kept)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == shown[0]


def test_hidden_gpus_leave_the_processor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_driver(tmp_path, monkeypatch, gpus(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cohort(["serve", "--model", str(model), "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["engine"]["device"] == "auto" and shown["engine"]["max_step_tokens"] == 2048


def test_a_wrong_setting_is_refused_before_anything_starts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cohort(["serve", "--model", str(model), "--set", "experiment.bros.drosp=false", "--print-config"]) == 2
    assert "unknown setting 'experiment.bros.drosp'; did you mean drops?" in capsys.readouterr().err


def test_a_host_too_small_for_all_workers_refuses_before_any_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_driver(tmp_path, monkeypatch, [])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(host_memory, "computes_bfloat16", lambda: True)
    assert cohort(["serve", "--model", str(model), "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert "llama-8b does not fit this host: each of its 2 workers needs 15.0 GiB for weights" in told
    assert "20.0 GiB are available" in told and "1 of the 2 workers (--preset unified has one)" in told


def test_a_checkpoint_that_is_not_what_was_asked_for_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_driver(tmp_path, monkeypatch, [])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    assert cohort(["serve", "--model", str(model), "--port", "0", "--quantization", "awq"]) == 2
    assert "awq, but config.json of llama-8b says that its weights are plain" in capsys.readouterr().err
