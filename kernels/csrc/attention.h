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

// `count` rows of the cache as numbers of T: where they lie, or, in FP8, read into `place` [count, head_dim].
template <typename T>
inline const T* rows_of(const CacheView& cache, const char* from, int count, T* place) {
  if (!cache.fp8) return reinterpret_cast<const T*>(from);
  for (int i = 0; i < count; ++i) {
    read_fp8_row(reinterpret_cast<const uint8_t*>(from) + int64_t(i) * cache.row, cache.head_dim,
                 place + int64_t(i) * cache.head_dim);
  }
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

struct Task {
  int row, kv_head, kv_heads;  // heads [kv_head, kv_head + kv_heads)
  int query_begin, query_end;  // within the row
  int64_t kv_begin, kv_end;    // positions
  int merge;                   // index of the merge group, or -1: this task owns its columns
  int part;                    // which part of the merge group
};

// Columns whose context was split over several tasks. The task that finishes last merges.
struct MergeGroup {
  int parts;
  int64_t offset;  // floats, into the partial results: [part][column][head_dim + 2], the last two: maximum, sum
};

// Soft-capping, cap · tanh(score / cap), of scores that are scaled and in powers of two as the cap is.
template <int W>
inline typename Simd<W>::F soft_capped(typename Simd<W>::F scores, float cap_log2) {
  return Simd<W>::tanh(scores * (1.0f / cap_log2)) * cap_log2;
}

inline int columns_of(const Task& task, int group) {
  return (task.query_end - task.query_begin) * task.kv_heads * group;
}

// Tokens of a row that lie beside each other in memory; their order inside does not matter to a softmax.
struct Segment {
  const char* keys;
  const char* values;
  int count;
};

// The part of one block that holds positions [begin, end) of a row, end not beyond the block.
//
// R13 · A block filled right to left holds its j-th token in slot block_size-1-j, so tokens [a, b) of it lie in slots
// [block_size-b, block_size-a): still one contiguous piece, which is why direction costs nothing here.
// Of the task's first head; the next heads' keys and values follow `CacheView::head_stride` apart.
template <typename T>
inline Segment segment_of(const Step<T>& step, const Task& task, int64_t begin, int64_t end) {
  const CacheView& cache = step.cache;
  int64_t index = begin / cache.block_size;
  int first = int(begin - index * cache.block_size), count = int(end - begin);
  int64_t block = step.block_tables[task.row * step.table_stride + index];
  if (block < 0 || block >= cache.num_blocks) throw std::out_of_range("block table names a block outside the cache");
  if (step.directions && step.directions[task.row * step.direction_stride + index]) {
    first = cache.block_size - first - count;
  }
  const char* keys = cache.keys(block, task.kv_head) + int64_t(first) * cache.row;
  return {keys, keys + cache.value_offset, count};
}

// One column's finished sum: divided and written out, or left as a partial result for the merge.
template <typename T>
inline void write_column(const Step<T>& step, const Task& task, int column, const float* sum, float maximum,
                         float total, float* partial) {
  int head_dim = step.cache.head_dim;
  if (partial) {
    float* to = partial + int64_t(column) * (head_dim + 2);
    std::memcpy(to, sum, sizeof(float) * head_dim);
    to[head_dim] = maximum;
    to[head_dim + 1] = total;
    return;
  }
  const int heads = task.kv_heads * step.group;
  int64_t token = step.query_start[task.row] + task.query_begin + column / heads;
  int64_t head = int64_t(task.kv_head) * step.group + column % heads;
  T* to = step.out + token * step.out_token_stride + head * step.out_head_stride;
  float inverse = 1.0f / total;
  if (step.sinks) {  // here, where a column is finished, so a context in parts counts its sink once
    const float sink = step.sinks[head] * 1.44269504f, peak = std::max(maximum, sink);
    const float shrink = std::exp2(maximum - peak);
    inverse = shrink / (total * shrink + std::exp2(sink - peak));
  }
  for (int d = 0; d < head_dim; ++d) to[d] = from_float<T>(sum[d] * inverse);
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
