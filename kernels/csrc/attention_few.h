// Attention of the heads of one query position (decode): bound by reading the cache, so it reads each key and value
// once, in the order they lie, and prefetches the next block while computing this one.
//
// Per chunk of blocks: scores of all tokens, then the softmax weights, then the weighted sum of values; an online
// softmax joins the chunks. Scores are computed head by head, W tokens at once, so that their dot products end in one
// vector; values are read once for up to four heads.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"

namespace cohort {

constexpr int kSegmentTokens = 64;  // a block longer than this is taken in pieces
constexpr int kChunkSegments = 32;
constexpr int kPrefetchBytes = 8192;  // how far ahead of the arithmetic memory is asked for; measured
constexpr int kMaxDistance = 16;

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
  static constexpr bool kPairedTokens = false;
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
  // Values of two tokens meet the pair of their weights in one instruction; the elements of a chunk lie as interleaving
  // leaves them.
  static constexpr bool kPairedTokens = true;
  static inline int place(int i) {
    int chunk = i / kChunk, lane = i % kChunk / 8, rest = i % 8;
    return chunk * kChunk + rest / 4 * W + lane * 4 + rest % 4;
  }
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
  static constexpr bool kPairedTokens = false;
  static inline int place(int i) { return even_odd_place<W>(i); }
#endif
  static inline void load_values(const bf16* from, F* to) { S::load_even_odd(from, to[0], to[1]); }
};

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
// The elements of two rows side by side, as `Dot<bf16, W>::place` says.
template <int W>
inline void interleave(const bf16* first, const bf16* second, typename Lanes<W>::Pairs* both) {
  if constexpr (W == 16) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    both[0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
    both[1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
  } else {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    both[0] = (__m256bh)_mm256_unpacklo_epi16(a, b);
    both[1] = (__m256bh)_mm256_unpackhi_epi16(a, b);
  }
}
template <int W>
inline typename Lanes<W>::Pairs splat_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, 4);
  if constexpr (W == 16) return (__m512bh)_mm512_set1_epi32(pair);
  else return (__m256bh)_mm256_set1_epi32(pair);
}
template <int W>
inline typename Simd<W>::F add_pairs(typename Simd<W>::F sum, typename Lanes<W>::Pairs a, typename Lanes<W>::Pairs b) {
  if constexpr (W == 16) return (typename Simd<W>::F)_mm512_dpbf16_ps((__m512)sum, a, b);
  else return (typename Simd<W>::F)_mm256_dpbf16_ps((__m256)sum, a, b);
}
#endif

// Into the second cache: lines asked for by the first one are too few in flight to hide the memory (measured: 25 GB/s
// against 15, with or without other hints).
inline void prefetch_bytes(const char* at, int64_t begin, int64_t end) {
  for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}

// query · key of W tokens of which `last` is the last one; a full group is told at compile time.
template <typename T, int W, bool kFull>
inline typename Simd<W>::F score_tokens(const T* keys, int last, const float* query, int head_dim) {
  using D = Dot<T, W>;
  using F = typename Simd<W>::F;
  const int chunks = head_dim / D::kChunk;
  F sums[W];
#pragma GCC unroll 16
  for (int t = 0; t < W; ++t) sums[t] = F{};
  for (int c = 0; c < chunks; ++c) {
    const typename D::Key held = D::load_query(query + c * D::kQueryStep);
    const T* column = keys + c * D::kChunk;
#pragma GCC unroll 16
    for (int t = 0; t < W; ++t) {
      // past the end the last token again: slots nobody wrote may hold anything
      const int64_t token = kFull ? t : std::min(t, last);
      sums[t] = D::madd(sums[t], D::load_key(column + token * head_dim), held);
    }
  }
  return Simd<W>::sum_rows(sums);
}

// scores[token] = query · key[token] · scale, soft-capped where `cap_log2` is not 0, for `count` tokens, masked from
// there to `capacity` tokens (a multiple of W). Meanwhile as many rows of `row_bytes` from `next` are asked for.
template <typename T, int W>
inline void score_segment(const T* all_keys, int count, const char* next, int64_t row_bytes, const float* query,
                          int head_dim, float scale, float cap_log2, float* scores, int capacity) {
  using S = Simd<W>;
  for (int token = 0; token < count; token += W) {
    if (next) prefetch_bytes(next, token * row_bytes, (token + W) * row_bytes);
    const T* keys = all_keys + int64_t(token) * head_dim;
    const int last = count - 1 - token;
    auto sums = last >= W - 1 ? score_tokens<T, W, true>(keys, last, query, head_dim)
                              : score_tokens<T, W, false>(keys, last, query, head_dim);
    sums *= scale;
    S::store(scores + token, cap_log2 > 0 ? soft_capped<W>(sums, cap_log2) : sums);
  }
  for (int token = count; token < capacity; ++token) scores[token] = kMasked;
}

