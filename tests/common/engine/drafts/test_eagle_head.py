"""A head drafts what the published formula says, from the model's own states, as far as they are there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cohort.common.config import load_config
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.drafts.batch_drafts import DraftRow
from cohort.common.engine.drafts.states_drafter import StatesDrafter
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.step.batch import GREEDY, SamplingRow
from cohort.common.errors import ConfigError, ModelError
from tests.common.engine.driver import VOCAB, Driver, make_runner, random_prompts
from tests.engine_models import BLOCK_SIZE

ModelFolder = Callable[[str], Path]
HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 48, 6, 2, 16, 64
NUMBER = 7


def head_folder(folder: Path, *, bias: bool = True, prefix: str = "", model: Path | None = None, **edits: Any) -> Path:
    """A random checkpoint in the published format, for the tiny Llama, or for the one in `model`."""
    folder.mkdir(exist_ok=True)
    shape = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
    }
    if model is not None:
        read = json.loads((model / "config.json").read_text())
        shape = {"head_dim": read["hidden_size"] // read["num_attention_heads"]} | {
            name: read[name] for name in shape if read.get(name)
        }
    hidden, size, inner = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    chance = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance) * 0.2

    layer = f"{prefix}layers.0."
    tensors = {
        f"{prefix}fc.weight": drawn(hidden, 2 * hidden),
        f"{prefix}embed_tokens.weight": drawn(shape["vocab_size"], hidden),  # the model's is read
        f"{layer}self_attn.q_proj.weight": drawn(heads * size, hidden),
        f"{layer}self_attn.k_proj.weight": drawn(kv_heads * size, hidden),
        f"{layer}self_attn.v_proj.weight": drawn(kv_heads * size, hidden),
        f"{layer}self_attn.o_proj.weight": drawn(hidden, heads * size),
        f"{layer}mlp.gate_proj.weight": drawn(inner, hidden),
        f"{layer}mlp.up_proj.weight": drawn(inner, hidden),
        f"{layer}mlp.down_proj.weight": drawn(hidden, inner),
        f"{layer}post_attention_layernorm.weight": 1 + drawn(hidden),
    }
    if bias:
        tensors[f"{prefix}fc.bias"] = drawn(hidden)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **shape,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config | edits))
    return folder


class Reference:
    """The formula over a whole text, with nothing kept: float32, no cache."""

    def __init__(self, model: Path, head: Path, prefix: str = "") -> None:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = loaded.eval()
        self._read = {
            name.removeprefix(prefix): tensor for name, tensor in load_file(head / "model.safetensors").items()
        }

    @torch.no_grad()
    def drafts(
        self, tokens: Sequence[int], count: int, begins: int = 0, among: Sequence[int] = range(VOCAB)
    ) -> list[int]:
        """Greedy ones of these tokens, of a head that attends from position `begins` on."""
        ids = list(tokens)
        states = self._model.model(torch.tensor([ids])).last_hidden_state[0, begins:-1]
        for _ in range(count):
            embedded = self._model.model.embed_tokens(torch.tensor(ids[begins + 1 :]))
            after = self._layer(torch.cat([embedded, states], dim=1), begins)
            states = torch.cat([states, after[-1:]])
            ids.append(among[int(self._model.lm_head(after[-1])[list(among)].argmax())])
        return ids[len(tokens) :]

    def _layer(self, both: Tensor, begins: int) -> Tensor:
        read = self._read
        x = torch.nn.functional.linear(both, read["fc.weight"], read.get("fc.bias"))
        positions = torch.arange(begins, begins + len(x)).float()

        def rotated(name: str) -> Tensor:
            heads = (x @ read[f"layers.0.self_attn.{name}.weight"].T).view(len(x), -1, SIZE).transpose(0, 1)
            angles = positions[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
            first, second = heads.chunk(2, dim=2)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

        query, key = rotated("q_proj"), rotated("k_proj").repeat_interleave(HEADS // KV_HEADS, dim=0)
        value = (x @ read["layers.0.self_attn.v_proj.weight"].T).view(len(x), -1, SIZE).transpose(0, 1)
        value = value.repeat_interleave(HEADS // KV_HEADS, dim=0)
        scores = query @ key.transpose(1, 2) / SIZE**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf")).softmax(dim=2)
        x = x + (scores @ value).transpose(0, 1).reshape(len(x), -1) @ read["layers.0.self_attn.o_proj.weight"].T
        normed = x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + 1e-6)
        normed = normed * read["layers.0.post_attention_layernorm.weight"]
        gate = torch.nn.functional.silu(normed @ read["layers.0.mlp.gate_proj.weight"].T)
        return x + (gate * (normed @ read["layers.0.mlp.up_proj.weight"].T)) @ read["layers.0.mlp.down_proj.weight"].T


class Served:
    """The tiny Llama with a head, and one sequence in blocks that alternate in direction."""

    def __init__(
        self, model: Path, head: Path, *, reverse: bool = True, device_steps: bool = False, **options: Any
    ) -> None:
        """`device_steps`: of model and head, recorded, over standing
        buffers and sampled by the batch, as on a GPU. `options`: of the runner."""
        runner = make_runner(model, device_steps=device_steps, share=DeviceShare(graphs=1 << 40), **options)
        config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(head)}})
        planned = plan_draft(config, model, runner.geometry, dtype="float32", device=runner.device, degree=1)
        assert planned is not None and planned.head
        planned = dataclasses.replace(planned, block_size=BLOCK_SIZE, graph_bytes=1 << 40)
        drafter = load_draft(planned, config, runner)
        assert isinstance(drafter, StatesDrafter)
        self.runner, self.head, runner.drafter = runner, drafter, drafter
        if device_steps:
            runner.warm_up()
            steps: Any = drafter._steps
            assert steps.decode.classes == (1, 2, 4, 8) and steps.mixed.classes and runner.captured_batch_sizes
        self.driver = Driver(runner, shuffle=3, reverse=reverse)
        batch = self.driver.batch

        def numbered(plan: Any) -> Any:
            made = batch(plan)
            object.__setattr__(made, "numbers", torch.tensor([NUMBER] * made.num_rows).numpy())
            return made

        self.driver.batch = numbered  # type: ignore[method-assign]

    def drafts(self, name: str, count: int, number: int = NUMBER) -> list[int]:
        (found,) = self.together({name: count}, number)
        return found

    def together(self, counts: dict[str, int], number: int = NUMBER) -> list[list[int]]:
        rows = []
        for name, count in counts.items():
            request, chain = self.driver.requests[name], TokenChain("")
            chain.grow(request.tokens)
            self.driver.slot(request, len(request.tokens) + count)
            directions = request.directions if self.driver._reverse else None
            rows.append(DraftRow(chain, request.blocks, directions, (GREEDY,) * count, number))
        return self.head.propose_all(rows).tokens


@pytest.mark.parametrize(
    ("bias", "prefix", "device_steps"), [(True, "", False), (False, "model.", False), (True, "", True)]
)
def test_drafts_are_those_of_the_formula(
    model_folder: ModelFolder, tmp_path: Path, bias: bool, prefix: str, device_steps: bool
) -> None:
    model, head = model_folder("llama"), head_folder(tmp_path / "head", bias=bias, prefix=prefix)
    served, reference = Served(model, head, device_steps=device_steps), Reference(model, head, prefix)
    served.driver.add("r", random_prompts((40,))[0])
    served.driver.step([("r", 25)])
    served.driver.step([("r", 15)])
    for count in (4, 1, 3):
        tokens = served.driver.requests["r"].tokens
        assert served.drafts("r", count) == reference.drafts(tokens, count)
        served.driver.step([("r", 1)])
    for _ in range(20):  # more than are computed with a draft
        served.driver.step([("r", 1)])
    assert served.drafts("r", 3) == reference.drafts(served.driver.requests["r"].tokens, 3)


@pytest.mark.parametrize("device_steps", [False, True])
def test_a_head_may_draft_from_some_tokens(model_folder: ModelFolder, tmp_path: Path, device_steps: bool) -> None:
    """Whose rows of the last product it brings."""
    model, head, some = model_folder("llama"), head_folder(tmp_path / "head", draft_vocab_size=40), range(3, 199, 5)
    brought = {
        "d2t": torch.tensor(some) - torch.arange(len(some)),
        "lm_head.weight": load_file(model / "model.safetensors")["model.embed_tokens.weight"][list(some)],
    }
    save_file(load_file(head / "model.safetensors") | brought, head / "model.safetensors")
    served, reference = Served(model, head, device_steps=device_steps), Reference(model, head)
    served.driver.add("r", random_prompts((21,))[0])
    served.driver.step([("r", 21)])
    for count in (4, 2):
        tokens = served.driver.requests["r"].tokens
        expected = reference.drafts(tokens, count, among=some)
        assert served.drafts("r", count) == expected != reference.drafts(tokens, count)
        served.driver.step([("r", 1)])
    save_file(load_file(head / "model.safetensors") | {"d2t": brought["d2t"] + 3}, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t names tokens beyond the model's 199"):
        Served(model, head)


@pytest.mark.parametrize("device_steps", [False, True])
def test_rows_are_drafted_together(model_folder: ModelFolder, tmp_path: Path, device_steps: bool) -> None:
    """Of different lengths, so many drafts, and positions that they lack; drafts that the model never computes too."""
    model, head = model_folder("llama"), head_folder(tmp_path / "head")
    served, reference = Served(model, head, device_steps=device_steps), Reference(model, head)
    for name, prompt in zip("abc", random_prompts((40, 9, 17)), strict=True):
        served.driver.add(name, prompt)
        served.driver.step([(name, len(prompt))])
    for counts in ({"a": 1, "b": 4, "c": 3}, {"c": 2, "a": 3, "b": 1}, {"b": 2, "c": 2}):
        tokens = [served.driver.requests[name].tokens for name in counts]
        expected = [reference.drafts(*each) for each in zip(tokens, counts.values(), strict=True)]
        assert served.together(counts) == expected
        served.driver.step([(name, 1) for name in "abc"])
        served.driver.step([("b", 1)])


def test_it_attends_from_where_states_are_known(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Those of a prefix that another sequence computed are not its own, nor are those of another number's."""
    model, head = model_folder("llama"), head_folder(tmp_path / "head")
    served, reference = Served(model, head), Reference(model, head)
    served.driver.add("r", random_prompts((30,))[0])
    served.driver.step([("r", 30)])
    assert served.drafts("r", 2, number=NUMBER + 1) == []
    request = served.driver.requests["r"]
    served.head._known[served.driver.slot(request, 10)] = 0  # in the second block
    assert served.drafts("r", 3) == reference.drafts(request.tokens, 3, begins=2 * BLOCK_SIZE)
    served.driver.step([("r", 1)])
    assert served.drafts("r", 1) == reference.drafts(request.tokens, 1, begins=2 * BLOCK_SIZE)
    served.runner.warm_up()  # writes into the first blocks, for no sequence
    assert not served.head._known[0]


