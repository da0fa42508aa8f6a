"""When a request that changes hands in its answer counts as about to arrive."""

from __future__ import annotations

import pytest

from cohort.common.machines.worker.kv_receiver import Incoming
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, SamplingParams

BLOCK = 16


def incoming(prompt: int, positions: int, chunks: list[int]) -> Incoming:
    """`chunks`: blocks of each that was announced."""
    request = Request(Attempt("r", 0), "g", [7] * prompt, prompt, SamplingParams(max_tokens=4096), 0.0)
    found = Incoming(Sequence(request, list(request.tokens), None, 0, 0.0), "other", 1, 1, positions)
    for blocks in chunks:
        found.announced(blocks)
    return found


@pytest.mark.parametrize(
    ("prompt", "positions", "chunks", "expected"),
    [
        (640, 320, [20], False),  # changes hands within its prompt: no client waits for a token of it
        (320, 320, [], False),  # it takes two iterations, and nothing of it has come
        (250, 250, [], True),  # this one may come at once
        (640, 640, [16], False),  # 384 tokens of the prompt are left, chunks have 256
        (640, 640, [16, 16], True),  # one more chunk
        (640, 840, [16, 16], False),  # and then 200 tokens one by one
        (640, 840, [16, 16, 8, 8], False),  # 72 of them left: the largest chunk says nothing about an answer
        (640, 840, [16, 16, 8, *[1] * 11], True),  # 24 left
        (40, 300, [], False),  # a short prompt whose answer goes on for long
        (40, 300, [2, *[1] * 15], True),
    ],
)
def test_requests_about_to_arrive(prompt: int, positions: int, chunks: list[int], expected: bool) -> None:
    assert incoming(prompt, positions, chunks).imminent(BLOCK, 256) is expected
