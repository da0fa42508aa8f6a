"""The tokens that grammars allow next, as one bit mask for a step's rows.

    prompt's first step ──▶ compile, first mask (a thread) ─┐
    forward under way ──▶ step with new tokens ──┬──────────┴─▶ mask ──▶ both samplers, ahead of everything else
                                                 └─ not in time ──▶ late: no token in this step; a thread computes

Owned by the model runner, called on the engine thread: on a GPU while the device computes, on a processor after it. A
grammar is compiled once for all requests that have it, during the steps of their prompts; its matcher lives with the
sequence. While an answer reasons before what is bound, its mask costs nothing: all tokens but those that end it. Two
accounts in processor time, which other threads do not lengthen: a step's, beyond which a row sits the
step out (`TokenMasks.late`) and a thread finds its mask meanwhile; and a request's, beyond which it ends. A grammar
beyond its limits ends its own request and no other.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from cohort.common.engine.step.batch import Int32Array, SamplingRow
from cohort.common.engine.step.mask_turns import Mask, MaskTurns
from cohort.common.errors import ModelError
from cohort.common.grammar import MASKS, GrammarError, GrammarTokens, Matcher
from cohort.common.sampling_inputs import GrammarInputs

log = structlog.get_logger(__name__)

_WORD_BITS = 32
_COMPILED_BYTES = 64 << 20
"""Estimated bytes of the compiled grammars that are stored for the next request with one of them."""
STEP_S = 0.01
"""Processor time of all masks that a step computes on the engine thread, where everybody's tokens wait for them; one
mask may exceed it, a grammar's first that does."""
_REPLAYED, _TAKE_S = 16, 20e-6
"""Tokens that a matcher is stepped with at once beyond which an answer counts as replayed; estimated processor time of
each."""
_LOCK_SHARE = 1 / 3
"""Processor time that may be the wait's own, of a second in which a thread does not run: measured 0.25."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`bits` int32 [S, ceil(vocabulary / 32)]: token t of row r may come next where bit t % 32 of `bits[r, t // 32]` is
    set; rows without a grammar have all set. `failures`: by row, why it can have no further token. `late`: rows whose
    mask was not ready: they have no token in this step, and all bits set."""

    bits: Int32Array
    failures: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    """Rows whose bits or failures are final."""


@dataclass(slots=True, eq=False)
class _Compiled:
    """Grammar with the first mask of every answer, and the processor time of its slowest mask so far."""

    tokens: GrammarTokens
    matcher: Matcher
    first: Int32Array
    slowest_s: float

    def note(self, cost_s: float) -> None:
        self.slowest_s = max(self.slowest_s, cost_s)

    def check(self) -> None:
        """Raise `GrammarError` if one mask took more than an answer's whole account: then all its answers end, as they
        would one after the other."""
        self.tokens.check_account(self.slowest_s, 1)


@dataclass(slots=True, eq=False)
class _Answer:
    """Engine's state of one answer (`GrammarInputs.answer`). While a thread computes `mask`, `matcher` is its own."""

    compiled: Future[_Compiled]
    matcher: Matcher | None = None
    begin: int = 0
    """Place in the output where `matcher` begins."""
    mask: Future[Mask] | None = None
    costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=MASKS))
    """Processor times of its last masks."""
    mean_s: float = 0.0
    """Moving average of these; 0 before the first, which is tried."""

    @property
    def expected_s(self) -> float:
        """Processor time that its next mask is expected to take: the grammar's longest before it has had any."""
        if self.costs_s or self.compiled.exception() is not None:
            return self.mean_s
        return self.compiled.result().slowest_s

    @property
    def is_broken(self) -> bool:
        return self.matcher is not None and self.matcher.broken

    def note(self, cost_s: float) -> None:
        """Enter a mask into the account. Raises `GrammarError` beyond it; masks that are still to come count as 0."""
        self.costs_s.append(cost_s)
        self.mean_s += (cost_s - self.mean_s) / len(self.costs_s)
        self.compiled.result().tokens.check_account(sum(self.costs_s), len(self.costs_s))


Find = Callable[[GrammarInputs, SamplingRow], Int32Array | None]


