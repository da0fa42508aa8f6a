# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Where top_k and top_p end in a row of logits, without sorting it: the search that `sampling_kernel` calls.

Device functions only. Works on the bits of distances below the largest logit: never negative, so they order like
integers. Counts and masses are kept per lane and reduced once a pass: what crosses lanes in a loop over a row costs
more than all the rest of it. A guess decides what is looked at next, never what is answered.
"""

import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from triton.language.extra import libdevice

AT_ONCE = tl.constexpr(4)
SAMPLED = tl.constexpr(16)
_LEAST_SAMPLE = tl.constexpr(64)
_GUESSES = tl.constexpr(3)  # passes over a row after which nothing is guessed any more
_MANY = tl.constexpr(64)  # of so many distances it is guessed where the wanted one is
_EVENLY = tl.constexpr(2)  # of three rounds the one that guesses nothing
_LINEAR = tl.constexpr(14)  # rounds after which equal distances have come together, if there are no others
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def row_logits(row, first, vocab, LANES: tl.constexpr, VEC: tl.constexpr):
    """Load a tile of a row: ids [LANES, VEC], which of them exist, and their logits (others: -inf)."""
    index = first + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    valid = index < vocab
    return index, valid, tl.load(row + index, mask=valid, other=float("-inf"))


@triton.jit
def distance_bits(logit, top):
    """Return distances below the largest logit, as bits, which order like integers; infinite for absent ids."""
    return (top - logit).to(tl.int32, bitcast=True)


@triton.jit
def _quotient(distance, temperature):
    """Divide distance by temperature as division rounds it, in four instructions instead of eleven and a branch: a
    product with the rounded inverse, and what it leaves over (Markstein 1990). Beyond 200 temperatures, where no weight
    is left, it is 200: the rest of infinity would be none."""
    inverse = tl.math.div_rn(1.0, temperature)  # once a row: nothing of it changes
    near = tl.minimum(distance, 200.0 * temperature)
    about = near * inverse
    return tl.fma(tl.fma(-about, temperature, near), inverse, about)


@triton.jit
def weight_of(bits, temperature, INTERPRETED: tl.constexpr):
    """Return exp(-distance / temperature) in float32, rounded as torch rounds it on a GPU."""
    distance = bits.to(tl.float32, bitcast=True)
    if INTERPRETED:  # whose fma rounds twice
        return tl.exp(tl.math.div_rn(distance, -temperature))
    return libdevice.exp(-_quotient(distance, temperature))


@triton.jit
def _add_within(bits, weight, pivot, count, mass, BY_MASS: tl.constexpr):
    """Add what lies within the pivot to the counts and masses of every lane."""
    within = bits <= pivot
    count += tl.sum(within.to(tl.int32), 1)
    if BY_MASS:
        mass += tl.sum(tl.where(within, weight, 0.0), 1)
    return count, mass


@triton.jit
def _sums(count, other_count, mass, other_mass, BY_MASS: tl.constexpr):
    """Sum over all lanes. Two counts are one number: a reduction costs more than what it adds."""
    both = tl.sum((other_count.to(tl.int64) << 32) | count.to(tl.int64), 0)
    total, other = both.to(tl.int32), (both >> 32).to(tl.int32)
    if BY_MASS:
        return total, other, tl.sum(mass, 0), tl.sum(other_mass, 0)
    return total, other, total.to(mass.dtype), other.to(mass.dtype)


@triton.jit
def _few(cells, slot, held, temperature, EXACT: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load AT_ONCE copied distances of every lane, as bits, and their weights: float64 if EXACT, else roughly."""
    place = slot + tl.arange(0, AT_ONCE)[None, :]
    cell = cells + place * LANES + tl.arange(0, LANES)[:, None]
    bits = tl.load(cell, mask=place < held[:, None], other=_INFINITE)
    if EXACT:
        weight = weight_of(bits, temperature, INTERPRETED).to(tl.float64)
    else:
        weight = tl.exp2(bits.to(tl.float32, bitcast=True) * (-1.4426950408889634 / temperature))
    return bits, weight


