"""What a GGUF file becomes: configuration, tokenizer, and a folder in the cache. `test_serve.py` serves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import ModelError
from cohort.services.launcher import preflight
from cohort.services.launcher.models.gguf_folder import (
    generation_config,
    gguf_file,
    make_folder,
    model_config,
    served_folder,
)
from tests.gguf_models import CONFIGS, VOCABULARY, add_tokenizer, random_model, write_gguf

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
    "llama.rope.freq_base": 50000.0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}
TENSORS = {"token_embd.weight": [99, 64]}


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_configuration_is_the_model_s(arch: str, tmp_path: Path) -> None:
    """Geometry as read from the folder around the file, and from the one that transformers saves."""
    model = random_model(arch)
    file = write_gguf(model, tmp_path / "x.gguf", "Q8_0", extra=add_tokenizer)
    make_folder(file, tmp_path / "made")
    model.save_pretrained(tmp_path / "saved")
    made, saved = read_geometry(tmp_path / "made"), read_geometry(tmp_path / "saved")
    for name in made.__dataclass_fields__:
        if name != "checkpoint_dtype":
            assert getattr(made, name) == pytest.approx(getattr(saved, name)), name
    preflight.check_model(tmp_path / "made")


def test_the_tokenizer_of_the_metadata(tmp_path: Path) -> None:
    file = write_gguf(random_model("llama"), tmp_path / "x.gguf", "Q8_0", extra=add_tokenizer)
    make_folder(file, tmp_path / "made")
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    text = "the sea, Wörld <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[-1] == 2
    assert max(ids) < VOCABULARY
    assert len(ids) < len(text.encode())  # pairs are merged
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    file = write_gguf(random_model("llama"), tmp_path / "x.gguf", "Q8_0", extra=add_tokenizer)
    (tmp_path / "tokenizer.json").write_text('{"mine": 1}')
    make_folder(file, tmp_path / "made")
    assert (tmp_path / "made" / "tokenizer.json").read_text() == '{"mine": 1}'


def test_without_any_tokenizer_the_error_says_what_to_do(tmp_path: Path) -> None:
    file = write_gguf(random_model("llama"), tmp_path / "x.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"put the model's tokenizer\.json"):
        make_folder(file, tmp_path / "made")
    assert not list(tmp_path.glob("*made*"))


def test_plain_metadata() -> None:
    config = model_config(FIELDS, TENSORS)
    assert (config["model_type"], config["vocab_size"], config["head_dim"]) == ("llama", 99, 16)
    assert config["tie_word_embeddings"]
    assert not config["attention_bias"]
    assert "rope_scaling" not in config
    assert generation_config(FIELDS) == {"eos_token_id": [2, 7]}


def test_rotary_frequencies_with_factors_of_their_own() -> None:
    """Llama 3.1's files: the frequencies are divided by them, whatever a request's length."""
    scaling = model_config(FIELDS, TENSORS, [1.0, 2.0, 8.0])["rope_scaling"]
    assert scaling["short_factor"] == [1.0, 2.0, 8.0]
    assert scaling["attention_factor"] == 1.0
    assert scaling["original_max_position_embeddings"] == 512
    yarn = {**FIELDS, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert model_config(yarn, TENSORS)["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"general.architecture": "gemma3"}, r"architecture 'gemma3' are not served; served are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.context_length": None}, r"lacks llama\.context_length"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not served"),
        ({"llama.rope.dimension_count": 8}, "differ in size"),
    ],
)
def test_what_is_not_served_is_named(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        model_config({**FIELDS, **changed}, TENSORS)


def test_the_file_that_is_meant(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    first = tmp_path / "a.gguf"
    first.touch()
    assert gguf_file(first) == gguf_file(tmp_path) == first
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) is None
    assert served_folder(tmp_path) == tmp_path


def test_the_folder_is_made_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(random_model("qwen2"), tmp_path / "tiny.Q8_0.gguf", "Q8_0", extra=add_tokenizer)
    folder = served_folder(file)
    assert folder.name == "tiny.Q8_0"
    assert folder.is_relative_to(tmp_path / "cache" / "gguf")
    assert (folder / "model.gguf").resolve() == file
    made_ns = folder.stat().st_mtime_ns
    assert served_folder(tmp_path) == folder  # the folder that holds the file
    assert folder.stat().st_mtime_ns == made_ns
    damaged = tmp_path / "other" / "x.gguf"
    damaged.parent.mkdir()
    damaged.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"x\.gguf: not a complete GGUF file"):
        served_folder(damaged)
