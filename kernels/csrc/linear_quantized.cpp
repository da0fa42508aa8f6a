// Matrix products with weights of 8 or 4 bits: packed once into panels, read once per step in the order they lie.
//
// weight[o, i] = factor[o] · (scale[o, unit of i] · (code[o, i] - zero) + offset[o, unit of i])
//
// A unit is 32 inputs, or 16. A panel holds two strips of W outputs (gated: W gates, W ups), and everything that a
// strip's product reads stands in it in the order of reading:
//
//     header [64 bytes, once]
//     strip: factors float32 [W], then of every unit: scales float16 [W], offsets float16 [W] if any, codes
//     codes, 8 bits: [unit / 4][W][4 inputs]      4 bits: [unit / 8][W][4 bytes]: low nibbles hold four inputs, high
//                                                 ones the next four
//
// Weights in E4M3 have strips of their own (e4m3.h), under the same header with a group for its unit.
//
// Weights of different kinds whose outputs follow one another (a projection that a checkpoint keeps in parts) lie one
// after the other, each with a header of its own.
//
// The rows of x are rounded to 8 bits with one scale a unit, so the sums over a unit are exact sums of integers: four
// multiply-adds per lane and instruction where the processor has VNNI (or AVX2's pairs). Units are added in order, in
// one float32 accumulator an output: a row's result has the same bits whatever other rows stand beside it. Rounding x
// adds to a product at most Σ over units of |x|max / 254 · Σ |weight|; see `docs/models.md`.
#include <c10/util/FunctionRef.h>

#include <cmath>
#include <vector>

#include "e4m3.h"
#include "ops.h"
#include "panels.h"
#include "quantized.h"
#include "rounded.h"

namespace cohort {
namespace {

using S = Simd<kWide>;
using F = S::F;
using I = S::I;
using H = S::H;

constexpr int kTileRows = kWide == 16 ? 12 : 4;  // as many integer and float sums as registers hold
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kUnsignedBytes = true;  // the instruction multiplies unsigned codes with signed inputs
#else
constexpr bool kUnsignedBytes = false;
#endif

// What becomes of a row's sums of a panel: called, not inlined, since eight kinds of weights times seven kinds of outputs
// take a compiler 15 s.
using Finish = c10::function_ref<void(int64_t row, int64_t panel, float* sums)>;

// Stands at the head of packed data, which therefore says itself what it is.
struct Header {
  int32_t bits, unit, zero, offsets, gated, e4m3, reserved[2];  // gated and e4m3: 0 or 1, as offsets
  int64_t inputs, outputs;  // outputs of the product: half the weight's rows where it is gated
  int64_t padding[2];

  int64_t units() const { return (inputs + unit - 1) / unit; }
  int64_t unit_bytes() const { return kWide * (2 * (1 + offsets) + unit * bits / 8); }
  int64_t strip_bytes() const { return e4m3 ? units() * kWide * (4 + unit) : kWide * 4 + units() * unit_bytes(); }
  int64_t outputs_per_panel() const { return gated ? kWide : kPanel; }
  int64_t panels() const { return (outputs + outputs_per_panel() - 1) / outputs_per_panel(); }
  int64_t bytes() const { return (int64_t(sizeof(Header)) + panels() * 2 * strip_bytes() + 63) / 64 * 64; }
};
static_assert(sizeof(Header) == 64);

// One weight of packed data: where it begins, and the outputs before its own.
struct Part {
  const uint8_t* data;
  int64_t first;

  const Header& header() const { return *reinterpret_cast<const Header*>(data); }
};

std::vector<Part> parts_of(const at::Tensor& panels) {
  TORCH_CHECK_VALUE(panels.dim() == 1 && panels.is_contiguous(), "weights must be packed by pack_quantized");
  const uint8_t* data = static_cast<const uint8_t*>(panels.const_data_ptr());
  std::vector<Part> parts;
  int64_t at = 0, outputs = 0;
  while (at + int64_t(sizeof(Header)) <= panels.numel()) {
    parts.push_back({data + at, outputs});
    outputs += parts.back().header().outputs;
    at += parts.back().header().bytes();
  }
  TORCH_CHECK_VALUE(!parts.empty() && at == panels.numel(), "weights must be packed by pack_quantized");
  return parts;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  const float size = rest >= 0x7c00   ? (rest == 0x7c00 ? INFINITY : NAN)
                     : rest >= 0x0400 ? std::ldexp(float(0x400 | (rest & 0x3ff)), int(rest >> 10) - 25)
                                      : std::ldexp(float(rest), -24);
  return sign ? -size : size;
}

inline F load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__) && !defined(COHORT_WIDE_LANES)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  uint16_t halves[kWide];
  std::memcpy(halves, from, sizeof(halves));
  F v;
  for (int i = 0; i < kWide; ++i) v[i] = half_to_float(halves[i]);
  return v;
#endif
}

