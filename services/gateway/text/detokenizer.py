"""Token ids to text, piece by piece, never cutting a character.

One detokenizer per stream; called by `choice.py`. Three ways, chosen by the tokenizer's decoder:

- byte-level (GPT-2 style): every token is a byte string; an incremental UTF-8 decoder holds back what may become a
  character. The pieces joined are exactly the whole decode, also for bytes that are no UTF-8 at all.
- byte fallback (SentencePiece style): the same over pieces and <0xNN> tokens. Equal to the whole decode for every
  valid text; inside runs of bytes that are no UTF-8 the number of replacement characters may differ, because the
  library judges a run only when it has seen all of it.
- anything else (WordPiece …): decode a short window twice, with and without the new token, and send the difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from cohort.services.gateway.text.tokenizer import Tokenizer

# A window ending in this character may still be waiting for the rest of it …
REPLACEMENT = "\ufffd"
# … but a character has at most four bytes: after more tokens than that it is what the model meant.
MAX_HELD_TOKENS = 8
CONTEXT_TOKENS = 5


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that is certain now."""

    def flush(self) -> str:
        """The end: the text held back."""


class TokenText:
    """Per-token bytes of one tokenizer, and the detokenizers made from them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._style, self._strips = _style_of(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    def stream(
        self, *, context: Sequence[int] = (), skip_special: bool = True, kept: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """`context`: prompt tokens the answer continues. With none, the text starts afresh, and a decoder that strips
        the first space strips it here. `kept`: special tokens that are not skipped, where tokens have bytes."""
        if self._style == "window":
            return _WindowDetokenizer(self.tokenizer, context, skip_special)
        strip = self._strips and not context
        return _ByteDetokenizer(self, skip_special=skip_special, strip_first_space=strip, kept=kept)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (for logprobs and for streaming)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token whose bytes are whole characters; None of any other."""
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

    def __init__(self, text: TokenText, *, skip_special: bool, strip_first_space: bool, kept: frozenset[int]) -> None:
        self._text = text
        self._skipped = text.tokenizer.special_ids - kept if skip_special else frozenset()
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = False
        """The decoder may hold a part of a character."""

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
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final and held < MAX_HELD_TOKENS):
            return ""
        piece = after[len(before) :]
        # Keep a little that was sent: decoders look at a token's neighbours.
        self._window = self._window[-CONTEXT_TOKENS:]
        self._sent = len(self._window)
        return piece


def _style_of(tokenizer: Tokenizer) -> tuple[str, bool]:
    """How to stream this tokenizer's text, and whether its decoder strips the space before the first word."""
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
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
