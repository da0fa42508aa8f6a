"""E2, E7 · Whether the cache can hold all decodes until their predicted ends: the peak of what they will hold together.

    blocks ▲        ╱▏ most blocks are needed just before a decode ends,
           │   ╱▏  ╱ ▏ so only the ends have to be looked at
           │  ╱ ▏ ╱  ▏╲
           │ ╱  ▏╱      ▏
           └────────────────▶ iterations
             end of 1   end of 2

KVC pipelining lends what one decode has allocated and does not use yet to another that is done before. Taken to its
end, no decode has unused blocks: a decode runs if none will have too few at any time, and takes each block when it
reaches it. Called by `TimeSynced`. Pure arithmetic over lengths; holds no blocks.
"""

from __future__ import annotations

from bisect import insort


class Forecast:
    """Over a cache of `blocks`."""

    def __init__(self, blocks: int, block_size: int, most_blocks: int = 0) -> None:
        """`most_blocks`: of one sequence, where a window bounds them; 0 = nothing does."""
        self._headroom = blocks
        self._size = block_size
        self._most = most_blocks
        self._members: list[tuple[int, int]] = []
        """(− iterations until the predicted end, positions computed): those that last longest first."""

    def add(self, computed: int, left: int) -> None:
        insort(self._members, (-left, computed))

    def hold(self, blocks: int) -> None:
        """So many are taken throughout, by waiting sequences; negative = no more."""
        self._headroom -= blocks

    def fits(self, computed: int, left: int, spare: int = 0) -> bool:
        """Whether there are enough blocks at all times with this one, too, and `spare` besides."""
        insort(self._members, (-left, computed))
        fits = self._within(self._headroom - spare)
        self._members.remove((-left, computed))
        return fits

    def _within(self, headroom: int) -> bool:
        """For all ends t:  Σ_{i: left_i ≥ t} ceil((computed_i + t) / block_size) ≤ room.

        The sum lies between that of the fractions and one block more for each; it is computed only where that leaves
        a doubt.
        """
        positions = 0
        for alive, (negative, computed) in enumerate(self._members, 1):
            if self._most:
                held = (-(-(other - negative) // self._size) for _, other in self._members[:alive])
                if sum(min(self._most, blocks) for blocks in held) > headroom:
                    return False
                continue
            positions += computed
            least = -(-(positions - alive * negative) // self._size)
            if least > headroom:
                return False
            if least + alive > headroom:
                exact = sum(-(-(other - negative) // self._size) for _, other in self._members[:alive])
                if exact > headroom:
                    return False
        return True
