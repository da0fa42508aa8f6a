from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from cohort.common.config import Config, GatewayConfig, KvConfig, MetricsConfig, ModelConfig, MonitorConfig
from cohort.common.errors import ConfigError, ModelError
from cohort.common.http import ports
from cohort.services.launcher import preflight
from cohort.services.launcher.plan import plan
from tests.common.devices.test_fit import shard

SHAPE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    shard(folder / "model.safetensors", {"w": ("F32", [2, 2])})
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def test_a_model_folder_passes(tmp_path: Path):
    preflight.check_model(model_folder(tmp_path))
    tags = "{%- generation %}x{% endgeneration -%}"
    (tmp_path / "chat_template.jinja").write_text(f"{{% for m in messages %}}{tags}{{% endfor %}}")
    preflight.check_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        (
            "config.json",
            json.dumps({"model_type": "frobnicator", "hidden_size": 64}),
            "models of type frobnicator.*; serve",
        ),
        ("config.json", json.dumps({"model_type": "t5", "is_encoder_decoder": True}), "encoder-decoder; only decoders"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vo', "no tokenizer can be read.*; fetch the model again"),
        ("tokenizer.json", "{}", "no tokenizer can be read.*; fetch the model again"),
        ("chat_template.jinja", "{% for m in messages %}", "no chat template.*; mend it, or remove it"),
        ("model.safetensors", "", "model.safetensors is cut off or damaged.*; fetch the model again"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "other.safetensors"}}',
            "other.safetensors is missing; fetch",
        ),
    ],
)
def test_what_a_process_would_only_find_later_is_refused_in_one_sentence(
    tmp_path: Path, file: str, content: str, complaint: str
):
    (model_folder(tmp_path) / file).write_text(content)
    with pytest.raises(ModelError, match=complaint) as refused:
        preflight.check_model(tmp_path)
    assert "\n" not in str(refused.value)


def test_kv_beyond_the_memory_is_refused_at_once(tmp_path: Path):
    config = Config(kv=KvConfig(memory_bytes=900 * 10**9))
    with pytest.raises(ConfigError, match=r"2 workers want 1\d{3}\.\d GiB for weights and KV, .* available; --set kv"):
        preflight.check(config, model_folder(tmp_path))


@pytest.mark.parametrize(
    ("removed", "complaint"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_a_missing_part_is_named(tmp_path: Path, removed: str, complaint: str):
    (model_folder(tmp_path) / removed).unlink()
    with pytest.raises(ModelError, match=complaint):
        preflight.check_model(tmp_path)


def test_a_folder_that_is_not_there_and_a_gguf_file(tmp_path: Path):
    with pytest.raises(ModelError, match="no such folder"):
        preflight.check_model(tmp_path / "absent")
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    with pytest.raises(ModelError, match=r"gguf_folder .*x\.gguf"):
        preflight.check_model(gguf)


def config_on(block: int) -> Config:
    return Config(
        gateway=GatewayConfig(port=block),
        monitor=MonitorConfig(port=block + 1),
        metrics=MetricsConfig(base_port=block + 10),
    )


def test_free_ports_pass_and_a_taken_one_is_named_with_its_owner():
    block = ports.free_port()
    plans = plan(config_on(block))
    preflight.check_ports(plans)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", block + 11))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"manager: port {block + 11} .* taken .*metrics\.base_port"):
            preflight.check_ports(plans)


def test_one_port_for_two_is_an_error():
    with pytest.raises(ConfigError, match="meant for both gateway and monitor"):
        preflight.check_ports(plan(Config(gateway=GatewayConfig(port=8001))))


def test_an_address_of_another_machine():
    assert "cannot listen on 192.0.2.1:1" in ports.port_problem("192.0.2.1", 18_000)


def test_the_open_file_limit_is_raised_within_the_hard_one():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        preflight.raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65_536, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_adapter_that_no_worker_would_serve_is_named(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9, **shape}))
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "use_dora": True}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))

    def config(name: str) -> Config:
        return Config(model=ModelConfig(path=str(base), lora={name: str(tmp_path / "adapter")}))

    with pytest.raises(ModelError, match=r"adapter_config\.json: use_dora"):
        preflight.check_adapters(config("sql"), base)
    with pytest.raises(ModelError, match="'base' is the base model's name"):
        preflight.check_adapters(config("base"), base)
    preflight.check_adapters(Config(model=ModelConfig(path=str(base))), base)