inline I load_codes(const uint8_t* from) {
  I v;
  std::memcpy(&v, from, sizeof(I));
  return v;
}

template <int Bits>
inline I dot4_by_bytes(I sum, I codes, const int8_t* inputs) {
  for (int byte = 0; byte < 4; ++byte) {
    const I code = Bits == 4 || kUnsignedBytes ? (codes >> (8 * byte)) & 0xff : (codes << (24 - 8 * byte)) >> 24;
    sum += code * int32_t(inputs[byte]);
  }
  return sum;
}

// sum + Σ of four products in each lane: codes of `Bits` bits with four inputs, the same in every lane.
template <int Bits>
inline I dot4(I sum, I codes, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, 4);
  const I x = I{} + four;
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512BW__)
  __m512i pairs;
  if constexpr (Bits == 4) {
    pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  } else {  // |code| · ±x: at most 2 · 128 · 127, which fits 16 bits
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)codes);
    const __m512i signed_x = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), signed_x);
  }
  return sum + (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX512F__) || defined(COHORT_WIDE_LANES)
  return dot4_by_bytes<Bits>(sum, codes, inputs);
#elif defined(__AVXVNNI__)
  return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__AVX2__)
  __m256i pairs;
  if constexpr (Bits == 4) {
    pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  } else {  // as above
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), _mm256_sign_epi8((__m256i)x, (__m256i)codes));
  }
  return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot4_by_bytes<Bits>(sum, codes, inputs);
#endif
}

// sums[m][o] = Σ x[m][i] · weight[o][i] for R rows and the W outputs of a strip
template <int Bits, int U, bool kOffsets, int R>
void tile(const Rounded<U>* x, int64_t units, const uint8_t* strip, float* sums) {
  constexpr int kStep = 4 * kWide;  // bytes of a vector of codes
  F held[R];
  for (int m = 0; m < R; ++m) held[m] = F{};
  F factors;
  std::memcpy(&factors, strip, sizeof(F));
  strip += sizeof(F);
  for (int64_t u = 0; u < units; ++u, ++x) {
    const F scales = load_halves(strip);
    strip += 2 * kWide;
    F offsets{};
    if constexpr (kOffsets) {
      offsets = load_halves(strip);
      strip += 2 * kWide;
    }
    I sum[R];
    for (int m = 0; m < R; ++m) sum[m] = I{} + x[m * units].initial;
    for (int i = 0; i < U; i += 32 / Bits, strip += kStep) {
      const I codes = load_codes(strip);
      __builtin_prefetch(strip + kAheadBytes, 0, 3);
      if constexpr (Bits == 4) {
        const I low = codes & 0x0f0f0f0f, high = (codes >> 4) & 0x0f0f0f0f;
        for (int m = 0; m < R; ++m) sum[m] = dot4<4>(sum[m], low, x[m * units].q + i);
        for (int m = 0; m < R; ++m) sum[m] = dot4<4>(sum[m], high, x[m * units].q + i + 4);
      } else {
        for (int m = 0; m < R; ++m) sum[m] = dot4<8>(sum[m], codes, x[m * units].q + i);
      }
    }
    for (int m = 0; m < R; ++m) {
      const F scaled = __builtin_convertvector(sum[m], F) * x[m * units].scale;
      held[m] = held[m] + scaled * scales;
      if constexpr (kOffsets) held[m] = held[m] + offsets * x[m * units].total;
    }
  }
  for (int m = 0; m < R; ++m) S::store(sums + m * kPanel, held[m] * factors);
}