// Scores become weights 2^(score - maximum); a head's `maximum` and `total` move on. Returns by how much earlier sums
// shrink. `pairs` (for paired tokens) takes the weights as bfloat16.
template <typename T, int W>
inline float weigh(float* scores, int tokens, float& maximum, float& total, bf16* pairs) {
  using S = Simd<W>;
  using F = typename S::F;
  float lanes[W];
  F highest = S::splat(maximum);
  for (int i = 0; i < tokens; i += W) highest = S::max(S::load(scores + i), highest);
  S::store(lanes, highest);
  float best = lanes[0];
  for (int lane = 1; lane < W; ++lane) best = std::max(best, lanes[lane]);
  const F shift = S::splat(best);
  F sum{};
  for (int i = 0; i < tokens; i += W) {
    F weight = S::exp2(S::load(scores + i) - shift);
    if constexpr (Dot<T, W>::kPairedTokens) {
      S::store(pairs + i, weight);
    } else {
      S::store(scores + i, weight);
    }
    sum += weight;
  }
  const float rescale = std::exp2(maximum - best);
  total = total * rescale + S::sum(sum);
  maximum = best;
  return rescale;
}

// sums[head] += Σ_token weight[head][token] · value[token], for `kSteps` chunks of the head dimension at once. A head's
// weights begin `stride` after those of the head before.
template <typename T, int W, int NH, int kSteps>
inline void add_values(const T* values, int tokens, int head_dim, const float* weights, size_t stride, float* sums) {
  using D = Dot<T, W>;
  using S = Simd<W>;
  using F = typename S::F;
  constexpr int kVectors = kSteps * D::kVectors;
  F held[NH][kVectors];
  for (int h = 0; h < NH; ++h)
    for (int v = 0; v < kVectors; ++v) held[h][v] = S::load(sums + h * head_dim + v * W);
  if constexpr (D::kPairedTokens) {
    const bf16* pairs = reinterpret_cast<const bf16*>(weights);
    for (int token = 0; token < tokens; token += 2) {
      const T* first = values + int64_t(token) * head_dim;
      const T* second = token + 1 < tokens ? first + head_dim : first;  // its weight is zero
      typename D::Pairs both[kVectors];
      for (int s = 0; s < kSteps; ++s) interleave<W>(first + s * D::kChunk, second + s * D::kChunk, both + 2 * s);
      for (int h = 0; h < NH; ++h) {
        const auto weight = splat_pair<W>(pairs + 2 * h * stride + token);
        for (int v = 0; v < kVectors; ++v) held[h][v] = add_pairs<W>(held[h][v], both[v], weight);
      }
    }
  } else {
    for (int token = 0; token < tokens; ++token) {
      F value[kVectors];
      for (int s = 0; s < kSteps; ++s) {
        D::load_values(values + int64_t(token) * head_dim + s * D::kChunk, value + s * D::kVectors);
      }
      for (int h = 0; h < NH; ++h) {
        F weight = S::splat(weights[h * stride + token]);
        for (int v = 0; v < kVectors; ++v) held[h][v] += weight * value[v];
      }
    }
  }
  for (int h = 0; h < NH; ++h)
    for (int v = 0; v < kVectors; ++v) S::store(sums + h * head_dim + v * W, held[h][v]);
}

template <typename T, int W, int NH>
inline void add_segment(const T* values, int count, const char* next, int64_t row_bytes, int head_dim,
                        const float* weights, size_t stride, float* sums) {
  using D = Dot<T, W>;
  // few heads leave few sums in flight: take more of the head dimension at once to hide the multiply-add's latency
  constexpr int kSteps = NH * D::kVectors >= 6 ? 2 : 4;
  const int chunks = head_dim / D::kChunk;
  const int64_t bytes = count * row_bytes;
  int c = 0;
  auto take = [&](auto steps) {
    if (next) prefetch_bytes(next, bytes * c / chunks, bytes * (c + steps()) / chunks);
    add_values<T, W, NH, steps()>(values + c * D::kChunk, count, head_dim, weights, stride, sums + c * D::kChunk);
    c += steps();
  };
  while (c + kSteps <= chunks) take(std::integral_constant<int, kSteps>{});
  while (c + 2 <= chunks) take(std::integral_constant<int, 2>{});
  while (c < chunks) take(std::integral_constant<int, 1>{});
}

// Calls `f` with the number of heads as a compile-time constant.
template <typename Call>
inline void with_heads(int heads, Call&& f) {
  using std::integral_constant;
  switch (heads) {
    case 4:
      return f(integral_constant<int, 4>{});
    case 3:
      return f(integral_constant<int, 3>{});
    case 2:
      return f(integral_constant<int, 2>{});
    default:
      return f(integral_constant<int, 1>{});
  }
}

// The blocks whose scores are held at once.
struct Chunk {
  int count = 0;
  Segment segments[kChunkSegments];

