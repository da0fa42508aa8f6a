"""Prompts and their true continuations, computed once a session."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from tests.e2e.equality.golden import Golden, golden_outputs

NEW_TOKENS = 16

SENTENCES = (
    "The harbour was quiet when the last ship came in, and nobody asked where it had been.",
    "Write a short story about a clockmaker who repairs time itself.",
    "A prime number is a natural number greater than one that",
    "def fibonacci(n):\n    ",
    "Explain in three sentences why the sky is blue.",
    "Water boils at a lower temperature on a mountain because",
    "List five things you would take to a desert island:",
    "In the year 1492,",
    "Dear Sir or Madam, I am writing to complain about",
    "The mitochondria is",
    "Translate to French: I would like a cup of coffee.",
    "import numpy as np\n\nx = np.",
    "Once upon a time there was a fox who",
    "How do I make pancakes without eggs?",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
)


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """52 prompts of 1 to 700 tokens: sentences, chats, shared prefixes, random ids."""
    random = Random(20)
    ids = [tokenizer.encode(text).ids for text in SENTENCES]
    chats = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in SENTENCES[:8]
    ]
    preamble = tokenizer.encode(" ".join(SENTENCES)).ids
    shared = [preamble + tokenizer.encode(f" Question {index}: {text}").ids for index, text in enumerate(SENTENCES[:6])]
    vocabulary = tokenizer.get_vocab_size()
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80, 100, 129, 160, 200, 256, 300, 700]
    noise = [[random.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    return ids + chats + shared + noise


@pytest.fixture(scope="session")
def goldens(small_model: Path) -> list[Golden]:
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    return golden_outputs(small_model, make_prompts(tokenizer), NEW_TOKENS)
