"""What a head is trained on: the user's files as tokens, and questions that the model is to make up itself.

Called by `command`. Knows files and the model's tokenizer; never the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from cohort.common.errors import ConfigError

PLAIN = frozenset({".txt", ".md", ".rst", ".py"})
_LINES = ".jsonl"
_WORDS = "QQQ"
"""Stands for a user's words, to see what a template puts around them."""


class Prompt(NamedTuple):
    """Tokens; `answered`: the model goes on from them, else they are the text."""

    tokens: list[int]
    answered: bool


class Texts:
    """Of one model."""

    def __init__(self, model: Path, length: int) -> None:
        """`length`: tokens of a text, at most; of a file that is longer every part is one."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._model, self._length = model, length

    def read(self, paths: Sequence[Path]) -> list[Prompt]:
        """Files, and those below folders. Raises `ConfigError` for what holds no text."""
        found = [prompt for path in paths for file in _files(path) for prompt in self._of_file(file)]
        if paths and not found:
            raise ConfigError(f"no text in {', '.join(map(str, paths))}")
        return found

    def question(self) -> tuple[list[int], int]:
        """The tokens before a user's words, and the first one behind them. Raises `ConfigError`."""
        before, found, behind = self._rendered([{"role": "user", "content": _WORDS}], answer=False).partition(_WORDS)
        tokens = self._tokenizer.encode(behind, add_special_tokens=False)
        if not found or not tokens:
            raise ConfigError(f"{self._model.name}: its chat template has no end of a question; give --texts instead")
        return self._tokenizer.encode(before, add_special_tokens=False), int(tokens[0])

    def asked(self, words: Sequence[int]) -> Prompt:
        """A question that the model made up, as it is served one."""
        return self._chat(
            [{"role": "user", "content": self._tokenizer.decode(words, skip_special_tokens=True).strip()}]
        )

    def _of_file(self, file: Path) -> Iterator[Prompt]:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix != _LINES:
            yield from self._parts(text)
            return
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                read = json.loads(line)
                if "messages" in read:
                    yield self._chat(read["messages"])
                elif "prompt" in read:
                    yield self._chat([{"role": "user", "content": str(read["prompt"])}])
                else:
                    yield from self._parts(str(read["text"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}:{number}: not JSON with messages, prompt or text ({error!r})") from error

    def _parts(self, text: str) -> Iterator[Prompt]:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        for first in range(0, len(tokens), self._length):
            if len(part := tokens[first : first + self._length]) > 2:
                yield Prompt(part, answered=False)

    def _chat(self, messages: list[dict[str, Any]]) -> Prompt:
        """Answered where the user has the last word."""
        answered = messages[-1]["role"] != "assistant"
        text = self._rendered(messages, answer=answered)
        return Prompt(self._tokenizer.encode(text, add_special_tokens=False)[: self._length], answered)

    def _rendered(self, messages: list[dict[str, Any]], *, answer: bool) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))
        except ValueError as error:
            raise ConfigError(f"{self._model.name} has no chat template; give --texts of plain text") from error


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.suffix in PLAIN | {_LINES} and file.is_file())
    elif path.is_file() and path.suffix in PLAIN | {_LINES}:
        yield path
    else:
        raise ConfigError(f"{path}: neither a folder nor a file ending in {', '.join(sorted(PLAIN | {_LINES}))}")
