"""What stands in the slots of a draft model's cache: of each slot a mark of the token there and of all before it.

    tokens of a sequence   t0  t1  t2  t3  t4  t5        its blocks' slots   m0  m1  m2  x   m4  -
    their marks            m0  m1  m2  m3  m4  m5        ⇒ three positions are there, the rest is to be computed

A position counts as computed where its slot has its mark. So nobody has to say what became of a block since: what came
by a KV transfer, was swapped, preempted, lent, rejected, or taken by another sequence has other marks, and what two
sequences share has the same. Marks are the draft model's, on the engine's thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cohort.common.engine.step.batch import Int64Array
from cohort.common.engine.step.counter_random import GOLDEN, MIX_1, MIX_2

Marks = npt.NDArray[np.uint64]

_SECRET = secrets.token_bytes(16)
"""A secret of this process: nobody can choose tokens whose marks are another text's."""


class TokenChain:
    """The tokens of one sequence as they grow, with their marks."""

    def __init__(self, salt: str) -> None:
        """`salt`: sequences of different ones have no mark in common, whatever their tokens."""
        digest = hashlib.blake2b(salt.encode(), key=_SECRET, digest_size=16).digest()
        self._start, self._salt = np.frombuffer(digest, dtype=np.uint64)
        self._tokens: Int64Array = np.zeros(64, dtype=np.int64)
        self._marks: Marks = np.zeros(64, dtype=np.uint64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Int64Array:
        """[known]"""
        return self._tokens[: self._length]

    @property
    def marks(self) -> Marks:
        """[known]"""
        return self._marks[: self._length]

    def grow(self, tokens: Sequence[int]) -> None:
        """Append the end of `tokens`, which begin with those that are known."""
        first, length = self._length, len(tokens)
        if length > len(self._tokens):
            more = max(length, 2 * len(self._tokens)) - len(self._tokens)
            self._tokens, self._marks = np.pad(self._tokens, (0, more)), np.pad(self._marks, (0, more))
        self._tokens[first:length] = tokens[first:]
        self._marks[first:length] = self.after(self._tokens[first:length])
        self._length = length

    def after(self, tokens: Int64Array) -> Marks:
        """Return the marks of tokens that would follow those known: each the sum of the numbers of all up to it."""
        places = np.arange(self._length, self._length + len(tokens), dtype=np.uint64)
        before = self._marks[self._length - 1] if self._length else self._start
        with np.errstate(over="ignore"):
            value = _mixed(tokens.astype(np.uint64) ^ _mixed(places * np.uint64(GOLDEN) + self._salt))
            marks: Marks = before + np.cumsum(value, dtype=np.uint64)
        return marks


class SlotMarks:
    """The mark of every slot of a cache; 0 = nothing is there."""

    def __init__(self, slots: int) -> None:
        self._marks: Marks = np.zeros(slots, dtype=np.uint64)

    def computed(self, slots: Int64Array, marks: Marks) -> int:
        """Return the number of leading positions, of those in these slots, that hold their marks."""
        other = self._marks[slots[: len(marks)]] != marks
        return int(other.argmax()) if other.any() else len(marks)

    def write(self, slots: Int64Array, marks: Marks) -> None:
        self._marks[slots] = marks


def _mixed(value: Marks) -> Marks:
    """Apply the last steps of SplitMix64 to each number."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_2)
    mixed: Marks = value ^ (value >> np.uint64(31))
    return mixed