@triton.jit
def _mass_of_few(cells, held, most, temperature, EXACT: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the weight of all copied distances."""
    mass = tl.zeros([LANES], tl.float64 if EXACT else tl.float32)
    for slot in range(0, most, AT_ONCE):
        _, weight = _few(cells, slot, held, temperature, EXACT, LANES, INTERPRETED)
        mass += tl.sum(weight, 1)
    return tl.sum(mass, 0)


@triton.jit
def _within(
    source,
    held,
    end,
    top,
    temperature,
    p0,
    p1,
    p2,
    p3,
    ASIDE: tl.constexpr,
    EXACT: tl.constexpr,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Count the distances within each of four pivots, and sum their weights: those of a row's `end` tokens or, ASIDE,
    those in cells, `held` of every lane and `end` at most, EXACT or nearly so."""
    PARTS: tl.constexpr = 1 if ASIDE else 2
    STEP: tl.constexpr = AT_ONCE if ASIDE else LANES * VEC
    zero, none = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float64 if EXACT else tl.float32)
    c0, c1, c2, c3 = zero, zero, zero, zero
    m0, m1, m2, m3 = none, none, none, none
    for first in range(0, end, STEP * PARTS):
        for part in tl.static_range(PARTS):
            if ASIDE:
                bits, weight = _few(source, first, held, temperature, EXACT, LANES, INTERPRETED)
            else:
                _, _, logit = row_logits(source, first + part * STEP, end, LANES, VEC)
                bits = distance_bits(logit, top)
                weight = bits
                if BY_MASS:
                    weight = weight_of(bits, temperature, INTERPRETED).to(tl.float64)
            c0, m0 = _add_within(bits, weight, p0, c0, m0, BY_MASS)
            c1, m1 = _add_within(bits, weight, p1, c1, m1, BY_MASS)
            c2, m2 = _add_within(bits, weight, p2, c2, m2, BY_MASS)
            c3, m3 = _add_within(bits, weight, p3, c3, m3, BY_MASS)
    n0, n1, s0, s1 = _sums(c0, c1, m0, m1, BY_MASS)
    n2, n3, s2, s3 = _sums(c2, c3, m2, m3, BY_MASS)
    return n0, n1, n2, n3, s0, s1, s2, s3


@triton.jit
def _narrowed(low, high, before, upto, below, above, pivot, count, mass, enough):
    """Return a bracket (low, high], with the masses and numbers of what lies up to either end, after one more pivot."""
    inside = (pivot > low) & (pivot < high)
    reached = mass >= enough
    higher, lower = inside & reached, inside & (mass < enough)
    return (
        tl.where(lower, pivot, low),
        tl.where(higher, pivot, high),
        tl.where(lower, mass, before),
        tl.where(higher, mass, upto),
        tl.where(lower, count, below),
        tl.where(higher, count, above),
    )


@triton.jit
def _pivot(low, high, part: tl.constexpr, by_bits):
    """Return one of four pivots inside (low, high]: equally far apart as distances, or as bits, which always ends."""
    near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    far = high.to(tl.float32, bitcast=True)
    between = (near + (far - near) * (part / 5)).to(tl.int32, bitcast=True)
    even = low + ((high.to(tl.int64) - low) * part // 5).to(tl.int32)
    further = (near * (1.0 + part / 2)).to(tl.int32, bitcast=True)
    chosen = tl.where(high >= _INFINITE, tl.where(low > 0, further, even), between)
    chosen = tl.where(by_bits, even, chosen)
    if part == 1:
        chosen = tl.where(low < 0, 0, chosen)  # those at no distance at all
    return tl.minimum(tl.maximum(chosen, low + 1), high - 1)


@triton.jit
def _inside(low, high, distance):
    """Return the bits of a distance, put into (low, high)."""
    bits = tl.maximum(distance, 0.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, low + 1), high - 1)