template <int Bits, int U, bool kOffsets, int R = kTileRows>
void tile_of(int rows, const Rounded<U>* x, int64_t units, const uint8_t* strip, float* sums) {
  if constexpr (R > 0) {
    if (rows == R) return tile<Bits, U, kOffsets, R>(x, units, strip, sums);
    tile_of<Bits, U, kOffsets, R - 1>(rows, x, units, strip, sums);
  }
}

template <int Bits, int U, bool kOffsets, typename T>
void multiply_as(const at::Tensor& x, const Part& part, Finish finish) {
  const Header& header = part.header();
  const T* input = static_cast<const T*>(x.const_data_ptr());
  const uint8_t* packed = part.data + sizeof(Header);
  const int64_t rows = x.size(0), x_stride = x.stride(0), inputs = header.inputs, units = header.units();
  const int64_t strip = header.strip_bytes(), work = rows * header.panels() * kPanel * inputs;
  // One buffer a thread: products of one thread come one after the other.
  static thread_local std::vector<Rounded<U>> rounded;
  if (int64_t(rounded.size()) < rows * units) rounded.resize(rows * units);
  Rounded<U>* to = rounded.data();
  const int64_t rows_apiece = std::max<int64_t>(1, kWorthThreads / 4 / std::max<int64_t>(inputs, 1));
  at::parallel_for(0, rows, rows_apiece, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      round_row<U>(input + row * x_stride, inputs, header.zero, to + row * units);
    }
  });
  auto sums_of = [=](int64_t first, int count, int64_t panel, float* sums) {
    const uint8_t* strips = packed + panel * 2 * strip;
    tile_of<Bits, U, kOffsets>(count, to + first * units, units, strips, sums);
    tile_of<Bits, U, kOffsets>(count, to + first * units, units, strips + strip, sums + kWide);
  };
  for_each_panel<kTileRows>(rows, inputs, header.panels(), work, sums_of, finish);
}

template <typename T>
void multiply_e4m3(const at::Tensor& x, const Part& part, Finish finish) {
  const Header& header = part.header();
  const T* input = static_cast<const T*>(x.const_data_ptr());
  const uint8_t* packed = part.data + sizeof(Header);
  const int64_t rows = x.size(0), x_stride = x.stride(0), inputs = header.inputs, group = header.unit;
  const int64_t strip = header.strip_bytes(), work = rows * header.panels() * kPanel * inputs;
  auto sums_of = [=](int64_t first, int count, int64_t panel, float* sums) {
    const uint8_t* strips = packed + panel * 2 * strip;
    const T* from = input + first * x_stride;
    e4m3_tile_of<T, kTileRows>(count, from, x_stride, inputs, group, strips, sums);
    e4m3_tile_of<T, kTileRows>(count, from, x_stride, inputs, group, strips + strip, sums + kWide);
  };
  for_each_panel<kTileRows>(rows, inputs * int64_t(sizeof(T)), header.panels(), work, sums_of, finish);
}

template <typename T>
void multiply(const at::Tensor& x, const Part& part, Finish finish) {
  const Header& header = part.header();
  if (header.e4m3) return multiply_e4m3<T>(x, part, finish);
  const int kind = (header.bits == 8 ? 4 : 0) + (header.unit == 16 ? 2 : 0) + header.offsets;
  switch (kind) {
    case 0: return multiply_as<4, 32, false, T>(x, part, finish);
    case 1: return multiply_as<4, 32, true, T>(x, part, finish);
    case 2: return multiply_as<4, 16, false, T>(x, part, finish);
    case 3: return multiply_as<4, 16, true, T>(x, part, finish);
    case 4: return multiply_as<8, 32, false, T>(x, part, finish);
    case 5: return multiply_as<8, 32, true, T>(x, part, finish);
    case 6: return multiply_as<8, 16, false, T>(x, part, finish);
    default: return multiply_as<8, 16, true, T>(x, part, finish);
  }
}

bool is_float(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "x must be float32 or bfloat16");
  return x.scalar_type() == at::kFloat;
}

