"""Contents of prompts: token ids (or words) of exact length, drawn by seed and salt, prefixes shared where planned.

Pure but for reading a tokenizer file. Called by `measuring` before a run, so that no drawing falls into measured time.

A prompt is a sequence of symbols. As ids a symbol is an ordinary token of the vocabulary; as text it is a word that
the tokenizer keeps as one token wherever it stands, so that n words are n tokens. Which symbols: block i of a trace's
`hash_ids` is drawn from (seed, salt, hash id), so equal ids are equal tokens; the turns of a session are prefixes of
one stream (the server's own answers, which a real client would have sent back, are replaced by sampled tokens);
everything else is drawn from (seed, salt, request index).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cohort.common.errors import ConfigError
from cohort.services.bench.http.load.workload import RequestPlan

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TOKEN_RANGE = (1000, 8000)
"""Ids that are ordinary tokens in every vocabulary in use; taken when no tokenizer can be read."""
DEFAULT_HASH_BLOCK_TOKENS = 512
"""Mooncake's block of tokens per hash id."""
_MAX_WORDS = 2000
_CACHED_BLOCKS = 16384
_MAX_LENGTH_CORRECTIONS = 8

Symbols = NDArray[np.int32]


class _Kind(IntEnum):
    OWN = 1
    HASHED = 2
    SESSION = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The symbols prompts are made of. `words` is empty without a tokenizer: then only ids can be made."""

    token_ids: Symbols
    words: tuple[str, ...]
    origin: str
    tokenizer: Tokenizer | None = None

    def count_tokens(self, text: str) -> int:
        if self.tokenizer is None:
            raise ConfigError("counting tokens of a text needs a tokenizer; give --tokenizer FOLDER")
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def from_range(low: int, high: int) -> Vocabulary:
    """Return the ids in [low, high)."""
    return Vocabulary(np.arange(low, high, dtype=np.int32), (), f"ids {low}-{high - 1}")


def from_tokenizer(folder: Path) -> Vocabulary:
    """Return every ordinary token of `folder/tokenizer.json`; no special or added one."""
    from tokenizers import Tokenizer

    file = folder if folder.is_file() else folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--tokenizer {folder}: no tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ConfigError(f"--tokenizer {file}: {error}") from error
    added = set(tokenizer.get_added_tokens_decoder())
    pieces = sorted((token_id, piece) for piece, token_id in tokenizer.get_vocab().items() if token_id not in added)
    if not pieces:
        raise ConfigError(f"--tokenizer {file}: an empty vocabulary")
    ids = np.array([token_id for token_id, _ in pieces], dtype=np.int32)
    return Vocabulary(ids, tuple(_safe_words(tokenizer, [piece for _, piece in pieces])), str(folder), tokenizer)


def _safe_words(tokenizer: Tokenizer, pieces: list[str]) -> list[str]:
    """Return lower-case words that are one token at the start of a text and after a space."""
    words: list[str] = []
    for piece in pieces:
        found = re.fullmatch(r"[Ġ▁]([a-z]{2,12})", piece)
        if not found:
            continue
        word = found[1]
        alone = tokenizer.encode(word, add_special_tokens=False).ids
        pair = tokenizer.encode(f"{word} {word}", add_special_tokens=False).ids
        if len(alone) == 1 and len(pair) == 2:
            words.append(word)
            if len(words) == _MAX_WORDS:
                break
    return words


class PromptFactory:
    """Draws the prompts of one run. Same (seed, salt) → same prompts; another salt shares no prefix with them."""

    def __init__(
        self, vocabulary: Vocabulary, *, seed: int, salt: int, hash_block_tokens: int = DEFAULT_HASH_BLOCK_TOKENS
    ) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._salt = salt
        self._hash_block_tokens = hash_block_tokens
        self._blocks: OrderedDict[int, Symbols] = OrderedDict()

    def token_ids(self, plan: RequestPlan) -> list[int]:
        """Return exactly `plan.prompt_tokens` ids."""
        alphabet = self._vocabulary.token_ids
        ids: list[int] = alphabet[self._symbols(plan, plan.prompt_tokens, len(alphabet))].tolist()
        return ids

    def text(self, plan: RequestPlan) -> str:
        """Return a text of `plan.prompt_tokens` tokens by the tokenizer, special tokens of the server not counted.

        One word is one token, but a tokenizer may merge in ways that a pair does not show: so the text is counted and
        corrected. The server's count is compared with the plan in the report in any case.
        """
        words = self._vocabulary.words
        if not words:
            raise ConfigError(
                f"text prompts need a tokenizer with whole words; {self._vocabulary.origin} has none. "
                "Give --tokenizer FOLDER, or --prompt-format ids"
            )
        count = plan.prompt_tokens
        text = ""
        for _ in range(_MAX_LENGTH_CORRECTIONS):
            text = " ".join(words[at] for at in self._symbols(plan, count, len(words)))
            missing = plan.prompt_tokens - self._vocabulary.count_tokens(text)
            if missing == 0 or count + missing < 1:
                break
            count += missing
        return text

    def _symbols(self, plan: RequestPlan, count: int, alphabet: int) -> Symbols:
        if plan.hash_ids:
            return self._hashed(plan, count, alphabet)
        if plan.session:
            key = int.from_bytes(blake2b(plan.session.encode(), digest_size=8).digest(), "big")
            return self._draw(_Kind.SESSION, key, count, alphabet)
        return self._draw(_Kind.OWN, plan.index, count, alphabet)

    def _hashed(self, plan: RequestPlan, count: int, alphabet: int) -> Symbols:
        """Block by block; a tail that no hash id covers is the request's own."""
        size = self._hash_block_tokens
        pieces = [self._block(hash_id, alphabet) for hash_id in plan.hash_ids[: -(-count // size)]]
        covered = len(pieces) * size
        if covered < count:
            pieces.append(self._draw(_Kind.OWN, plan.index, count - covered, alphabet))
        return np.concatenate(pieces)[:count]

    def _block(self, hash_id: int, alphabet: int) -> Symbols:
        block = self._blocks.get(hash_id)
        if block is None:
            block = self._blocks[hash_id] = self._draw(_Kind.HASHED, hash_id, self._hash_block_tokens, alphabet)
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(hash_id)
        return block

    def _draw(self, kind: _Kind, key: int, count: int, alphabet: int) -> Symbols:
        rng = np.random.default_rng([self._seed, self._salt, int(kind), key % (1 << 64)])
        # Floats, not integers(): a shorter draw is then a prefix of a longer one, which sessions rely on.
        return (rng.random(count) * alphabet).astype(np.int32)