  // Takes the blocks from position `at` on; returns where the next chunk begins.
  template <typename T>
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
  const int kv_heads = task.kv_heads, heads = kv_heads * group;
  const int64_t head_stride = step.cache.head_stride(), row_bytes = step.cache.row;
  const size_t query_stride = D::query_floats(head_dim);
  const int capacity = (std::min(block_size, kSegmentTokens) + W - 1) / W * W;  // score places of one segment
  const size_t chunk_scores = size_t(kChunkSegments) * capacity;                // of one lane
  const size_t staged = step.cache.fp8 ? size_t(std::min(block_size, kSegmentTokens)) * head_dim : 0;
  scratch.reset(heads * (query_stride + head_dim + 2 + chunk_scores + 8) + head_dim + staged + 7 * 16);
  float* query = scratch.take(heads * query_stride);
  float* sums = scratch.take(size_t(heads) * head_dim);
  float* maximum = scratch.take(heads);
  float* total = scratch.take(heads);
  float* ordered = scratch.take(head_dim);
  // scores [head][token], and after `weigh` weights: bfloat16 ones in the first half of each head's place
  float* scores = scratch.take(heads * chunk_scores);
  T* place = reinterpret_cast<T*>(scratch.take(staged));  // of a segment's rows, read once for all heads of a group

  const int64_t token = step.query_start[task.row] + task.query_begin;
  for (int h = 0; h < heads; ++h) {
    int64_t head = int64_t(task.kv_head) * group + h;
    D::pack_query(step.query + token * step.query_token_stride + head * step.query_head_stride, head_dim,
                  query + h * query_stride);
    maximum[h] = kNoScore;
    total[h] = 0;
  }
  std::fill(sums, sums + size_t(heads) * head_dim, 0.0f);

  // What is read, in this order: the chunk's keys, its values, the next chunk's keys; of every block one head after the
  // other, as they lie. The hardware does not foresee the jumps between blocks, so each piece is prefetched `distance`
  // pieces ahead, line by line among the arithmetic.
  Chunk chunk, next;
  const int piece_bytes = std::min(block_size, kSegmentTokens) * int(row_bytes);
  const int distance = std::clamp(kPrefetchBytes / piece_bytes, 1, kMaxDistance);
  int64_t at = chunk.fill(step, task, task.kv_begin);
  for (int i = 0; i < std::min(distance, chunk.count * kv_heads); ++i) {
    prefetch_bytes(chunk.segments[i / kv_heads].keys + i % kv_heads * head_stride, 0, piece_bytes);
  }
  for (; chunk.count > 0; std::swap(chunk, next)) {
    at = next.fill(step, task, at);
    const int pieces = chunk.count * kv_heads;
    auto ahead = [&](int piece) -> const char* {
      piece += distance;
      const int64_t head = piece % kv_heads * head_stride;  // `pieces` is a multiple of kv_heads
      if (piece < pieces) return chunk.segments[piece / kv_heads].keys + head;
      if (piece < 2 * pieces) return chunk.segments[piece / kv_heads - chunk.count].values + head;
      piece = piece / kv_heads - 2 * chunk.count;
      return piece < next.count ? next.segments[piece].keys + head : nullptr;
    };
    for (int piece = 0; piece < pieces; ++piece) {
      const Segment& segment = chunk.segments[piece / kv_heads];
      const int first = piece % kv_heads * group;  // the kv head's first column
      const T* keys = rows_of<T>(step.cache, segment.keys + piece % kv_heads * head_stride, segment.count, place);
      for (int h = first; h < first + group; ++h) {
        score_segment<T, W>(keys, segment.count, h == first ? ahead(piece) : nullptr, row_bytes,
                            query + h * query_stride, head_dim, step.scale_log2, step.cap_log2,
                            scores + h * chunk_scores + piece / kv_heads * capacity, capacity);
      }
    }
    for (int h = 0; h < heads; ++h) {
      float* own = scores + h * chunk_scores;
      const float rescale =
          weigh<T, W>(own, chunk.count * capacity, maximum[h], total[h], reinterpret_cast<bf16*>(own));
      if (rescale == 1.0f) continue;
      for (int d = 0; d < head_dim; ++d) sums[int64_t(h) * head_dim + d] *= rescale;
    }
    for (int piece = 0; piece < pieces; ++piece) {
      const Segment& segment = chunk.segments[piece / kv_heads];
      const int first = piece % kv_heads * group;
      const T* values = rows_of<T>(step.cache, segment.values + piece % kv_heads * head_stride, segment.count, place);
      for (int h = first; h < first + group; h += 4) {
        const float* weights = scores + h * chunk_scores;
        // bfloat16 weights take half the place
        weights += piece / kv_heads * capacity / (D::kPairedTokens ? 2 : 1);
        const char* next_piece = h == first ? ahead(pieces + piece) : nullptr;
        with_heads(std::min(4, first + group - h), [&](auto count) {
          add_segment<T, W, count()>(values, segment.count, next_piece, row_bytes, head_dim, weights, chunk_scores,
                                     sums + int64_t(h) * head_dim);
        });
      }
    }
  }

  for (int h = 0; h < heads; ++h) {
    const float* sum = sums + int64_t(h) * head_dim;
    for (int d = 0; d < head_dim; ++d) ordered[d] = sum[D::place(d)];
    write_column(step, task, h, ordered, maximum[h], total[h], partial);
  }
}

}  // namespace cohort
