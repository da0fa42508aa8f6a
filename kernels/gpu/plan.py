"""How the work of one attention launch is cut into programs: pure arithmetic on shapes.

Called by `attention` for every launch and by `workspace` for the sizes of its buffers. Reads no tensor: a captured CUDA
graph keeps the grid it was captured with, so nothing here may depend on what a step's rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS_PER_MULTIPROCESSOR = 2  # as many as have room; while one waits for its first keys the other reads
_LEAST_ROWS = 16
_PART_KEYS = 256  # positions that one program walks at least, where contexts fall into parts by position
_WANTED_TILES = 128  # about as many as GPUs have multiprocessors; not this GPU's number, so that all compute alike
_LEAST_DEPTH = 256  # inputs of a product's part
_ITEMS_PER_PROGRAM = 4  # so that the last round is a small part of all


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode launch: `programs` programs share the items of all rows, an item being a part of one row's context for
    one kv head.

    How long a part is, is decided on the device from what the rows hold: such that there are about `items` of them, but
    no shorter than `min_part_keys`. So the grid is the same whatever the rows hold, a row longer than the others
    becomes more parts instead of a later end, and short rows cost no empty programs. `tile_keys` keys are read at a
    time.
    """

    programs: int
    items: int
    min_part_keys: int
    tile_keys: int
    warps: int
    stages: int

    def parts(self, rows: int, kv_heads: int) -> int:
        """Return a bound of the parts of `rows` rows together."""
        return rows + self.items // kv_heads


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill launch: a program holds `tile_rows` rows (tokens × query heads of one kv head)."""

    tile_rows: int
    tile_tokens: int
    tile_keys: int
    warps: int
    stages: int


def decode_plan(*, head_dim: int, element_bytes: int, multiprocessors: int, fp8: bool = False) -> DecodePlan:
    """Return the plan for rows of one token each, of any number and length; `fp8`: over codes of such queries' KV."""
    # K and V of a tile are up to 32 KiB. A tile takes two loads, one after the other (the block table's entry, then the
    # keys), so five stages are two tiles on their way: 72 KiB on Hopper for heads of 128; two programs share its 227.
    tile_keys = max(16, min(128, _power_of_two_below(16384 // (head_dim * element_bytes))))
    programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    # Products without matrix units keep their sums in registers: with four warps some variants of narrow heads spill a
    # few bytes, with eight some of wide ones.
    warps = 8 if element_bytes > 2 and head_dim <= 64 else 4
    if element_bytes > 2 and fp8:  # numbers of 32 bits beside the codes that they are made of
        tile_keys, warps = 16, 8
    return DecodePlan(programs, _ITEMS_PER_PROGRAM * programs, max(128, tile_keys), tile_keys, warps, stages=5)


def prefill_plan(*, group: int, head_dim: int, element_bytes: int) -> PrefillPlan:
    """Return the plan for rows of several tokens; `group` query heads share a kv head."""
    if element_bytes > 2:  # products without matrix units: more threads, or the sums leave the registers
        tile_rows = max(32, power_of_two_from(group))
        return PrefillPlan(tile_rows, tile_rows // group, tile_keys=16, warps=8, stages=1)
    wide = head_dim > 128
    tile_rows = max(32 if wide else 128, power_of_two_from(group))
    tile_keys = max(16, min(32 if wide else 64, _power_of_two_below(16384 // (head_dim * element_bytes))))
    return PrefillPlan(tile_rows, tile_rows // group, tile_keys, warps=4 if wide else 8, stages=2 if wide else 3)


def latent_group(heads: int, element_bytes: int) -> int:
    """Return how many heads a program serves together: the most that divide them and whose sums its registers hold."""
    most = 16 if element_bytes > 2 else 64  # products without matrix units keep their sums in registers
    return next(group for group in range(min(heads, most), 0, -1) if heads % group == 0)


def latent_decode_plan(*, group: int, element_bytes: int, multiprocessors: int) -> DecodePlan:
    """Return the plan for rows of one token over latents of 512 + 64 numbers, `group` heads at a time."""
    programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    if element_bytes > 2:
        return DecodePlan(programs, _ITEMS_PER_PROGRAM * programs, 128, tile_keys=16, warps=8, stages=1)
    few = group <= 16  # with more heads tiles of 32 latents spill up to 56 bytes
    keys, warps = (32, 4) if few else (16, 8)
    return DecodePlan(programs, _ITEMS_PER_PROGRAM * programs, 128, tile_keys=keys, warps=warps, stages=5)


def latent_prefill_plan(*, group: int, element_bytes: int) -> PrefillPlan:
    """Return the plan for rows of several tokens over latents, `group` heads at a time."""
    if element_bytes > 2:
        tile_rows = max(16, power_of_two_from(group))
        return PrefillPlan(tile_rows, tile_rows // group, tile_keys=16, warps=8, stages=1)
    tile_rows = max(64, power_of_two_from(group))
    return PrefillPlan(tile_rows, tile_rows // group, tile_keys=32, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """One product over tiles: a program computes `tile_rows` rows (of one expert, where there are several),
    `tile_columns` outputs of each, `tile_depth` inputs at a time."""

    tile_rows: int
    tile_columns: int
    tile_depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PositionPlan:
    """One launch of attention that gives a position the same bits in every step: all rows have these tiles, and a
    context falls into parts of `part_keys` positions, each a multiple of `tile_keys`."""

    tile_rows: int
    tile_tokens: int
    tile_keys: int
    part_keys: int
    programs: int  # of a multiprocessor, as many as its registers hold
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """One product that gives a row the same bits beside any others: its tile, and the parts of its inputs, which are
    added in order, each of `part_depth`, a multiple of `tile_depth`."""

    tile_rows: int
    tile_columns: int
    tile_depth: int
    parts: int
    part_depth: int
    warps: int
    stages: int


def position_plan(*, group: int, head_dim: int, element_bytes: int) -> PositionPlan:
    """Return the plan for rows of any number of tokens; `group` query heads share a kv head. A decode row fills a small
    part of a tile: its arithmetic is padding, but reading the keys still takes longer."""
    if element_bytes > 2:  # products without matrix units
        tile_rows, tile_keys, warps, stages = 32, 16, 8, 1
    elif head_dim > 128:  # two sums of a tile's values are held: of one part, and of those before it
        tile_rows, tile_keys, warps, stages = 32, 32, 8, 2
    else:
        tile_rows, tile_keys, warps, stages = 64, 64, 8 if head_dim > 64 else 4, 3
    tile_rows = max(tile_rows, power_of_two_from(group))
    return PositionPlan(tile_rows, tile_rows // group, tile_keys, _PART_KEYS, 8 // warps, warps, stages)


def fixed_plan(*, outputs: int, inputs: int, element_bytes: int) -> FixedPlan:
    """Return the plan of a weight, for any number of rows. A decode row fills one row of a tile: its arithmetic is
    padding, but reading the weight still takes longer. Weights of few columns have more parts, for more programs."""
    columns, depth, rows, warps, stages = (32, 32, 32, 4, 2) if element_bytes > 2 else (128, 64, 128, 8, 3)
    columns = max(16, min(columns, power_of_two_from(outputs)))
    parts, tiles = 1, -(-outputs // columns)
    while tiles * parts < _WANTED_TILES and inputs > 2 * parts * _LEAST_DEPTH:
        parts *= 2
    part_depth = -(-inputs // (parts * depth)) * depth
    return FixedPlan(rows, columns, depth, -(-inputs // part_depth), part_depth, warps, stages)


def expert_plan(*, rows: int, experts: int, element_bytes: int, fixed: bool = False) -> ExpertPlan:
    """Return the plan for `rows` rows over all experts. Two plans a type, so that two variants serve all steps: few
    rows an expert are bound by reading weights, others by arithmetic. `fixed`: one for all numbers of rows."""
    few = rows <= 16 * experts and not fixed
    if element_bytes > 2:  # products without matrix units
        return ExpertPlan(16 if few else 32, 32, 32, warps=4, stages=2)
    return ExpertPlan(16, 64, 128, warps=4, stages=3) if few else ExpertPlan(64, 64, 64, warps=4, stages=3)


def coded_plan(*, rows: int, group: int, inputs: int, element_bytes: int, fixed: bool = False) -> ExpertPlan:
    """Return the plan of a product over codes with scales for `group` inputs each. Few rows are bound by reading codes,
    and want many programs; more by making numbers of codes, once a tile. `fixed`: as in `expert_plan`."""
    few = rows <= 16 and not fixed
    if element_bytes > 2:  # products without matrix units
        return ExpertPlan(16 if few else 32, 32, 32, warps=4, stages=2)
    most = 128 if few else 64
    depth = most if group >= inputs else min(most, group & -group)
    return ExpertPlan(16, 32, depth, warps=4, stages=4) if few else ExpertPlan(64, 64, depth, warps=4, stages=3)


def padded_rows(rows: int, at_least: int = 0) -> int:
    """Return the rows that kernels are compiled for. Below 16 padding costs nothing, and saves variants."""
    return power_of_two_from(max(rows, at_least, _LEAST_ROWS))


def power_of_two_from(value: int) -> int:
    """Return the smallest power of two that is not less than `value` ≥ 1."""
    return 1 << (value - 1).bit_length()


def _power_of_two_below(value: int) -> int:
    """Return the largest power of two that is not more than `value` ≥ 1; 1 below that."""
    return 1 << (max(1, value).bit_length() - 1)