// `whole`: what stands in the panels of a gated weight, gates and ups as they lie there, in place of its outputs.
std::vector<Part> check_product(const at::Tensor& x, const at::Tensor& panels, const at::Tensor& out, bool gated,
                                bool whole = false) {
  std::vector<Part> parts = parts_of(panels);
  for (const Part& part : parts) {
    TORCH_CHECK_VALUE(bool(part.header().gated) == gated, "weights must be packed ", gated ? "gated" : "plain");
    TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1 && x.size(1) == part.header().inputs,
                      "x must be [rows, inputs] with dense rows");
  }
  const Header& last = parts.back().header();
  const int64_t outputs = parts.back().first + (whole ? last.panels() * kPanel : last.outputs);
  TORCH_CHECK_VALUE(out.dim() == 2 && out.stride(1) == 1 && out.size(0) == x.size(0) && out.size(1) == outputs,
                    "out must be [rows, outputs] with dense rows");
  return parts;
}

at::Tensor columns(const at::Tensor& of, const Part& part) { return of.narrow(1, part.first, part.header().outputs); }

// The weight's row at place `o` of a strip; -1 beyond the last one.
int64_t row_at(const Header& header, int64_t strip, int64_t o) {
  if (!header.gated) {
    const int64_t row = strip * kWide + o;
    return row < header.outputs ? row : -1;
  }
  const int64_t row = strip / 2 * kWide + o;
  return row < header.outputs ? row + (strip % 2) * header.outputs : -1;
}

struct Source {
  const uint8_t* codes;  // rows of inputs (8 bits) or inputs / 2 bytes
  const float* factors;
  const uint16_t* scales;
  const uint16_t* offsets;
  int64_t group, groups;
};

void pack_strip(const Source& source, const Header& header, int64_t strip, uint8_t* to) {
  const int64_t stored = header.bits == 8 ? header.inputs : (header.inputs + 1) / 2;
  auto code_at = [&](int64_t row, int64_t i) -> uint8_t {
    if (row < 0 || i >= header.inputs) return 0;
    if (header.bits == 8) return uint8_t(source.codes[row * stored + i] + (kUnsignedBytes ? 128 : 0));
    const uint8_t both = source.codes[row * stored + i / 2];
    return i % 2 ? both >> 4 : both & 15;
  };
  auto put = [&](const void* value, size_t size) {
    std::memcpy(to, value, size);
    to += size;
  };
  for (int o = 0; o < kWide; ++o) {
    const int64_t row = row_at(header, strip, o);
    const float factor = row < 0 ? 0.0f : source.factors[row];
    put(&factor, 4);
  }
  for (int64_t first = 0; first < header.inputs; first += header.unit) {
    const int64_t group = first / source.group;
    for (const uint16_t* of : {source.scales, source.offsets}) {
      if (of == nullptr) continue;
      for (int o = 0; o < kWide; ++o) {
        const int64_t row = row_at(header, strip, o);
        const uint16_t value = row < 0 ? 0 : of[row * source.groups + group];
        put(&value, 2);
      }
    }
    for (int64_t i = first; i < first + header.unit; i += 32 / header.bits) {
      for (int o = 0; o < kWide; ++o) {
        const int64_t row = row_at(header, strip, o);
        for (int64_t j = i; j < i + 4; ++j) {
          const uint8_t code = header.bits == 8 ? code_at(row, j) : code_at(row, j) | code_at(row, j + 4) << 4;
          put(&code, 1);
        }
      }
    }
  }
}

template <typename T>
void unpack_row(const Header& header, const uint8_t* packed, int64_t id, T* to) {
  const int64_t lane = id % kWide;
  const uint8_t* strip = packed + id / kWide * header.strip_bytes();
  if (header.e4m3) return unpack_e4m3_row(strip, header.inputs, header.unit, lane, to);
  float factor;
  std::memcpy(&factor, strip + 4 * lane, 4);
  for (int64_t u = 0; u < header.units(); ++u) {
    const uint8_t* unit = strip + kWide * 4 + u * header.unit_bytes();
    auto half_at = [&](int64_t index) {
      uint16_t half;
      std::memcpy(&half, unit + 2 * index, 2);
      return half_to_float(half);
    };
    const float scale = factor * half_at(lane), offset = header.offsets ? factor * half_at(kWide + lane) : 0.0f;
    const uint8_t* codes = unit + kWide * 2 * (1 + header.offsets);
    const int64_t first = u * header.unit, count = std::min<int64_t>(header.unit, header.inputs - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t per_step = 32 / header.bits, within = i % per_step;
      const uint8_t byte = codes[(i / per_step * kWide + lane) * 4 + within % 4];
      int code = header.bits == 4 ? (within < 4 ? byte & 15 : byte >> 4) : kUnsignedBytes ? byte : int8_t(byte);
      to[first + i] = from_float<T>(scale * float(code - header.zero) + offset);
    }
  }
}

