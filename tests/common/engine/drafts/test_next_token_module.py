"""The module that DeepSeek-V3's checkpoints bring drafts what the published formula says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from cohort.common.config import load_config
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.runner.draft_loading import plan_draft
from cohort.common.errors import ConfigError, ModelError
from tests.common.engine.drafts.test_eagle_head import Served
from tests.common.engine.driver import random_prompts
from tests.engine_models import CONFIGS

CUDA = torch.device("cuda:0")
_OWN = ("enorm", "hnorm", "shared_head.norm")


class Checkpoint:
    """Random, with one module behind the last layer: transformers' model of one layer more, whose last one is the
    module's. It does not read such tensors itself."""

    def __init__(self, folder: Path, vocabulary: int = 0) -> None:
        """`vocabulary`: of another size than the tiny models'."""
        self.folder = folder
        torch.manual_seed(3)
        config = CONFIGS["deepseek3"]()
        config.vocab_size = vocabulary or config.vocab_size
        self.layers = config.num_hidden_layers
        config.num_hidden_layers += 1
        model: Any = DeepseekV3ForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + float(name.endswith("norm.weight")))
        model.save_pretrained(folder)
        hidden, prefix = config.hidden_size, f"model.layers.{self.layers}."
        self.own = {name: 1 + 0.3 * torch.randn(hidden) for name in _OWN} | {
            "eh_proj": 0.2 * torch.randn(hidden, 2 * hidden)
        }
        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {f"{prefix}{name}.weight": tensor for name, tensor in self.own.items()},
            folder / "model.safetensors",
        )
        read = json.loads((folder / "config.json").read_text())
        changed = {"num_hidden_layers": self.layers, "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(read | changed))
        self._model, self._layer, self._eps = model, model.model.layers[self.layers], config.rms_norm_eps
        model.model.layers = model.model.layers[: self.layers]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self._eps) * self.own[name]

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        ids, inner = list(tokens), self._model.model
        states = inner(torch.tensor([ids])).last_hidden_state[0, :-1]
        for _ in range(count):
            embedded = inner.embed_tokens(torch.tensor(ids[1:]))
            both = torch.cat([self._normed(embedded, "enorm"), self._normed(states, "hnorm")], dim=1)
            x = (both @ self.own["eh_proj"].T)[None]
            positions = torch.arange(len(embedded))[None]
            mask = torch.full((len(embedded), len(embedded)), float("-inf")).triu(1)[None, None]
            out = self._layer(
                x, attention_mask=mask, position_ids=positions, position_embeddings=inner.rotary_emb(x, positions)
            )
            after = self._normed(
                (out[0] if isinstance(out, tuple) else out).view(len(embedded), -1), "shared_head.norm"
            )
            states = torch.cat([states, after[-1:]])
            ids.append(int(self._model.lm_head(after[-1]).argmax()))
        return ids[len(tokens) :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("brings-a-module"))


@pytest.mark.parametrize("device_steps", [False, True])
def test_drafts_are_those_of_the_formula(checkpoint: Checkpoint, device_steps: bool) -> None:
    """Also by recorded steps, although no GPU has DeepSeek's form."""
    served = Served(checkpoint.folder, None, device_steps=device_steps)
    served.driver.add("r", random_prompts((30,))[0])
    served.driver.step([("r", 21)])
    served.driver.step([("r", 9)])
    for count in (3, 1, 4):
        tokens = served.driver.requests["r"].tokens
        assert served.drafts("r", count) == checkpoint.drafts(tokens, count)
        served.driver.step([("r", 1)])


def test_what_is_not_there_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = load_config(overrides={"speculation": {"mode": "model"}})
    options: dict[str, Any] = {"dtype": "float32", "device": torch.device("cpu"), "degree": 1}
    read = json.loads((checkpoint.folder / "config.json").read_text())
    for name, edits in (("none", {"num_nextn_predict_layers": 0}), ("lacks", {"num_hidden_layers": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(read | edits))
        (tmp_path / name / "model.safetensors").symlink_to(checkpoint.folder / "model.safetensors")
    with pytest.raises(ConfigError, match="needs the folder of a smaller model"):
        plan_draft(config, tmp_path / "none", read_geometry(tmp_path / "none"), **options)
    with pytest.raises(ModelError, match=r"layers\.2\.enorm\.weight"):
        Served(tmp_path / "lacks", None)
    rounded = load_config(overrides={"speculation": {"mode": "model", "draft_quantization": "int4"}})
    with pytest.raises(ConfigError, match="is served as it is"):
        plan_draft(rounded, checkpoint.folder, read_geometry(checkpoint.folder), **options)
    with pytest.raises(ConfigError, match="by a module on cuda:0: it runs on a processor"):
        plan_draft(config, checkpoint.folder, read_geometry(checkpoint.folder), **(options | {"device": CUDA}))
