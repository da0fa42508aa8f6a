"""Grammars that bind an answer, over one model's tokens: compiled, stepped, and asked for the tokens that may follow.

The gateway compiles a client's schema, regular expression or grammar once, in a process of its own, to learn whether it
can be used; a worker compiles its text again and steps it with every token. Both have the same limits, so what passes
there runs here. The state of a grammar is a function of its text and the output tokens: a worker that takes a request
over replays them. The library is llguidance; nothing else imports it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from cohort.common import json_schemas
from cohort.common.errors import CohortError, ModelError

Words = npt.NDArray[np.int32]

# Beyond these the library gives a grammar up with a message. A mask of an ordinary schema costs 20 to 100 µs. A schema
# has 4 items in a row for each optional property, and 8 in a step for one that is a string: so 1,000 of these fit, with
# masks of up to 20 ms, and 200 of any type.
_LIMITS: dict[str, int] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
}
# A client's grammar can make an item cost as much as it has rules (`s: a s | b s | …`, where s may be empty): with the
# limits above one mask takes 11 s, and one token longer, which holds the interpreter's lock. These bound both to 20 ms;
# GBNF's examples of C and JSON have sizes of 125 and 50.
_WRITTEN_LIMITS = {**_LIMITS, "max_items_in_row": 500, "step_max_items": 1_000, "max_grammar_size": 1_000}
_WRITTEN = '{"grammars":[{"name":"written"'
"""First characters of the text of a grammar that a client wrote; no other one has them."""
MASKS = 8
ACCOUNT_S = 0.04
"""Processor time that `MASKS` masks of an answer in a row may take on any machine. One of an ordinary schema takes
0.05 ms."""
_LARGEST = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
_OF_LARGEST = 4
"""Times that as long as the first masks of the largest honest schema an answer's may take where these are slower: 30 to
50 ms on a slow core. The dearest ones of an answer with that schema take two to four times as long as its first."""
_TRIES = 3
WHITE_SPACE = r"[ \t\r\n]{1,32}"
"""White space between the parts of JSON."""
_WORD_BITS = 32
_SENTENCES = {
    "oneOf constraints are not supported": "oneOf: its branches cannot be told apart; give each an own value of a "
    "required property (const), or use anyOf"
}
"""Messages of the library that a client could not act on, by what they contain."""
_MESSAGE_CHARACTERS = 500


class GrammarError(CohortError):
    """A grammar that cannot be compiled, or an answer that its limits end; the message says what is wrong."""


class Matcher:
    """State of one answer in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._taken = 0

    @property
    def taken(self) -> int:
        """Number of tokens that it has been stepped with."""
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
        """Whether the limits have ended it: it is of no further use."""
        return self._matcher.is_error()

    @contextmanager
    def ahead(self, tokens: Sequence[int]) -> Iterator[None]:
        """Step it with these tokens inside the block, and back afterwards unless it is broken. Raises `GrammarError` as
        `take` does."""
        before = self._taken
        try:
            self.take(tokens)
            yield
        finally:
            if self._taken > before and not self.broken:
                self._matcher.rollback(self._taken - before)
            self._taken = before

    def copy(self) -> Matcher:
        """Copy the state for another answer; what was learned of the grammar is shared."""
        other = Matcher(self._matcher.deep_copy())
        other._taken = self._taken
        return other

    def _error(self) -> str:
        return plain_message(self._matcher.get_error())