template <typename T>
void rows_as(const std::vector<Part>& parts, const at::Tensor& ids, at::Tensor& out) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  T* to = static_cast<T*>(out.mutable_data_ptr());
  at::parallel_for(0, ids.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      auto part = parts.rbegin();
      while (part->first > id[t]) ++part;
      unpack_row(part->header(), part->data + sizeof(Header), id[t] - part->first, to + t * out.stride(0));
    }
  });
}

}  // namespace

int64_t quantized_bytes(int64_t bits, int64_t unit, bool offsets, bool gated, int64_t outputs, int64_t inputs,
                        bool e4m3) {
  Header header{int32_t(bits), int32_t(unit), 0, offsets, gated, e4m3, {}, inputs, gated ? outputs / 2 : outputs, {}};
  return header.bytes();
}

void pack_quantized(const at::Tensor& codes, const at::Tensor& factors, const at::Tensor& scales,
                    const std::optional<at::Tensor>& offsets, int64_t group, int64_t zero, int64_t unit, bool gated,
                    at::Tensor& panels) {
  const bool bytes = codes.scalar_type() == at::kChar;
  TORCH_CHECK_TYPE(bytes || codes.scalar_type() == at::kByte, "codes must be int8, or uint8 of two nibbles");
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.is_contiguous(), "codes must be dense [outputs, inputs]");
  const int64_t rows = codes.size(0), inputs = codes.size(1) * (bytes ? 1 : 2), groups = (inputs + group - 1) / group;
  TORCH_CHECK_VALUE((unit == 16 || unit == 32) && group > 0 && (group % unit == 0 || groups == 1),
                    "units of 16 or 32 inputs must divide a group of ", group);
  TORCH_CHECK_VALUE(!bytes || zero == 0, "codes of 8 bits are signed");
  auto check = [&](const at::Tensor& of) {
    TORCH_CHECK_TYPE(of.scalar_type() == at::kHalf, "scales and offsets must be float16");
    TORCH_CHECK_VALUE(of.is_contiguous() && of.dim() == 2 && of.size(0) == rows && of.size(1) == groups,
                      "scales and offsets must be dense [outputs, groups]");
    return static_cast<const uint16_t*>(of.const_data_ptr());
  };
  Header header{bytes ? 8 : 4, int32_t(unit), int32_t(bytes && kUnsignedBytes ? 128 : zero), offsets.has_value(), gated,
                0, {}, inputs, gated ? rows / 2 : rows, {}};
  const Source source{static_cast<const uint8_t*>(codes.const_data_ptr()), factors.const_data_ptr<float>(), check(scales),
                    offsets ? check(*offsets) : nullptr, group, groups};
  TORCH_CHECK_VALUE(factors.is_contiguous() && factors.numel() == rows, "factors must be one per output");
  TORCH_CHECK_VALUE(panels.scalar_type() == at::kByte && panels.is_contiguous() && panels.dim() == 1 &&
                        panels.numel() == header.bytes(),
                    "panels must have ", header.bytes(), " bytes");
  uint8_t* to = static_cast<uint8_t*>(panels.mutable_data_ptr());
  std::memcpy(to, &header, sizeof(Header));
  at::parallel_for(0, 2 * header.panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) pack_strip(source, header, s, to + sizeof(Header) + s * header.strip_bytes());
  });
}

