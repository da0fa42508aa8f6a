# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""One token per row of logits in one launch: penalties to log-probabilities, greedy and sampled rows alike.

Launched by `sampling`, with one program per row. It computes `sampling.sample_rows_reference`; which rules apply to a
row is data in device buffers, so one recorded launch serves any mixture of rows. No row is sorted:

- pass 1 finds the largest logit and where it stands; a greedy row ends here;
- top_k and top_p want the distance (below the largest logit) at which a number of tokens, or a share of the mass, is
  reached. Distances are never negative, so their bits order like integers: a pass counts tokens and sums masses
  (float64) up to four pivots, and keeps the bracket between two of them. The tokens in it are copied aside, and the
  search ends among those. Where they are too many, one in sixteen of them, in float32, tells about where the distance
  is; what lies around it is copied, and held against the exact mass before it. A wrong guess costs a pass, never a
  token: all tokens at the distance found stay, as the reference has it;
- the last pass is the race: SplitMix64 in 64-bit integers, its logarithm in float64. As -log(u) >= 1 - u, a tile
  whose lower bounds all lie behind the best time so far takes no logarithm and no exact weight.

Penalties, bias and bans are applied to the row where it lies, after saving what they replace, and taken back at the
end: nothing copies a row, and log-probabilities come from the raw logits.

Cost, estimated from the assembler's instructions, not measured, for 256 rows of 128,256 logits on an H200: a pass over
all rows reads 131 MB, more than the second-level cache holds (50 MB), so 31 us from memory at 4.3 TB/s. Arithmetic is
more than that: per logit 10 instructions for the maximum, 52 for a pass with pivots, 23 for the copy (55 where it is
weighed), 10 to 40 for the search aside, 62 for the race. docs/benchmarks-gpu-kernels.md has the sums. What decides is
that nothing in these loops crosses lanes: counts and masses are kept per lane, and reduced once a pass.

Triton reads annotations, so this file must not postpone them.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

GREEDY_BELOW = tl.constexpr(1e-5)
NEGLIGIBLE = tl.constexpr(2.0**-53 / 37.0)
AT_ONCE = tl.constexpr(4)
SAMPLED = tl.constexpr(16)
_LEAST_SAMPLE = tl.constexpr(64)
_GUESSES = tl.constexpr(3)  # passes over a row after which nothing is guessed any more
_MANY = tl.constexpr(64)  # of so many distances it is guessed where the wanted one is
_EVENLY = tl.constexpr(2)  # of three rounds the one that guesses nothing
_LINEAR = tl.constexpr(14)  # rounds after which equal distances have come together, if there are no others
_INFINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(-(2**63))


@triton.jit
def _logits(row, first, vocab, LANES: tl.constexpr, VEC: tl.constexpr):
    """A tile of a row: ids [LANES, VEC], which of them there are, and their logits (others: -inf)."""
    index = first + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    there = index < vocab
    return index, there, tl.load(row + index, mask=there, other=float("-inf"))


@triton.jit
def _distance_bits(logit, top):
    """How far below the largest logit, as bits, which order like integers; ids that are not there are infinitely far,
    as are those that are out."""
    return (top - logit).to(tl.int32, bitcast=True)


@triton.jit
def _weight(bits, temperature, INTERPRETED: tl.constexpr):
    """exp(-distance / temperature) in float32, rounded as torch rounds it on a GPU."""
    exponent = tl.math.div_rn(bits.to(tl.float32, bitcast=True), -temperature)
    if INTERPRETED:
        return tl.exp(exponent)
    return libdevice.exp(exponent)


