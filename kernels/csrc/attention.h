// What the attention kernels share: the cache's shape, the step's rows, one task and its result.
//
// A *column* is one (query position, query head) pair; the columns of one kv head read the same keys and values, so these
// are loaded once for the whole group (GQA).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "fp8_cache.h"
#include "simd.h"

namespace cohort {

// kv [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], seen from one layer; places and steps in bytes.
struct CacheView {
  const char* layer_base;  // kv + layer · (2 · Hkv · block_size · row)
  int64_t block_stride;    // from one block to the next
  int64_t value_offset;    // from a key to its value
  int64_t num_blocks;
  int num_kv_heads, block_size, head_dim;
  int row;   // from one token to the next
  bool fp8;  // rows as fp8_cache.h has them, else elements of the step's type

  int64_t head_stride() const { return int64_t(block_size) * row; }
  const char* keys(int64_t block, int kv_head) const {
    return layer_base + block * block_stride + kv_head * head_stride();
  }
};

// A row of the cache as numbers of T: where it lies, or, in FP8, read into `place` [head_dim].
template <typename T>
inline const T* row_of(const CacheView& cache, const char* from, T* place) {
  if (!cache.fp8) return reinterpret_cast<const T*>(from);
  read_fp8_row(reinterpret_cast<const uint8_t*>(from), cache.head_dim, place);
  return place;
}

template <typename T>
struct Step {
  CacheView cache;
  const T* query;
  int64_t query_token_stride, query_head_stride;
  T* out;
  int64_t out_token_stride, out_head_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const uint8_t* directions;  // null: every block left to right
  int64_t table_stride, direction_stride;
  int group;         // query heads of one kv head
  float scale_log2;  // softmax scale · log2(e): the kernels compute with 2^x
  int64_t window;    // 0: unlimited
  float cap_log2;    // bound of the soft-capped scores · log2(e); 0: not capped
  const float* sinks;  // per query head, a score that takes weight and gives no value; null: none
};

// Positions are taken in tiles that begin at multiples of this, whatever a step computes: see attention_tile.h.
constexpr int kTile = 128;

struct Task {
  int row, kv_head, kv_heads;  // heads [kv_head, kv_head + kv_heads)
  int query_begin, query_end;  // within the row
  int64_t kv_begin, kv_end;    // positions; tasks that share columns meet where tiles begin
  int merge;                   // index of the merge group, or -1: this task owns its columns

  int queries() const { return query_end - query_begin; }
  int64_t first_tile() const { return kv_begin / kTile; }
};

// Columns whose context was split over several tasks. The task that finishes last merges.
struct MergeGroup {
  int parts;
  int64_t first_tile, tiles;
  int64_t offset;  // floats, into the partial results: [tile][column] of `partial_floats` each
};

// Soft-capping, cap · tanh(score / cap), of scores that are scaled and in powers of two as the cap is.
template <int W>
inline typename Simd<W>::F soft_capped(typename Simd<W>::F scores, float cap_log2) {
  return Simd<W>::tanh(scores * (1.0f / cap_log2)) * cap_log2;
}

// Columns of one kv head; a task's columns are those of its first head, then those of the next.
inline int columns_of(const Task& task, int group) { return task.queries() * group; }

// Floats of a column's sums: its head, in whole vectors, and behind it a vector whose lanes add up to the total weight.
inline int sum_floats(int head_dim) { return (head_dim + kWide - 1) / kWide * kWide + kWide; }

// The same with the highest score behind it: what a tile leaves where another task merges.
inline int partial_floats(int head_dim) { return sum_floats(head_dim) + kWide; }

// The sums of a later part of a column's context are added to those of the part before. Two parts in the same order
// always give the same bits: one of the factors is 1, so each element is one multiply-add.
inline void merge_sums(float* sums, float& maximum, const float* later, float later_maximum, int floats) {
  using S = Simd<kWide>;
  const bool higher = later_maximum > maximum;
  const auto factor = S::exp2(S::splat(higher ? maximum - later_maximum : later_maximum - maximum));
  for (int i = 0; i < floats; i += kWide) {
    const auto before = S::load(sums + i), after = S::load(later + i);
    S::store(sums + i, higher ? S::madd(before, factor, after) : S::madd(after, factor, before));
  }
  if (higher) maximum = later_maximum;
}

// A column's finished sums: divided and written out.
template <typename T>
inline void write_column(const Step<T>& step, const Task& task, int kv_head, int column, const float* sums,
                         float maximum) {
  using S = Simd<kWide>;
  const int head_dim = step.cache.head_dim;
  const int64_t token = step.query_start[task.row] + task.query_begin + column / step.group;
  const int64_t head = int64_t(kv_head) * step.group + column % step.group;
  T* to = step.out + token * step.out_token_stride + head * step.out_head_stride;
  const float total = S::sum(S::load(sums + sum_floats(head_dim) - kWide));
  float inverse = 1.0f / total;
  if (step.sinks) {  // here, where a column is finished, so a context in parts counts its sink once
    const float sink = step.sinks[head] * 1.44269504f, peak = std::max(maximum, sink);
    const float shrink = std::exp2(maximum - peak);
    inverse = shrink / (total * shrink + std::exp2(sink - peak));
  }
  for (int d = 0; d < head_dim; ++d) to[d] = from_float<T>(sums[d] * inverse + 0.0f);  // no zero has a sign
}

// Aligned scratch that a thread keeps between tasks.
class Scratch {
 public:
  void reset(size_t floats) {
    if (floats + 16 > store_.size()) store_.resize(floats + 16);
    next_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(store_.data()) + 63) & ~uintptr_t(63));
  }
  float* take(size_t floats) {
    float* taken = next_;
    next_ += (floats + 15) & ~size_t(15);
    return taken;
  }

 private:
  std::vector<float> store_;
  float* next_ = nullptr;
};

// Finite, so that exp2(lowest - lowest) is 1 and not NaN when a whole tile is masked.
constexpr float kNoScore = -1e30f;
constexpr float kMasked = -__builtin_inff();

}  // namespace cohort
