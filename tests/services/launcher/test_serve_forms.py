"""`cohort serve` of every family and format of docs/models.md: tiny checkpoints, transformers' tokens."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.common.engine.driver import count_near_ties, random_prompts, reference_generate
from tests.common.engine.models.test_gpt_oss import mxfp4_folder as mxfp4_folder
from tests.engine_models import CONFIGS, VOCAB, save_random_model
from tests.examples import another_of_its_kind
from tests.gguf_models import add_tokenizer, random_model, write_gguf
from tests.quantised_models import write
from tests.services.gateway.tiny_model import byte_level, write_model
from tests.services.launcher.test_serve import Serve

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, another_of_its_kind()]

FAMILIES = (
    *("llama-bias-llama3", "mistral-window", "phi3", "phi3-longrope", "qwen2-window", "qwen3", "opt", "gpt-neox"),
    *("gemma2", "gemma3", "gemma3-images", "gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek2", "deepseek3"),
)
FORMATS = ("fp8-tensor", "fp8-blocks", "ct-fp8-channel", "ct-int8-channel", "ct-packed-4", "awq", "gptq-4", "gptq-8")
GGUF = ("Q8_0", "Q4_1", "Q6_K")
FLOAT32 = ["--preset", "unified", "--served-name", "served", "--set", "model.dtype=float32"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """`served(folder, *options)`: a pipeline that is ready."""
    started: list[Serve] = []

    def start(model: Path, *options: str) -> Serve:
        cache = tmp_path / "cache"
        cache.mkdir(exist_ok=True)
        serve = Serve(cache, model)
        started.append(serve)
        done = serve("--detach", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return serve

    yield start
    for serve in started:
        if (state := serve.files.state()) is not None:
            state.launcher.send(signal.SIGKILL)
            for mark in state.processes.values():
                mark.wait_ended(10.0)


def _with_tokenizer(folder: Path, scratch: Path) -> Path:
    outside = write_model(scratch / "outside", byte_level())
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((outside / file).read_bytes())
    return folder


def _model(name: str, scratch: Path) -> Path:
    """Tiny and random, with a row for each of the tokenizer's tokens."""
    config = CONFIGS[name]()
    text: Any = config.get_text_config()
    text.vocab_size = max(VOCAB, byte_level().get_vocab_size())
    return _with_tokenizer(save_random_model(config, scratch / name), scratch)


def _check(serve: Serve, reference: Path) -> None:
    for expected in reference_generate(reference, random_prompts((9, 30)), 8):
        answer = serve.answer(prompt=expected.prompt, max_tokens=8, ignore_eos=True, return_token_ids=True)
        assert count_near_ties(expected, answer["cohort"]["requests"][0]["token_ids"]) == 0
    assert serve("--stop").returncode == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, served: Callable[..., Serve], tmp_path: Path) -> None:
    assert name in CONFIGS
    folder = _model(name, tmp_path)
    _check(served(folder, *FLOAT32), folder)


def test_experts_in_mxfp4(mxfp4_folder: Path, served: Callable[..., Serve], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in mxfp4_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    _check(served(_with_tokenizer(folder, tmp_path), *FLOAT32), mxfp4_folder)


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_format(form: str, served: Callable[..., Serve], tmp_path: Path) -> None:
    written = write(_model("qwen3", tmp_path), tmp_path, form)
    _check(served(_with_tokenizer(written.folder, tmp_path), *FLOAT32), written.dequantised)


@pytest.mark.parametrize(
    "options", [("--kv-cache-dtype", "fp8"), ("--quantization", "int8"), ("--quantization", "int4")]
)
def test_what_rounds_keys_or_weights_answers(
    options: tuple[str, str], served: Callable[..., Serve], tmp_path: Path
) -> None:
    """How far it is off is measured elsewhere."""
    serve = served(_model("qwen3", tmp_path), "--preset", "unified", "--served-name", "served", *options)
    _check_some(serve)


@pytest.mark.parametrize("kind", GGUF)
def test_a_gguf_file(kind: str, served: Callable[..., Serve], tmp_path: Path) -> None:
    file = write_gguf(random_model("qwen2"), tmp_path / f"{kind}.gguf", kind, extra=add_tokenizer)
    _check_some(served(file, "--preset", "unified", "--served-name", "served"))


def _check_some(serve: Serve) -> None:
    wanted = {"prompt": random_prompts((20,))[0], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    first, again = (serve.answer(**wanted)["cohort"]["requests"][0]["token_ids"] for _ in range(2))
    assert len(first) == 8 and first == again
    assert serve("--stop").returncode == 0
