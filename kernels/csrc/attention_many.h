// Attention of many columns (prefill, chunks of it, very wide groups): bound by arithmetic, so it is two matrix
// products per tile of keys, in float32, each on register tiles.
//
// Everything is transposed: Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ. Then a column (query, head) is a vector lane: the softmax runs
// down the tokens with no reduction across lanes, the causal mask is a prefix of each token's row, and keys and values
// serve as they lie, only the queries are transposed, once per task. Columns go in panels of 2W that stay in the
// first-level cache.
#pragma once

#include <algorithm>

#include "attention.h"

namespace cohort {

// c[i][0..2W) (+)= Σ_k a(i, k) · b[k][0..2W) for MR rows; b and c have rows of 2W.
template <int W, int MR>
inline void multiply_rows(int depth, const float* a, ptrdiff_t row_stride, ptrdiff_t depth_stride, const float* b,
                          float* c, bool add) {
  using S = Simd<W>;
  using F = typename S::F;
  constexpr int kPanel = 2 * W;
  F low[MR] = {}, high[MR] = {};
  if (add) {
    for (int i = 0; i < MR; ++i) {
      low[i] = S::load(c + i * kPanel);
      high[i] = S::load(c + i * kPanel + W);
    }
  }
  for (int k = 0; k < depth; ++k) {
    F b_low = S::load(b + k * kPanel), b_high = S::load(b + k * kPanel + W);
    for (int i = 0; i < MR; ++i) {
      F factor = S::splat(a[i * row_stride + k * depth_stride]);
      low[i] += factor * b_low;
      high[i] += factor * b_high;
    }
  }
  for (int i = 0; i < MR; ++i) {
    S::store(c + i * kPanel, low[i]);
    S::store(c + i * kPanel + W, high[i]);
  }
}

template <int W, int MR>
inline void multiply_rest(int rows, int depth, const float* a, ptrdiff_t row_stride, ptrdiff_t depth_stride,
                          const float* b, float* c, bool add) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      multiply_rows<W, MR>(depth, a, row_stride, depth_stride, b, c, add);
    } else {
      multiply_rest<W, MR - 1>(rows, depth, a, row_stride, depth_stride, b, c, add);
    }
  }
}

template <int W>
inline void multiply(int rows, int depth, const float* a, ptrdiff_t row_stride, ptrdiff_t depth_stride, const float* b,
                     float* c, bool add) {
  constexpr int kRows = W == 16 ? 12 : 6;  // as many sums as the register file holds beside one row of b
  int i = 0;
  for (; i + kRows <= rows; i += kRows) {
    multiply_rows<W, kRows>(depth, a + i * row_stride, row_stride, depth_stride, b, c + i * 2 * W, add);
  }
  multiply_rest<W, kRows - 1>(rows - i, depth, a + i * row_stride, row_stride, depth_stride, b, c + i * 2 * W, add);
}