class GrammarTokens:
    """A model's tokens for grammars: their bytes, and the ones that end an answer."""

    def __init__(self, tokenizer: str, end_tokens: Sequence[int], vocabulary: int = 0) -> None:
        """`tokenizer`: the text of a tokenizer.json. `vocabulary`: number of logits, if there are more than tokens.
        Raises `ModelError` for kinds of tokenizers whose tokens have no bytes."""
        if not end_tokens:
            raise ModelError("the model names no end token, so that no answer could end where its grammar does")
        try:
            try:
                self.tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary or None, eos_token=[*end_tokens])
            except ValueError:  # fewer logits than tokens
                self.tokens = llguidance.LLTokenizer(tokenizer, eos_token=[*end_tokens])
        except ValueError as error:
            raise ModelError(f"the model's tokenizer cannot be used with grammars: {error}") from error
        self.ends = tuple(end_tokens)
        self._limits, self._written_limits = (
            llguidance.LLParserLimits(verbose_errors=False, **limits)  # type: ignore[arg-type]
            for limits in (_LIMITS, _WRITTEN_LIMITS)
        )

    @staticmethod
    def of_model(folder: Path, end_tokens: Sequence[int], vocabulary: int = 0) -> GrammarTokens:
        """Read a model's tokenizer. Raises `ModelError` for a folder without a tokenizer.json."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder.name} has no tokenizer.json, which grammars need")
        return GrammarTokens(file.read_text(encoding="utf-8"), end_tokens, vocabulary)

    @property
    def words(self) -> int:
        """Number of words in a mask."""
        return -(-int(self.tokens.vocab_size) // _WORD_BITS)

    def compile(self, grammar: str) -> Matcher:
        """Compile a grammar. Raises `GrammarError`. The interpreter's lock is free meanwhile."""
        limits = self._written_limits if grammar.startswith(_WRITTEN) else self._limits
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(plain_message(matcher.get_error()))
        return Matcher(matcher)

    def check_first(self, matcher: Matcher) -> None:
        """Raise `GrammarError` for what a worker's limits or account of masks would end at the first tokens of one
        answer. What takes too long is tried again: a busy machine adds time of its own, but not each time."""
        for tries_left in reversed(range(_TRIES)):
            spent_s = self._first_s(matcher.copy())
            if tries_left == 0 or spent_s <= self.account_s:
                self.check_account(spent_s, MASKS)
                return

    def check_account(self, spent_s: float, masks: int) -> None:
        """Raise `GrammarError` if an answer's last masks, `MASKS` at most, took more processor time than they may."""
        if spent_s > ACCOUNT_S and spent_s > self.account_s:
            raise GrammarError(
                f"to find the tokens that may come next took {1000 * spent_s:.0f} ms of processor time for {masks} "
                f"tokens; the limit is {1000 * self.account_s:.0f} ms for {MASKS}"
            )

    @cached_property
    def account_s(self) -> float:
        """Processor time of an answer's account of masks, measured when it is first asked for: a slow machine refuses
        nothing that a fast one takes."""
        with suppress(GrammarError):  # tokens of many letters may come to the limits
            matcher = self.compile(of_json_schema(_LARGEST))
            return max(ACCOUNT_S, _OF_LARGEST * min(self._first_s(matcher.copy()) for _ in range(_TRIES)))
        return ACCOUNT_S

    def _first_s(self, matcher: Matcher) -> float:
        """Step a grammar with the first tokens of one answer, of those that may come always the lowest: letters and
        signs before words. Return the processor time. Raises `GrammarError` where its limits end it."""
        mask, began_s = np.zeros(self.words, dtype=np.int32), time.thread_time()
        for _ in range(MASKS):
            matcher.mask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = next((token for token in allowed.tolist() if token not in self.ends), None)
            if token is None:
                break
            matcher.take([token])
        return time.thread_time() - began_s


def plain_message(text: str) -> str:
    """Return the library's message in one line of bounded length, without the state that it adds."""
    line = " ".join(text.partition("<state>")[0].replace("<non-verbose/>", "").split())
    line = next((sentence for mark, sentence in _SENTENCES.items() if mark in line), line)
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}…"


# -- The texts of grammars ---------------------------------------------------------------------------------------


def of_json_schema(schema: dict[str, Any] | bool, *, closes: bool = True) -> str:
    """Return the grammar of JSON of this schema; {} is any JSON. Its objects close if `closes` (`json_schemas.py`)."""
    if not isinstance(schema, bool):
        schema = with_white_space(json_schemas.ending(schema, closes=closes))
    return json.dumps({"grammars": [{"json_schema": schema}]}, separators=(",", ":"))


def with_white_space(schema: dict[str, Any]) -> dict[str, Any]:
    """Bound white space between the parts of JSON unless the schema has `x-guidance`: a small model would repeat it
    until its tokens are used up."""
    return {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema}


def of_regex(pattern: str) -> str:
    """Return the grammar of a regular expression in the syntax of Rust's regex crate: no look-around, no
    back-references."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_choice(choices: Sequence[str]) -> str:
    """Return the grammar of exactly one of these texts."""
    return of_lark("start: " + " | ".join(map(quoted, choices)) + "\n")


def of_lark(lark: str) -> str:
    """Return a grammar in llguidance's variant of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, separators=(",", ":"))


def of_grammar(text: str) -> str:
    """Convert a grammar as clients write it: Lark, or GBNF / EBNF (`root ::= …`). Raises `GrammarError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        written = {"name": "written", "lark_grammar": any_to_lark(text)}
        return json.dumps({"grammars": [written]}, separators=(",", ":"))
    except Exception as error:  # the converter raises bare ones
        raise GrammarError(f"neither Lark nor GBNF: {plain_message(str(error))}") from error


def quoted(text: str) -> str:
    """Return a literal of a Lark grammar."""
    return json.dumps(text)
