// Keys and values in FP8: a row of the cache is `head_dim` codes in E4M3 and one byte, the row's scale.
//
// The scale is a power of two and belongs to one token's key or value of one head, so a row is complete when it is
// written: nothing is calibrated, no outlier of another token costs it precision, and a block means the same wherever
// its bytes go. A code's value is sign · 1.mmm · 2^(exponent - 7) · 2^(scale byte - kScaleBias); the exponent 0 is zero
// (no subnormals: what they would add lies 2^-14 below the row's largest). Codes are therefore bfloat16 numbers whose
// exponent is moved by the scale byte, and reading one is exact in bfloat16 and in float32.
//
// A row with an infinity or a NaN has every code at its largest under the scale `kSpoiled`, which reads as NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace cohort {

constexpr int kScaleBias = 120;   // of float32's exponents (127) over E4M3's (7)
constexpr int kLargestScale = 239;  // 448 times it is the largest that bfloat16 holds
constexpr int kSpoiled = 240;
constexpr float kLargestCode = 448.0f;

inline float power_of_two(int exponent) {  // -126 to 127
  const int32_t bits = (exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// `to`: count + 1 bytes.
template <typename T>
inline void write_fp8_row(const T* from, int count, uint8_t* to) {
  int32_t largest = 0;  // of float32's bits, which order as sizes do; a NaN counts as the largest
  for (int i = 0; i < count; ++i) {
    const float value = to_float(from[i]);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  if (largest >= 0x7f800000) {
    std::fill(to, to + count, uint8_t(0x7f));
    to[count] = kSpoiled;
    return;
  }
  // 448 is 1.75 · 2^8: the largest lies in (224, 448] once it is scaled
  const int exponent = (largest >> 23) - 127 - 8 + ((largest & 0x7fffff) > 0x600000);
  const int scale = std::clamp(exponent + kScaleBias, 0, kLargestScale);
  const int down = kScaleBias - scale;  // may be more than one power of two can say
  const float factor = power_of_two(down / 2), rest = power_of_two(down - down / 2);
  for (int i = 0; i < count; ++i) {
    const float value = to_float(from[i]) * factor * rest;
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    const int32_t size = bits & 0x7fffffff;
    // three bits of mantissa, to nearest even; then float32's exponents become E4M3's
    int32_t code = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (kScaleBias << 3);
    code = code < 0 ? 0 : code < 8 ? 8 : code > 0x7e ? 0x7e : code;  // 2^-7 and above is 2^-6 rather than 0
    to[i] = uint8_t(code | ((bits >> 24) & 0x80));
  }
  to[count] = uint8_t(scale);
}

// The bits of bfloat16 of W codes under a scale byte, each in a lane of 32.
template <int W>
inline typename Simd<W>::I fp8_bits(const uint8_t* codes, int32_t scale) {
  using I = typename Simd<W>::I;
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  Bytes packed;
  std::memcpy(&packed, codes, W);
  const I code = __builtin_convertvector(packed, I);
  const I size = (code & 0x7f) << 4;
  const I moved = size + (scale << 7);
  return (size < 0x80 ? I{} : moved) | ((code & 0x80) << 8);
}

inline uint16_t fp8_bits_of(uint8_t code, int32_t scale) {
  const int32_t size = (code & 0x7f) << 4;
  return uint16_t((size < 0x80 ? 0 : size + (scale << 7)) | ((code & 0x80) << 8));
}

inline void read_fp8_row(const uint8_t* from, int count, float* to) {
  using S = Simd<kWide>;
  const int32_t scale = from[count];
  int i = 0;
  for (; i + kWide <= count; i += kWide) {
    const S::I bits = fp8_bits<kWide>(from + i, scale) << 16;
    S::F value;
    std::memcpy(&value, &bits, sizeof(value));
    S::store(to + i, value);
  }
  for (; i < count; ++i) to[i] = to_float(bf16{fp8_bits_of(from[i], scale)});
}

inline void read_fp8_row(const uint8_t* from, int count, bf16* to) {
  const int32_t scale = from[count];
  int i = 0;
#if defined(__AVX512BW__)
  const __m512i added = _mm512_set1_epi16(int16_t(scale << 7));
  for (; i + 32 <= count; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    const __m512i size = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
    const __mmask32 there = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x78));
    const __m512i value = _mm512_maskz_add_epi16(there, size, added);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(int16_t(0x8000)));
    _mm512_storeu_si512(to + i, _mm512_or_si512(value, sign));
  }
#endif
  using S = Simd<kWide>;
  for (; i + kWide <= count; i += kWide) {
    const S::H bits = __builtin_convertvector(fp8_bits<kWide>(from + i, scale), S::H);
    std::memcpy(to + i, &bits, sizeof(bits));
  }
  for (; i < count; ++i) to[i] = bf16{fp8_bits_of(from[i], scale)};
}

}  // namespace cohort
