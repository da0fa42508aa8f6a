"""A head in plain torch: its forward, its training as EAGLE's authors describe it, and how often it is right.

Li et al., EAGLE (arXiv 2401.15077), section 4: smooth L1 between the head's state and the model's next one, and 0.1
times the cross entropy between the distributions that the model's last product makes of both; AdamW with betas of 0.9
and 0.95; noise of ±0.1 on the states that go in. Differs from the paper: the learning rate is that of a small head and
a short run, which begins with the best linear map instead of a random one; the cross entropy may be taken over the most
frequent tokens alone (Zhao et al., FR-Spec, arXiv 2502.14856), which the head then drafts from. Called by `command`.
Served, `common/engine/drafts/eagle_head.py` computes the same forward.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from cohort.common.errors import ConfigError
from cohort.services.bench.heads.collecting import Text

DEPTH = 4
_FROM_MODEL = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
_LOGITS_AT_ONCE = 1 << 22
"""Of a step, for the cross entropy: it is taken at a sample of positions."""
_WARM_UP = 0.05
_RIDGE = 1e-3
_CUTS, _JUDGED = 4, 16
"""Places of a text behind which drafts are judged, and texts."""


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` bound the training, however many `epochs` are left."""

    epochs: int = 8
    minutes: float = 10.0
    rows: int = 8
    rate: float = 1e-3
    noise: float = 0.1
    cross_entropy: float = 0.1
    bfloat16: bool = False
    seed: int = 0


class Head(nn.Module):
    """`fc` over [embedding of the next token ; state], and one decoder layer without a first norm."""

    def __init__(self, model: Path) -> None:
        """Of the shape of the model in this folder."""
        super().__init__()
        read = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.config = {name: read[name] for name in _FROM_MODEL if read.get(name) is not None}
        shape: Any = LlamaConfig(**{**self.config, "num_hidden_layers": 1, "attn_implementation": "sdpa"})
        layer: Any = LlamaDecoderLayer(shape, 0)
        layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([layer])
        self._rotary = LlamaRotaryEmbedding(shape)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The states that follow [B, n, hidden]: of the embeddings of tokens 1 … n, and the states at 0 … n - 1."""
        both = self.fc(torch.cat([embedded, states], dim=2))
        rotations = self._rotary(both, torch.arange(both.shape[1])[None])
        following: Tensor = self.layers[0](both, position_embeddings=rotations)
        return following

    def read(self, folder: Path) -> None:
        """The weights in this folder. Raises `ConfigError`."""
        try:
            own = {
                name: tensor
                for name, tensor in load_file(folder / "model.safetensors").items()
                if name in self.state_dict()
            }
            self.load_state_dict(own)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{folder}: no head to go on from ({error})") from error

    def write(self, folder: Path, drafted: tuple[Tensor, Tensor] | None = None) -> None:
        """As `speculation.draft_model` takes it. `drafted`: the tokens it drafts from, in ascending order, and their
        rows of the last product; None = all, by the model's."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        config = {
            "architectures": ["LlamaForCausalLMEagle"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self.config,
        }
        if drafted is not None:
            tokens, rows = drafted
            tensors |= {
                "d2t": tokens - torch.arange(len(tokens)),
                "lm_head.weight": rows.to(torch.bfloat16).contiguous(),
            }
            config["draft_vocab_size"] = len(tokens)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def frequent(texts: Sequence[Text], count: int, always: Sequence[int], vocabulary: int) -> Tensor:
    """The `count` tokens that are learned from most often, `always` among them, in ascending order; of those that never
    occur the first, since a vocabulary that was merged pair by pair has frequent ones first."""
    said = torch.cat([text.tokens[text.begins :] for text in texts])
    counts = torch.bincount(said, minlength=vocabulary)
    counts[list(always)] = len(said) + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


@torch.no_grad()
def begin(head: Head, embedding: Tensor, texts: Sequence[Text]) -> None:
    """`fc` as the least squares of the next states, the layer adding nothing: in seconds what many steps come to."""
    inputs, hidden = head.fc.in_features + 1, head.fc.out_features
    both, wanted = torch.zeros(inputs, inputs), torch.zeros(inputs, hidden)
    for text in texts:
        given = torch.cat([embedding[text.tokens[1:]], text.states[:-1]], dim=1)[max(0, text.begins - 2) :].float()
        given = torch.cat([given, torch.ones(len(given), 1)], dim=1)
        both += given.t() @ given
        wanted += given.t() @ text.states[len(text.states) - len(given) :].float()
    both += torch.diag(_RIDGE * (both.diagonal() + 1))
    solved = torch.linalg.solve(both.double(), wanted.double()).float()
    head.fc.weight.copy_(solved[:-1].t())
    head.fc.bias.copy_(solved[-1])
    layer: Any = head.layers[0]
    for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
        last.weight.zero_()


