"""What the clients ask, and what they compare."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.e2e.pipeline import Answer

VOCABULARY = 400
DECODE = "decode-0"


def bodies(streams: int, new_tokens: int) -> list[dict[str, Any]]:
    """Half greedy, half seeded; prompts of 3 to 40 tokens."""
    random = Random(5)
    return [
        {
            "prompt": [random.randrange(3, VOCABULARY) for _ in range(random.randint(3, 40))],
            "max_tokens": new_tokens,
            "temperature": 0.8 if index % 2 else 0,
            "seed": index,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        for index in range(streams)
    ]


def same(answers: Sequence[Answer], undisturbed: Sequence[Answer], new_tokens: int) -> None:
    """Every answer is whole, and says what it says where nothing is broken."""
    assert [answer.error for answer in answers] == [""] * len(undisturbed)
    assert [len(answer.tokens) for answer in answers] == [new_tokens] * len(undisturbed)
    other = [i for i, (one, two) in enumerate(zip(answers, undisturbed, strict=True)) if one.tokens != two.tokens]
    assert not other, f"{len(other)} answers say something else than undisturbed: {other[:10]}"
