"""What may happen to a virtual cluster in a property test; each fault is one for `World.inflict`."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

Fault = tuple[str, float, float]
"""Kind, second of the run, seconds until it is over."""

PREFILL_AND_DECODE_TWICE = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def any_faults(
    workers: Sequence[str] = PREFILL_AND_DECODE_TWICE, *, latest_s: float = 4.0, longest_s: float = 4.0, most: int = 4
) -> st.SearchStrategy[list[Fault]]:
    """Up to `most` faults from second 1.6 to `latest_s`, each over after up to `longest_s`."""
    kinds = st.sampled_from([*workers, "manager", "leave", "cancel"])
    return st.lists(st.tuples(kinds, st.floats(1.6, latest_s), st.floats(0.1, longest_s)), max_size=most)