class GrammarMasks:
    """Grammars of one model. `reason`: why grammars are not possible, if `tokens` is None."""

    def __init__(
        self,
        tokens: GrammarTokens | None,
        vocabulary: int,
        reason: str = "",
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock`: processor seconds of the calling thread."""
        self._tokens = tokens
        self._reason = reason
        self._clock = clock
        self._words = -(-vocabulary // _WORD_BITS)
        self._compiled: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._compiled_bytes = 0
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._turns = MaskTurns()
        self._left_s = STEP_S
        """Time left of the step's account."""
        self._crowded = False
        """Whether the last step left masks to the helper."""
        self._counted = (0.0, 0.0)
        """Value of the clock up to which the account has been charged."""
        # Bits of the last word that are tokens: what a grammar's vocabulary has beyond the logits cannot be sampled.
        self._unbound: Int32Array = np.full(self._words, -1, dtype=np.int32)
        """Mask of an answer that reasons."""
        _clear(self._unbound, () if tokens is None else tokens.ends)
        self._last_word = np.uint32((1 << (vocabulary % _WORD_BITS or _WORD_BITS)) - 1).view(np.int32)

    @staticmethod
    def of_model(folder: Path, end_tokens: Sequence[int], vocabulary: int) -> GrammarMasks:
        try:
            return GrammarMasks(GrammarTokens.of_model(folder, end_tokens, vocabulary), vocabulary)
        except ModelError as error:
            log.info("no structured output", reason=str(error))
            return GrammarMasks(None, vocabulary, str(error))

    def prepare(self, grammars: Sequence[GrammarInputs], rows: Sequence[SamplingRow] = ()) -> None:
        """Begin a step: open its account, and begin to compile what its rows will need; returns at once. `rows`: those
        that it samples. If the last step had no time for all masks, the helper begins with those that this one will
        have none for, while the forward runs."""
        self._left_s = STEP_S
        for inputs in grammars:
            if inputs.answer is None and not inputs.failure:
                self._answer(inputs)
        crowded, self._crowded = self._crowded, False
        if crowded:
            self._share([index for index, row in enumerate(rows) if _has_all_tokens(row)], rows)

    def _share(self, due: Sequence[int], rows: Sequence[SamplingRow]) -> list[int]:
        """Hand the helper what the step has no time for. Return the rest, cheap masks first."""
        here, planned_s = list[int](), 0.0
        for expected_s, index in sorted([(_expected_s(rows[index]), index) for index in due]):
            if planned_s + expected_s <= self._left_s:
                planned_s += expected_s
                here.append(index)
            else:
                self._hand_over(rows[index])
        return here

    def of(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """Return the masks; None if no row has a grammar. End tokens that are banned yet stay away only if others may
        come: a complete answer ends, whatever min_tokens says."""
        bound = [index for index, row in enumerate(rows) if row.grammar is not None]
        if not bound:
            return None
        masks = TokenMasks(np.full((len(rows), self._words), -1, dtype=np.int32))
        late = self._fill(masks, rows, bound)
        if len(late) == len(rows):  # nobody else's token waits
            self._wait([rows[index].grammar for index in late])
            late = self._fill(masks, rows, late)
        masks.late.update(late)
        for index in bound:
            row = rows[index]
            if index in masks.late or index in masks.failures:
                masks.bits[index] = -1
            if row.grammar is not None and not row.ahead:
                row.grammar.late = index in masks.late
        return masks

    def _fill(self, masks: TokenMasks, rows: Sequence[SamplingRow], bound: Sequence[int]) -> list[int]:
        """Set the bits of these rows, cheap masks first. Return those that have none yet. The helper gets what the step
        has no time for before the rest is computed, so that some of it is ready then."""
        due = [index for index in bound if not self._try(masks, index, rows[index], self._known)]
        here = self._share(due, rows)
        self._counted = self._times()
        for index in here:
            if self._left_s > 0.0:
                self._try(masks, index, rows[index], self._computed)
            else:
                self._hand_over(rows[index])
        return [index for index in due if not self._try(masks, index, rows[index], self._known)]

    def _try(self, masks: TokenMasks, index: int, row: SamplingRow, find: Find) -> bool:
        """Set the row's bits, or why it can have no token: after drafts that holds for this row alone. Return False if
        `find` has neither."""
        inputs = row.grammar
        if index in masks.found or inputs is None:
            return True
        if not inputs.failure:
            try:
                bits = find(inputs, row)
            except GrammarError as error:
                masks.failures[index] = f"its grammar was given up: {error}"
                if not row.ahead:
                    inputs.failure = masks.failures[index]
                if isinstance(answer := inputs.answer, _Answer) and (not row.ahead or answer.is_broken):
                    answer.matcher = None
            else:
                if bits is None:
                    return False
                self._allow(masks.bits[index], bits, row.banned)
        else:
            masks.failures[index] = inputs.failure
        masks.found.add(index)
        return True

    def _known(self, inputs: GrammarInputs, row: SamplingRow) -> Int32Array | None:
        """Return a mask that costs the step nothing: an answer's first, or one from the helper."""
        answer = self._answer(inputs)
        if len(inputs.output) < row.awaits:
            return None  # the step before gave it no token
        begin = inputs.begin(row.ahead)
        if not answer.compiled.done():
            return self._unbound if begin < 0 else None
        compiled = answer.compiled.result()
        if begin < 0:
            return self._unbound
        if answer.mask is not None:
            if row.ahead or not answer.mask.done():
                return None
            self._crowded = True
            mask, answer.mask = answer.mask, None
            bits, cost_s = mask.result()
            answer.note(cost_s)
            return bits
        if begin < len(inputs.output) + len(row.ahead):
            return None
        compiled.check()
        return _with(compiled.first, inputs.may_open(row.ahead))

    def _computed(self, inputs: GrammarInputs, row: SamplingRow) -> Int32Array | None:
        """Compute a mask here, unless the helper has the answer's matcher."""
        answer = self._answer(inputs)
        if answer.mask is not None:
            return None
        replay_s = 0.0
        try:
            bits, replay_s = self._compute(inputs, answer, row.ahead)
        finally:  # one that fails takes as long
            before, self._counted = self._counted, self._times()
            self._left_s -= self._counted[0] - before[0]
            cost_s = _cost_s(before, self._counted, replay_s)
            answer.compiled.result().note(cost_s)
        answer.note(cost_s)
        return bits

    def _hand_over(self, row: SamplingRow) -> None:
        """Let the helper compute a mask; what follows drafts is not worth it."""
        if (inputs := row.grammar) is None or row.ahead:
            return
        answer = self._answer(inputs)
        if answer.mask is None and answer.compiled.done() and inputs.output:
            self._crowded = True
            answer.mask = self._turns.add(inputs.text, answer.expected_s, partial(self._help, inputs, answer))
            self._helper.submit(self._turns.compute_next)

    def _help(self, inputs: GrammarInputs, answer: _Answer) -> Mask:
        """Compute a mask in the helper's thread; return it with its processor time."""
        began, replay_s = self._times(), 0.0
        try:
            bits, replay_s = self._compute(inputs, answer, ())
        finally:
            cost_s = _cost_s(began, self._times(), replay_s)
            answer.compiled.result().note(cost_s)
        return bits, cost_s

    def _compute(self, inputs: GrammarInputs, answer: _Answer, ahead: tuple[int, ...]) -> Mask:
        """Return a mask, and the processor time of tokens that were replayed for it, which count for no mask."""
        matcher, compiled, begin = answer.matcher, answer.compiled.result(), inputs.begin(ahead)
        compiled.check()
        if matcher is None or answer.begin != begin:
            matcher, answer.begin = compiled.matcher.copy(), begin
            answer.matcher = matcher
        replays = len(inputs.output) - begin - matcher.taken > _REPLAYED
        replay_s = self._clock() if replays else 0.0
        matcher.take(inputs.output[begin + matcher.taken :])
        if replays:
            replay_s = self._clock() - replay_s
        with matcher.ahead(ahead[max(0, begin - len(inputs.output)) :]):
            return _with(self._mask(matcher), inputs.may_open(ahead)), replay_s

    def _mask(self, matcher: Matcher) -> Int32Array:
        assert self._tokens is not None
        bits = np.zeros(max(self._tokens.words, self._words), dtype=np.int32)
        matcher.mask(bits[: self._tokens.words])
        bits = bits[: self._words]
        bits[-1] &= self._last_word
        if not bits.any():
            raise GrammarError("no token of the model may come next")
        return bits

    def _allow(self, into: Int32Array, bits: Int32Array, banned: Sequence[int]) -> None:
        into[:] = bits
        _clear(into, banned)
        if banned and not into.any():
            into[:] = bits

    def _wait(self, late: Sequence[GrammarInputs | None]) -> None:
        """Wait for one of these masks or grammars, at most as long as the step's account lasts."""
        awaited: list[Future[Any]] = []
        for inputs in late:
            if inputs is not None:
                answer = self._answer(inputs)
                awaited.append(answer.compiled if answer.mask is None else answer.mask)
        awaited = [each for each in awaited if not each.done()]
        if awaited and self._left_s > 0.0:
            began_s = time.monotonic()
            wait(awaited, timeout=self._left_s, return_when=FIRST_COMPLETED)
            self._left_s -= time.monotonic() - began_s

    def _answer(self, inputs: GrammarInputs) -> _Answer:
        if not isinstance(inputs.answer, _Answer):
            inputs.answer = _Answer(self._begin(inputs.text))
        return inputs.answer

    def _begin(self, text: str) -> Future[_Compiled]:
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._compiled[text] = self._compiler.submit(self._compile, text)
            self._compiled_bytes += _compiled_bytes(text)
            while self._compiled_bytes > _COMPILED_BYTES and len(self._compiled) > 1:
                self._compiled_bytes -= _compiled_bytes(self._compiled.popitem(last=False)[0])
        else:
            self._compiled.move_to_end(text)
        return compiled

    def _compile(self, text: str) -> _Compiled:
        if self._tokens is None:
            raise GrammarError(self._reason)
        matcher, began = self._tokens.compile(text), self._times()
        first = self._mask(matcher)
        return _Compiled(self._tokens, matcher, first, _cost_s(began, self._times()))

    def _times(self) -> tuple[float, float]:
        return self._clock(), time.monotonic()


def _cost_s(began: tuple[float, float], ended: tuple[float, float], replay_s: float = 0.0) -> float:
    """Return the processor time between two times of one thread, less what its waits took: beside a busy thread a wait
    for the interpreter's lock is processor time by a fifth, which may be 100 ms. A thread that other programs keep
    waiting has its masks counted at a discount while it runs for a quarter of the elapsed time, at nothing below."""
    spent_s = ended[0] - began[0]
    waited_s = max(0.0, ended[1] - began[1] - spent_s)
    return max(0.0, spent_s - _LOCK_SHARE * waited_s - replay_s)


def _has_all_tokens(row: SamplingRow) -> bool:
    """Return whether a row has a mask that can be looked for before the step: the one before it may be under way."""
    inputs = row.grammar
    is_known = inputs is not None and not inputs.failure and len(inputs.output) >= row.awaits
    return is_known and inputs is not None and inputs.begin(row.ahead) >= 0


def _expected_s(row: SamplingRow) -> float:
    """Return the processor time that a row's mask is expected to take: infinite if it cannot be computed yet, or if a
    mask of its grammar has exceeded a step's account."""
    inputs = row.grammar
    assert inputs is not None and isinstance(inputs.answer, _Answer), "a mask was looked for"
    answer = inputs.answer
    if not answer.compiled.done() or answer.mask is not None or len(inputs.output) < row.awaits:
        return math.inf
    if answer.compiled.exception() is not None:
        return 0.0  # its failure is found at once
    if answer.compiled.result().slowest_s > STEP_S:
        return math.inf
    begin = inputs.begin(row.ahead)
    taken = 0 if answer.matcher is None or answer.begin != begin else answer.matcher.taken
    return answer.mean_s + _TAKE_S * max(0, len(inputs.output) - begin - taken)


def _clear(into: Int32Array, tokens: Sequence[int]) -> None:
    for token in tokens:
        if 0 <= token < len(into) * _WORD_BITS:
            into[token // _WORD_BITS] &= np.int32(~np.uint32(1 << token % _WORD_BITS).view(np.int32))


def _with(bits: Int32Array, token: int) -> Int32Array:
    """Return a mask that allows one more token; the same mask for -1."""
    if not 0 <= token < len(bits) * _WORD_BITS:
        return bits
    more = bits.copy()
    more[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS).view(np.int32)
    return more


def _compiled_bytes(text: str) -> int:
    """Return the estimated memory of a compiled grammar, from its text. Measured: 0 to 80 bytes a character of a
    schema, more the longer it is, and 150 once masks were found with it."""
    return (64 << 10) + 150 * len(text)
