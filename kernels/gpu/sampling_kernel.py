# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""One token per row of logits in one launch: penalties to log-probabilities, greedy and sampled rows alike.

Launched by `sampling`, with one program per row. It computes `sampling.sample_rows_reference`; which rules apply to a
row is data in device buffers, so one recorded launch serves any mixture of rows. No row is sorted:

- pass 1 finds the largest logit and where it stands; a greedy row ends here;
- top_k and top_p want the distance (below the largest logit) at which a number of tokens, or a share of the mass, is
  reached. Distances are never negative, so their bits order like integers: each pass counts tokens and sums masses
  (float64) up to eight pivots at once, and keeps the bracket between two of them. As soon as a bracket holds few
  tokens they are copied aside, and the rest of the search runs on that tile. All tokens at the distance found stay,
  as the reference has it;
- the last pass is the race: SplitMix64 in 64-bit integers, its logarithm in float64. As -log(u) >= 1 - u, a tile
  whose lower bounds all lie behind the best time so far takes no logarithm.

Penalties, bias and bans are applied to the row where it lies, after saving what they replace, and taken back at the
end: nothing copies a row, and log-probabilities come from the raw logits.

Cost, estimated, not measured, for 256 rows of 128,256 logits on an H200: a pass over all rows reads 131 MB, more than
the second-level cache holds (50 MB), so 31 us from memory at 4.3 TB/s. Greedy takes one pass, temperature two, top_k or
top_p four (up to three more where a bracket of the first pivots is still crowded). Arithmetic is more than that: some
12 instructions per logit for the maximum, 95 for a pass with pivots, 20 for the copy, 70 for the race, i.e. 80 or 200
per logit for temperature or top_p; 33 million logits at 132 x 128 lanes x 1.7 GHz and 60 % issue: 0.15 and 0.38 ms. Up
to 132 rows run side by side, one per multiprocessor, so fewer rows take half of that, not less.

Triton reads annotations, so this file must not postpone them.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

GREEDY_BELOW = tl.constexpr(1e-5)
NEGLIGIBLE = tl.constexpr(2.0**-53 / 37.0)
PIVOTS = tl.constexpr(8)
AT_ONCE = tl.constexpr(4)
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
def _distance_bits(logit, there, top):
    """How far below the largest logit, as bits, which order like integers; ids that are not there lie behind all."""
    return tl.where(there, (top - logit).to(tl.int32, bitcast=True), _NAN)


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
def _up_to(bits, pivots, temperature, BY_MASS: tl.constexpr, INTERPRETED: tl.constexpr):
    """How many tokens lie within each pivot and what they weigh, summed over the last dimension of `bits` [A, B]:
    int32 and float64 [PIVOTS, A]."""
    within = bits[None, :, :] <= pivots[:, None, None]
    count = tl.sum(within.to(tl.int32), 2)
    if BY_MASS:
        weight = _weight(bits, temperature, INTERPRETED).to(tl.float64)
        return count, tl.sum(tl.where(within, weight[None, :, :], 0.0), 2)
    return count, count.to(tl.float64)


