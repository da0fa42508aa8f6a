"""Which weights in codes the compiled products read as they are, by the numbers of their layout alone.

Called by `quantized_panels` and `coded`, and by those who count memory before torch is loaded: hence no torch here.
"""

from __future__ import annotations

_UNITS = (32, 16)
_LEAST_TILE = 32
"""Inputs: a GPU multiplies nibbles in halves of a tile, and a tile's product has a depth of 16 at least."""


def unit_of(group: int, inputs: int) -> int | None:
    """Return the inputs summed as integers, for scales in groups of `group`; None where these cannot be packed."""
    if group >= inputs:
        return _UNITS[0]
    return next((unit for unit in _UNITS if group % unit == 0), None)


def packable(*, bits: int, floating: bool, group: int, inputs: int, offsets: bool) -> bool:
    """Return whether codes can be packed. Integers: groups of whole units. E4M3 (`floating`): even groups, inputs."""
    if floating:
        return not offsets and inputs % 2 == 0 and (group >= inputs or group % 2 == 0)
    return unit_of(group, inputs) is not None and (bits == 8 or inputs % 2 == 0)


def tiled(*, bits: int, group: int, inputs: int) -> bool:
    """Return whether a GPU's kernel reads these codes in tiles: groups of whole tiles, codes of 4 bits in pairs."""
    return (group >= inputs or group % _LEAST_TILE == 0) and (bits == 8 or inputs % 2 == 0)