@triton.jit
def _narrow_few(
    cells,
    held,
    most,
    low,
    high,
    before,
    upto,
    below,
    above,
    enough,
    stop,
    temperature,
    EXACT: tl.constexpr,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Search among the copied distances of the bracket, until it has at most `stop` of them; return it, and their
    number. `before` and `below` are of what lies up to `low`, `upto` and `above` of what lies up to `high`."""
    started, skipped = before, below
    rounds = tl.full([], 0, tl.int32)
    while (high - low > 1) & (above - below > stop):
        by_bits = rounds > _LINEAR
        p0, p1 = _pivot(low, high, 1, by_bits), _pivot(low, high, 2, by_bits)
        p2, p3 = _pivot(low, high, 3, by_bits), _pivot(low, high, 4, by_bits)
        if (rounds % 3 != _EVENLY) & (not by_bits) & (low >= 0) & (high < _INFINITE) & (above - below > _MANY):
            # Where the mass would be reached if it lay evenly, two deviations around it, and more.
            near, far = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
            share = ((enough - before) / (upto - before)).to(tl.float32)
            spread = (far - near) / tl.sqrt((above - below).to(tl.float32))
            at = near + (far - near) * share
            p0, p1 = _inside(low, high, at - 4.0 * spread), _inside(low, high, at - spread)
            p2, p3 = _inside(low, high, at + spread), _inside(low, high, at + 4.0 * spread)
        n0, n1, n2, n3, s0, s1, s2, s3 = _within(
            cells, held, most, None, temperature, p0, p1, p2, p3, True, EXACT, BY_MASS, LANES, AT_ONCE, INTERPRETED
        )
        low, high, before, upto, below, above = _narrowed(
            low, high, before, upto, below, above, p0, skipped + n0, started + s0, enough
        )
        low, high, before, upto, below, above = _narrowed(
            low, high, before, upto, below, above, p1, skipped + n1, started + s1, enough
        )
        low, high, before, upto, below, above = _narrowed(
            low, high, before, upto, below, above, p2, skipped + n2, started + s2, enough
        )
        low, high, before, upto, below, above = _narrowed(
            low, high, before, upto, below, above, p3, skipped + n3, started + s3, enough
        )
        rounds += 1
    return low, high, above - below


@triton.jit
def _copy_bracket(
    row,
    vocab,
    top,
    temperature,
    low,
    high,
    cells,
    weighed,
    BY_MASS: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SLOTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Copy distances in (low, high] into cells [SLOTS, LANES], of one group of VEC ids in EACH; return how many each
    lane has, above SLOTS where some are lost, and, if `weighed`, the number of those up to `low` and their weight."""
    held, count, lane = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float64)
    for first in range(0, vocab, LANES * VEC * EACH):
        index = first + lane[:, None] * (VEC * EACH) + tl.arange(0, VEC)[None, :]
        bits = distance_bits(tl.load(row + index, mask=index < vocab, other=float("-inf")), top)
        inside = ((bits > low) & (bits <= high)).to(tl.int32)
        place = held[:, None] + tl.cumsum(inside, 1) - 1
        tl.store(cells + place * LANES + lane[:, None], bits, mask=(inside > 0) & (place < SLOTS))
        held += tl.sum(inside, 1)
        if EACH == 1:  # noqa: SIM102 - decided when compiling, the other one when running
            if weighed:
                weight = bits
                if BY_MASS:
                    weight = weight_of(bits, temperature, INTERPRETED).to(tl.float64)
                count, mass = _add_within(bits, weight, low, count, mass, BY_MASS)
    tl.debug_barrier()
    return held, count, mass


