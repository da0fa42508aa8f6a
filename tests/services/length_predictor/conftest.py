"""A made-up world in which lengths depend on what is asked, so that learning can be told from guessing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cohort.common.messages import LengthFacts
from cohort.services.length_predictor.buffer import Dataset, Observation, ObservationBuffer
from cohort.services.length_predictor.features import extract

LIST_IT, EXPLAIN_IT, SAY_YES = 11, 12, 13
TYPICAL_TOKENS = {LIST_IT: 120, EXPLAIN_IT: 600, SAY_YES: 6}
NOISE = 0.35
"""Standard deviation of log length around its typical value."""


class World:
    """Draws requests: a task word somewhere among filler tokens decides the typical length."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def request(self, max_tokens: int = 4096) -> tuple[LengthFacts, int]:
        """Facts of a request and the length its answer would have without a limit."""
        task = int(self.random.choice(list(TYPICAL_TOKENS)))
        filler = self.random.integers(1000, 30_000, size=int(self.random.integers(5, 60))).tolist()
        filler.insert(int(self.random.integers(0, len(filler))), task)
        length = round(TYPICAL_TOKENS[task] * float(np.exp(self.random.normal(0.0, NOISE))))
        facts = LengthFacts(
            filler, chat=True, max_tokens=max_tokens, temperature=1.0, stop_strings=0, text_bytes=4 * len(filler)
        )
        return facts, max(1, length)

    def observation(self, max_tokens: int = 4096) -> Observation:
        facts, length = self.request(max_tokens)
        return Observation(extract(facts), min(length, max_tokens), max_tokens, truncated=length > max_tokens)

    def dataset(self, rows: int, max_tokens: int = 4096) -> Dataset:
        buffer = ObservationBuffer(rows)
        for _ in range(rows):
            buffer.add(self.observation(max_tokens))
        return buffer.dataset()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make_world() -> Callable[[int], World]:
    return World


@pytest.fixture(scope="session")
def large_dataset() -> Dataset:
    return World(seed=1).dataset(1000)
