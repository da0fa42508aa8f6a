"""`cohort bench`: hands its words over to the measuring wing, which has commands of its own (`services.bench`).

The wing is imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    from cohort.services.bench.__main__ import main as bench

    return bench(words)
