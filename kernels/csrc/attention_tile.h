// Attention of one task: the columns of some positions of a row, a tile of keys and values at a time.
//
// A column's bits are those of its position, its head and the window alone: the same for a prompt at once, for any chunk of
// one, for positions that a decode row carries to be verified, and for a single one. What makes them so:
//
//   - tiles begin at multiples of kTile positions, and a tile's maximum, weights and sums depend on no other tile;
//   - scores and weighted values are chains over units in order (attention_units.h); tokens that a column does not see have
//     the weight zero, which changes no sum;
//   - weights are added up lane by lane, a token's lane being its position modulo the lanes;
//   - tiles are merged in order, by one function, whether one task has them all or several had some each;
//   - a block's direction (R13) decides where a token is read, never when.
//
// Keys are transposed and values interleaved once per tile, for all columns of a task: a row of several positions reads its
// KV once. Few columns are bound by reading the cache, so the next tile is asked for among this tile's arithmetic.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_few.h"

namespace cohort {

// How a task multiplies: keys and values read where they lie, or packed; and these by vectors or by the matrix unit. The unit
// sums in an order of its own: where it is there, all tasks in its type use it.
enum class Way { kInPlace, kPacked, kMatrixUnit };

template <Way kWay>
constexpr int kMost = kWay == Way::kInPlace ? kFew : kWay == Way::kPacked ? kRows : kUnitRows;  // columns at once
template <Way kWay>
constexpr int kSpan = kWay == Way::kMatrixUnit ? 2 * kWide : kWide;  // tokens at once
constexpr int kMostSpan = 2 * kWide;

// Where the tokens of a tile lie; the task's first head, others `head_stride` apart.
struct TileRows {
  const char* keys[kTile];
  int64_t begin = 0;         // the tile's first position
  int first = 0, count = 0;  // tokens in [first, count) are the task's; whole spans around them have a row as well

  template <typename T>
  void find(const Step<T>& step, const Task& task, int64_t tile) {
    const CacheView& cache = step.cache;
    begin = tile;
    const int64_t from = std::max(tile, task.kv_begin), to = std::min(tile + kTile, task.kv_end);
    first = int(from - tile);
    count = int(std::max(from, to) - tile);
    for (int64_t at = from; at < to;) {
      const int64_t index = at / cache.block_size, start = index * cache.block_size;
      const int64_t stop = std::min(start + cache.block_size, to);
      const int64_t block = step.block_tables[task.row * step.table_stride + index];
      if (block < 0 || block >= cache.num_blocks) throw std::out_of_range("block table names a block outside the cache");
      // R7, R13 · A block filled right to left holds its j-th token in slot block_size - 1 - j.
      const bool reversed = step.directions && step.directions[task.row * step.direction_stride + index];
      const char* base = cache.keys(block, task.kv_head);
      for (; at < stop; ++at) {
        const int64_t slot = reversed ? cache.block_size - 1 - (at - start) : at - start;
        keys[at - tile] = base + slot * cache.row;
      }
    }
    if (count == first) return;
    // Slots that hold none of the task's tokens are never read: nobody may have written them, or another by now.
    for (int t = first / kMostSpan * kMostSpan; t < first; ++t) keys[t] = keys[first];
    for (int t = count; t % kMostSpan; ++t) keys[t] = keys[count - 1];
  }
};

// Asks for the lines of a tile's keys and values, a share at a time. Into the second cache: lines asked for by the first
// one are too few in flight to hide the memory.
class Ahead {
 public:
  // `shares`: how often `take` will be called; 0 = nothing is asked for
  Ahead(const TileRows& rows, int64_t offset, const CacheView& cache, int shares)
      : rows_(rows), offset_(offset), value_offset_(cache.value_offset), row_bytes_(cache.row) {
    at_ = rows.first;
    planes_ = rows.count == rows.first || shares == 0 ? 0 : value_offset_ == 0 ? 1 : 2;
    if (planes_ == 0) return;
    share_ = (planes_ * (rows.count - rows.first) + shares - 1) / shares;
  }

