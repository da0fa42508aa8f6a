"""Every family and format of checkpoint with a GPU's kernels: tiny models, loaded and recorded as a worker does.

In float32 the tokens are transformers'. In the precision that is served, in which codes stay codes, log-probabilities
of the likeliest tokens lie near those of the dequantised model in float32.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.common.engine.models.test_gpt_oss import mxfp4_folder as mxfp4_folder
from tests.common.engine.test_equality import GENERIC, LEAN
from tests.engine_models import VOCAB, save_random_model
from tests.engine_models import model_folder as model_folder
from tests.examples import another_of_its_kind
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.test_models import check_tokens
from tests.kernels.gpu.test_models import every_kernel as every_kernel
from tests.kernels.gpu.test_presets import agreement
from tests.quantised_models import FORMATS, WIDE_GROUPS, write

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LARGEST = 0.5
"""Error of a log-probability, in standard deviations of its position's logits: weights of these models are no numbers
of bfloat16, and transformers' own error over them is as large."""
MIXTURES = ("mixtral", "moe", "gpt-oss", "deepseek")
LATER = ("gpt-oss", "gemma3-images", "deepseek2", "deepseek2-groups", "deepseek3", "deepseek3-apart")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(transformers.Qwen3Config(**SHAPE), tmp_path_factory.mktemp("qwen3"))


@another_of_its_kind()
@pytest.mark.parametrize("name", [*LEAN, *GENERIC, *LATER])
def test_a_family_gives_transformers_tokens(name: str, model_folder: Callable[[str], Path], every_kernel: None) -> None:
    check_tokens(model_folder(name), "auto")


@another_of_its_kind()
@pytest.mark.skipif(DEVICE.type != "cuda", reason="bfloat16 is served so on a GPU alone")
@pytest.mark.parametrize("name", [*LEAN, *GENERIC, *LATER])
def test_a_family_in_bfloat16(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    _check_near(folder, folder, mixture=any(each in name for each in MIXTURES))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a processor keeps other codes")
@pytest.mark.parametrize("name", [*FORMATS, *WIDE_GROUPS])
def test_a_format_in_bfloat16(name: str, source: Path, tmp_path: Path) -> None:
    if name.startswith("ct-") and importlib.util.find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors writes it")
    written = write(source, tmp_path, name)
    _check_near(written.folder, written.dequantised)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="bfloat16 is served so on a GPU alone")
def test_mxfp4_in_bfloat16(mxfp4_folder: Path) -> None:
    _check_near(mxfp4_folder, mxfp4_folder, mixture=True)


def _check_near(folder: Path, exact: Path, *, mixture: bool = False) -> None:
    """A mixture of random experts may choose others where two are as good: then only its decisions are compared."""
    error, clear, wrong = agreement(folder, exact, vocabulary=VOCAB)
    print(f"error {error:.4f}, {clear} clear decisions, {len(wrong)} others")
    assert 0.0 < error < (math.inf if mixture else LARGEST), (error, clear, wrong)
    assert len(wrong) <= clear // 8, (error, clear, wrong)
