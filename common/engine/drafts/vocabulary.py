"""Whether two models mean the same by a token id: a draft is a token of the model that verifies it.

Asked once at start, before a draft model's weights are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.errors import ConfigError

_FILE = "tokenizer.json"


def check_vocabulary(model_dir: Path, geometry: ModelGeometry, draft_dir: Path, draft: ModelGeometry) -> None:
    """Raises `ConfigError` unless every token has the same id in both folders' tokenizers. Where neither has one, the
    vocabularies have to be of one size; tables may be longer than the vocabulary (padding)."""
    named, drafted = _tokens(model_dir), _tokens(draft_dir)
    refused = f"speculation.draft_model: {draft_dir.name} cannot draft for {model_dir.name}: "
    if (named is None) != (drafted is None):
        without = model_dir if named is None else draft_dir
        raise ConfigError(f"{refused}{without} holds no {_FILE}, so that their tokens cannot be compared")
    if named is None or drafted is None:
        if geometry.vocab_size != draft.vocab_size:
            raise ConfigError(f"{refused}its vocabulary has {draft.vocab_size} tokens, not {geometry.vocab_size}")
        return
    if other := sorted(token for token in named.keys() | drafted.keys() if named.get(token) != drafted.get(token)):
        first = other[0]
        raise ConfigError(
            f"{refused}{len(other)} tokens differ, the first of them {first!r}: id {_id(drafted, first)}, "
            f"not {_id(named, first)}; both need one tokenizer"
        )


def _id(tokens: dict[str, int], token: str) -> str:
    return str(tokens[token]) if token in tokens else "none"


def _tokens(folder: Path) -> dict[str, int] | None:
    """The ids of all tokens by their names; None where the folder has no tokenizer."""
    try:
        read: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"speculation.draft_model: {folder / _FILE} cannot be read: {error}") from None
    vocabulary = (read.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        ids = {str(token): int(number) for token, number in vocabulary.items()}
    else:  # a unigram model's: pairs of token and weight, in the order of their ids
        ids = {str(pair[0]): index for index, pair in enumerate(vocabulary)}
    return ids | {str(added["content"]): int(added["id"]) for added in read.get("added_tokens") or ()}