  void take() {
    for (int i = 0; i < share_ && plane_ < planes_; ++i) {
      const char* row = rows_.keys[at_] + offset_ + plane_ * value_offset_;
      for (int64_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(row + byte, 0, 2);
      if (++at_ == rows_.count) {
        at_ = rows_.first;
        ++plane_;
      }
    }
  }

 private:
  const TileRows& rows_;
  int64_t offset_, value_offset_, row_bytes_;
  int at_, plane_ = 0, planes_, share_ = 0;
};

// A column's scores of tokens [first, last) of a tile become weights 2^(score - maximum); those outside [begin, end) become
// zeros. Adds the weights up into `total` and returns the maximum.
template <typename T>
inline float weigh(const Step<T>& step, float* scores, int first, int last, int begin, int end,
                   typename Units<T>::Weight* weights, float* total) {
  using S = Simd<kWide>;
  using F = S::F;
  for (int t = first; t < last; t += kWide) {
    F score = S::load(scores + t) * step.scale_log2;
    S::store(scores + t, step.cap_log2 > 0 ? soft_capped<kWide>(score, step.cap_log2) : score);
  }
  std::fill(scores + first, scores + std::max(first, begin), kMasked);
  std::fill(scores + std::min(last, end), scores + last, kMasked);
  F highest = S::splat(kNoScore);
  for (int t = first; t < last; t += kWide) highest = S::max(S::load(scores + t), highest);
  const float best = S::highest(highest);
  F sum{};
  for (int t = first; t < last; t += kWide) {
    const F weight = S::exp2(S::load(scores + t) - best);
    Units<T>::store_weights(weights + t, weight);
    sum += weight;
  }
  S::store(total, sum);
  return best;
}

// A vector of tokens' keys or values, `offset` bytes behind `from`: where they lie, or, in FP8, read into `place`.
template <typename T>
struct TokenRows {
  const T* rows[kWide];

