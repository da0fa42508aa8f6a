"""A head that has learned texts by heart, so that its drafts are right now and then; read as a published one is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad, smooth_l1_loss
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class _Head(nn.Module):
    """`fc` over [embedding of the next token ; state], and one decoder layer without a first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(last.weight)  # it begins with `fc` alone
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers, self._rotary = nn.ModuleList([layer]), LlamaRotaryEmbedding(config)

    def forward(self, given: Tensor) -> Tensor:
        both = self.fc(given)
        rotations = self._rotary(both, torch.arange(both.shape[1])[None])
        following: Tensor = self.layers[0](both, position_embeddings=rotations)
        return following


def learn_by_heart(model: Path, folder: Path, texts: Sequence[list[int]]) -> None:
    """The head in `folder`, of the model's shape, gets other weights: the best linear map, then a short training as
    EAGLE's (arXiv 2401.15077, section 4) towards the model's next states and tokens."""
    torch.manual_seed(0)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = LlamaConfig.from_json_file(folder / "config.json")
    config._attn_implementation = "sdpa"
    head, product = _Head(config), loaded.lm_head.weight.detach()
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    learned = torch.arange(1, tokens.shape[1]) < torch.tensor([[len(text)] for text in texts])
    with torch.no_grad():
        states = loaded.model(tokens).last_hidden_state
        given = torch.cat([loaded.model.embed_tokens(tokens[:, 1:]), states[:, :-1]], dim=2)
        wanted = states[:, 1:][learned]
        likely = linear(wanted, product).softmax(dim=1)
        found = torch.linalg.lstsq(pad(given[learned], (0, 1), value=1.0), wanted, driver="gelsd").solution
        head.fc.weight.copy_(found[:-1].t())
        head.fc.bias.copy_(found[-1])
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for _ in range(40):
        said = head(given + 0.1 * (2 * torch.rand_like(given) - 1))[learned]
        optimizer.zero_grad()
        (smooth_l1_loss(said, wanted) + cross_entropy(linear(said, product), likely)).backward()
        optimizer.step()
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
