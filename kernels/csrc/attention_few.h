// Attention of the heads of one query position (decode): bound by reading the cache, so it reads each key and value
// once, in the order they lie, and prefetches the next block while computing this one.
//
// Per chunk of blocks: scores of all tokens, then the softmax weights, then the weighted sum of values; an online
// softmax joins the chunks. Heads go in tiles of HT (1, 2, 4) lanes with W / HT tokens beside them, so that W dot
// products end in exactly one vector: lane = token · HT + head.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"

namespace cohort {

constexpr int kSegmentTokens = 64;  // a block longer than this is taken in pieces
constexpr int kChunkSegments = 32;
constexpr int kPrefetchBytes = 4096;  // how far ahead of the arithmetic memory is asked for; measured, AVX2
constexpr int kMaxDistance = 8;

// How W-lane kernels hold keys and queries. `kChunk` elements of a row are one step of the dot product.
template <typename T, int W>
struct Dot;

template <int W>
struct Dot<float, W> {
  using S = Simd<W>;
  using F = typename S::F;
  static constexpr int kChunk = W, kVectors = 1;
  struct Key {
    F all;
  };
  static size_t query_floats(int head_dim) { return head_dim; }
  static void pack_query(const float* from, int head_dim, float* to) {
    std::memcpy(to, from, sizeof(float) * head_dim);
  }
  static inline Key load_key(const float* from) { return {S::load(from)}; }
  static inline Key load_query(const float* from) { return {S::load(from)}; }
  static inline F madd(F sum, Key key, Key query) { return sum + key.all * query.all; }
  static constexpr int kQueryStep = W;  // floats of packed query per chunk
  static inline void load_values(const float* from, F* to) { to[0] = S::load(from); }
  static inline int place(int i) { return i; }
};

template <int W>
struct Dot<bf16, W> {
  using S = Simd<W>;
  using F = typename S::F;
  static constexpr int kChunk = 2 * W, kVectors = 2;
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  // products of bfloat16 pairs are exact in float32: one instruction does the work of two multiply-adds and the
  // widening
  using Pairs = typename Lanes<W>::Pairs;
  struct Key {
    Pairs pairs;
  };
  static size_t query_floats(int head_dim) { return head_dim / 2; }
  static void pack_query(const bf16* from, int head_dim, float* to) { std::memcpy(to, from, 2 * head_dim); }
  static inline Key load_key(const bf16* from) {
    Key key;
    std::memcpy(&key.pairs, from, sizeof(Pairs));
    return key;
  }
  static inline Key load_query(const float* from) { return load_key(reinterpret_cast<const bf16*>(from)); }
  static inline F madd(F sum, Key key, Key query) {
    if constexpr (W == 16) {
      return (F)_mm512_dpbf16_ps((__m512)sum, key.pairs, query.pairs);
    } else {
      return (F)_mm256_dpbf16_ps((__m256)sum, key.pairs, query.pairs);
    }
  }
  static constexpr int kQueryStep = W;
#else
  struct Key {
    F even, odd;
  };
  static size_t query_floats(int head_dim) { return head_dim; }
  static void pack_query(const bf16* from, int head_dim, float* to) {
    for (int d = 0; d < head_dim; ++d) to[even_odd_place<W>(d)] = to_float(from[d]);
  }
  static inline Key load_key(const bf16* from) {
    Key key;
    S::load_even_odd(from, key.even, key.odd);
    return key;
  }
  static inline Key load_query(const float* from) { return {S::load(from), S::load(from + W)}; }
  static inline F madd(F sum, Key key, Key query) { return sum + key.even * query.even + key.odd * query.odd; }
  static constexpr int kQueryStep = 2 * W;
#endif
  static inline void load_values(const bf16* from, F* to) { S::load_even_odd(from, to[0], to[1]); }
  static inline int place(int i) { return even_odd_place<W>(i); }
};

// Without a trace in the outer caches: a step reads its KV once, and there this was 10 to 15 % faster than all other
// hints.
template <typename T>
inline void prefetch_bytes(const T* from, int64_t begin, int64_t end) {
  const char* at = reinterpret_cast<const char*>(from);
  for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(at + byte, 0, 0);
}

// scores[token · HT + head] = query[head] · key[token] · scale for the segment's tokens, masked from there to
// `capacity` tokens (a multiple of W). NH ≤ HT heads are real.
template <typename T, int W, int HT, int NH>
inline void score_segment(const Segment<T>& segment, const T* next, const float* query, size_t query_stride,
                          int head_dim, float scale, float* scores, int capacity) {
  using D = Dot<T, W>;
  using S = Simd<W>;
  using F = typename S::F;
  constexpr int kTokens = W / HT, kHeld = kTokens <= NH ? kTokens : NH;
  const int chunks = head_dim / D::kChunk;
  const int64_t row_bytes = int64_t(head_dim) * sizeof(T);
  for (int token = 0; token < segment.count; token += kTokens) {
    if (next) prefetch_bytes(next, token * row_bytes, (token + kTokens) * row_bytes);
    const T* rows[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      // past the end the last row again: slots nobody wrote may hold anything
      rows[t] = segment.keys + int64_t(std::min(token + t, segment.count - 1)) * head_dim;
    }
    F sums[W] = {};
    for (int c = 0; c < chunks; ++c) {
      typename D::Key held[kHeld];  // the smaller side stays in registers, the other passes by
      if constexpr (kTokens <= NH) {
        for (int t = 0; t < kTokens; ++t) held[t] = D::load_key(rows[t] + c * D::kChunk);
        for (int h = 0; h < NH; ++h) {
          typename D::Key passing = D::load_query(query + h * query_stride + c * D::kQueryStep);
          for (int t = 0; t < kTokens; ++t) sums[t * HT + h] = D::madd(sums[t * HT + h], held[t], passing);
        }
      } else {
        for (int h = 0; h < NH; ++h) held[h] = D::load_query(query + h * query_stride + c * D::kQueryStep);
        for (int t = 0; t < kTokens; ++t) {
          typename D::Key passing = D::load_key(rows[t] + c * D::kChunk);
          for (int h = 0; h < NH; ++h) sums[t * HT + h] = D::madd(sums[t * HT + h], passing, held[h]);
        }
      }
    }
    S::store(scores + token * HT, S::sum_rows(sums) * scale);
  }
  std::fill(scores + segment.count * HT, scores + capacity * HT, kMasked);
}

// Scores become weights 2^(score - maximum); `maximum` and `total` of the tile's heads move on, `rescale` says by how
// much earlier sums shrink.
template <int W, int HT>
inline void weigh(float* scores, int tokens, int heads, float* maximum, float* total, float* rescale) {
  using S = Simd<W>;
  using F = typename S::F;
  float lanes[W];
  F highest = S::splat(kNoScore);
  for (int i = 0; i < tokens * HT; i += W) highest = S::max(S::load(scores + i), highest);
  S::store(lanes, highest);
  float pattern[W];
  for (int h = 0; h < HT; ++h) {
    float best = h < heads ? maximum[h] : kNoScore;
    for (int lane = h; lane < W; lane += HT) best = std::max(best, lanes[lane]);
    for (int lane = h; lane < W; lane += HT) pattern[lane] = best;
  }
  F shift = S::load(pattern);
  F sum{};
  for (int i = 0; i < tokens * HT; i += W) {
    F weight = S::exp2(S::load(scores + i) - shift);
    S::store(scores + i, weight);
    sum += weight;
  }
  S::store(lanes, sum);
  for (int h = 0; h < heads; ++h) {
    rescale[h] = std::exp2(maximum[h] - pattern[h]);
    float added = 0;
    for (int lane = h; lane < W; lane += HT) added += lanes[lane];
    total[h] = total[h] * rescale[h] + added;
    maximum[h] = pattern[h];
  }
}

// sums[head] += Σ_token weight[token][head] · value[token], for `kSteps` chunks of the head dimension at once.
template <typename T, int W, int HT, int NH, int kSteps>
inline void add_values(const T* values, int tokens, int head_dim, const float* weights, float* sums,
                       int64_t sum_stride) {
  using D = Dot<T, W>;
  using S = Simd<W>;
  using F = typename S::F;
  constexpr int kVectors = kSteps * D::kVectors;
  F held[NH][kVectors];
  for (int h = 0; h < NH; ++h)
    for (int v = 0; v < kVectors; ++v) held[h][v] = S::load(sums + h * sum_stride + v * W);
  for (int token = 0; token < tokens; ++token) {
    F value[kVectors];
    for (int s = 0; s < kSteps; ++s) {
      D::load_values(values + int64_t(token) * head_dim + s * D::kChunk, value + s * D::kVectors);
    }
    for (int h = 0; h < NH; ++h) {
      F weight = S::splat(weights[token * HT + h]);
      for (int v = 0; v < kVectors; ++v) held[h][v] += weight * value[v];
    }
  }
  for (int h = 0; h < NH; ++h)
    for (int v = 0; v < kVectors; ++v) S::store(sums + h * sum_stride + v * W, held[h][v]);
}

template <typename T, int W, int HT, int NH>
inline void add_segment(const Segment<T>& segment, const T* next, int head_dim, const float* weights, float* sums,
                        int64_t sum_stride) {
  using D = Dot<T, W>;
  // few heads leave few sums in flight: take more of the head dimension at once to hide the multiply-add's latency
  constexpr int kSteps = NH * D::kVectors >= 6 ? 1 : NH * D::kVectors >= 3 ? 2 : 4;
  const int chunks = head_dim / D::kChunk;
  const int64_t bytes = int64_t(segment.count) * head_dim * sizeof(T);
  int c = 0;
  for (; c + kSteps <= chunks; c += kSteps) {
    if (next) prefetch_bytes(next, bytes * c / chunks, bytes * (c + kSteps) / chunks);
    add_values<T, W, HT, NH, kSteps>(segment.values + c * D::kChunk, segment.count, head_dim, weights,
                                     sums + c * D::kChunk, sum_stride);
  }
  for (; c < chunks; ++c) {
    add_values<T, W, HT, NH, 1>(segment.values + c * D::kChunk, segment.count, head_dim, weights, sums + c * D::kChunk,
                                sum_stride);
  }
}

// Up to four heads that share a pass over the keys.
struct HeadTile {
  int first, real, lanes;
};

inline std::vector<HeadTile> head_tiles(int group) {
  std::vector<HeadTile> tiles;
  for (int first = 0; first < group;) {
    int real = std::min(group - first, 4);
    tiles.push_back({first, real, real == 3 ? 4 : real});
    first += real;
  }
  return tiles;
}

// Calls `f(lanes, real)` with the tile's numbers as compile-time constants.
template <typename Call>
inline void with_constants(const HeadTile& tile, Call&& f) {
  using std::integral_constant;
  switch (tile.real) {
    case 4:
      f(integral_constant<int, 4>{}, integral_constant<int, 4>{});
      break;
    case 3:
      f(integral_constant<int, 4>{}, integral_constant<int, 3>{});
      break;
    case 2:
      f(integral_constant<int, 2>{}, integral_constant<int, 2>{});
      break;
    default:
      f(integral_constant<int, 1>{}, integral_constant<int, 1>{});
  }
}

// The blocks whose scores are held at once.
template <typename T>
struct Chunk {
  int count = 0;
  Segment<T> segments[kChunkSegments];

