"""How the work of one attention launch is cut into programs: pure arithmetic on shapes.

Called by `attention` for every launch and by `workspace` for the sizes of its buffers. Reads no tensor: a captured CUDA
graph keeps the grid it was captured with, so nothing here may depend on what a step's rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 128  # what the merge reads at most for one head
_PROGRAMS_PER_MULTIPROCESSOR = 4  # enough reads in flight everywhere, and the last ones to finish are small
_LONGEST_WALK = 8192  # keys: one long row among many short ones must not be one program's work


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode launch: every (kv head, row) is walked by up to `splits` programs, each over a part of the context.

    How many of them a row uses is decided on the device, from its own length: a part has `min_split_keys` keys or more,
    and programs without a part end at once. `tile_keys` keys are read at a time.
    """

    splits: int
    min_split_keys: int
    tile_keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill launch: a program holds `tile_rows` rows (tokens × query heads of one kv head)."""

    tile_rows: int
    tile_tokens: int
    tile_keys: int
    warps: int
    stages: int


def decode_splits(rows: int, kv_heads: int, max_context: int, multiprocessors: int, min_split_keys: int) -> int:
    """Into how many parts a row's context may fall (flash-decoding).

    As many as give every multiprocessor its programs, or as keep one program from walking more than 8,192 keys,
    whichever is more; but not more than `max_context` has parts of `min_split_keys`.
    """
    programs = max(1, rows * kv_heads)
    wanted = max(-(-_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs), -(-max_context // _LONGEST_WALK))
    return max(1, min(wanted, -(-max_context // min_split_keys), MAX_SPLITS))


def decode_plan(
    rows: int, *, kv_heads: int, head_dim: int, element_bytes: int, max_context: int, multiprocessors: int
) -> DecodePlan:
    """The plan for `rows` rows of one token each, none with more than `max_context` positions."""
    # K and V of a tile are up to 32 KiB: with two more tiles on their way, two programs share a multiprocessor.
    tile_keys = max(16, min(128, _power_of_two_below(16384 // (head_dim * element_bytes))))
    min_split_keys = max(128, tile_keys)
    splits = decode_splits(rows, kv_heads, max_context, multiprocessors, min_split_keys)
    return DecodePlan(splits, min_split_keys, tile_keys, warps=4, stages=3)


def prefill_plan(*, group: int, head_dim: int, element_bytes: int) -> PrefillPlan:
    """The plan for rows of several tokens; `group` query heads share a kv head."""
    wide = head_dim > 128 or element_bytes > 2
    tile_rows = max(32 if wide else 128, power_of_two_from(group))
    tile_keys = max(16, min(64, _power_of_two_below(16384 // (head_dim * element_bytes))))
    return PrefillPlan(tile_rows, tile_rows // group, tile_keys, warps=4 if wide else 8, stages=2 if wide else 3)


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is not less than `value` ≥ 1."""
    return 1 << (value - 1).bit_length()


def _power_of_two_below(value: int) -> int:
    """The largest power of two that is not more than `value` ≥ 1; 1 below that."""
    return 1 << (max(1, value).bit_length() - 1)
