"""A bfloat16 GGUF file of a Llama in Hugging Face format, as llama.cpp's own converter writes it.

    python -m tests.benchmarks.make_gguf MODEL_FOLDER FILE

Byte-pair tokenizers of SmolLM's kind and tied embeddings alone: what `scripts/opponents` measures with.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from tests.gguf_models import write_gguf


def write(folder: Path, file: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.model_type != "llama" or not model.config.tie_word_embeddings:
        raise SystemExit(f"{folder}: only a Llama with tied embeddings can be written")
    write_gguf(model, file, "BF16", extra=partial(_add_tokenizer, folder, model.config))


def _add_tokenizer(folder: Path, config: Any, writer: Any) -> None:
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    described = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in described["added_tokens"] if token["special"]}
    ids = {**described["model"]["vocab"], **{token["content"]: token["id"] for token in described["added_tokens"]}}
    names = {token_id: name for name, token_id in ids.items()}
    tokens = [names.get(index, f"[PAD{index}]") for index in range(config.vocab_size)]
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
