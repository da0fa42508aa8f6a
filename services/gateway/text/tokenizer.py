"""Text to token ids and back, equal to the model's transformers tokenizer, without importing torch.

Reads tokenizer.json through the `tokenizers` library, or lets transformers build the same kind of object. Called by
`generator.py` (prompts) and `choice.py` (answers). Long texts are encoded in threads, within the budget of
`text_budget.py`; chat templates run in processes of their own (`template_process.py`): the event loop never waits for
one prompt.

Answers become text piece by piece, never cutting a character, by one detokenizer per stream. Three ways, chosen by the
tokenizer's decoder:

- byte-level (GPT-2 style): every token is a byte string; an incremental UTF-8 decoder holds back what may become a
  character. The pieces joined are exactly the whole decode, also for bytes that are no UTF-8 at all.
- byte fallback (SentencePiece style): the same over pieces and <0xNN> tokens. Equal to the whole decode for every
  valid text; inside runs of bytes that are no UTF-8 the number of replacement characters may differ, because the
  library judges a run only when it has seen all of it.
- anything else (WordPiece …): decode a short window twice, with and without the new token, and send the difference.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tokenizers

from cohort.common.errors import TOO_LONG, ModelError, RequestError
from cohort.common.json_files import read_json_object
from cohort.services.gateway.text import text_budget
from cohort.services.gateway.text.chat_template import load_template_source, to_be_continued, up_to_continuation
from cohort.services.gateway.text.template_process import ChatRenderer, TemplateLimits
from cohort.services.gateway.text.text_budget import TextBudget

Messages = Sequence[Mapping[str, Any]]
M = TypeVar("M", bound=Mapping[str, Any])
# A window ending in this character may still be waiting for the rest of it …
REPLACEMENT = "\ufffd"
# … but a character has at most four bytes: after more tokens than that it is what the model meant.
MAX_HELD_TOKENS = 8
CONTEXT_TOKENS = 5

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

T = TypeVar("T")


class PromptTooLong(RequestError):
    """Error of a prompt that exceeds its limit however it is cut; it has at least `least` tokens."""

    def __init__(self, message: str, *, least: int = 0, param: str | None = None) -> None:
        super().__init__(message, param=param, code=TOO_LONG)
        self.least = least


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
        self._kinds = _kinds(self._backend, state)
        self._only_ascii = _composes(state)
        self.texts = TextBudget()
        self.template_source = source = load_template_source(model_dir, config)
        self._chats = ChatRenderer(source, named, limits) if source else None

    @property
    def has_chat_template(self) -> bool:
        return self._chats is not None

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Encode a text; `special_tokens` adds what the tokenizer puts around a text (BOS, say).

        Raises `RequestError` for a text that it has no tokens for."""
        # Of the library's entry points only the batch ones release the interpreter's lock while they work.
        try:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)
        except Exception as error:  # bare: a character without a token, say, and none for the unknown
            raise RequestError(f"The model's tokenizer cannot encode this text: {error}") from error

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on a text's tokens, from its bytes alone."""
        if self._only_ascii and not text.isascii():
            return 0
        data = text.encode("utf-8", "surrogatepass")
        return max((-(-kind.count(data) // kind.longest) for kind in self._kinds), default=0)

    def refuse_too_long(self, text: str, limit: int, param: str) -> None:
        """Raise `PromptTooLong` for a text of more than `limit` tokens however it is cut, before encoding megabytes."""
        if 4 * len(text) > limit and (least := self.least_tokens(text)) > limit:  # a character has at most four bytes
            raise PromptTooLong(
                f"This model's maximum context length is {limit} tokens, but the prompt alone has at least {least} "
                "tokens.",
                least=least,
                param=param,
            )

    async def encode_all(
        self, texts: Sequence[str], *, special_tokens: bool, limit: int, owner: str = ""
    ) -> list[list[int]]:
        """Encode texts, off the event loop if they are long; `owner` as in `TextBudget.run`. Raises `RequestError` when
        one is hopelessly long."""
        for text in texts:
            self.refuse_too_long(text, limit, "prompt")

        def work() -> list[list[int]]:
            return [self.encode(text, special_tokens=special_tokens) for text in texts]

        return await self.within_budget(sum(map(byte_length, texts)), work, owner)

    async def within_budget(self, size: int, work: Callable[[], T], owner: str) -> T:
        """Run `work` on `size` bytes of text: at once if it is short, else as `TextBudget.run`."""
        return work() if size <= text_budget.INLINE_BYTES else await self.texts.run(size, work, owner)

    def warm(self) -> None:
        """Start what the first chat needs. Raises `ModelError` when the chat template cannot be compiled."""
        if self._chats is not None:
            self._chats.warm()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the rendered messages; blocks. Raises `RequestError` without a template or if it refuses."""
        return self._renderer().render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def _renderer(self) -> ChatRenderer:
        if self._chats is None:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        return self._chats

    async def render_soon(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        limit: int,
        owner: str,
        continues: bool = False,
    ) -> str:
        """Return the messages, rendered in the turn of their owner; `continues` ends them within the last. Raises
        `RequestError`, also for hopelessly long ones."""
        text = await self._renderer().render_soon(
            to_be_continued(messages) if continues else messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            owner=owner,
        )
        if continues:
            text = up_to_continuation(text)
        self.refuse_too_long(text, limit, "messages")
        return text

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **rendering: Any
    ) -> list[int]:
        """Return the tokens of a chat, rendered as by `render_soon`. None are added: its template writes the special
        tokens itself."""
        text = await self.render_soon(messages, owner=owner, **rendering)
        return await self.within_budget(byte_length(text), partial(self.encode, text, special_tokens=False), owner)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def added_token(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def to_json(self) -> str:
        """Return a tokenizer.json, with the special tokens that only the model's other files name."""
        return str(self._backend.to_str())

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token; None for an id that does not exist."""
        return self._backend.id_to_token(token_id)


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _from_json(model_dir: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        backend.encode("")  # a template of special tokens that are absent shows here
    except BaseException as error:  # the library raises bare Exception for malformed files, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{model_dir / 'tokenizer.json'} cannot be read: {error}") from error
    merged = {**_read_json(model_dir / "special_tokens_map.json"), **config}
    named = {name: text for name in _SPECIAL_NAMES if (text := _content(merged.get(name))) is not None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(named.values()) if text not in known]
    if missing:
        backend.add_special_tokens(missing)
    # As in transformers, a tokenizer.json overrides add_bos_token and add_eos_token of tokenizer_config.json.
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
    except Exception as error:  # transformers raises whatever its readers meet
        raise ModelError(f"{model_dir} has no tokenizer that could be read: {error}") from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{model_dir}: its tokenizer ({type(made).__name__}) has no form that can be streamed")
    return backend, {name: str(text) for name, text in made.special_tokens_map.items() if isinstance(text, str)}


def _content(token: Any) -> str | None:
    """Return a special token's text, which is written as it is or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.exists() else {}


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """Return the text that is certain now."""

    def flush(self) -> str:
        """Return the text held back, at the end."""


class TokenText:
    """Per-token bytes of one tokenizer, and the detokenizers made from them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._style, self._strips = _style_of(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    def stream(
        self, *, context: Sequence[int] = (), skip_special: bool = True, unskipped: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Start a detokenizer. `context`: prompt tokens that the answer continues; without any, a decoder that strips
        the first space strips it here. `unskipped`: special tokens that stay, where tokens have bytes."""
        if self._style == "window":
            return _WindowDetokenizer(self.tokenizer, context, skip_special)
        strip = self._strips and not context
        return _ByteDetokenizer(self, skip_special=skip_special, strip_space=strip, unskipped=unskipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, for logprobs and for streaming."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """Return the text of a token whose bytes are whole characters, else None."""
        try:
            return self._whole[token_id]
        except KeyError:
            try:
                text = self._whole[token_id] = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                self._whole[token_id] = None
                return None
            return text

    def _make_bytes(self, token_id: int) -> bytes:
        piece = self.tokenizer.piece(token_id)
        if piece is None:
            return b""
        if self._style == "byte_level":
            try:
                return bytes(_BYTE_OF[character] for character in piece)
            except KeyError:
                return piece.encode()  # an added token, spelled plainly
        if self._style == "byte_fallback":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                try:
                    return bytes([int(piece[3:5], 16)])
                except ValueError:
                    return piece.encode()
            return piece.replace("▁", " ").encode()
        return self.tokenizer.decode([token_id], skip_special=False).encode()


class _ByteDetokenizer:
    __slots__ = ("_decoder", "_held", "_skipped", "_strip", "_text")

    def __init__(self, text: TokenText, *, skip_special: bool, strip_space: bool, unskipped: frozenset[int]) -> None:
        self._text = text
        self._skipped = text.tokenizer.special_ids - unskipped if skip_special else frozenset()
        self._strip = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = False
        """Whether the decoder may hold a part of a character."""

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._held:
            text = self._text.whole_text(token_id)
            if text is not None:
                return self._first(text) if self._strip else text
        text = self._decoder.decode(self._text.token_bytes(token_id))
        self._held = bool(self._decoder.getstate()[0])
        return self._first(text)

    def flush(self) -> str:
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, piece: str) -> str:
        if self._strip and piece:
            self._strip = False
            return piece.removeprefix(" ")
        return piece


class _WindowDetokenizer:
    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = list(context[-CONTEXT_TOKENS:])
        self._sent = len(self._window)  # tokens of the window whose text was sent

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._sent], skip_special=self._skip_special)
        after = self._tokenizer.decode(self._window, skip_special=self._skip_special)
        held = len(self._window) - self._sent
        if len(after) <= len(before) and held >= MAX_HELD_TOKENS:
            del self._window[self._sent :]  # special tokens that are skipped, say: they may come for ever
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final and held < MAX_HELD_TOKENS):
            return ""
        piece = after[len(before) :]
        # Keep a little that was sent: decoders look at a token's neighbours.
        self._window = self._window[-CONTEXT_TOKENS:]
        self._sent = len(self._window)
        return piece


def _style_of(tokenizer: Tokenizer) -> tuple[str, bool]:
    """Return how to stream this tokenizer's text, and whether its decoder strips the space before the first word."""
    decoder = tokenizer.decoder_state
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaced = steps[0]
        plain = replaced.get("pattern") == {"String": "▁"} and replaced.get("content") == " "
        stripped = len(steps) == 3 or (steps[3].get("start"), steps[3].get("stop")) == (1, 0)
        if plain and stripped:
            return "byte_fallback", len(steps) == 4
    return "window", False


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's bytes by character: printable ones are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
_LETTERS = frozenset(byte for byte in range(128) if chr(byte).isalnum())


@dataclass(frozen=True, slots=True)
class _Kind:
    """Bytes of one kind, and how many of them the token with most of them has."""

    others: bytes
    longest: int

    @classmethod
    def of(cls, counted: frozenset[int], tokens: Sequence[bytes]) -> _Kind:
        others = bytes(byte for byte in range(256) if byte not in counted)
        return cls(others, max(len(token.translate(None, others)) for token in tokens))

    def count(self, data: bytes) -> int:
        return len(data.translate(None, self.others))


def _kinds(backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> tuple[_Kind, ...]:
    """Return the kinds of bytes whose number bounds the tokens: all, and those of words, as the longest tokens are
    rows of spaces and dashes. None where bytes may vanish, or many become one token."""
    added, pieces = backend.get_added_tokens_decoder().values(), backend.get_vocab()
    if state["model"].get("type") != "BPE" or any(token.lstrip or token.rstrip for token in added):  # swallow spaces
        return ()
    if _falls_back(state, pieces):
        tokens = [piece.encode() for piece in pieces]  # with three bytes for ▁, which a text may have itself
        found = (_Kind.of(frozenset(range(256)), tokens), _Kind.of(_LETTERS, tokens))
        return tuple(kind for kind in found if kind.longest)
    if not _keeps_bytes(state):
        return ()
    known = frozenset(byte for piece, byte in _BYTE_OF.items() if piece in pieces)  # others are left out, or fused
    plain = {token.content for token in added}
    tokens = [
        piece.encode() if piece in plain or not set(piece) <= _BYTE_OF.keys() else bytes(_BYTE_OF[c] for c in piece)
        for piece in pieces
    ]
    words = frozenset(byte for byte in known if byte >= 128 or chr(byte).isalnum())
    found = (_Kind.of(known, tokens), _Kind.of(words, tokens))
    return tuple(kind for kind in found if kind.longest)


def _steps(part: Mapping[str, Any] | None, name: str) -> list[dict[str, Any]]:
    return list(part.get(name, [part])) if part else []


def _keeps(step: Mapping[str, Any], *types: str) -> bool:
    return step["type"] in types or (step["type"] == "Split" and step["behavior"] != "Removed")


def _keeps_bytes(state: Mapping[str, Any]) -> bool:
    """Return whether the tokens are bytes (GPT-2 style), and none is lost before."""
    steps = _steps(state.get("pre_tokenizer"), "pretokenizers")
    return (
        (not state.get("normalizer") or _composes(state))
        and all(_keeps(step, "ByteLevel", "Digits") for step in steps)
        and any(step["type"] == "ByteLevel" for step in steps)
        and (state.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _falls_back(state: Mapping[str, Any], pieces: Mapping[str, int]) -> bool:
    """Return whether what is in no piece becomes bytes (SentencePiece style), and nothing is changed but spaces."""
    return (
        bool(state["model"].get("byte_fallback"))
        and all(f"<0x{byte:02X}>" in pieces for byte in range(256))
        and all(_keeps(step, "Metaspace") for step in _steps(state.get("pre_tokenizer"), "pretokenizers"))
        and all(
            step["type"] == "Prepend" or (step["type"], step.get("pattern")) == ("Replace", {"String": " "})
            for step in _steps(state.get("normalizer"), "normalizers")
        )
    )


def _composes(state: Mapping[str, Any]) -> bool:
    """Return whether the normalizer is NFC, which leaves ASCII as it is."""
    return bool((state.get("normalizer") or {}).get("type") == "NFC")


async def latest_turns(
    messages: Sequence[M], most_tokens: int, encode: Callable[[Sequence[M]], Awaitable[list[int]]]
) -> tuple[list[int], list[M]]:
    """Return the tokens without the oldest turns, as few as bring them to `most_tokens`, found by bisection, and the
    messages that they are of.
    What precedes the first turn stays; a turn goes whole, from one user message to the next, so that no result lacks
    its call. Raises `PromptTooLong` if the last turn alone is too long."""
    head = len(list(takewhile(lambda message: message["role"] == "system", messages)))
    turns = [index for index in range(head, len(messages)) if messages[index]["role"] == "user"] or [head]
    turns[0] = head

    async def from_turn(turn: int) -> tuple[list[int], list[M]]:
        kept = [*messages[:head], *messages[turns[turn] :]]
        return await encode(kept), kept

    async def fits(turn: int) -> tuple[list[int], list[M]] | None:
        try:
            tokens, kept = await from_turn(turn)
        except PromptTooLong:
            return None
        return (tokens, kept) if len(tokens) <= most_tokens else None

    if (whole := await fits(0)) is not None:
        return whole
    found: tuple[list[int], list[M]] | None = None
    low, high = 1, len(turns) - 1
    while low <= high:
        middle = (low + high) // 2
        fitting = await fits(middle)
        if fitting is None:
            low = middle + 1
        else:
            found, high = fitting, middle - 1
    return await from_turn(len(turns) - 1) if found is None else found
