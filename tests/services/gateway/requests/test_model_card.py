from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.common.config import ModelConfig
from cohort.common.errors import ModelError
from cohort.services.gateway.requests.model_card import ModelCard, SamplingDefaults, read_model_card


def folder(path: Path, config: dict[str, Any] | None, generation: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def card(path: Path, **options: Any) -> ModelCard:
    return read_model_card(ModelConfig(path=str(path), **options))


BASE = {"max_position_embeddings": 64, "vocab_size": 10, "eos_token_id": 2}


def test_a_card_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", BASE)
    assert card(path) == ModelCard("m", path, 64, 10, (2,))
    assert card(path, served_name="big").names == {"big", str(path)}
    assert card(path, max_model_len=32).max_model_len == 32


def test_the_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    assert card(folder(tmp_path / "m", BASE, {"eos_token_id": [7, 5]})).eos_token_ids == (5, 7)
    assert card(folder(tmp_path / "m", BASE, {"temperature": 1})).eos_token_ids == (2,)


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    named = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 33}
    path = folder(tmp_path / "m", BASE, {"do_sample": False, **named})
    assert card(path).sampling == SamplingDefaults(0.7, 0.8, 20, 0.0, 1.05, 33)
    assert card(path, sampling_defaults="neutral").sampling == SamplingDefaults()


def test_the_default_model_has_what_its_authors_recommend(tmp_path: Path) -> None:
    silent = folder(tmp_path / "SmolLM2-135M-Instruct", BASE, {"eos_token_id": 2})
    assert card(silent).sampling == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert card(silent, sampling_defaults="neutral").sampling == SamplingDefaults()
    named = folder(tmp_path / "SmolLM2-135M-Instruct", BASE, {"temperature": 0.5})
    assert card(named).sampling == SamplingDefaults(temperature=0.5)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"min_p": True}])
def test_a_default_that_no_request_may_ask_for_ends_the_start(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(bad))} .*sampling_defaults=neutral"):
        card(folder(tmp_path / "m", BASE, bad))


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    assert card(folder(tmp_path / "m", {"text_config": BASE, "max_position_embeddings": 9})).max_model_len == 64


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, {}, "no config.json"),
        ({"vocab_size": 3}, {}, "model.max_model_len"),
        ({"max_position_embeddings": 3}, {}, "vocab_size"),
        (BASE, {"max_model_len": 65}, "allows 64"),
    ],
)
def test_a_missing_part_is_named(
    tmp_path: Path, config: dict[str, Any] | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        card(folder(tmp_path / "m", config), **options)


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", BASE)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        card(path)
