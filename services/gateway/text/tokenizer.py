"""Text to token ids and back, equal to the model's transformers tokenizer, without importing torch.

Reads tokenizer.json through the `tokenizers` library; a folder that has none falls back to transformers, which builds
the same kind of object. Called by `generator.py` (prompts) and `detokenizer.py` (answers). Long texts are encoded in a
thread, so that the event loop of a busy gateway never waits for one prompt; chat templates run in processes of their
own (`template_process.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway.text.chat_template import load_template_source
from cohort.services.gateway.text.template_process import ChatRenderer, TemplateLimits

# About two milliseconds of encoding; a thread switch costs a tenth of one.
INLINE_CHARACTERS = 4096

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTooLong(RequestError):
    """However it is cut, a prompt has more tokens than its limit."""


class Tokenizer:
    """One model's tokenizer. Immutable after construction and safe to use from threads."""

    def __init__(self, model_dir: Path, limits: TemplateLimits = TemplateLimits()) -> None:  # noqa: B008 -- immutable
        config = _read_json(model_dir / "tokenizer_config.json")
        if (model_dir / "tokenizer.json").is_file():
            self._backend, named = _from_json(model_dir, config)
        else:
            self._backend, named = _from_transformers(model_dir)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens: Mapping[str, str] = named
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        state = json.loads(self._backend.to_str())
        self.decoder_state: Mapping[str, Any] = state.get("decoder") or {}
        self._longest_token = self._longest() if not state.get("normalizer") else 0
        self.template_source = source = load_template_source(model_dir, config)
        self._chats = ChatRenderer(source, named, limits) if source else None

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 where the length of a text says nothing certain about its tokens."""
        return self._longest_token

    @property
    def has_chat_template(self) -> bool:
        return self._chats is not None

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """`special_tokens`: add what the model's tokenizer puts around a text (BOS, say)."""
        # Of the library's entry points only the batch ones release the interpreter's lock while they work.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)

    def _longest(self) -> int:
        """Characters of the longest token; 0 where a text's length says nothing certain about its tokens: unknown
        characters may be fused into one token, and added tokens may swallow the spaces beside them."""
        greedy = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if self.decoder_state.get("type") != "ByteLevel" or greedy:
            return 0
        return max(map(len, self._backend.get_vocab()), default=0)

    def refuse_too_long(self, text: str, limit: int, param: str) -> None:
        """Raise `PromptTooLong` before encoding a text that has more than `limit` tokens however it is cut: megabytes
        of a prompt that cannot fit cost nothing."""
        if self._longest_token and len(text) > limit * self._longest_token:
            raise PromptTooLong(
                f"This model's maximum context length is {limit} tokens, but the prompt alone has at least "
                f"{len(text) // self._longest_token} tokens.",
                param=param,
            )

    async def encode_soon(self, texts: Sequence[str], *, special_tokens: bool, limit: int) -> list[list[int]]:
        """Like `encode`, of all these, off the event loop when they are long together. Raises `RequestError` when one
        is hopelessly long."""
        for text in texts:
            self.refuse_too_long(text, limit, "prompt")

        def work() -> list[list[int]]:
            return [self.encode(text, special_tokens=special_tokens) for text in texts]

        return work() if sum(map(len, texts)) <= INLINE_CHARACTERS else await asyncio.to_thread(work)

    def warm(self) -> None:
        """Start what the first chat needs. Raises `ModelError` when the chat template cannot be compiled."""
        if self._chats is not None:
            self._chats.warm()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Blocks. Raises `RequestError` when the model has no template or the template refuses."""
        return self._renderer().render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def _renderer(self) -> ChatRenderer:
        if self._chats is None:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        return self._chats

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        limit: int,
    ) -> list[int]:
        """Render and encode. The template writes the special tokens itself, so none are added."""
        text = await self._renderer().render_soon(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        self.refuse_too_long(text, limit, "messages")
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, special_tokens=False)
        return await asyncio.to_thread(self.encode, text, special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def added_token(self, text: str) -> int | None:
        """The id of the added token with exactly this text."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def to_json(self) -> str:
        """As a tokenizer.json, with the special tokens that only the model's other files name."""
        return str(self._backend.to_str())

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id that does not exist."""
        return self._backend.id_to_token(token_id)


def _from_json(model_dir: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for malformed files
        raise ModelError(f"{model_dir / 'tokenizer.json'} cannot be read: {error}") from error
    merged = {**_read_json(model_dir / "special_tokens_map.json"), **config}
    named = {name: text for name in _SPECIAL_NAMES if (text := _content(merged.get(name))) is not None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(named.values()) if text not in known]
    if missing:
        backend.add_special_tokens(missing)
    # add_bos_token and add_eos_token of tokenizer_config.json are void beside a tokenizer.json: what is put around a
    # text is in there (the same rule as in transformers).
    return backend, named


def _from_transformers(model_dir: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{model_dir} has no tokenizer.json, and reading its other tokenizer files needs the transformers package"
        ) from error
    try:
        made = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir} has no tokenizer that could be read: {error}") from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{model_dir}: its tokenizer ({type(made).__name__}) has no form that can be streamed")
    return backend, {name: str(text) for name, text in made.special_tokens_map.items() if isinstance(text, str)}


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}