@triton.jit
def _evenly(low, high):
    """Pivots in (low, high], the last one `high`."""
    part = tl.arange(0, PIVOTS) + 1
    return (low + (high.to(tl.int64) - low) * part // PIVOTS).to(tl.int32)


@triton.jit
def _copy_bracket(row, vocab, top, low, high, scratch, LANES: tl.constexpr, VEC: tl.constexpr, SLOTS: tl.constexpr):
    """Distances in (low, high] into scratch [SLOTS, LANES]; how many each lane has, above SLOTS where some are lost."""
    held = tl.zeros([LANES], tl.int32)
    lane = tl.arange(0, LANES)
    for first in range(0, vocab, LANES * VEC):
        _, there, logit = _logits(row, first, vocab, LANES, VEC)
        bits = _distance_bits(logit, there, top)
        inside = (bits > low) & (bits <= high)
        place = held[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
        tl.store(scratch + place * LANES + lane[:, None], bits, mask=inside & (place < SLOTS))
        held += tl.sum(inside.to(tl.int32), 1)
    return held


@triton.jit
def _reach(
    row,
    vocab,
    top,
    temperature,
    wanted,
    limit,
    scratch,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SLOTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The smallest distance, as bits, within which there are `wanted` tokens; BY_MASS: `wanted` of the mass of all
    tokens up to `limit`."""
    part = tl.arange(0, PIVOTS)
    low = tl.full([], -1, tl.int32)  # what lies up to here is less than wanted
    high = limit + tl.full([], 0, tl.int32)  # what lies up to here is enough
    before = tl.full([], 0.0, tl.float64)
    below = tl.full([], 0, tl.int32)
    # Where the crossing mostly is: 0.25 to 12 temperatures below the largest.
    reach = 0.25 * ((part + 1) * (part + 1)).to(tl.float32) * (temperature if BY_MASS else 1.0)
    pivots = tl.minimum(tl.where(part == PIVOTS - 1, _INFINITE, reach.to(tl.int32, bitcast=True)), limit)
    enough = wanted + tl.full([], 0.0, tl.float64)
    passes = tl.full([], 0, tl.int32)
    while high - low > 1:
        counts = tl.zeros([PIVOTS, LANES], tl.int32)
        masses = tl.zeros([PIVOTS, LANES], tl.float64)
        for first in range(0, vocab, LANES * VEC):
            _, there, logit = _logits(row, first, vocab, LANES, VEC)
            bits = _distance_bits(logit, there, top)
            count, mass = _up_to(bits, pivots, temperature, BY_MASS, INTERPRETED)
            counts += count
            masses += mass
        count_of, mass_of = tl.sum(counts, 1), tl.sum(masses, 1)
        if BY_MASS:
            enough = tl.where(passes == 0, wanted * tl.max(mass_of, 0), enough)
        reached = (mass_of >= enough) | (pivots >= high)
        low = tl.max(tl.where(reached, low, pivots), 0)
        high = tl.min(tl.where(reached, pivots, high), 0)
        before = tl.max(tl.where(reached, before, mass_of), 0)
        below = tl.max(tl.where(reached, below, count_of), 0)
        inside = tl.min(tl.where(reached, count_of, 0x7FFFFFFF), 0) - below
        passes += 1
        if (high - low > 1) & (inside * 4 <= LANES * SLOTS):
            held = _copy_bracket(row, vocab, top, low, high, scratch, LANES, VEC, SLOTS)
            tl.debug_barrier()
            most = tl.max(held, 0)
            if most <= SLOTS:
                while high - low > 1:
                    pivots = _evenly(low, high)
                    masses = tl.zeros([PIVOTS, LANES], tl.float64)
                    for slot in range(0, most, AT_ONCE):
                        place = slot + tl.arange(0, AT_ONCE)[None, :]
                        cell = scratch + place * LANES + tl.arange(0, LANES)[:, None]
                        few = tl.load(cell, mask=place < held[:, None], other=_NAN)
                        _, mass = _up_to(few, pivots, temperature, BY_MASS, INTERPRETED)
                        masses += mass
                    reached = (before + tl.sum(masses, 1) >= enough) | (pivots >= high)
                    low = tl.max(tl.where(reached, low, pivots), 0)
                    high = tl.min(tl.where(reached, pivots, high), 0)
            tl.debug_barrier()
        pivots = _evenly(low, high)
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
    """The id whose exponential time, divided by its weight, is smallest, the first of equals; -1 if none runs."""
    times = tl.full([LANES, VEC], float("inf"), tl.float64)
    ids = tl.full([LANES, VEC], 0x7FFFFFFF, tl.int32)
    soonest = tl.full([], float("inf"), tl.float64)
    for first in range(0, vocab, LANES * VEC):
        index, there, logit = _logits(row, first, vocab, LANES, VEC)
        bits = _distance_bits(logit, there, top)
        weight = _weight(bits, temperature, INTERPRETED)
        wide = weight.to(tl.float64)
        runs = (bits <= reach) & (weight >= min_p) & (wide > NEGLIGIBLE)
        drawn = (_mixed(index.to(tl.uint64) ^ key) >> 11).to(tl.int64)  # 53 bits; u = (drawn + 1) / 2**53
        least = (0x1FFFFFFFFFFFFF - drawn).to(tl.float32) * (2.0**-53 * (1.0 - 2.0**-20))
        least = tl.where(runs, least / tl.where(runs, weight, 1.0), float("inf"))
        if tl.min(tl.min(least, 1), 0).to(tl.float64) <= soonest:
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

    pair = _likeliest(row, vocab, tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), LANES, VEC)
    token = _id_of(pair)
    top = _logit_of(pair)
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