  TokenRows(const CacheView& cache, const char* const* from, int64_t offset, T* place) {
    for (int t = 0; t < kWide; ++t) rows[t] = row_of(cache, from[t] + offset, place + t * int64_t(cache.head_dim));
  }
};

// c[m][n] = Σ_k a[m][k] · b[k][n] for at most kMost columns and kVectors vectors; steps in floats. By the unit, rows of `c` up
// to the next sixteen are written, too.
template <Way kWay, typename T>
inline void multiply(int rows, int vectors, int depth, const float* a, int64_t a_stride, const float* b,
                     int64_t b_stride, float* c, int64_t c_stride) {
#if defined(COHORT_MATRIX_UNIT)
  if constexpr (kWay == Way::kMatrixUnit) {
    for (int v = 0; v < vectors; v += 2) {
      auto by = [&]<bool kTall, bool kWideBlock>() {
        MatrixUnit::multiply<kTall, kWideBlock>(depth, a, 4 * a_stride, b + v * kWide, 4 * b_stride, c + v * kWide,
                                                4 * c_stride);
      };
      const bool wide = v + 1 < vectors;
      if (rows > kUnitRows / 2) {
        wide ? by.template operator()<true, true>() : by.template operator()<true, false>();
      } else {
        wide ? by.template operator()<false, true>() : by.template operator()<false, false>();
      }
    }
    return;
  }
#endif
  multiply<T>(rows, vectors, depth, a, a_stride, b, b_stride, c, c_stride);
}

// One task's arrays; `kt` and `vt` hold a tile of one head, where it is packed.
struct TileScratch {
  float *query, *sums, *maximum, *kt, *vt, *scores, *weights, *found;
};

// What the columns of one kv head do in one tile, `offset` bytes behind the task's first head. `query` (of `units` units),
// `sums` and `maximum`: of the head; `partial`: of the head and tile, or null where the task merges tiles itself. `own` asks
// for what is left of this tile, `ahead` for what is next.
template <Way kWay, typename T, typename PackKeys, typename PackValues>
inline void attend_tile(const Step<T>& step, const Task& task, const TileRows& rows, int64_t offset, int units,
                        const TileScratch& at, float* partial, Ahead& own, Ahead& ahead, PackKeys&& pack_tile_keys,
                        PackValues&& pack_tile_values) {
  using U = Units<T>;
  constexpr int kMost = cohort::kMost<kWay>, kSpan = cohort::kSpan<kWay>;
  const int head_dim = step.cache.head_dim, group = step.group, columns = columns_of(task, group);
  const int floats = sum_floats(head_dim), width = floats - kWide;
  const int queries = step.query_start[task.row + 1] - step.query_start[task.row];
  const int64_t first_position = step.context_lens[task.row] - queries + task.query_begin;
  const int groups = (columns + kMost - 1) / kMost;
  // The tile's tokens that the column sees.
  auto seen = [&](int column) {
    const int64_t position = first_position + column / group;
    const int64_t begin = step.window ? std::max(rows.begin, position - step.window + 1) : rows.begin;
    return std::pair<int, int>(int(std::clamp<int64_t>(begin - rows.begin, rows.first, rows.count)),
                               int(std::clamp<int64_t>(position + 1 - rows.begin, rows.first, rows.count)));
  };
  for (int g = 0; g < groups; ++g) {
    const int from = columns * g / groups, to = columns * (g + 1) / groups, count = to - from;
    const int first = seen(from).first / kSpan * kSpan, last = (seen(to - 1).second + kSpan - 1) / kSpan * kSpan;
    if (g == 0) pack_tile_keys();
    if constexpr (kWay == Way::kInPlace) {
      for (int t = first; t < last; t += kWide) {
        score_columns<T>(count, rows.keys + t, offset, units, at.query + int64_t(from) * units, at.scores + t, kTile);
        own.take();
        ahead.take();
      }
    } else {
      for (int stripe = first / kStripe * kStripe; stripe < last; stripe += kStripe) {
        const int vectors = std::min(kVectors, (last - stripe) / kWide);
        multiply<kWay, T>(count, vectors, units, at.query + int64_t(from) * units, units,
                          at.kt + int64_t(stripe) * units, kStripe, at.scores + stripe, kTile);
        ahead.take();
      }
    }
    float best[kMost];
    for (int m = 0; m < count; ++m) {
      const auto [begin, end] = seen(from + m);
      auto* weights = reinterpret_cast<typename U::Weight*>(at.weights + m * kTile);
      best[m] = weigh<T>(step, at.scores + m * kTile, first, last, begin, end, weights, at.found + m * floats + width);
      if (begin >= end) best[m] = kMasked;
    }
    if (g == 0) pack_tile_values();
    const int tokens = std::max(0, last - first);
    if constexpr (kWay == Way::kInPlace) {
      for (int m = 0; m < count; m += kRows) {
        add_columns<T>(std::min(kRows, count - m), width / kWide, rows.keys + first, offset + step.cache.value_offset,
                       tokens, at.weights + m * kTile + first / U::kElements, kTile, at.found + m * floats, floats,
                       [&] { ahead.take(); });
      }
    } else {
      for (int d = 0; d < width; d += kStripe) {
        multiply<kWay, T>(count, std::min(kVectors, (width - d) / kWide), tokens / U::kElements,
                          at.weights + first / U::kElements, kTile, at.vt + int64_t(first / U::kElements) * width + d,
                          width, at.found + d, floats);
        ahead.take();
      }
    }
    for (int m = 0; m < count; ++m) {
      const float* found = at.found + m * floats;
      if (partial) {
        float* to_column = partial + int64_t(from + m) * partial_floats(head_dim);
        std::memcpy(to_column, found, sizeof(float) * floats);
        to_column[floats] = best[m];
      } else if (best[m] != kMasked) {
        merge_sums(at.sums + int64_t(from + m) * floats, at.maximum[from + m], found, best[m], floats);
      }
    }
  }
}

template <Way kWay, typename T>
void attend_by(const Step<T>& step, const Task& task, float* partial, int64_t partial_tile, Scratch& scratch) {
  using U = Units<T>;
  constexpr int kMost = cohort::kMost<kWay>, kSpan = cohort::kSpan<kWay>;
  constexpr int kUnits = kWay == Way::kMatrixUnit ? kUnitPairs : 1;
  const int head_dim = step.cache.head_dim, heads = task.kv_heads, columns = columns_of(task, step.group);
  const int units = (units_of<T>(head_dim) + kUnits - 1) / kUnits * kUnits;
  const int floats = sum_floats(head_dim), width = floats - kWide;
  const CacheView& cache = step.cache;
  const int64_t head_stride = cache.head_stride();
  const int64_t all = int64_t(heads) * columns;
  constexpr int kRoom = kWay == Way::kMatrixUnit ? kUnitRows / 2 : 0;  // the unit reads columns by sixteen
  constexpr bool few = kWay == Way::kInPlace;
  const size_t packed_keys = few ? 0 : size_t(kTile) * units;
  const size_t packed_values = few ? 0 : size_t(kTile) / U::kElements * width;
  const size_t read = cache.fp8 ? size_t(kWide) * head_dim : 0;  // floats, of which bfloat16 takes half
  [[maybe_unused]] const std::conditional_t<kWay == Way::kMatrixUnit, MatrixUnit, int> unit{};
  scratch.reset(all * (units + floats + 1) + kRoom * units + packed_keys + packed_values +
                kMost * (2 * kTile + floats) + read + 9 * 16);
  TileScratch at;
  at.kt = scratch.take(packed_keys);
  at.vt = scratch.take(packed_values);
  if (columns <= kMost && packed_values <= packed_keys) at.vt = at.kt;  // the keys are done with when values are packed
  at.scores = scratch.take(kMost * kTile);
  at.weights = scratch.take(kMost * kTile);
  at.found = scratch.take(kMost * floats);
  float* query = scratch.take((all + kRoom) * units);
  float* sums = scratch.take(all * floats);
  float* maximum = scratch.take(all);
  T* place = reinterpret_cast<T*>(scratch.take(read));

  const int64_t first_token = step.query_start[task.row] + task.query_begin;
  for (int64_t i = 0; i < all; ++i) {
    const int64_t token = first_token + i % columns / step.group;
    const int64_t head = (task.kv_head + i / columns) * step.group + i % step.group;
    const T* from = step.query + token * step.query_token_stride + head * step.query_head_stride;
    float* to = query + i * units;
    if constexpr (sizeof(T) * U::kElements == sizeof(float)) {
      std::fill(to + head_dim / U::kElements, to + units, 0.0f);
      std::memcpy(to, from, sizeof(T) * head_dim);
    } else {
      for (int d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
    }
    maximum[i] = kNoScore;
  }
  std::fill(sums, sums + all * floats, 0.0f);

  const int groups = (columns + kMost - 1) / kMost;
  const int products = groups * ((kTile + kStripe - 1) / kStripe + (width + kStripe - 1) / kStripe);
  TileRows kept[2];
  kept[0].find(step, task, task.first_tile() * kTile);
  int now = 0;
  for (int64_t tile = task.first_tile(); tile * kTile < task.kv_end; ++tile, now = 1 - now) {
    const TileRows& rows = kept[now];
    kept[1 - now].find(step, task, (tile + 1) * kTile);  // none, at the end
    const int begin = rows.first / kSpan * kSpan;
    const int vectors = (rows.count - begin + kSpan - 1) / kSpan * (kSpan / kWide), end = begin + vectors * kWide;
    for (int head = 0; head < heads; ++head) {
      const bool same = head + 1 < heads;
      at.query = query + head * columns * int64_t(units);
      at.sums = sums + head * columns * int64_t(floats);
      at.maximum = maximum + head * columns;
      float* of_tile = nullptr;
      if (partial) of_tile = partial + ((tile - partial_tile) * all + head * columns) * partial_floats(head_dim);
      const int64_t offset = head * head_stride;
      Ahead ahead(same ? rows : kept[1 - now], same ? offset + head_stride : 0, cache,
                  few ? (columns / kFew + 1 + groups) * vectors : 2 * vectors + products);
      // The first tile nobody asked for: twice as fast as it is read, its keys first.
      const bool unasked = columns <= kMostFew && tile == task.first_tile() && head == 0;
      Ahead own(rows, offset, cache, unasked ? vectors : 0);
      own.take();
      auto pack_tile_keys = [&] {
        for (int t = begin; !few && t < end; t += kWide) {
          const TokenRows<T> keys(cache, rows.keys + t, offset, place);
          pack_keys(keys.rows, head_dim, units, at.kt + int64_t(t / kStripe * kStripe) * units + t % kStripe);
          own.take();
          ahead.take();
        }
      };
      auto pack_tile_values = [&] {
        for (int t = begin; !few && t < end; t += kWide) {
          const TokenRows<T> values(cache, rows.keys + t, offset + cache.value_offset, place);
          pack_values(values.rows, head_dim, width, at.vt + int64_t(t) / U::kElements * width);
          ahead.take();
        }
      };
      attend_tile<kWay>(step, task, rows, offset, units, at, of_tile, own, ahead, pack_tile_keys, pack_tile_values);
    }
  }
  if (partial) return;
  for (int64_t i = 0; i < all; ++i) {
    write_column(step, task, int(task.kv_head + i / columns), int(i % columns), sums + i * floats, maximum[i]);
  }
}

// `partial`: [tile of the merge group][column], or null.
template <typename T>
void attend(const Step<T>& step, const Task& task, float* partial, int64_t partial_tile, Scratch& scratch) {
  if constexpr (kByMatrixUnit<T>) {
    attend_by<Way::kMatrixUnit>(step, task, partial, partial_tile, scratch);
  } else if (columns_of(task, step.group) <= kMostFew && read_in_place<T>(step.cache)) {
    attend_by<Way::kInPlace>(step, task, partial, partial_tile, scratch);
  } else {
    attend_by<Way::kPacked>(step, task, partial, partial_tile, scratch);
  }
}

}  // namespace cohort