inline void widen(const float* from, float* to, int64_t count) { std::memcpy(to, from, sizeof(float) * count); }
inline void widen(const bf16* from, float* to, int64_t count) {
  using S = Simd<8>;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) S::store(to + i, S::load(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

// `count` rows of the cache as float32.
template <typename T>
inline void widen_rows(const CacheView& cache, const char* from, int count, float* to) {
  if (cache.fp8) {
    rows_of<float>(cache, from, count, to);
  } else {
    widen(reinterpret_cast<const T*>(from), to, int64_t(count) * cache.head_dim);
  }
}

// Keys and values of positions [begin, end) in order of position, as float32.
template <typename T>
inline void read_tile(const Step<T>& step, const Task& task, int64_t begin, int64_t end, float* keys, float* values) {
  const int head_dim = step.cache.head_dim, block_size = step.cache.block_size;
  const int64_t row = step.cache.row;
  for (int64_t at = begin; at < end;) {
    int64_t stop = std::min((at / block_size + 1) * block_size, end);
    Segment segment = segment_of(step, task, at, stop);
    float* key = keys + (at - begin) * head_dim;
    float* value = values + (at - begin) * head_dim;
    bool reversed = step.directions && step.directions[task.row * step.direction_stride + at / block_size];
    if (!reversed) {
      widen_rows<T>(step.cache, segment.keys, segment.count, key);
      widen_rows<T>(step.cache, segment.values, segment.count, value);
    } else {
      for (int i = 0; i < segment.count; ++i) {  // R13: from the right
        int64_t slot = segment.count - 1 - i;
        widen_rows<T>(step.cache, segment.keys + slot * row, 1, key + int64_t(i) * head_dim);
        widen_rows<T>(step.cache, segment.values + slot * row, 1, value + int64_t(i) * head_dim);
      }
    }
    at = stop;
  }
}

template <typename T, int W>
void attend_many(const Step<T>& step, const Task& task, float* partial, Scratch& scratch) {
  using S = Simd<W>;
  using F = typename S::F;
  constexpr int kPanel = 2 * W;
  const int head_dim = step.cache.head_dim, group = step.group;
  const int columns = columns_of(task, group), panels = (columns + kPanel - 1) / kPanel;
  const int tile_tokens = head_dim <= 64 ? 96 : 48;  // keys and values of a tile stay close
  const int64_t panel_floats = int64_t(head_dim) * kPanel;

  scratch.reset(2 * panels * (panel_floats + kPanel) + 2 * int64_t(tile_tokens) * head_dim + tile_tokens * kPanel +
                head_dim + 8 * 16);
  float* query = scratch.take(panels * panel_floats);  // [panel][d][column]
  float* sums = scratch.take(panels * panel_floats);   // [panel][d][column]
  float* maximum = scratch.take(panels * kPanel);
  float* total = scratch.take(panels * kPanel);
  float* keys = scratch.take(int64_t(tile_tokens) * head_dim);
  float* values = scratch.take(int64_t(tile_tokens) * head_dim);
  float* scores = scratch.take(tile_tokens * kPanel);  // [token][column]
  float* ordered = scratch.take(head_dim);

  std::fill(query, query + panels * panel_floats, 0.0f);
  std::fill(sums, sums + panels * panel_floats, 0.0f);
  std::fill(maximum, maximum + panels * kPanel, kNoScore);
  std::fill(total, total + panels * kPanel, 0.0f);
  const int64_t first_token = step.query_start[task.row] + task.query_begin;
  for (int column = 0; column < columns; ++column) {
    int64_t head = int64_t(task.kv_head) * group + column % group;
    const T* from =
        step.query + (first_token + column / group) * step.query_token_stride + head * step.query_head_stride;
    float* to = query + column / kPanel * panel_floats + column % kPanel;
    for (int d = 0; d < head_dim; ++d) to[d * kPanel] = to_float(from[d]) * step.scale_log2;
  }

  const int row_queries = step.query_start[task.row + 1] - step.query_start[task.row];
  const int64_t first_position = step.context_lens[task.row] - row_queries + task.query_begin;
  for (int64_t tile = task.kv_begin; tile < task.kv_end; tile += tile_tokens) {
    const int64_t tile_end = std::min(tile + tile_tokens, task.kv_end);
    read_tile(step, task, tile, tile_end, keys, values);
    for (int p = 0; p < panels; ++p) {
      const int column_begin = p * kPanel, column_end = std::min(columns, column_begin + kPanel);
      const int64_t lowest = first_position + column_begin / group, highest = first_position + (column_end - 1) / group;
      const int64_t begin = step.window ? std::max(tile, lowest - step.window + 1) : tile;
      const int64_t end = std::min(tile_end, highest + 1);
      if (begin >= end) continue;
      const int tokens = int(end - begin);
      const int64_t skip = (begin - tile) * head_dim;

      multiply<W>(tokens, head_dim, keys + skip, head_dim, 1, query + p * panel_floats, scores, false);
      if (step.cap_log2 > 0) {
        for (int i = 0; i < tokens * kPanel; i += W) {
          S::store(scores + i, soft_capped<W>(S::load(scores + i), step.cap_log2));
        }
      }
      for (int64_t t = std::max(begin, lowest + 1); t < end; ++t) {  // queries before token t do not see it
        int hidden = int(std::clamp<int64_t>((t - first_position) * group - column_begin, 0, kPanel));
        std::fill_n(scores + (t - begin) * kPanel, hidden, kMasked);
      }
      if (step.window) {  // queries at t + window and later no longer see token t
        for (int64_t t = begin; t < end && t + step.window <= highest; ++t) {
          int seen = int(std::clamp<int64_t>((t + step.window - first_position) * group - column_begin, 0, kPanel));
          std::fill_n(scores + (t - begin) * kPanel + seen, kPanel - seen, kMasked);
        }
      }

      float* sum = sums + p * panel_floats;
      for (int half = 0; half < kPanel; half += W) {
        float* best_at = maximum + p * kPanel + half;
        float* total_at = total + p * kPanel + half;
        const F before = S::load(best_at);
        F best = before;
        for (int t = 0; t < tokens; ++t) best = S::max(S::load(scores + t * kPanel + half), best);
        const F rescale = S::exp2(before - best);
        F added{};
        for (int t = 0; t < tokens; ++t) {
          float* at = scores + t * kPanel + half;
          F weight = S::exp2(S::load(at) - best);
          S::store(at, weight);
          added += weight;
        }
        S::store(total_at, S::load(total_at) * rescale + added);
        S::store(best_at, best);
        for (int d = 0; d < head_dim; ++d) {
          float* at = sum + d * kPanel + half;
          S::store(at, S::load(at) * rescale);
        }
      }
      multiply<W>(head_dim, tokens, values + skip, 1, head_dim, scores, sum, true);
    }
  }

  for (int column = 0; column < columns; ++column) {
    const float* from = sums + column / kPanel * panel_floats + column % kPanel;
    for (int d = 0; d < head_dim; ++d) ordered[d] = from[d * kPanel];
    write_column(step, task, column, ordered, maximum[column], total[column], partial);
  }
}

}  // namespace cohort
