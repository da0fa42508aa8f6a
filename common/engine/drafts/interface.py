"""What proposes tokens for the model to verify: one drafter per sequence, behind two verbs.

Called by the engine, which verifies every proposal: a wrong one costs a computed position and never changes a response.
How many tokens a step may verify is a policy's decision, not a drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Of one sequence, whose tokens only grow from call to call."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that are likely to follow `tokens` (prompt and response so far); perhaps none.

        `tokens` begins with the tokens of every earlier call. Costs O(new tokens + limit), not O(tokens).
        """
        ...

    def observe(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """The sequence has ended with `tokens`, the first `prompt_tokens` of which are its prompt. Called once at most;
        drafters that learn from one response for the next take it here."""
        ...
