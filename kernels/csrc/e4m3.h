// Weights in E4M3 as panels keep them, and a tile of their product.
//
// A strip of W outputs, group of inputs by group, in the order of reading:
//
//     scales float32 [W], codes [inputs of a group / 2][W][2 inputs]      the last group is filled up with zeros
//
// Codes become bfloat16 in registers, which holds every E4M3 number, subnormals too, and meet inputs as they are: nothing
// is rounded before the sums, which are float32. A group's sum is multiplied by its scale, groups are added in order:
// a row's result has the same bits whatever other rows stand beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "panels.h"

namespace cohort {

constexpr uint8_t kE4m3Nan = 0x7f;  // without its sign

inline float e4m3_to_float(uint8_t code) {
  const int size = code & 0x7f;
  uint32_t bits = size < 8 ? 0 : (uint32_t(size) << 20) + (120u << 23);
  float value;
  std::memcpy(&value, &bits, 4);
  if (size < 8) value = float(size) / 512.0f;
  return code & 0x80 ? -value : value;
}

// The same for W codes, each in a lane of 32 bits.
inline Simd<kWide>::F e4m3_lanes(Simd<kWide>::I code) {
  using S = Simd<kWide>;
  using I = S::I;
  const I size = code & 0x7f;
  const I bits = (size << 20) + (120 << 23);
  S::F normal;
  std::memcpy(&normal, &bits, sizeof(normal));
  const S::F small = __builtin_convertvector(size, S::F) * (1.0f / 512.0f);
  const S::F value = size < 8 ? small : normal;
  I signed_bits;
  std::memcpy(&signed_bits, &value, sizeof(I));
  signed_bits |= (code & 0x80) << 24;
  S::F result;
  std::memcpy(&result, &signed_bits, sizeof(result));
  return result;
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Subnormal codes, of which there are eight: n · 2^-9 in bfloat16.
alignas(64) constexpr uint16_t kE4m3Subnormals[32] = {0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

inline __m512bh e4m3_pairs(const uint8_t* codes, __m512i subnormals) {
  const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i size = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
  const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, small, code, subnormals);
  // value | sign
  return (__m512bh)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(code, 8), _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
}
#endif

// sums[m][o] = Σ x[m][i] · weight[o][i] for R rows and the W outputs of a strip
template <typename T, int R>
void e4m3_tile(const T* x, int64_t x_stride, int64_t inputs, int64_t group, const uint8_t* strip, float* sums) {
  using S = Simd<kWide>;
  using F = S::F;
  constexpr int kStep = 2 * kWide;  // bytes of a step of two inputs
  F held[R];
  for (int m = 0; m < R; ++m) held[m] = F{};
  for (int64_t first = 0; first < inputs; first += group) {
    F scales;
    std::memcpy(&scales, strip, sizeof(F));
    const uint8_t* codes = strip + sizeof(F);
    const T* own = x + first;
    const int64_t steps = std::min(group, inputs - first) / 2;
    F sum[R];
    for (int m = 0; m < R; ++m) sum[m] = F{};
    for (int64_t k = 0; k < steps; ++k, codes += kStep) {
      __builtin_prefetch(codes + kAheadBytes, 0, 3);
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
      if constexpr (std::is_same_v<T, bf16>) {
        const __m512bh weights = e4m3_pairs(codes, _mm512_load_si512(kE4m3Subnormals));
        for (int m = 0; m < R; ++m) {
          int32_t pair;
          std::memcpy(&pair, own + m * x_stride + 2 * k, 4);
          sum[m] = (F)_mm512_dpbf16_ps((__m512)sum[m], (__m512bh)_mm512_set1_epi32(pair), weights);
        }
        continue;
      }
#endif
      S::H both;
      std::memcpy(&both, codes, sizeof(both));
      const S::I wide = __builtin_convertvector(both, S::I);
      const F even = e4m3_lanes(wide & 0xff), odd = e4m3_lanes(wide >> 8);
      for (int m = 0; m < R; ++m) {
        const T* pair = own + m * x_stride + 2 * k;
        sum[m] = sum[m] + even * to_float(pair[0]);
        sum[m] = sum[m] + odd * to_float(pair[1]);
      }
    }
    for (int m = 0; m < R; ++m) held[m] = held[m] + sum[m] * scales;
    strip += kWide * (4 + group);
  }
  for (int m = 0; m < R; ++m) S::store(sums + m * kPanel, held[m]);
}

template <typename T, int R>
void e4m3_tile_of(int rows, const T* x, int64_t x_stride, int64_t inputs, int64_t group, const uint8_t* strip,
                  float* sums) {
  if constexpr (R > 0) {
    if (rows == R) return e4m3_tile<T, R>(x, x_stride, inputs, group, strip, sums);
    e4m3_tile_of<T, R - 1>(rows, x, x_stride, inputs, group, strip, sums);
  }
}

// One strip: `row_at(o)` is the weight's row at place `o`, -1 beyond the last. A group with a NaN has a NaN for its scale.
template <typename RowAt>
void pack_e4m3_strip(const uint8_t* codes, const float* scales, int64_t inputs, int64_t group, RowAt&& row_at,
                     uint8_t* to) {
  const int64_t groups = (inputs + group - 1) / group;
  for (int64_t g = 0; g < groups; ++g, to += kWide * (4 + group)) {
    std::fill(to, to + kWide * (4 + group), uint8_t(0));
    const int64_t first = g * group, count = std::min(group, inputs - first);
    for (int64_t o = 0; o < kWide; ++o) {
      const int64_t row = row_at(o);
      if (row < 0) continue;
      const uint8_t* from = codes + row * inputs + first;
      float scale = scales[row * groups + g];
      uint8_t* place = to + kWide * 4 + 2 * o;
      for (int64_t i = 0; i < count; ++i) {
        if ((from[i] & 0x7f) == kE4m3Nan) scale = __builtin_nanf("");
        place[i / 2 * 2 * kWide + i % 2] = from[i];
      }
      std::memcpy(to + 4 * o, &scale, 4);
    }
  }
}

// The weight's row in lane `lane` of a strip.
template <typename T>
void unpack_e4m3_row(const uint8_t* strip, int64_t inputs, int64_t group, int64_t lane, T* to) {
  for (int64_t i = 0; i < inputs; ++i) {
    const uint8_t* part = strip + i / group * kWide * (4 + group);
    const int64_t within = i % group;
    float scale;
    std::memcpy(&scale, part + 4 * lane, 4);
    to[i] = from_float<T>(scale * e4m3_to_float(part[kWide * 4 + within / 2 * 2 * kWide + 2 * lane + within % 2]));
  }
}

}  // namespace cohort
