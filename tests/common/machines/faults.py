"""What may happen to a virtual cluster in a property test; each fault is one for `World.inflict`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import strategies as st

from cohort.common.virtual_cluster.cluster import GATEWAY, MANAGER

Fault = tuple[str, float, float]
"""Kind, second of the run, seconds until it is over."""

PREFILL_AND_DECODE_TWICE = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def any_faults(
    workers: Sequence[str] = PREFILL_AND_DECODE_TWICE,
    *,
    latest_s: float = 4.0,
    longest_s: float = 4.0,
    most: int = 4,
    managers: Sequence[str] = (MANAGER,),
) -> st.SearchStrategy[list[Fault]]:
    """Up to `most` faults from second 1.6 to `latest_s`, each over after up to `longest_s`: half of them end processes
    or requests (a worker's death is noticed at once, or by its silence) or tell of a death that was none; half stop a
    process for a while, cut a pair off from each other, or drain a worker."""
    everybody = (*workers, *managers, GATEWAY)
    ends = st.sampled_from([*workers, *managers, "leave", "cancel"])
    noticed = st.sampled_from([f"{how} {name}" for name in workers for how in ("crash", "alarm")])
    pauses = st.sampled_from([f"freeze {name}" for name in everybody])
    drains = st.sampled_from([f"drain {name}" for name in workers])
    cuts = st.sampled_from([f"cut {one} {other}" for one, other in combinations(everybody, 2)])
    kinds = ends | noticed | pauses | cuts | drains
    return st.lists(st.tuples(kinds, st.floats(1.6, latest_s), st.floats(0.1, longest_s)), max_size=most)
