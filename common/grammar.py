"""Grammars that bind an answer, over one model's tokens: compiled, stepped, and asked for the tokens that may follow.

The gateway compiles a client's schema, regular expression or grammar once, in a process of its own, to learn whether it
can be used; a worker compiles its text again and steps it with every token. Both go by the same limits, so what passes
there runs here. The state of a grammar is a function of its text and the output tokens: a worker that takes a request
over replays them. The library is llguidance; nothing else imports it. Decides nothing about requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from cohort.common.errors import CohortError, ModelError

Words = npt.NDArray[np.int32]

# A mask costs 3 µs where the grammar is plain. These bound one that is made to cost more: a few milliseconds for a
# mask, 20 MB for a grammar. Beyond them the library gives a grammar up with a message.
_LIMITS: dict[str, int] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
}
WHITE_SPACE = r"[ \t\r\n]{1,32}"
"""Between the parts of JSON."""
_WORD_BITS = 32
_MESSAGE_CHARACTERS = 500


class GrammarError(CohortError):
    """A grammar that cannot be compiled, or an answer that its limits end; the message says what is wrong."""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._taken = 0

    @property
    def taken(self) -> int:
        """Tokens it has been stepped with."""
        return self._taken

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def take(self, tokens: Sequence[int]) -> None:
        """Step it. Raises `GrammarError` for a token that may not come here."""
        taken = self._matcher.try_consume_tokens(list(tokens)) if tokens else 0
        self._taken += taken
        if taken < len(tokens):
            raise GrammarError(self._error() or f"token {tokens[taken]} may not come after {self._taken} tokens")

    def mask(self, into: Words) -> None:
        """Set the bits of the tokens that may come next, clear all others: token t is bit t % 32 of word t // 32.
        Raises `GrammarError` when the limits end it."""
        if self._matcher.is_error():
            raise GrammarError(self._error())
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._error())

    @property
    def broken(self) -> bool:
        """The limits have ended it: it is of no further use."""
        return self._matcher.is_error()

    @contextmanager
    def ahead(self, tokens: Sequence[int]) -> Iterator[None]:
        """Within, it has been stepped with these too. Raises `GrammarError` as `take` does; it is where it was
        afterwards, unless it is broken."""
        before = self._taken
        try:
            self.take(tokens)
            yield
        finally:
            if self._taken > before and not self.broken:
                self._matcher.rollback(self._taken - before)
            self._taken = before

    def copy(self) -> Matcher:
        """Another answer at the same place; what was learned of the grammar so far is shared."""
        other = Matcher(self._matcher.deep_copy())
        other._taken = self._taken
        return other

    def _error(self) -> str:
        return plain_message(self._matcher.get_error())


class GrammarTokens:
    """A model's tokens as grammars see them: their bytes, and which of them end an answer."""

    def __init__(self, tokenizer: str, end_tokens: Sequence[int], vocabulary: int = 0) -> None:
        """`tokenizer`: the text of a tokenizer.json. `vocabulary`: logits a model has, where they are more than tokens.
        Raises `ModelError` for kinds of tokenizers whose tokens have no bytes."""
        if not end_tokens:
            raise ModelError("the model names no end token, so that no answer could end where its grammar does")
        try:
            try:
                self._tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary or None, eos_token=[*end_tokens])
            except ValueError:  # fewer logits than tokens
                self._tokens = llguidance.LLTokenizer(tokenizer, eos_token=[*end_tokens])
        except ValueError as error:
            raise ModelError(f"the model's tokenizer cannot be used with grammars: {error}") from error
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)  # type: ignore[arg-type]

    @staticmethod
    def of_model(folder: Path, end_tokens: Sequence[int], vocabulary: int = 0) -> GrammarTokens:
        """Raises `ModelError` for a folder without a tokenizer.json."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder.name} has no tokenizer.json, which grammars need")
        return GrammarTokens(file.read_text(encoding="utf-8"), end_tokens, vocabulary)

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-int(self._tokens.vocab_size) // _WORD_BITS)

    def compile(self, grammar: str) -> Matcher:
        """At the grammar's beginning. Raises `GrammarError`. The interpreter's lock is free meanwhile."""
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(plain_message(matcher.get_error()))
        return Matcher(matcher)

    def tokens_of(self, text: str) -> list[int]:
        return list(self._tokens.tokenize_str(text))


def plain_message(text: str) -> str:
    """The library's message in one line, of a bounded length, without the state that it adds."""
    line = " ".join(text.partition("<state>")[0].replace("<non-verbose>", "").split())
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}…"


# -- The texts of grammars ---------------------------------------------------------------------------------------


def of_json_schema(schema: dict[str, Any] | bool) -> str:
    """Any text that is JSON of this schema; {} is any JSON. White space between its parts is bounded unless the schema
    says otherwise (`x-guidance`): a small model would go on with it until its tokens are used up."""
    if not isinstance(schema, bool):
        schema = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema}
    return json.dumps({"grammars": [{"json_schema": schema}]}, separators=(",", ":"))


def of_regex(pattern: str) -> str:
    """The whole text matches this, in the syntax of Rust's regex crate: no look-around, no back-references."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_choice(choices: Sequence[str]) -> str:
    """Exactly one of these texts."""
    return of_lark("start: " + " | ".join(map(quoted, choices)) + "\n")


def of_lark(lark: str) -> str:
    """A grammar in llguidance's variant of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, separators=(",", ":"))


def of_grammar(text: str) -> str:
    """A grammar as clients write it for other servers: Lark, or GBNF / EBNF (`root ::= …`). Raises `GrammarError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return of_lark(any_to_lark(text))
    except Exception as error:  # the converter raises bare ones
        raise GrammarError(f"neither Lark nor GBNF: {plain_message(str(error))}") from error


def quoted(text: str) -> str:
    """A literal of a Lark grammar."""
    return json.dumps(text)