void pack_e4m3(const at::Tensor& codes, const at::Tensor& scales, int64_t group, bool gated, at::Tensor& panels) {
  TORCH_CHECK_TYPE(codes.scalar_type() == at::kFloat8_e4m3fn && scales.scalar_type() == at::kFloat,
                   "codes must be E4M3, scales float32");
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.is_contiguous() && scales.dim() == 2 && scales.is_contiguous(),
                    "codes must be dense [outputs, inputs], scales dense [outputs, groups]");
  const int64_t rows = codes.size(0), inputs = codes.size(1);
  TORCH_CHECK_VALUE(group > 0 && group % 2 == 0 && inputs % 2 == 0, "groups and inputs must be even");
  TORCH_CHECK_VALUE(scales.size(0) == rows && scales.size(1) == (inputs + group - 1) / group,
                    "scales must be dense [outputs, groups]");
  const Header header{8, int32_t(group), 0, 0, gated, 1, {}, inputs, gated ? rows / 2 : rows, {}};
  TORCH_CHECK_VALUE(panels.scalar_type() == at::kByte && panels.is_contiguous() && panels.dim() == 1 &&
                        panels.numel() == header.bytes(),
                    "panels must have ", header.bytes(), " bytes");
  const uint8_t* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  const float* factors = scales.const_data_ptr<float>();
  uint8_t* to = static_cast<uint8_t*>(panels.mutable_data_ptr());
  std::memcpy(to, &header, sizeof(Header));
  at::parallel_for(0, 2 * header.panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      pack_e4m3_strip(from, factors, inputs, group, [&](int64_t o) { return row_at(header, s, o); },
                      to + sizeof(Header) + s * header.strip_bytes());
    }
  });
}

void quantized_product(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                       at::Tensor& out) {
  TORCH_CHECK_VALUE(!bias || (bias->is_contiguous() && bias->numel() == out.size(1) &&
                              bias->scalar_type() == x.scalar_type()),
                    "bias must be dense, one per output, of x's dtype");
  const bool wide = out.scalar_type() == at::kFloat;
  TORCH_CHECK_TYPE(wide || out.scalar_type() == x.scalar_type(), "out must have x's dtype or be float32");
  const bool floats = is_float(x), gated = parts_of(panels).front().header().gated;
  TORCH_CHECK_VALUE(!gated || !bias, "gates and ups take no bias");
  for (const Part& part : check_product(x, panels, out, gated, gated)) {
    at::Tensor own = gated ? out : columns(out, part);
    std::optional<at::Tensor> own_bias;
    if (bias) own_bias = bias->narrow(0, part.first, part.header().outputs);
    if (floats) {
      multiply<float>(x, part, into_outputs<float, float>(own_bias, own));
    } else if (wide) {
      multiply<bf16>(x, part, into_outputs<bf16, float>(own_bias, own));
    } else {
      multiply<bf16>(x, part, into_outputs<bf16, bf16>(own_bias, own));
    }
  }
}

void quantized_product_added(const at::Tensor& x, const at::Tensor& panels, at::Tensor& residual) {
  TORCH_CHECK_TYPE(residual.scalar_type() == x.scalar_type(), "residual must have x's dtype");
  const bool floats = is_float(x);
  for (const Part& part : check_product(x, panels, residual, false)) {
    at::Tensor own = columns(residual, part);
    floats ? multiply<float>(x, part, added_to<float>(own)) : multiply<bf16>(x, part, added_to<bf16>(own));
  }
}

void quantized_product_gated(const at::Tensor& x, const at::Tensor& panels, at::Tensor& out) {
  TORCH_CHECK_TYPE(out.scalar_type() == x.scalar_type(), "out must have x's dtype");
  const bool floats = is_float(x);
  for (const Part& part : check_product(x, panels, out, true)) {
    at::Tensor own = columns(out, part);
    floats ? multiply<float>(x, part, gated_into<float>(own)) : multiply<bf16>(x, part, gated_into<bf16>(own));
  }
}

void quantized_rows(const at::Tensor& panels, const at::Tensor& ids, at::Tensor& out) {
  const std::vector<Part> parts = parts_of(panels);
  const int64_t outputs = parts.back().first + parts.back().header().outputs;
  for (const Part& part : parts) {
    TORCH_CHECK_VALUE(!part.header().gated && out.dim() == 2 && out.stride(1) == 1 && out.size(0) == ids.size(0) &&
                          out.size(1) == part.header().inputs,
                      "out must be [tokens, inputs] with dense rows");
  }
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.is_contiguous(), "ids must be dense int64");
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < ids.size(0); ++t) {
    TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < outputs, "token ", id[t], " of ", outputs);
  }
  is_float(out) ? rows_as<float>(parts, ids, out) : rows_as<bf16>(parts, ids, out);
}

}  // namespace cohort