  // Takes the blocks from position `at` on; returns where the next chunk begins.
  int64_t fill(const Step<T>& step, const Task& task, int64_t at) {
    const int block_size = step.cache.block_size;
    for (count = 0; count < kChunkSegments && at < task.kv_end; ++count) {
      int64_t end = std::min({(at / block_size + 1) * block_size, at + kSegmentTokens, task.kv_end});
      segments[count] = segment_of(step, task, at, end);
      at = end;
    }
    return at;
  }
};

template <typename T, int W>
void attend_few(const Step<T>& step, const Task& task, float* partial, Scratch& scratch) {
  using D = Dot<T, W>;
  const int head_dim = step.cache.head_dim, block_size = step.cache.block_size, group = step.group;
  const size_t query_stride = D::query_floats(head_dim);
  const int capacity = (std::min(block_size, kSegmentTokens) + W - 1) / W * W;  // score places of one segment
  const size_t chunk_scores = size_t(kChunkSegments) * capacity;                // of one lane
  static thread_local std::vector<HeadTile> tiles;
  if (tiles.empty() || tiles.back().first + tiles.back().real != group) tiles = head_tiles(group);

  scratch.reset(group * (query_stride + head_dim + 2 + 4 * chunk_scores) + head_dim + 5 * 16);
  float* query = scratch.take(group * query_stride);
  float* sums = scratch.take(size_t(group) * head_dim);
  float* maximum = scratch.take(group);
  float* total = scratch.take(group);
  float* ordered = scratch.take(head_dim);
  float* scores = scratch.take(group * 4 * chunk_scores);  // each head of a tile of three has 4/3 places

  const int64_t token = step.query_start[task.row] + task.query_begin;
  for (int h = 0; h < group; ++h) {
    int64_t head = int64_t(task.kv_head) * group + h;
    D::pack_query(step.query + token * step.query_token_stride + head * step.query_head_stride, head_dim,
                  query + h * query_stride);
    maximum[h] = kNoScore;
    total[h] = 0;
  }
  std::fill(sums, sums + size_t(group) * head_dim, 0.0f);

  // What is read, in this order: the chunk's keys, its values, the next chunk's keys. The hardware does not foresee the
  // jumps between blocks, so each piece is prefetched `distance` pieces ahead, line by line among the arithmetic.
  Chunk<T> chunk, next;
  const int piece_bytes = std::min(block_size, kSegmentTokens) * head_dim * int(sizeof(T));
  const int distance = std::clamp(kPrefetchBytes / piece_bytes, 1, kMaxDistance);
  int64_t at = chunk.fill(step, task, task.kv_begin);
  for (int s = 0; s < std::min(distance, chunk.count); ++s) prefetch_bytes(chunk.segments[s].keys, 0, piece_bytes);
  for (; chunk.count > 0; std::swap(chunk, next)) {
    at = next.fill(step, task, at);
    const int count = chunk.count;
    auto ahead = [&](int piece) -> const T* {
      piece += distance;
      if (piece < count) return chunk.segments[piece].keys;
      if (piece < 2 * count) return chunk.segments[piece - count].values;
      return piece < 2 * count + next.count ? next.segments[piece - 2 * count].keys : nullptr;
    };
    for (int s = 0; s < count; ++s) {
      for (const HeadTile& tile : tiles) {
        with_constants(tile, [&](auto lanes, auto real) {
          score_segment<T, W, lanes(), real()>(
              chunk.segments[s], tile.first ? nullptr : ahead(s), query + tile.first * query_stride, query_stride,
              head_dim, step.scale_log2, scores + (tile.first * 4 * chunk_scores + s * capacity * lanes()), capacity);
        });
      }
    }
    for (const HeadTile& tile : tiles) {
      float rescale[4];
      with_constants(tile, [&](auto lanes, auto real) {
        weigh<W, lanes()>(scores + tile.first * 4 * chunk_scores, count * capacity, real(), maximum + tile.first,
                          total + tile.first, rescale);
      });
      for (int h = 0; h < tile.real; ++h) {
        if (rescale[h] == 1.0f) continue;
        float* sum = sums + int64_t(tile.first + h) * head_dim;
        for (int d = 0; d < head_dim; ++d) sum[d] *= rescale[h];
      }
    }
    for (int s = 0; s < count; ++s) {
      for (const HeadTile& tile : tiles) {
        with_constants(tile, [&](auto lanes, auto real) {
          add_segment<T, W, lanes(), real()>(chunk.segments[s], tile.first ? nullptr : ahead(count + s), head_dim,
                                             scores + (tile.first * 4 * chunk_scores + s * capacity * lanes()),
                                             sums + int64_t(tile.first) * head_dim, head_dim);
        });
      }
    }
  }

  for (int h = 0; h < group; ++h) {
    const float* sum = sums + int64_t(h) * head_dim;
    for (int d = 0; d < head_dim; ++d) ordered[d] = sum[D::place(d)];
    write_column(step, task, h, ordered, maximum[h], total[h], partial);
  }
}

}  // namespace cohort
