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
"""

import triton  # reads annotations: they are not to be postponed here
import triton.language as tl

from cohort.kernels.gpu.sampling.sampling_search import distance_bits, reach_of, row_logits, weight_of

GREEDY_BELOW = tl.constexpr(1e-5)
NEGLIGIBLE = tl.constexpr(2.0**-53 / 37.0)
_INFINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(-(2**63))


@triton.jit
def _likeliest(row, vocab, below, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return the largest (logit, id) before `below`, of equal logits the first id, as one int64: logit above, id below.

    As argmax has it, NaN is larger than any number, and the two zeros are equal.
    """
    best = tl.full([LANES], _NEVER, tl.int64)
    # Four loads at a time: little is computed meanwhile, and 8 KiB on their way are a quarter of what memory gives.
    for first in range(0, vocab, LANES * VEC * 4):
        index, valid, logit = row_logits(row, first, vocab, LANES, VEC * 4)
        bits = logit.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(logit == 0.0, 0, tl.where(logit != logit, _NAN, key))
        pair = (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
        pair = tl.where(valid & (pair < below), pair, _NEVER)
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
    """Return the largest logit and the first id that has it, as `_likeliest` orders them."""
    best = tl.full([LANES, VEC], -(2**31), tl.int32)
    tile = tl.zeros([LANES, VEC], tl.int32)  # where the best of each place was
    # Four loads at a time: little is computed meanwhile, and 8 KiB on their way are a quarter of what memory gives.
    for first in range(0, vocab, LANES * VEC * 4):
        for part in tl.static_range(4):
            begin = first + part * LANES * VEC
            _, _, logit = row_logits(row, begin, vocab, LANES, VEC)
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
def _mixed(value):
    """Run one step of SplitMix64 on uint64; see `common.engine.counter_random`."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _race(
    row, vocab, top, temperature, reach, min_p, key, LANES: tl.constexpr, VEC: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Return the id whose exponential time, divided by its weight, is smallest, the first of equals; -1 if none runs.

    -log(u) >= 1 - u, so a tile in which these bounds, over weights rounded up, all lie after the best time so far needs
    neither logarithms nor exact weights.
    """
    times = tl.full([LANES, VEC], float("inf"), tl.float64)
    ids = tl.full([LANES, VEC], 0x7FFFFFFF, tl.int32)
    soonest = tl.full([], float("inf"), tl.float64)
    scale = -1.4426950408889634 / temperature
    for first in range(0, vocab, LANES * VEC):
        index, _, logit = row_logits(row, first, vocab, LANES, VEC)
        bits = distance_bits(logit, top)
        at_most = tl.exp2(bits.to(tl.float32, bitcast=True) * scale) * (1.0 + 2.0**-12)
        random = _mixed(index.to(tl.uint64) ^ key)
        least = (0xFFFFFFFF - (random >> 32).to(tl.uint32)).to(tl.float32) * (2.0**-32 * (1.0 - 2.0**-20))
        bound = (soonest * (1.0 + 2.0**-20)).to(tl.float32)
        ahead = (bits <= reach) & (at_most >= min_p) & (least <= bound * at_most)
        if tl.max(tl.max(ahead.to(tl.int32), 1), 0) > 0:
            weight = weight_of(bits, temperature, INTERPRETED)
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
    """Apply entries [begin, end) of one kind, whose ids differ: 0 repetition, 1 less, 2 more, 3 banned."""
    for first in range(begin, end, EDITS):
        entry = first + tl.arange(0, EDITS)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        valid = (entry < end) & (token >= 0) & (token < vocab)
        old = tl.load(row + token, mask=valid, other=0.0)
        value = tl.load(values + entry, mask=valid, other=1.0)
        tl.store(saved + entry, old, mask=valid)
        if KIND == 0:
            new = tl.where(old > 0, tl.math.div_rn(old, value), old * value)
        elif KIND == 1:
            new = old - value
        elif KIND == 2:
            new = old + value
        else:
            new = tl.full([EDITS], float("-inf"), tl.float32)
        tl.store(row + token, new, mask=valid)
    tl.debug_barrier()


@triton.jit
def _take_back(row, vocab, begin, end, ids, saved, EDITS: tl.constexpr):
    for first in range(begin, end, EDITS):
        entry = first + tl.arange(0, EDITS)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        valid = (entry < end) & (token >= 0) & (token < vocab)
        tl.store(row + token, tl.load(saved + entry, mask=valid, other=0.0), mask=valid)
    tl.debug_barrier()


@triton.jit
def _normaliser(row, vocab, top, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return the log of the sum of exp(logit - top), float32."""
    total = tl.zeros([LANES], tl.float64)
    for first in range(0, vocab, LANES * VEC):
        _, _, logit = row_logits(row, first, vocab, LANES, VEC)
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
    repeated, generated = tl.load(starts), tl.load(starts + 1)
    biased, banned, end = tl.load(starts + 2), tl.load(starts + 3), tl.load(starts + 4)
    if end > repeated:
        _edit(row, vocab, repeated, generated, edit_ids, edit_values, saved, 0, EDITS)
        _edit(row, vocab, generated, biased, edit_ids, edit_values, saved, 1, EDITS)
        _edit(row, vocab, biased, banned, edit_ids, edit_values, saved, 2, EDITS)
        _edit(row, vocab, banned, end, edit_ids, edit_values, saved, 3, EDITS)

    top, token = _largest(row, vocab, LANES, VEC)
    temperature = tl.load(temperatures + number)
    if (temperature >= GREEDY_BELOW) & (tl.abs(top) < float("inf")):
        own = scratch + number.to(tl.int64) * (SLOTS * LANES)
        reach = tl.full([], _INFINITE, tl.int32)
        top_k = tl.load(top_ks + number)
        if (top_k > 0) & (top_k < vocab):
            reach = reach_of(
                row, vocab, top, temperature, top_k.to(tl.float64), reach, own, False, LANES, VEC, SLOTS, INTERPRETED
            )
        top_p = tl.load(top_ps + number)
        if top_p < 1.0:
            reach = reach_of(row, vocab, top, temperature, top_p, reach, own, True, LANES, VEC, SLOTS, INTERPRETED)
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
        _take_back(row, vocab, generated, biased, edit_ids, saved, EDITS)
        _take_back(row, vocab, repeated, generated, edit_ids, saved, EDITS)
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
