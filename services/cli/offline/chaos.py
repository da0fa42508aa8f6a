"""`cohort chaos`: hands its words over to `services.bench.chaos`, which is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    from cohort.services.bench.__main__ import main as bench

    return bench(["chaos", *words])