def train(
    head: Head, embedding: Tensor, product: Tensor, texts: Sequence[Text], options: Options, say: Callable[[str], None]
) -> list[float]:
    """The loss of each step. `embedding` [vocabulary, hidden], `product` [tokens, hidden]: the model's own, of the
    tokens that are drafted."""
    chance = random.Random(options.seed)
    torch.manual_seed(options.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95))
    steps, losses, began_s, said_s = (
        options.epochs * -(-len(texts) // options.rows),
        list[float](),
        time.monotonic(),
        0.0,
    )
    for _ in range(options.epochs):
        for batch in _batches(texts, options.rows, chance):
            passed_s = time.monotonic() - began_s
            done = max(len(losses) / steps, passed_s / (60 * options.minutes))
            if done >= 1:
                return losses
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1.0, (len(losses) + 1) / (_WARM_UP * steps)) * (1 - done)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
                state, tokens, right = _losses(head, embedding, product, batch, options.noise)
                loss = state + options.cross_entropy * tokens
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
            if passed_s - said_s > 10 or len(losses) in (1, steps):
                said_s = passed_s
                say(
                    f"step {len(losses)} of {steps}, {passed_s:.0f} s: states {state.item():.4f}, "
                    f"tokens {tokens.item():.3f}, {right:.0%} right"
                )
    return losses


def _batches(texts: Sequence[Text], rows: int, chance: random.Random) -> Iterator[list[Text]]:
    """Each text once, in rows of about the same length, in any order."""
    order = sorted(texts, key=lambda text: len(text.tokens) * chance.uniform(0.9, 1.1))
    firsts = list(range(0, len(order), rows))
    chance.shuffle(firsts)
    for first in firsts:
        yield order[first : first + rows]


def _losses(
    head: Head, embedding: Tensor, product: Tensor, batch: Sequence[Text], noise: float
) -> tuple[Tensor, Tensor, float]:
    """Smooth L1 of the states, the distributions' cross entropy, and how often both let the same token win."""
    tokens = nn.utils.rnn.pad_sequence([text.tokens for text in batch], batch_first=True)
    states = nn.utils.rnn.pad_sequence([text.states for text in batch], batch_first=True).float()
    places = torch.arange(1, tokens.shape[1])
    lengths, begins = (
        torch.tensor(each)[:, None] for each in zip(*[(len(t.tokens), t.begins) for t in batch], strict=True)
    )
    learned = (places < lengths) & (places >= begins - 1)  # the state there says the token behind
    given = states[:, :-1] + noise * (2 * torch.rand_like(states[:, :-1]) - 1)
    said, wanted = head(embedding[tokens[:, 1:]].float(), given)[learned], states[:, 1:][learned]
    state = functional.smooth_l1_loss(said.float(), wanted)
    most = _LOGITS_AT_ONCE // len(product)
    if len(said) > most:
        sample = torch.randperm(len(said))[:most]
        said, wanted = said[sample], wanted[sample]
    logits = functional.linear(said, product.to(said.dtype))
    with torch.no_grad():
        target = functional.linear(wanted.to(said.dtype), product.to(said.dtype)).float().softmax(dim=1)
    right = (logits.argmax(dim=1) == target.argmax(dim=1)).float().mean().item()
    return state, functional.cross_entropy(logits.float(), target), right


@torch.no_grad()
def drafts(head: Head, embedding: Tensor, product: Tensor, drafted: Tensor, text: Text, known: Sequence[int]) -> Tensor:
    """[cuts, DEPTH] what the head drafts behind the first so many tokens of a text, for each of `known`, greedily."""
    longest = max(known) + DEPTH - 1
    tokens, states = text.tokens[:longest].repeat(len(known), 1), text.states[:longest].float().repeat(len(known), 1, 1)
    if (lacking := longest - tokens.shape[1]) > 0:
        tokens, states = functional.pad(tokens, (0, lacking)), functional.pad(states, (0, 0, 0, lacking))
    rows, ends, found = torch.arange(len(known)), torch.tensor(known) - 2, list[Tensor]()
    for depth in range(DEPTH):
        said = head(embedding[tokens[:, 1:]].float(), states[:, :-1])[rows, ends + depth].float()
        found.append(drafted[functional.linear(said, product.float()).argmax(dim=1)])
        if depth + 1 < DEPTH:
            states[rows, ends + depth + 1], tokens[rows, ends + depth + 2] = said, found[-1]
    return torch.stack(found, dim=1)


def judge(head: Head, embedding: Tensor, product: Tensor, drafted: Tensor, texts: Sequence[Text]) -> list[float]:
    """By depth, the share of drafts that are the text's own tokens where those before them are."""
    tried, right = torch.zeros(DEPTH), torch.zeros(DEPTH)
    for text in texts[:_JUDGED]:
        first, last = text.begins + 2, len(text.tokens) - DEPTH
        known = sorted({first + (last - first) * cut // _CUTS for cut in range(_CUTS)}) if last >= first else []
        if not known:
            continue
        came = torch.stack([text.tokens[each : each + DEPTH] for each in known])
        equal = (drafts(head, embedding, product, drafted, text, known) == came).long().cumprod(dim=1).float()
        right += equal.sum(dim=0)
        tried += torch.cat([torch.ones(len(known), 1), equal[:, :-1]], dim=1).sum(dim=0)
    return (right / tried.clamp(min=1)).tolist()
