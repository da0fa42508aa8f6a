"""A conversation that is longer than the model's context, without its oldest turns.

What stands before the first turn (instructions, tools) stays; a turn goes as a whole, from one message of the user's to
the next, so that no result is left without its call. As few turns go as are needed, found by bisection: a handful of
renderings, however long the conversation. Pure but for the `encode` it is given; called by `generator.py` for requests
that ask for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from cohort.services.gateway.text.tokenizer import PromptTooLong

Messages = Sequence[Mapping[str, Any]]


async def latest_turns(
    messages: Messages, most_tokens: int, encode: Callable[[Messages], Awaitable[list[int]]]
) -> list[int]:
    """The tokens of the messages without as many of their oldest turns as it takes to be at most so many; of the last
    turn alone where that is too long too. `encode` may raise `PromptTooLong`; here it is raised for the last turn."""
    head = len(list(takewhile(lambda message: message["role"] == "system", messages)))
    turns = [index for index in range(head, len(messages)) if messages[index]["role"] == "user"] or [head]
    turns[0] = head

    async def from_turn(turn: int) -> list[int]:
        return await encode([*messages[:head], *messages[turns[turn] :]])

    async def fits(turn: int) -> list[int] | None:
        try:
            tokens = await from_turn(turn)
        except PromptTooLong:
            return None
        return tokens if len(tokens) <= most_tokens else None

    if (whole := await fits(0)) is not None:
        return whole
    found: list[int] | None = None
    low, high = 1, len(turns) - 1
    while low <= high:
        middle = (low + high) // 2
        tokens = await fits(middle)
        if tokens is None:
            low = middle + 1
        else:
            found, high = tokens, middle - 1
    return await from_turn(len(turns) - 1) if found is None else found
