"""A Llama of two layers with fixed random weights: what is broken are processes, not the matrix products.

Half a core serves some thousand of its tokens a second. Its text is noise, but greedy and seeded text is the same in
every run, forms and tools bind it like any model's, and noise is full of broken UTF-8. Called by `command`; written
without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, CONTEXT = 64, 2, 4, 2, 16, 128, 2048
_VOCABULARY = 512
_START, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TRAINING = (
    "The harbour was quiet when the last ship came in, and it is not known where it had been. 0123456789",
    '{"name": "Tom", "age": 3, "colour": "red"} def main(): return [1, 2.5, None]',
    "Grüße aus Köln, wo 東京 und 🦊 wohnen; ça va?",
)


def write(folder: Path, seed: int = 0) -> Path:
    """Write the model in Hugging Face format to `folder`, which may exist."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    end = tokenizer.token_to_id(_END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(_START),
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _START, "eos_token": _END}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    save_file(_weights(tokenizer.get_vocab_size(), seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, seed: int = 1, rank: int = 4) -> Path:
    """Write an adapter of the model in PEFT's format, of all its layers' queries and outputs, that changes its text."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for module in ("q_proj", "o_proj"):  # of HEADS * HEAD_DIM = HIDDEN rows and columns
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0.0, HIDDEN**-0.5, (rank, HIDDEN)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0.0, rank**-0.5, (HIDDEN, rank)).astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>", _START, _END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TRAINING * 4, trainer)
    return tokenizer


def _weights(vocabulary: int, seed: int) -> dict[str, Any]:
    """Return weights so large that logits differ clearly: a near-tie could fall either way when a prompt runs again."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return random.normal(0.0, 1.5 / columns**0.5, (rows, columns)).astype(np.float32)

    def norm() -> Any:
        return random.normal(1.0, 0.2, HIDDEN).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "model.norm.weight": norm()}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        weights[f"{layer}.input_layernorm.weight"] = norm()
        weights[f"{layer}.post_attention_layernorm.weight"] = norm()
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return weights