@triton.jit
def _likeliest(row, vocab, below, LANES: tl.constexpr, VEC: tl.constexpr):
    """The largest (logit, id) before `below`, of equal logits the first id, as one int64: logit above, id below.

    As argmax has it, NaN is larger than any number, and the two zeros are equal.
    """
    best = tl.full([LANES], _NEVER, tl.int64)
    # Four loads at a time: little is computed meanwhile, and 8 KiB on their way are a quarter of what memory gives.
    for first in range(0, vocab, LANES * VEC * 4):
        index, there, logit = _logits(row, first, vocab, LANES, VEC * 4)
        bits = logit.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(logit == 0.0, 0, tl.where(logit != logit, _NAN, key))
        pair = (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
        pair = tl.where(there & (pair < below), pair, _NEVER)
        best = tl.maximum(best, tl.max(pair, 1))
    return tl.max(best, 0)


@triton.jit
def _logit_of(pair):
    key = (pair >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(pair):
    return 0x7FFFFFFF - (pair & 0x7FFFFFFF)


@triton.jit
def _largest(row, vocab, LANES: tl.constexpr, VEC: tl.constexpr):
    """The largest logit and the first id that has it, as `_likeliest` orders them: logit, id."""
    best = tl.full([LANES, VEC], -(2**31), tl.int32)
    tile = tl.zeros([LANES, VEC], tl.int32)  # where the best of each place was
    # Four loads at a time: little is computed meanwhile, and 8 KiB on their way are a quarter of what memory gives.
    for first in range(0, vocab, LANES * VEC * 4):
        for part in tl.static_range(4):
            begin = first + part * LANES * VEC
            _, _, logit = _logits(row, begin, vocab, LANES, VEC)
            bits = (logit + 0.0).to(tl.int32, bitcast=True)  # of both zeros the same
            key = tl.where(logit != logit, _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))
            ahead = key > best
            best = tl.where(ahead, key, best)
            tile = tl.where(ahead, begin, tile)
    key = tl.max(tl.max(best, 1), 0)
    place = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    id = tl.min(tl.min(tl.where(best == key, tile + place, 0x7FFFFFFF), 1), 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), id.to(tl.int64)


@triton.jit
def _add_within(bits, weight, pivot, count, mass, BY_MASS: tl.constexpr):
    """Counts and masses of every lane, with what lies within the pivot added."""
    within = bits <= pivot
    count += tl.sum(within.to(tl.int32), 1)
    if BY_MASS:
        mass += tl.sum(tl.where(within, weight, 0.0), 1)
    return count, mass


@triton.jit
def _sums(count, other_count, mass, other_mass, BY_MASS: tl.constexpr):
    """Over all lanes. Two counts are one number: a reduction costs more than what it adds."""
    both = tl.sum((other_count.to(tl.int64) << 32) | count.to(tl.int64), 0)
    total, other = both.to(tl.int32), (both >> 32).to(tl.int32)
    if BY_MASS:
        return total, other, tl.sum(mass, 0), tl.sum(other_mass, 0)
    return total, other, total.to(mass.dtype), other.to(mass.dtype)


@triton.jit
def _row_within(
    row,
    vocab,
    top,
    temperature,
    p0,
    p1,
    p2,
    p3,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """How many tokens of the row lie within each of four pivots, and what they weigh."""
    zero, none = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float64)
    c0, c1, c2, c3 = zero, zero, zero, zero
    m0, m1, m2, m3 = none, none, none, none
    for first in range(0, vocab, LANES * VEC * 2):
        for part in tl.static_range(2):
            _, _, logit = _logits(row, first + part * LANES * VEC, vocab, LANES, VEC)
            bits = _distance_bits(logit, top)
            weight = bits
            if BY_MASS:
                weight = _weight(bits, temperature, INTERPRETED).to(tl.float64)
            c0, m0 = _add_within(bits, weight, p0, c0, m0, BY_MASS)
            c1, m1 = _add_within(bits, weight, p1, c1, m1, BY_MASS)
            c2, m2 = _add_within(bits, weight, p2, c2, m2, BY_MASS)
            c3, m3 = _add_within(bits, weight, p3, c3, m3, BY_MASS)
    n0, n1, s0, s1 = _sums(c0, c1, m0, m1, BY_MASS)
    n2, n3, s2, s3 = _sums(c2, c3, m2, m3, BY_MASS)
    return n0, n1, n2, n3, s0, s1, s2, s3


@triton.jit
def _few(cells, slot, held, temperature, EXACT: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """AT_ONCE distances of every lane that stand aside, as bits, and their weights: exact ones in float64, others to
    some bits in float32."""
    place = slot + tl.arange(0, AT_ONCE)[None, :]
    cell = cells + place * LANES + tl.arange(0, LANES)[:, None]
    bits = tl.load(cell, mask=place < held[:, None], other=_INFINITE)
    if EXACT:
        weight = _weight(bits, temperature, INTERPRETED).to(tl.float64)
    else:
        weight = tl.exp2(bits.to(tl.float32, bitcast=True) * (-1.4426950408889634 / temperature))
    return bits, weight


@triton.jit
def _mass_of_few(cells, held, most, temperature, EXACT: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """What the distances that stand aside weigh together."""
    mass = tl.zeros([LANES], tl.float64 if EXACT else tl.float32)
    for slot in range(0, most, AT_ONCE):
        _, weight = _few(cells, slot, held, temperature, EXACT, LANES, INTERPRETED)
        mass += tl.sum(weight, 1)
    return tl.sum(mass, 0)


@triton.jit
def _few_within(
    cells,
    held,
    most,
    temperature,
    p0,
    p1,
    p2,
    p3,
    EXACT: tl.constexpr,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """As `_row_within`, of the distances that stand aside; EXACT or nearly so. What is not there is infinitely far."""
    zero, none = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float64 if EXACT else tl.float32)
    c0, c1, c2, c3 = zero, zero, zero, zero
    m0, m1, m2, m3 = none, none, none, none
    for slot in range(0, most, AT_ONCE):
        bits, weight = _few(cells, slot, held, temperature, EXACT, LANES, INTERPRETED)
        c0, m0 = _add_within(bits, weight, p0, c0, m0, BY_MASS)
        c1, m1 = _add_within(bits, weight, p1, c1, m1, BY_MASS)
        c2, m2 = _add_within(bits, weight, p2, c2, m2, BY_MASS)
        c3, m3 = _add_within(bits, weight, p3, c3, m3, BY_MASS)
    n0, n1, s0, s1 = _sums(c0, c1, m0, m1, BY_MASS)
    n2, n3, s2, s3 = _sums(c2, c3, m2, m3, BY_MASS)
    return n0, n1, n2, n3, s0, s1, s2, s3


@triton.jit
def _narrowed(low, high, before, upto, below, above, pivot, count, mass, enough):
    """A bracket (low, high] with the masses and numbers of what lies up to either end, after one more pivot."""
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
    """A pivot inside (low, high], of four: equally far apart as distances, or as bits, which always come to an end."""
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
    """The bits of a distance, put into (low, high)."""
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
    """The bracket after a search among the distances that stand aside, all of which lie in it, until it has no more
    than `stop` of them, and how many it has; `before` and `below` are of what lies up to `low`, `upto` and `above` of
    what lies up to `high`."""
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
        n0, n1, n2, n3, s0, s1, s2, s3 = _few_within(
            cells, held, most, temperature, p0, p1, p2, p3, EXACT, BY_MASS, LANES, INTERPRETED
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
    """Distances in (low, high] into cells [SLOTS, LANES], of one group of VEC ids in EACH; how many each lane has,
    above SLOTS where some are lost. Beside it, if `weighed`, the number of those up to `low`, and what they weigh."""
    held, count, lane = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float64)
    for first in range(0, vocab, LANES * VEC * EACH):
        index = first + lane[:, None] * (VEC * EACH) + tl.arange(0, VEC)[None, :]
        bits = _distance_bits(tl.load(row + index, mask=index < vocab, other=float("-inf")), top)
        inside = ((bits > low) & (bits <= high)).to(tl.int32)
        place = held[:, None] + tl.cumsum(inside, 1) - 1
        tl.store(cells + place * LANES + lane[:, None], bits, mask=(inside > 0) & (place < SLOTS))
        held += tl.sum(inside, 1)
        if EACH == 1:
            if weighed:
                weight = bits
                if BY_MASS:
                    weight = _weight(bits, temperature, INTERPRETED).to(tl.float64)
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
    """A bracket within (low, high] that holds the distance at which `share` of what lies in it is reached, most likely:
    where a sample has it, and two deviations more to either side. (low, high] itself where the sample is too small."""
    held = tl.minimum(held, SLOTS)
    some, most = tl.sum(held, 0), tl.max(held, 0)
    mass = some.to(tl.float32)
    if BY_MASS:
        mass = _mass_of_few(cells, held, most, temperature, False, LANES, INTERPRETED)
    if some > _LEAST_SAMPLE:
        spread = tl.sqrt(some.to(tl.float32))
        near, far, left = _narrow_few(
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
            more = (end - begin) * tl.maximum(spread / tl.maximum(left, 1).to(tl.float32), 1.0)
            begin, end = tl.maximum(begin - more, 0.0), end + more
        low = tl.where(near > 0, tl.maximum(low, begin.to(tl.int32, bitcast=True)), low)
        high = tl.minimum(high, end.to(tl.int32, bitcast=True))
    return low, high


@triton.jit
def _reach(
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
    """A distance, as bits, that has within it as few tokens as there can be and `wanted` of them; BY_MASS: `wanted` of
    the mass of all tokens up to `limit`. Between it and the last token's distance no other token's lies."""
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
        n0, n1, n2, n3, s0, s1, s2, s3 = _row_within(
            row, vocab, top, temperature, p0, p1, p2, p3, BY_MASS, LANES, VEC, INTERPRETED
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
        left = above - below
        if (high - low > 1) & (left > 1):
            near, far = low, high
            fits = left * 8 <= LANES * SLOTS * 3
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
                        low, high, left = _narrow_few(
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


@triton.jit
def _mixed(value):
    """One step of SplitMix64 on uint64; see `common.engine.counter_random`."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _race(
    row, vocab, top, temperature, reach, min_p, key, LANES: tl.constexpr, VEC: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The id whose exponential time, divided by its weight, is smallest, the first of equals; -1 if none runs.

    -log(u) >= 1 - u, so a tile in which these bounds, over weights rounded up, all lie behind the best time so far
    needs neither logarithms nor exact weights.
    """
    times = tl.full([LANES, VEC], float("inf"), tl.float64)
    ids = tl.full([LANES, VEC], 0x7FFFFFFF, tl.int32)
    soonest = tl.full([], float("inf"), tl.float64)
    scale = -1.4426950408889634 / temperature
    for first in range(0, vocab, LANES * VEC):
        index, _, logit = _logits(row, first, vocab, LANES, VEC)
        bits = _distance_bits(logit, top)
        at_most = tl.exp2(bits.to(tl.float32, bitcast=True) * scale) * (1.0 + 2.0**-12)
        random = _mixed(index.to(tl.uint64) ^ key)
        least = (0xFFFFFFFF - (random >> 32).to(tl.uint32)).to(tl.float32) * (2.0**-32 * (1.0 - 2.0**-20))
        bound = (soonest * (1.0 + 2.0**-20)).to(tl.float32)
        ahead = (bits <= reach) & (at_most >= min_p) & (least <= bound * at_most)
        if tl.max(tl.max(ahead.to(tl.int32), 1), 0) > 0:
            weight = _weight(bits, temperature, INTERPRETED)
            wide = weight.to(tl.float64)
            runs = (bits <= reach) & (weight >= min_p) & (wide > NEGLIGIBLE)
            drawn = (random >> 11).to(tl.int64)  # 53 bits; u = (drawn + 1) / 2**53
            time = -tl.log((drawn.to(tl.float64) + 1.0) * 2.0**-53) / tl.where(runs, wide, 1.0)
            ahead = runs & (time < times)
            times = tl.where(ahead, time, times)
            ids = tl.where(ahead, index, ids)
            soonest = tl.min(tl.min(times, 1), 0)
    winner = tl.min(tl.min(tl.where(times == soonest, ids, 0x7FFFFFFF), 1), 0)
    return tl.where(soonest < float("inf"), winner, -1)


@triton.jit
def _edit(row, vocab, begin, end, ids, values, saved, KIND: tl.constexpr, EDITS: tl.constexpr):
    """Entries [begin, end) of one kind, whose ids differ: 0 repetition, 1 less, 2 more, 3 banned."""
    for first in range(begin, end, EDITS):
        entry = first + tl.arange(0, EDITS)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        there = (entry < end) & (token >= 0) & (token < vocab)
        old = tl.load(row + token, mask=there, other=0.0)
        value = tl.load(values + entry, mask=there, other=1.0)
        tl.store(saved + entry, old, mask=there)
        if KIND == 0:
            new = tl.where(old > 0, tl.math.div_rn(old, value), old * value)
        elif KIND == 1:
            new = old - value
        elif KIND == 2:
            new = old + value
        else:
            new = tl.full([EDITS], float("-inf"), tl.float32)
        tl.store(row + token, new, mask=there)
    tl.debug_barrier()


@triton.jit
def _take_back(row, vocab, begin, end, ids, saved, EDITS: tl.constexpr):
    for first in range(begin, end, EDITS):
        entry = first + tl.arange(0, EDITS)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        there = (entry < end) & (token >= 0) & (token < vocab)
        tl.store(row + token, tl.load(saved + entry, mask=there, other=0.0), mask=there)
    tl.debug_barrier()


@triton.jit
def _normaliser(row, vocab, top, LANES: tl.constexpr, VEC: tl.constexpr):
    """log of the sum of exp(logit - top), float32."""
    total = tl.zeros([LANES], tl.float64)
    for first in range(0, vocab, LANES * VEC):
        _, _, logit = _logits(row, first, vocab, LANES, VEC)
        total += tl.sum(tl.exp(logit - top).to(tl.float64), 1)
    return tl.log(tl.sum(total, 0)).to(tl.float32)


# Read one by one: whether they begin at a multiple of 16 bytes makes no variant.
_BUFFERS = [
    *("seeds", "positions", "top_ps", "temperatures", "min_ps", "top_ks", "wants"),
    *("edit_starts", "edit_ids", "edit_values", "saved", "scratch"),
    *("tokens", "logprobs", "top_ids", "top_logprobs", "most"),
]


@triton.jit(do_not_specialize=_BUFFERS)
def sample_rows(
    logits,
    seeds,
    positions,
    top_ps,
    temperatures,
    min_ps,
    top_ks,
    wants,
    edit_starts,
    edit_ids,
    edit_values,
    saved,
    scratch,
    tokens,
    logprobs,
    top_ids,
    top_logprobs,
    vocab,
    row_stride,
    most,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SLOTS: tl.constexpr,
    EDITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """See `sampling.SamplingTables` and `sampling.SampledRows` for the arguments. Grid (rows)."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    starts = edit_starts + number * 4  # a row's kinds follow one another, and the rows do
    repeated, said = tl.load(starts), tl.load(starts + 1)
    biased, banned, end = tl.load(starts + 2), tl.load(starts + 3), tl.load(starts + 4)
    if end > repeated:
        _edit(row, vocab, repeated, said, edit_ids, edit_values, saved, 0, EDITS)
        _edit(row, vocab, said, biased, edit_ids, edit_values, saved, 1, EDITS)
        _edit(row, vocab, biased, banned, edit_ids, edit_values, saved, 2, EDITS)
        _edit(row, vocab, banned, end, edit_ids, edit_values, saved, 3, EDITS)

    top, token = _largest(row, vocab, LANES, VEC)
    temperature = tl.load(temperatures + number)
    if (temperature >= GREEDY_BELOW) & (tl.abs(top) < float("inf")):
        own = scratch + number.to(tl.int64) * (SLOTS * LANES)
        reach = tl.full([], _INFINITE, tl.int32)
        top_k = tl.load(top_ks + number)
        if (top_k > 0) & (top_k < vocab):
            reach = _reach(
                row, vocab, top, temperature, top_k.to(tl.float64), reach, own, False, LANES, VEC, SLOTS, INTERPRETED
            )
        top_p = tl.load(top_ps + number)
        if top_p < 1.0:
            reach = _reach(row, vocab, top, temperature, top_p, reach, own, True, LANES, VEC, SLOTS, INTERPRETED)
        seed = tl.load(seeds + number).to(tl.uint64, bitcast=True)
        position = tl.load(positions + number).to(tl.uint64, bitcast=True)
        key = _mixed(_mixed(seed) ^ position)
        winner = _race(row, vocab, top, temperature, reach, tl.load(min_ps + number), key, LANES, VEC, INTERPRETED)
        token = tl.where(winner >= 0, winner.to(tl.int64), token)
    tl.store(tokens + number, token)

    if end > repeated:
        tl.debug_barrier()
        _take_back(row, vocab, banned, end, edit_ids, saved, EDITS)
        _take_back(row, vocab, biased, banned, edit_ids, saved, EDITS)
        _take_back(row, vocab, said, biased, edit_ids, saved, EDITS)
        _take_back(row, vocab, repeated, said, edit_ids, saved, EDITS)
    want = tl.load(wants + number)
    if want >= 0:
        pair = _likeliest(row, vocab, tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), LANES, VEC)
        top = _logit_of(pair)
        normaliser = _normaliser(row, vocab, top, LANES, VEC)
        tl.store(logprobs + number, (tl.load(row + token) - top) - normaliser)
        for place in range(0, tl.minimum(want, most)):
            tl.store(top_ids + number * most + place, _id_of(pair))
            tl.store(top_logprobs + number * most + place, (_logit_of(pair) - top) - normaliser)
            pair = _likeliest(row, vocab, pair, LANES, VEC)