@triton.jit
def _guess(
    cells,
    held,
    low,
    high,
    share,
    temperature,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return a bracket within (low, high] that most likely holds the distance at which `share` of what lies in it is
    reached: where a sample has it, and two deviations more to either side; all of it if the sample is too small."""
    held = tl.minimum(held, SLOTS)
    some, most = tl.sum(held, 0), tl.max(held, 0)
    mass = some.to(tl.float32)
    if BY_MASS:
        mass = _mass_of_few(cells, held, most, temperature, False, LANES, INTERPRETED)
    if some > _LEAST_SAMPLE:
        spread = tl.sqrt(some.to(tl.float32))
        near, far, remaining = _narrow_few(
            cells,
            held,
            most,
            low,
            high,
            mass * 0.0,
            mass,
            some * 0,
            some,
            share * mass,
            spread.to(tl.int32),
            temperature,
            False,
            BY_MASS,
            LANES,
            INTERPRETED,
        )
        begin, end = tl.maximum(near, 0).to(tl.float32, bitcast=True), far.to(tl.float32, bitcast=True)
        if far < _INFINITE:
            more = (end - begin) * tl.maximum(spread / tl.maximum(remaining, 1).to(tl.float32), 1.0)
            begin, end = tl.maximum(begin - more, 0.0), end + more
        low = tl.where(near > 0, tl.maximum(low, begin.to(tl.int32, bitcast=True)), low)
        high = tl.minimum(high, end.to(tl.int32, bitcast=True))
    return low, high


@triton.jit
def reach_of(
    row,
    vocab,
    top,
    temperature,
    wanted,
    limit,
    cells,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SLOTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return a distance, as bits, that has within it as few tokens as there can be and `wanted` of them; BY_MASS:
    `wanted` of the mass of all tokens up to `limit`. Between it and the last token's distance no other token's lies."""
    low = tl.full([], -1, tl.int32)  # what lies up to here is less than wanted
    high = limit + tl.full([], 0, tl.int32)  # what lies up to here is enough
    before, upto = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    below, above = tl.full([], 0, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    enough = wanted + tl.full([], 0.0, tl.float64)
    # Where the crossing mostly is, in temperatures below the largest.
    unit = tl.full([], 1.0, tl.float32) * (temperature if BY_MASS else 1.0)
    p0 = tl.minimum((0.5 * unit).to(tl.int32, bitcast=True), limit)
    p1 = tl.minimum((2.5 * unit).to(tl.int32, bitcast=True), limit)
    p2 = tl.minimum((8.0 * unit).to(tl.int32, bitcast=True), limit)
    p3 = high
    passes = tl.full([], 0, tl.int32)
    while (high - low > 1) & (above - below > 1):
        n0, n1, n2, n3, s0, s1, s2, s3 = _within(
            row, None, vocab, top, temperature, p0, p1, p2, p3, False, True, BY_MASS, LANES, VEC, INTERPRETED
        )
        if passes == 0:
            above, upto = n3, s3
            if BY_MASS:
                enough = wanted * s3
        low, high, before, upto, below, above = _narrowed(low, high, before, upto, below, above, p0, n0, s0, enough)
        low, high, before, upto, below, above = _narrowed(low, high, before, upto, below, above, p1, n1, s1, enough)
        low, high, before, upto, below, above = _narrowed(low, high, before, upto, below, above, p2, n2, s2, enough)
        low, high, before, upto, below, above = _narrowed(low, high, before, upto, below, above, p3, n3, s3, enough)
        passes += 1
        remaining = above - below
        if (high - low > 1) & (remaining > 1):
            near, far = low, high
            fits = remaining * 8 <= LANES * SLOTS * 3
            if (not fits) & (passes <= _GUESSES):
                held, _, _ = _copy_bracket(
                    row,
                    vocab,
                    top,
                    temperature,
                    low,
                    high,
                    cells,
                    False,
                    False,
                    SAMPLED,
                    LANES,
                    VEC,
                    SLOTS,
                    INTERPRETED,
                )
                share = ((enough - before) / (upto - before)).to(tl.float32)
                near, far = _guess(cells, held, low, high, share, temperature, BY_MASS, LANES, SLOTS, INTERPRETED)
                tl.debug_barrier()
            if fits | (near > low) | (far < high):
                # A guess is held against what really lies up to it.
                held, count, mass = _copy_bracket(
                    row,
                    vocab,
                    top,
                    temperature,
                    near,
                    far,
                    cells,
                    near > low,
                    BY_MASS,
                    1,
                    LANES,
                    VEC,
                    SLOTS,
                    INTERPRETED,
                )
                most, some = tl.max(held, 0), tl.sum(held, 0)
                if near > low:
                    count_of = tl.sum(count, 0)
                    mass_of = count_of.to(tl.float64)
                    if BY_MASS:
                        mass_of = tl.sum(mass, 0)
                    low, high, before, upto, below, above = _narrowed(
                        low, high, before, upto, below, above, near, count_of, mass_of, enough
                    )
                if (most <= SLOTS) & (low == near):
                    if far < high:
                        mass_of = some.to(tl.float64)
                        if BY_MASS:
                            mass_of = _mass_of_few(cells, held, most, temperature, True, LANES, INTERPRETED)
                        low, high, before, upto, below, above = _narrowed(
                            low, high, before, upto, below, above, far, below + some, before + mass_of, enough
                        )
                    if high == far:
                        low, high, remaining = _narrow_few(
                            cells,
                            held,
                            most,
                            low,
                            high,
                            before,
                            upto,
                            below,
                            above,
                            enough,
                            1,
                            temperature,
                            True,
                            BY_MASS,
                            LANES,
                            INTERPRETED,
                        )
                        above = below  # found
                tl.debug_barrier()
            by_bits = passes > _GUESSES
            p0, p1 = _pivot(low, high, 1, by_bits), _pivot(low, high, 2, by_bits)
            p2, p3 = _pivot(low, high, 3, by_bits), _pivot(low, high, 4, by_bits)
    return high
