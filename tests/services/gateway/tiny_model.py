"""A model folder without weights: a byte-level tokenizer with a chat template, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

EOS = "<|end|>"
BOS = "<|start|>"
CONTEXT = 512
WIDTH = 8
"""Numbers of a hidden state."""

TEXTS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "Grüße aus Köln, wo 東京 und 🦊🎉 wohnen; ça va?",
    "def main():\n    print('hello', 42)\n\n\treturn {1: [2, 3]}",
]
TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|unk|>", BOS, EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece-based models have it: ▁ for spaces, bytes as <0xNN>, the first space stripped on decoding."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in [
        "▁",
        "a",
        "b",
        "c",
        "o",
        "r",
        "d",
        "h",
        "e",
        "l",
        "w",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "wo",
        "wor",
        "worl",
        "world",
        "▁world",
        "é",
        ",",
    ]:
        vocab.setdefault(piece, len(vocab))
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("▁", "hello"),
        ("w", "o"),
        ("wo", "r"),
        ("wor", "l"),
        ("worl", "d"),
        ("▁", "world"),
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[PAD]", "un", "##believ", "##able", "story", "a", "##b", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[PAD]", special=True)])
    return tokenizer


def write_model(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    template: str | None = TEMPLATE,
    tokenizer_config: dict[str, Any] | None = None,
    context: int = CONTEXT,
) -> Path:
    tokenizer = tokenizer or byte_level()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<|unk|>"} if tokenizer_config is None else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **(tokenizer_config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "max_position_embeddings": context,
                "vocab_size": tokenizer.get_vocab_size(),
                "hidden_size": WIDTH,
                "num_attention_heads": 2,
                "eos_token_id": tokenizer.token_to_id(EOS),
            }
        )
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def costly(rules: int, start: str = 'start: (s "x")*') -> str:
    """Return a grammar whose masks take 80 ms with 200 rules, and a second with 700, in a few kilobytes."""
    alternatives = " | ".join(f"n{rule} s" for rule in range(rules))
    return f"{start}\ns: {alternatives} |\n" + "".join(f'n{rule}: "q" | "z"\n' for rule in range(rules))