def test_drafts_are_drawn_as_their_positions_are(model_folder: ModelFolder, tmp_path: Path) -> None:
    served = Served(model_folder("llama"), head_folder(tmp_path / "head"))
    served.driver.add("r", random_prompts((12,))[0])
    served.driver.step([("r", 12)])
    request, chain = served.driver.requests["r"], TokenChain("")
    chain.grow(request.tokens)

    def drawn(seed: int) -> list[int]:
        sampling = tuple([SamplingRow(seed, position, 1.0) for position in range(13, 17)])
        row = DraftRow(chain, request.blocks, request.directions, sampling, NUMBER)
        return served.head.propose_all([row]).tokens[0]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("model", "edits", "refused"),
    [
        ("llama", {"hidden_size": 64}, "hidden_size is 64, the model's is 48"),
        ("llama", {"vocab_size": 200}, "vocab_size is 200"),
        ("llama", {"num_hidden_layers": 2}, "one layer"),
        ("gemma3", {}, "states of gemma3_text models are not kept"),
        ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}, "is a LlamaForCausalLMEagle3"),
    ],
)
def test_heads_of_other_models_are_refused(
    model_folder: ModelFolder, tmp_path: Path, model: str, edits: dict[str, Any], refused: str
) -> None:
    head, folder = head_folder(tmp_path / "head", **edits), model_folder(model)
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(head)}})
    geometry = read_geometry(folder)
    with pytest.raises(ConfigError, match=refused):
        plan_draft(config, folder, geometry, dtype="float32", device=torch.device("cpu"), degree=1)
