"""The tokens that grammars allow next, as one bit mask for a step's rows.

    prompt's first step ──▶ compile in a thread ─┐
    forward under way ──▶ step with new tokens ──┴─▶ mask ──▶ both samplers, ahead of everything else

Owned by the model runner, called on the engine thread: on a GPU while the device computes, on a processor after it. A
grammar is compiled once for all requests that have it, during the steps of their prompts; its matcher lives with the
sequence. A grammar beyond its limits ends its own request and no other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from cohort.common.engine.step.batch import Int32Array, SamplingRow
from cohort.common.errors import ModelError
from cohort.common.grammar import GrammarError, GrammarTokens, Matcher
from cohort.common.sampling_inputs import GrammarInputs

log = structlog.get_logger(__name__)

_WORD_BITS = 32
_COMPILED = 64
"""Compiled grammars that are stored for the next request with one of them; 20 MB each at worst."""
SLOWEST_MASK_S = 0.25
"""Maximum processor time of one mask: a slower grammar would hold every row of its steps up."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`bits` int32 [S, ceil(vocabulary / 32)]: token t of row r may come next where bit t % 32 of `bits[r, t // 32]` is
    set; rows without a grammar have all set. `failures`: by row, why it can have no further token."""

    bits: Int32Array
    failures: dict[int, str] = field(default_factory=dict)


class GrammarMasks:
    """Grammars of one model. `reason`: why grammars are not possible, if `tokens` is None."""

    def __init__(self, tokens: GrammarTokens | None, vocabulary: int, reason: str = "") -> None:
        self._tokens = tokens
        self._reason = reason
        self._words = -(-vocabulary // _WORD_BITS)
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # Bits of the last word that are tokens: what a grammar's vocabulary has beyond the logits cannot be sampled.
        self._last_word = np.uint32((1 << (vocabulary % _WORD_BITS or _WORD_BITS)) - 1).view(np.int32)

    @staticmethod
    def of_model(folder: Path, end_tokens: Sequence[int], vocabulary: int) -> GrammarMasks:
        try:
            return GrammarMasks(GrammarTokens.of_model(folder, end_tokens, vocabulary), vocabulary)
        except ModelError as error:
            log.info("no structured output", reason=str(error))
            return GrammarMasks(None, vocabulary, str(error))

    def prepare(self, grammars: Sequence[GrammarInputs]) -> None:
        """Begin to compile what these will need; returns at once."""
        for inputs in grammars:
            if inputs.matcher is None and not inputs.failure:
                self._begin(inputs.text)

    def of(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """Return the masks; None if no row has a grammar. End tokens that are banned yet stay away only if others may
        come: a complete answer ends, whatever min_tokens says."""
        if all(row.grammar is None for row in rows):
            return None
        masks = TokenMasks(np.full((len(rows), self._words), -1, dtype=np.int32))
        for index, row in enumerate(rows):
            inputs = row.grammar
            if inputs is None:
                continue
            if failure := inputs.failure or self._fill(masks.bits[index], inputs, row):
                masks.failures[index] = failure
                masks.bits[index] = -1
        return masks

    def _fill(self, bits: Int32Array, inputs: GrammarInputs, row: SamplingRow) -> str:
        """Set the row's bits. Return why it can have no token, or "". After drafts that holds for this row alone."""
        try:
            matcher = self._matcher(inputs)
            began_s = time.thread_time()
            matcher.take(inputs.output[matcher.taken :])
            with matcher.ahead(row.ahead):
                self._mask(matcher, bits)
            if time.thread_time() - began_s > SLOWEST_MASK_S:
                raise GrammarError(f"the tokens that may come next took more than {SLOWEST_MASK_S:g} s to find")
        except GrammarError as error:
            failure = f"its grammar was given up: {error}"
            if not row.ahead:
                inputs.failure = failure
            if not row.ahead or (isinstance(inputs.matcher, Matcher) and inputs.matcher.broken):
                inputs.matcher = None
            return failure
        saved = bits.copy()
        for token in row.banned:
            if 0 <= token < self._words * _WORD_BITS:
                bits[token // _WORD_BITS] &= np.int32(~np.uint32(1 << token % _WORD_BITS).view(np.int32))
        if not bits.any():
            bits[:] = saved
        return ""

    def _mask(self, matcher: Matcher, bits: Int32Array) -> None:
        assert self._tokens is not None
        if self._tokens.words == self._words:
            matcher.mask(bits)
        else:
            whole = np.zeros(self._tokens.words, dtype=np.int32)
            matcher.mask(whole)
            bits[:] = whole[: self._words]
        bits[-1] &= self._last_word
        if not bits.any():
            raise GrammarError("no token of the model may come next")

    def _matcher(self, inputs: GrammarInputs) -> Matcher:
        if isinstance(inputs.matcher, Matcher):
            return inputs.matcher
        matcher = self._begin(inputs.text).result().copy()
        inputs.matcher = matcher
        return matcher

    def _begin(self, text: str) -> Future[Matcher]:
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._compiled[text] = self._compiler.submit(self._compile, text)
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(text)
        return compiled

    def _compile(self, text: str) -> Matcher:
        if self._tokens is None:
            raise GrammarError(self._reason)
        return self._tokens.compile(text)
